"""Block attention in plain PyTorch: the reference for every faster form.

Grouped heads are packed: the ``R = H / G`` query heads of a key-value head become rows of one matrix product,
so keys and values are never repeated in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend with ``q [B, H, T, D]`` to ``k, v [B, G, N, D]``; float32 inside (float64 for float64 inputs).

    Returns the output ``[B, H, T, Dv]`` in the dtype of ``q`` and the log-sum-exp of the scores ``[B, H, T]``.
    A query that sees no key gets output 0 and log-sum-exp -inf.
    """
    scores = masked_scores(q, k, mask=mask, scale=scale, softcap=softcap)  # [B, H, T, N]
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(scores.dtype).view(1, -1, 1))
    weights = torch.exp(scores - torch.nan_to_num(lse, neginf=0.0).unsqueeze(-1))
    out = _per_group(weights, v.to(weights.dtype))
    return out.to(q.dtype), lse


def masked_scores(q: Tensor, k: Tensor, *, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Return scaled, capped and masked scores ``[B, H, T, N]`` in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = _per_group(q.to(dtype), k.to(dtype).transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    return scores + mask


def _per_group(x: Tensor, y: Tensor) -> Tensor:
    """Multiply ``x [B, H, T, n]`` by ``y [B, G, n, m]``; head ``h`` uses group ``h // (H / G)``."""
    batch, heads, tokens, inner = x.shape
    groups = y.shape[1]
    packed = x.reshape(batch, groups, heads // groups * tokens, inner)
    return (packed @ y).reshape(batch, heads, tokens, y.shape[-1])
