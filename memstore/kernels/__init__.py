"""Pure tensor functions, one folder each: the package checks and dispatches, and a reference defines the truth."""

from memstore.kernels.best_products import best_products as best_products
from memstore.kernels.block_attention import block_attention as block_attention
from memstore.kernels.block_attention import merge_attention as merge_attention
from memstore.kernels.grouped_cross_attention import grouped_cross_attention as grouped_cross_attention
from memstore.kernels.hils_attention import hils_attention as hils_attention
from memstore.kernels.knn_attention import knn_attention as knn_attention
from memstore.kernels.knn_attention import knn_attention_with_lse as knn_attention_with_lse
from memstore.kernels.landmark_attention import landmark_attention as landmark_attention
from memstore.kernels.search_blocks import search_blocks as search_blocks
