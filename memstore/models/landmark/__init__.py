"""Landmark models: language models whose attention retrieves blocks of their own past, and the paper's baselines.

``LandmarkForCausalLM`` trains, saves and generates as any Hugging Face model does; ``make_landmark`` makes one of a
stock Llama-like model; ``memstore.attach`` gives it a memory.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.convert import make_landmark, unmake_landmark
from memstore.models.landmark.modeling import LandmarkForCausalLM, LandmarkModel, LandmarkOutput
from memstore.models.landmark.past import Past, WindowCache
from memstore.models.landmark.reader import LandmarkReader

__all__ = [
    "LandmarkCache",
    "LandmarkConfig",
    "LandmarkForCausalLM",
    "LandmarkModel",
    "LandmarkOutput",
    "LandmarkReader",
    "Past",
    "WindowCache",
    "make_landmark",
    "unmake_landmark",
]

# So that transformers' own loaders know a saved landmark model once this package is imported.
AutoConfig.register(LandmarkConfig.model_type, LandmarkConfig, exist_ok=True)
AutoModelForCausalLM.register(LandmarkConfig, LandmarkForCausalLM, exist_ok=True)
