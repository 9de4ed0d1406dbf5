"""Grouped cross attention: a weighted sum of attention to each of the retrieved blocks."""

from memstore.kernels.grouped_cross_attention.api import grouped_cross_attention
from memstore.kernels.grouped_cross_attention.native import FusedList
from memstore.kernels.grouped_cross_attention.prepared import Folded, Prepared, attend, attend_folded, fold, prepare

__all__ = [
    "Folded",
    "FusedList",
    "Prepared",
    "Ready",
    "attend",
    "attend_folded",
    "fold",
    "grouped_cross_attention",
    "prepare",
]

Ready = Prepared | Folded | FusedList
"""A list of each row, ready for the tokens of one layer."""
