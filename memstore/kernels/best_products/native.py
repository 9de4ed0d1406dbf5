"""The native back end: ``native.c`` computes product and maximum in one go, with 8-bit instructions."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import memstore.kernels.native as native

VECTORS = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512vl": "-mavx512vl", "avx512_vnni": "-mavx512vnni"}
MATRICES = {"amx_tile": "-mamx-tile", "amx_int8": "-mamx-int8"}
"""Features of the processor, and the compiler's flags for them. AVX2 is enough."""
NUMBERS_PER_THREAD = 1 << 19
"""Key numbers from which another thread pays."""


def best_products(codes: Tensor, queries: Tensor, chosen: Tensor | None, out: Tensor, *, matrices: bool = True) -> None:
    """Write to ``out [m, R]`` from ``codes [n, P, D]``, ``queries [R, D]``, ``chosen [m]``: see the public function.

    All are contiguous. ``matrices`` allows AMX, if the processor has it.
    """
    keys, dim = codes.shape[1:]
    groups, rows = out.shape
    threads = min(torch.get_num_threads(), 1 + groups * keys * dim // NUMBERS_PER_THREAD)
    tensors, sizes = (codes, chosen, queries, out), (groups, keys, dim, rows, threads)
    if _library.call("memstore_best_products", *tensors, *sizes, matrices and has_matrices()):
        raise MemoryError(
            f"there is not enough memory for {rows} queries of {dim} numbers; search fewer queries at once."
        )


@cache
def has_matrices() -> bool:
    """Return whether the processor has AMX, and this process may use it."""
    return bool(_library.call("memstore_has_amx"))


@cache
def in_c() -> int:
    """Return the address of the function in C, for others in C."""
    return _library.address("memstore_best_products")


def _load(source: Path) -> ctypes.CDLL:
    able = native.processor()
    if not able.issuperset(VECTORS):
        if "avx2" in able:
            return native.parallel(source, ["-mavx2"])
        raise native.Unavailable("needs Linux on an x86-64 processor with AVX2; use 'auto' or 'torch'")
    vectors = list(VECTORS.values())
    if able.issuperset(MATRICES):
        with suppress(native.Unavailable):  # old compilers do not know AMX
            return native.parallel(source, [*vectors, *MATRICES.values()])
    return native.parallel(source, vectors)


_library = native.Library(__file__, _load)
problem = _library.problem
