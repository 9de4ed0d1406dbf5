"""Attention over chosen rows in PyTorch's own operations, a few queries at a time: gathered rows stay in the cache.

Attending to the rows of several queries at once, with a mask, was slower for tables with more than twice as many rows
as a query chose.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 1 << 18
"""Numbers gathered at a time."""


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the public function."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, groups = q.shape[1], keys.shape[1]
    out = q.new_empty(*q.shape[:2], values.shape[2])
    lse = torch.empty(q.shape[:2], dtype=dtype, device=q.device)
    step = max(1, NUMBERS // (ids.shape[2] * keys.shape[2]))
    for group in range(groups):
        own = slice(group * heads // groups, (group + 1) * heads // groups)
        logits = None if sinks is None else sinks[own].to(dtype)
        for start in range(0, len(q), step):
            some = slice(start, start + step)
            chosen = ids[some, group if ids.shape[1] > 1 else 0]
            query = q[some, own].to(dtype) * scale
            out[some, own], lse[some, own] = _attend(query, keys[:, group], values[:, group], chosen, logits)
    return out, lse


def _attend(q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take ``q [s, h, D]``, ``keys [N, D]``, ``values [N, Dv]``, ``ids [s, k]``."""
    there = ids >= 0
    # An unused place repeats a chosen row: NaN in other rows must not reach the sums.
    rows = torch.where(there, ids, ids.amax(1, keepdim=True)).clamp(min=0).flatten()
    k = keys.index_select(0, rows).to(q.dtype).view(*ids.shape, -1)
    if inside(keys, values):
        v = k[..., : values.shape[1]]
    else:
        v = values.index_select(0, rows).to(q.dtype).view(*ids.shape, -1)
    scores = torch.bmm(q, k.mT)
    if not bool(there.all()):
        scores = scores.masked_fill(~there.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    weights = scores.sub_(torch.where(lse == -torch.inf, 0, lse).unsqueeze(-1)).exp_()
    return torch.bmm(weights, v).masked_fill(~there.any(1)[:, None, None], 0), lse


def inside(keys: Tensor, values: Tensor) -> bool:
    """Return whether ``values [N, ..., Dv]`` are the first numbers of ``keys [N, ..., D]`` in memory."""
    same = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    return same and values.dtype == keys.dtype and values.shape[-1] <= keys.shape[-1]
