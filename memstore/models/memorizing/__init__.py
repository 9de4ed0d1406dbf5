"""Memorizing Transformers: a decoder, one layer of which also looks up single tokens of everything that it has read.

``MemorizingForCausalLM`` trains, saves and generates as any Hugging Face model does. ``add_knn_memory`` gives a stock
model such a layer.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from memstore.attention.knn_memory import RecentTokens
from memstore.attention.knn_stored import StoredTokens, token_spec
from memstore.models.memorizing.cache import MemorizingCache
from memstore.models.memorizing.configuration import MemorizingConfig
from memstore.models.memorizing.modeling import MemorizingForCausalLM, MemorizingModel
from memstore.models.memorizing.reader import MemorizingReader
from memstore.models.memorizing.stock import (
    KNNMemory,
    add_knn_memory,
    knn_memory_of,
    load_knn_memory,
    remove_knn_memory,
)

__all__ = [
    "KNNMemory",
    "MemorizingCache",
    "MemorizingConfig",
    "MemorizingForCausalLM",
    "MemorizingModel",
    "MemorizingReader",
    "RecentTokens",
    "StoredTokens",
    "add_knn_memory",
    "knn_memory_of",
    "load_knn_memory",
    "remove_knn_memory",
    "token_spec",
]

# So that transformers' own loaders know a saved model once this package is imported.
AutoConfig.register(MemorizingConfig.model_type, MemorizingConfig, exist_ok=True)
AutoModelForCausalLM.register(MemorizingConfig, MemorizingForCausalLM, exist_ok=True)
