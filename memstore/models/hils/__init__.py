"""HiLS models: landmark attention of 2026, with its memory on disk (*HiLS-Attention*, arXiv 2607.02980).

``HilsForCausalLM`` loads released checkpoints, trains, saves and generates like any Hugging Face model. ``make_hils``
makes one from a stock model. ``memstore.attach`` gives it a memory.
"""

from typing import TYPE_CHECKING

from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.models.hils.cache import HilsCache
    from memstore.models.hils.configuration import HilsConfig, OlmoHilsConfig, QwenHilsConfig
    from memstore.models.hils.modeling import (
        HilsForCausalLM,
        HilsModel,
        OlmoHilsForCausalLM,
        QwenHilsForCausalLM,
        make_hils,
    )
    from memstore.models.hils.reader import HilsReader
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

__all__ = [
    "HilsCache",
    "HilsConfig",
    "HilsForCausalLM",
    "HilsModel",
    "HilsReader",
    "OlmoHilsConfig",
    "OlmoHilsForCausalLM",
    "QwenHilsConfig",
    "QwenHilsForCausalLM",
    "make_hils",
]
