"""Grouped cross attention: a weighted sum of attention to each of the retrieved blocks."""

from memstore.kernels.grouped_cross_attention.api import grouped_cross_attention
from memstore.kernels.grouped_cross_attention.prepared import (
    FoldedList,
    PreparedList,
    Ready,
    attend,
    attend_folded,
    fold,
    prepare,
)

__all__ = [
    "FoldedList",
    "PreparedList",
    "Ready",
    "attend",
    "attend_folded",
    "fold",
    "grouped_cross_attention",
    "prepare",
]
