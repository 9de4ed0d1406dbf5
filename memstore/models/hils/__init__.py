"""HiLS models: landmark attention of 2026, with its memory on disk (*HiLS-Attention*, arXiv 2607.02980).

``HilsForCausalLM`` loads released checkpoints, trains, saves and generates like any Hugging Face model. ``make_hils``
makes one from a stock model. ``memstore.attach`` gives it a memory.
"""

from typing import TYPE_CHECKING

from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.models.hils.cache import HilsCache as HilsCache
    from memstore.models.hils.configuration import HilsConfig as HilsConfig
    from memstore.models.hils.configuration import OlmoHilsConfig as OlmoHilsConfig
    from memstore.models.hils.configuration import QwenHilsConfig as QwenHilsConfig
    from memstore.models.hils.modeling import HilsForCausalLM as HilsForCausalLM
    from memstore.models.hils.modeling import HilsModel as HilsModel
    from memstore.models.hils.modeling import OlmoHilsForCausalLM as OlmoHilsForCausalLM
    from memstore.models.hils.modeling import QwenHilsForCausalLM as QwenHilsForCausalLM
    from memstore.models.hils.modeling import make_hils as make_hils
    from memstore.models.hils.reader import HilsReader as HilsReader
else:
    __getattr__ = lazy(
        __name__,
        {
            "cache": "HilsCache",
            "configuration": "HilsConfig, OlmoHilsConfig, QwenHilsConfig",
            "modeling": "HilsForCausalLM, HilsModel, OlmoHilsForCausalLM, QwenHilsForCausalLM, make_hils",
            "reader": "HilsReader",
        },
    )
