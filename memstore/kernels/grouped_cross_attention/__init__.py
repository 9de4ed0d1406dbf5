"""Grouped cross attention: a weighted sum of attention to each of the retrieved blocks."""

from memstore.kernels.grouped_cross_attention.api import grouped_cross_attention

__all__ = ["grouped_cross_attention"]
