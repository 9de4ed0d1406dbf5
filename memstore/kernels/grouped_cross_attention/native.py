"""Tokens that come one by one over a prepared list, with the projections around it, by ``native.c``.

``x + W_out attend(W_query RMSNorm(x))`` in float32: what a layer adds to a token, in one call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from memstore.kernels import native
from memstore.kernels.grouped_cross_attention.prepared import Prepared

SOURCE = Path(__file__).with_suffix(".c")
LARGEST = 1 << 20
"""Numbers of weights, keys and values that are read for a token: of more, libraries have the faster products."""


class _List(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "query", "keys", "values", "out", "scratch")),
        *((name, ctypes.c_int64) for name in ("rows", "hidden", "groups", "heads", "dim", "wide", "joined", "size")),
        ("eps", ctypes.c_float),
    )


class FusedList:
    """A prepared list of each row, and the weights of a layer: ``norm [hidden]``, ``query [H * D, hidden]``, ``out``.

    ``out`` is ``[hidden, H * Dv]``. Everything is float32 on the CPU.
    """

    def __init__(self, prepared: Prepared, norm: Tensor, query: Tensor, out: Tensor, eps: float) -> None:
        keys, values, size, groups = prepared
        many, dim, joined = keys.shape
        heads, wide = len(query) // dim, values.shape[2]
        scratch = torch.empty(len(norm) + heads * (dim + wide) + joined)
        self._tensors = [each.detach().contiguous() for each in (norm, query, keys, values, out, scratch)]
        pointers = [each.data_ptr() for each in self._tensors]
        sizes = (many // groups, len(norm), groups, heads // groups, dim, wide, joined, size)
        self._list = _List(*pointers, *sizes, eps)
        self._reference = ctypes.byref(self._list)
        self._attend = _function()
        self.prepared = prepared

    @staticmethod
    def takes(prepared: Prepared, norm: Tensor, query: Tensor, out: Tensor) -> bool:
        """Whether this can be made of them, and pays."""
        tensors = (prepared.keys, prepared.values, norm, query, out)
        plain = all(each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors)
        return plain and sum(each.numel() for each in tensors) <= LARGEST and problem() is None

    def added(self, x: Tensor) -> Tensor:
        """``x [B, 1, hidden]``, contiguous, plus what it finds in the list of its row."""
        out = torch.empty_like(x)
        self._attend(self._reference, x.data_ptr(), out.data_ptr())
        return out


@cache
def problem() -> str | None:
    """Why this cannot be; None if it can."""
    try:
        _function()
    except native.Unavailable as reason:
        return str(reason)
    return None


@cache
def _function() -> ctypes._FuncPointer:
    function = native.library(SOURCE, native.vectors()).memstore_attend_token
    function.argtypes = (ctypes.c_void_p,) * 3
    function.restype = None
    return function
