"""How keys and values lie in memory."""

from __future__ import annotations

from torch import Tensor


def inside(keys: Tensor, values: Tensor) -> bool:
    """Whether ``values [N, ..., Dv]`` are the first numbers of ``keys [N, ..., D]``, the very memory."""
    same = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    return same and values.dtype == keys.dtype and values.shape[-1] <= keys.shape[-1]
