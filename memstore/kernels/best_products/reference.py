"""Products in their plainest form, in float64, which holds them exactly."""

from __future__ import annotations

import torch
from torch import Tensor

STEP_NUMBERS = 1 << 20
"""Numbers of keys or products at a time: some processors have no other back end, and an index may have many keys."""


def best_products(codes: Tensor, queries: Tensor, chosen: Tensor | None) -> Tensor:
    """Take ``codes [n, P, D]``, ``queries [R, D]``, ``chosen [m]``: see the public function."""
    _, keys, dim = codes.shape
    step = max(1, STEP_NUMBERS // (keys * max(dim, len(queries))))
    pieces = codes.split(step) if chosen is None else (codes[some] for some in chosen.split(step))
    wide = queries.double()
    return torch.cat([torch.einsum("npd,rd->nrp", piece.double(), wide).amax(2).float() for piece in pieces])
