"""Attention over chosen rows in its plainest form: gather, score, softmax, sum."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Take ``q [S, H, D]``, ``keys [N, G, D]``, ``values [N, G, Dv]``, ``ids [S, 1 or G, k]``, ``sinks [H]``.

    Returns the output ``[S, H, Dv]`` and the log-sum-exp of the scores ``[S, H]``; see the public function.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, groups = q.shape[1], keys.shape[1]
    group = torch.arange(heads, device=q.device) // (heads // groups)  # of each head
    chosen = ids.expand(-1, groups, -1)[:, group]  # [S, H, k]
    there = chosen >= 0
    k, v = (
        torch.where(there.unsqueeze(-1), x[chosen.clamp(min=0), group[:, None]], 0).to(dtype)  # [S, H, k, D]
        for x in (keys, values)
    )
    scores = torch.einsum("shd,shkd->shk", q.to(dtype), k) * scale
    lse = scores.masked_fill(~there, -torch.inf).logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype))
    weights = torch.where(there, (scores - lse.unsqueeze(-1)).exp(), 0)
    return torch.einsum("shk,shkd->shd", weights, v).to(q.dtype), lse
