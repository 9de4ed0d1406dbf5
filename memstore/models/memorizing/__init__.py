"""Memorizing Transformers: a decoder, one layer of which also looks up single tokens of everything that it has read.

``MemorizingForCausalLM`` trains, saves and generates as any Hugging Face model does.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from memstore.models.memorizing.cache import MemorizingCache
from memstore.models.memorizing.configuration import MemorizingConfig
from memstore.models.memorizing.modeling import MemorizingForCausalLM, MemorizingModel

__all__ = ["MemorizingCache", "MemorizingConfig", "MemorizingForCausalLM", "MemorizingModel"]

# So that transformers' own loaders know a saved model once this package is imported.
AutoConfig.register(MemorizingConfig.model_type, MemorizingConfig, exist_ok=True)
AutoModelForCausalLM.register(MemorizingConfig, MemorizingForCausalLM, exist_ok=True)
