"""Tokens that come one by one over a prepared list, with the projections around it, by ``native.c``.

``x + W_out attend(W_query RMSNorm(x))`` in float32: what a layer adds to a token, in one call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memstore.kernels import native
from memstore.kernels.grouped_cross_attention.prepared import Prepared

SOURCE = Path(__file__).with_suffix(".c")
LARGEST = 1 << 20
"""Numbers of weights, keys and values that are read for a token: of more, libraries have the faster products."""


class _List(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "query", "keys", "values", "out")),
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
        self._tensors = [each.detach().contiguous() for each in (norm, query, keys, values, out)]
        pointers = [each.data_ptr() for each in self._tensors]
        sizes = (many // groups, len(norm), groups, heads // groups, dim, wide, joined, size)
        self._list = _List(*pointers, *sizes, eps)
        self._reference = ctypes.byref(self._list)
        self._attend = _function()
        self.prepared = prepared
        self.shape = (many // groups, 1, len(norm))
        """Of a token of each row."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Addresses cannot be copied: a copy of a cache has copies of the tensors.
        norm, query, _, _, out = self._tensors
        return FusedList, (self.prepared, norm, query, out, self._list.eps)

    @staticmethod
    def takes(prepared: Prepared, norm: Tensor, query: Tensor, out: Tensor) -> bool:
        """Whether this can be made of them, and pays."""
        tensors = (prepared.keys, prepared.values, norm, query, out)
        plain = all(type(each) in (Tensor, nn.Parameter) for each in tensors)  # quantised ones have no float32 to read
        fit = all(each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors)
        return plain and fit and sum(each.numel() for each in tensors) <= LARGEST and problem() is None

    def fits(self, x: Tensor) -> bool:
        """Whether ``added`` takes ``x``, of which there is no gradient."""
        plain = x.shape == self.shape and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()
        return plain and not torch.is_grad_enabled()

    def added(self, x: Tensor) -> Tensor:
        """``x [B, 1, hidden]``, which ``fits``, plus what it finds in the list of its row."""
        out = torch.empty_like(x)
        if self._attend(self._reference, x.data_ptr(), out.data_ptr()):
            raise MemoryError("no memory for one token.")
        return out


@cache
def problem() -> str | None:
    """Why this cannot be; None if it can."""
    return native.problem_of(_function)


@cache
def _function() -> ctypes._FuncPointer:
    function = native.library(SOURCE, native.vectors()).memstore_attend_token
    function.argtypes = (ctypes.c_void_p,) * 3
    function.restype = ctypes.c_int
    return function
