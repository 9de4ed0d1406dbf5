"""Codes made numbers again, and products as one would write them down, some blocks at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from memstore.kernels.best_codes.encoding import numbers

STEP_NUMBERS, STEP_NUMBERS_THERE = 1 << 20, 1 << 28
"""Of codes or of products, at a time, on a CPU and elsewhere."""


def best_codes(codes: Tensor, queries: Tensor) -> Tensor:
    """``codes [n, P, ...]``, ``queries [R, D]``: see the public function. In float64 for queries in float64."""
    wide = queries.to(torch.promote_types(queries.dtype, torch.float32))
    rows, dim = queries.shape
    most = STEP_NUMBERS if codes.device.type == "cpu" else STEP_NUMBERS_THERE
    step = max(1, most // (codes.shape[1] * max(dim, rows)))
    pieces = (numbers(piece, dim).to(wide.dtype) for piece in codes.split(step))
    return torch.cat(
        [(piece.flatten(0, 1) @ wide.T).unflatten(0, piece.shape[:2]).amax(1) for piece in pieces]
    ).T.float()
