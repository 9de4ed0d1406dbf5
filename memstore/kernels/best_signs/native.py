"""The native back end: ``native.c`` looks up and adds table entries, with 16-bit instructions."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from memstore.kernels import native

SOURCE = native.beside(__file__)
VECTORS = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw"}
"""Required features of the processor, and the compiler's flags for them."""
WORDS_PER_THREAD = 1 << 16
"""Key words from which another thread pays."""


def best_signs(words: Tensor, queries: Tensor, dim: int) -> Tensor:
    """Take contiguous ``words [n, tiles, W, 32]``, ``queries [R, dim]`` float32: see the public function.

    Returns ``[n, R]``.
    """
    blocks, tiles, _, _ = words.shape
    rows = len(queries)
    out = torch.empty(blocks, rows)
    if not out.numel():
        return out
    threads = min(torch.get_num_threads(), 1 + words.numel() // WORDS_PER_THREAD)
    given = queries.contiguous()
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (words, given, out))
    sizes = (ctypes.c_long(each) for each in (blocks, tiles, dim, rows, threads))
    if _library().memstore_best_signs(*pointers, *sizes):
        raise MemoryError(
            f"there is not enough memory for the tables of {rows} queries of {dim} numbers; search fewer queries "
            "at once."
        )
    return out


def pack(keys: Tensor, words: Tensor) -> bool:
    """Pack ``keys [n, P, D]`` float32 into contiguous ``words [n, tiles, W, 32]``; False unless all are signs."""
    if not keys.numel():
        return True
    given = keys.contiguous()
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in (given, words))
    return not _library().memstore_pack_signs(*pointers, *(ctypes.c_long(each) for each in keys.shape))


@cache
def problem() -> str | None:
    """Say why this back end is not available; None if it is."""
    return native.problem_of(_library)


@cache
def _library() -> ctypes.CDLL:
    if not native.processor().issuperset(VECTORS):
        raise native.Unavailable("needs Linux on an x86-64 processor with AVX-512 BW; use 'auto'")
    return native.parallel(SOURCE, list(VECTORS.values()))
