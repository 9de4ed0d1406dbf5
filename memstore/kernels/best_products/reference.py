"""Products as one would write them down, in float64, which holds them exactly."""

from __future__ import annotations

import torch
from torch import Tensor

STEP_NUMBERS = 1 << 20
"""Of keys or of products, at a time: some processors have no other way, and an index may have many keys."""


def best_products(codes: Tensor, queries: Tensor, chosen: Tensor | None) -> Tensor:
    """``codes [n, P, D]``, ``queries [R, D]``, ``chosen [m]``: see the public function."""
    _, keys, dim = codes.shape
    step = max(1, STEP_NUMBERS // (keys * max(dim, len(queries))))
    pieces = codes.split(step) if chosen is None else (codes[some] for some in chosen.split(step))
    wide = queries.double()
    return torch.cat([torch.einsum("npd,rd->nrp", piece.double(), wide).amax(2).float() for piece in pieces])
