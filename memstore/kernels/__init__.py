"""Pure tensor functions, one folder each: the package checks and dispatches, and a reference defines the truth."""

from memstore.kernels.best_products import best_products
from memstore.kernels.block_attention import block_attention, merge_attention
from memstore.kernels.grouped_cross_attention import grouped_cross_attention
from memstore.kernels.hils_attention import hils_attention
from memstore.kernels.knn_attention import knn_attention, knn_attention_with_lse
from memstore.kernels.landmark_attention import landmark_attention
from memstore.kernels.search_blocks import search_blocks

__all__ = [
    "best_products",
    "block_attention",
    "grouped_cross_attention",
    "hils_attention",
    "knn_attention",
    "knn_attention_with_lse",
    "landmark_attention",
    "merge_attention",
    "search_blocks",
]
