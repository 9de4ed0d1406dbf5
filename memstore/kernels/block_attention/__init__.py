"""Attention over gathered blocks, and the exact merge of partial results."""

from memstore.kernels.block_attention.api import attend, block_attention, merge_attention

__all__ = ["attend", "block_attention", "merge_attention"]
