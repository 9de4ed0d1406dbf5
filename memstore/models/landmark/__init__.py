"""Landmark models: language models whose attention retrieves blocks of their own past, and the paper's baselines.

``LandmarkForCausalLM`` trains, saves and generates as any Hugging Face model does. ``make_landmark`` makes one from a
stock Llama-like model. ``memstore.attach`` gives it a memory.
"""

from typing import TYPE_CHECKING

from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.models.landmark.cache import LandmarkCache as LandmarkCache
    from memstore.models.landmark.cache import WindowCache as WindowCache
    from memstore.models.landmark.configuration import LandmarkConfig as LandmarkConfig
    from memstore.models.landmark.modeling import LandmarkForCausalLM as LandmarkForCausalLM
    from memstore.models.landmark.modeling import make_landmark as make_landmark
    from memstore.models.landmark.modeling import unmake_landmark as unmake_landmark
    from memstore.models.landmark.reader import LandmarkReader as LandmarkReader
else:
    __getattr__ = lazy(
        __name__,
        {
            "cache": "LandmarkCache, WindowCache",
            "configuration": "LandmarkConfig",
            "modeling": "LandmarkForCausalLM, make_landmark, unmake_landmark",
            "reader": "LandmarkReader",
        },
    )
