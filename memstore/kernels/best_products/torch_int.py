"""The PyTorch back end: its product of int8 matrices, which oneDNN computes, some groups at a time."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from memstore.kernels.native import processor

TILE_PRODUCTS = 1 << 18
"""Products at a time for each thread: they stay in its cache until the best of each group are found."""


def best_products(codes: Tensor, queries: Tensor, chosen: Tensor | None, out: Tensor) -> None:
    """Write to ``out [m, R]`` from ``codes [n, P, D]``, ``queries [R, D]``, ``chosen [m]``: see the public function."""
    keys, dim = codes.shape[1:]
    groups, rows = out.shape
    step = min(max(1, TILE_PRODUCTS * torch.get_num_threads() // (rows * keys)), groups)
    room = torch.empty(step * keys * rows, dtype=torch.int32)
    best = torch.empty(step, rows, dtype=torch.int32)
    pieces = codes.split(step) if chosen is None else map(partial(_fetched, codes), chosen.split(step))
    for piece, into in zip(pieces, out.split(step), strict=True):
        n = len(piece)
        here, flat = room[: n * keys * rows], piece.reshape(-1, dim)
        # Reducing along the longer of the two leaves whole vectors to the processor.
        if rows >= keys:
            torch._int_mm(flat, queries.T, out=here.view(-1, rows))
            torch.amax(here.view(n, keys, rows), 1, out=best[:n])
            into.copy_(best[:n])
        else:
            torch._int_mm(queries, flat.T, out=here.view(rows, -1))
            into.copy_(here.view(rows, n, keys).amax(2).T)


def _fetched(codes: Tensor, chosen: Tensor) -> Tensor:
    # index_select of whole groups copies memory; with three dimensions it copies number by number.
    return codes.flatten(1).index_select(0, chosen).view(-1, *codes.shape[1:])


@cache
def problem() -> str | None:
    """Say why this back end is not available; None if it is."""
    # With AVX2 alone it takes as long as a plain loop, or cuts large sums off.
    if not torch.backends.mkldnn.is_available() or "avx512_vnni" not in processor():
        return "needs Linux, AVX-512 VNNI and a PyTorch with oneDNN; use 'auto' or 'reference'"
    # PyTorch does not document this product (2.13 computes it wrongly for vectors of one number), so it is tried.
    codes = (torch.arange(8 * 32 * 24) * 89 % 255 - 127).to(torch.int8).view(8, 32, 24)
    for rows in (3, 40):
        queries = (torch.arange(rows * 24) * 41 % 255 - 127).to(torch.int8).view(rows, 24)
        truth = torch.einsum("gkd,rd->grk", codes.long(), queries.long()).amax(2).float()
        out = torch.empty(8, rows)
        best_products(codes, queries, None, out)
        if not torch.equal(out, truth):
            return f"is computed wrongly by this PyTorch ({torch.__version__}); use 'auto' or 'reference'"
    return None
