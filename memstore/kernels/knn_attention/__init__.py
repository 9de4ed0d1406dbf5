"""kNN attention: every query attends to tokens of its own, found in a memory, and a gate mixes that with local text."""

from memstore.kernels.knn_attention.api import knn_attention, knn_attention_with_lse

__all__ = ["knn_attention", "knn_attention_with_lse"]
