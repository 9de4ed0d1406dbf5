"""HiLS models: landmark attention of 2026, with its memory on disk (*HiLS-Attention*, arXiv 2607.02980).

``HilsForCausalLM`` loads released checkpoints, trains, saves and generates as any Hugging Face model does;
``make_hils`` makes one of a stock model; ``memstore.attach`` gives it a memory.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from memstore.models.hils.cache import HilsCache
from memstore.models.hils.configuration import HilsConfig, OlmoHilsConfig, QwenHilsConfig
from memstore.models.hils.convert import make_hils
from memstore.models.hils.modeling import (
    HilsForCausalLM,
    HilsModel,
    HilsOutput,
    OlmoHilsForCausalLM,
    QwenHilsForCausalLM,
)
from memstore.models.hils.reader import HilsReader

__all__ = [
    "HilsCache",
    "HilsConfig",
    "HilsForCausalLM",
    "HilsModel",
    "HilsOutput",
    "HilsReader",
    "OlmoHilsConfig",
    "OlmoHilsForCausalLM",
    "QwenHilsConfig",
    "QwenHilsForCausalLM",
    "make_hils",
]

# So that transformers' own loaders know a saved HiLS model, and released ones, once this package is imported.
for _model in (HilsForCausalLM, OlmoHilsForCausalLM, QwenHilsForCausalLM):
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)
