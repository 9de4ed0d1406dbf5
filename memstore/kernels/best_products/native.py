"""By ``native.c``: product and maximum in one go, by the processor's instructions for 8 bits."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from memstore.kernels import native

SOURCE = Path(__file__).with_suffix(".c")
VECTORS = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512vl": "-mavx512vl", "avx512_vnni": "-mavx512vnni"}
MATRICES = {"amx_tile": "-mamx-tile", "amx_int8": "-mamx-int8"}
"""What the processor must be able to do, and the compiler's word for it."""
NUMBERS_PER_THREAD = 1 << 19
"""Numbers of keys from which on another thread pays."""


def best_products(codes: Tensor, queries: Tensor, chosen: Tensor | None, out: Tensor, *, matrices: bool = True) -> None:
    """``codes [n, P, D]``, ``queries [R, D]``, ``chosen [m]``, to ``out [m, R]``: see the public function.

    All are contiguous. ``matrices``: with AMX, where the processor has it.
    """
    library = _library()
    keys, dim = codes.shape[1:]
    groups, rows = out.shape
    threads = min(torch.get_num_threads(), 1 + groups * keys * dim // NUMBERS_PER_THREAD)
    sizes = (ctypes.c_long(each) for each in (groups, keys, dim, rows, threads))
    tensors = (codes, chosen, queries, out)
    pointers = (ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors)
    if library.memstore_best_products(*pointers, *sizes, int(matrices and has_matrices())):
        raise MemoryError(f"no memory for {rows} queries of {dim} numbers.")


@cache
def has_matrices() -> bool:
    """Whether the processor has AMX, and this process may use it."""
    return bool(_library().memstore_has_amx())


@cache
def problem() -> str | None:
    """Why this cannot be; None if it can."""
    return native.problem_of(_library)


@cache
def _library() -> ctypes.CDLL:
    able = native.processor()
    if not able.issuperset(VECTORS):
        raise native.Unavailable("needs Linux on an x86-64 processor with AVX-512 VNNI; use 'auto' or 'torch'")
    vectors = list(VECTORS.values())
    if able.issuperset(MATRICES):
        with suppress(native.Unavailable):  # old compilers know no AMX
            return native.parallel(SOURCE, [*vectors, *MATRICES.values()])
    return native.parallel(SOURCE, vectors)
