"""Attention to retrieved tokens as in the paper.

Wu, Rabe, Hutchins & Szegedy 2022, *Memorizing Transformers*, section 3.1: each query of each head attends to the (key,
value) pairs that were retrieved for it, ``V_m = softmax(scale Q K^T) V``. A gate of the head mixes the result with
local attention, ``V_a = V_m g + V_c (1 - g)`` with ``g = sigmoid(b)``. Deliberate deviation: the paper does not define
the case of a query that found nothing, as at the beginning of a document. Here its gate counts as closed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def knn_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``q [B, H, T, D]``, ``k, v [B, G, N, D]``, ``ids [B, H, T, K]``, ``scale, gate [H]``, ``local [B, H, T, Dv]``.

    Returns the output ``[B, H, T, Dv]`` and the log-sum-exp of the scores ``[B, H, T]``, -inf if nothing was found.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    per_group = q.shape[1] // k.shape[1]
    rows = torch.arange(len(q), device=q.device)[:, None, None, None]
    groups = torch.arange(q.shape[1], device=q.device)[:, None, None] // per_group
    there = ids >= 0
    keys, values = (
        torch.where(there.unsqueeze(-1), x[rows, groups, ids.clamp(min=0)], 0).to(dtype)  # [B, H, T, K, D]
        for x in (k, v)
    )
    scores = torch.einsum("bhtd,bhtkd->bhtk", q.to(dtype), keys) * scale.to(dtype)[:, None, None]
    scores = scores.masked_fill(~there, -torch.inf)
    found = there.any(-1, keepdim=True)
    weights = torch.where(found, scores, 0).softmax(-1) * found
    out = torch.einsum("bhtk,bhtkd->bhtd", weights, values)
    if local is not None and gate is not None:
        opened = torch.where(found, gate.to(dtype).sigmoid()[:, None, None], 0)
        out = out * opened + local.to(dtype) * (1 - opened)
    lse = torch.where(found, scores, 0).logsumexp(-1).masked_fill(~found.squeeze(-1), -torch.inf)
    return out.to(q.dtype), lse
