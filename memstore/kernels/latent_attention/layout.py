"""The memory layout of keys and values."""

from __future__ import annotations

from torch import Tensor


def inside(keys: Tensor, values: Tensor) -> bool:
    """Return whether ``values [N, ..., Dv]`` are the first numbers of ``keys [N, ..., D]`` in memory."""
    same = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    return same and values.dtype == keys.dtype and values.shape[-1] <= keys.shape[-1]
