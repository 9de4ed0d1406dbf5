"""Products as one would write them down, in whole numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def best_products(codes: Tensor, queries: Tensor, chosen: Tensor | None) -> Tensor:
    """``codes [n, P, D]``, ``queries [R, D]``, ``chosen [m]``: see the public function."""
    codes = codes if chosen is None else codes[chosen]
    return torch.einsum("npd,rd->nrp", codes.long(), queries.long()).amax(2).float()
