"""The choice in its plainest form: all scores, and the largest of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def choose(
    queries: Tensor, weights: Tensor | None, chunks: Sequence[Tensor], limit: Tensor, *,
    scale: float, k: int, relu: bool, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take ``queries [S, H, D]``, ``weights [S, H]``, ``chunks [T, D]``, ``limit [S]``: see the public function."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys = torch.cat(list(chunks)).to(dtype)
    products = torch.einsum("shd,td->sht", queries.to(dtype), keys) * scale
    if relu:
        products = products.relu()
    scores = products.sum(1) if weights is None else torch.einsum("sht,sh->st", products, weights.to(dtype))
    unseen = torch.arange(len(keys), device=keys.device) >= limit[:, None]
    scores = scores.masked_fill(unseen | scores.isnan(), -torch.inf)
    scores = F.pad(scores, (0, -len(keys) % block), value=-torch.inf).unflatten(1, (-1, block)).amax(2)
    # A stable sort puts the smaller of equal positions first.
    best, ids = (scores + 0.0).sort(dim=1, descending=True, stable=True)  # + 0.0: turns -0.0 into 0.0
    missing = max(0, k - best.shape[1])
    best, ids = F.pad(best[:, :k], (0, missing), value=-torch.inf), F.pad(ids[:, :k], (0, missing), value=-1)
    return ids.masked_fill(best == -torch.inf, -1), best
