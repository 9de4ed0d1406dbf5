"""The largest product of each block of signs with each query: what a memory that routes by codes of one bit asks."""

from memstore.kernels.best_signs.api import PackedSigns, best_signs, pack

__all__ = ["PackedSigns", "best_signs", "pack"]
