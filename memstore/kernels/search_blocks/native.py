"""The search for blocks by ``native.c``: one pass over the keys, which pays for a few queries."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.kernels import native

SOURCE = Path(__file__).with_suffix(".c")


class Part(NamedTuple):
    """Keys of one key head, side by side in memory."""

    keys: Tensor
    """``[n, P, D]`` float32 or bfloat16, all parts in one type"""
    ids: Tensor | None
    """``[n]`` int64: of the blocks. None: their rows"""
    wanted: Tensor | None
    """``[n]`` bool: the blocks that count. None: all"""


class _Part(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("keys", "ids", "wanted")), ("blocks", ctypes.c_int64))


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("size", "dim", "rows", "k", "half"))


class _Best(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scores", "ids", "offsets"))


def search_parts(parts: Sequence[Part], queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best blocks of all ``parts`` for ``queries [R, D]``: scores, ids and the keys that matched, ``[R, k]`` each.

    Best first, of equal blocks the smaller id first; -inf, -1 and -1 where there are fewer. Scores are float32.
    Everything is on the CPU.
    """
    rows, dim = queries.shape
    queries = queries.float().contiguous()
    # C writes to them: what they are must not depend on PyTorch's defaults.
    scores = torch.full((rows, k), -torch.inf, dtype=torch.float32, device="cpu")
    ids, offsets = torch.full((2, rows, k), -1, dtype=torch.int64, device="cpu")
    if parts:
        keys = parts[0].keys
        there = (_Part * len(parts))(*(_Part(*map(_pointer, part), len(part.keys)) for part in parts))
        sizes = _Sizes(keys.shape[1], dim, rows, k, keys.dtype == torch.bfloat16)
        best = _Best(*map(_pointer, (scores, ids, offsets)))
        _function()(there, len(parts), ctypes.byref(sizes), queries.data_ptr(), ctypes.byref(best))
    return scores, ids, offsets


def search_blocks(queries: Tensor, landmarks: Tensor, k: int, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """``queries [H, T, D]``, ``landmarks [G, N, P, D]``, ``wanted [N]``: see the public function."""
    by_head = queries.reshape(len(landmarks), -1, queries.shape[2])
    found = [
        search_parts([Part(keys.contiguous(), None, None if wanted is None else wanted.contiguous())], rows, k)
        for keys, rows in zip(landmarks, by_head, strict=True)
    ]
    scores, ids, _ = (torch.stack(each).view(*queries.shape[:2], k) for each in zip(*found, strict=True))
    return scores, ids


@cache
def problem() -> str | None:
    """Why this cannot be; None if it can."""
    try:
        _function()
    except native.Unavailable as reason:
        return str(reason)
    return None


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _function() -> ctypes._FuncPointer:
    function = native.library(SOURCE, native.vectors()).memstore_search
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, ctypes.c_int64, pointer, pointer, pointer)
    function.restype = None
    return function
