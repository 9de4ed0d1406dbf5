"""Memorizing Transformers: decoders with one layer that also looks up single tokens of the whole text so far.

``MemorizingForCausalLM`` trains, saves and generates as any Hugging Face model does. ``add_knn_memory`` gives a stock
model such a layer.
"""

from typing import TYPE_CHECKING

from memstore.lazy import lazy

if TYPE_CHECKING:
    from memstore.models.memorizing.cache import MemorizingCache as MemorizingCache
    from memstore.models.memorizing.configuration import MemorizingConfig as MemorizingConfig
    from memstore.models.memorizing.modeling import MemorizingForCausalLM as MemorizingForCausalLM
    from memstore.models.memorizing.reader import MemorizingReader as MemorizingReader
    from memstore.models.memorizing.stock import KNNMemory as KNNMemory
    from memstore.models.memorizing.stock import add_knn_memory as add_knn_memory
    from memstore.models.memorizing.stock import knn_memory_of as knn_memory_of
    from memstore.models.memorizing.stock import load_knn_memory as load_knn_memory
    from memstore.models.memorizing.stock import remove_knn_memory as remove_knn_memory
else:
    __getattr__ = lazy(
        __name__,
        {
            "cache": "MemorizingCache",
            "configuration": "MemorizingConfig",
            "modeling": "MemorizingForCausalLM",
            "reader": "MemorizingReader",
            "stock": "KNNMemory, add_knn_memory, knn_memory_of, load_knn_memory, remove_knn_memory",
        },
    )
