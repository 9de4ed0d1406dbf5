"""Products in their plainest form, in a type that holds them exactly."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_SINGLE_DIM = 1024
"""Numbers of a key whose products and sums float32 holds exactly: up to 2 ** 14 each, 2 ** 24 together."""
STEP_NUMBERS = 1 << 20
"""Numbers of keys or products at a time: some processors have no other back end, and an index may have many keys."""


def best_products(codes: Tensor, queries: Tensor, chosen: Tensor | None) -> Tensor:
    """Take ``codes [n, P, D]``, ``queries [R, D]``, ``chosen [m]``: see the public function."""
    _, keys, dim = codes.shape
    step = max(1, STEP_NUMBERS // (keys * max(dim, len(queries))))
    pieces = codes.split(step) if chosen is None else (codes[some] for some in chosen.split(step))
    dtype = torch.float32 if dim <= LARGEST_SINGLE_DIM else torch.float64
    wide = queries.to(dtype)
    return torch.cat([torch.einsum("npd,rd->nrp", piece.to(dtype), wide).amax(2).float() for piece in pieces])
