"""Grouped cross attention: a weighted sum of attention to each of the retrieved blocks."""

from memstore.kernels.grouped_cross_attention.api import grouped_cross_attention
from memstore.kernels.grouped_cross_attention.prepared import Prepared, attend, prepare

__all__ = ["Prepared", "attend", "grouped_cross_attention", "prepare"]
