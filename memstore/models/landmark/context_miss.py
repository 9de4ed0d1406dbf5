"""The context-miss token while training (Mohtashami & Jaggi 2023, appendix D).

It is no item of the stream. It stands at position -1, before everything, so it attends to nothing and its hidden state
in each layer is the same for every text: a vector that runs through the feed-forward layers alone. What counts is its
key in each layer. In the paper's words, with ``L_CMT`` the landmarks under its control, its score is one more column of
the group of a query's own block and the free landmarks, and the weight it gets there is handed to the landmarks of
``L_CMT``, among which a softmax of their own divides it. Where a query sees none of ``L_CMT``, the token keeps its
weight, which is lost.

This is landmark attention with another score for controlled landmarks,

    s_l + s_CMT - logsumexp over visible l' of L_CMT (s_l')

which gives each the weight that the paper's product of three softmaxes gives it. That term is a number of the query
times a flag of the key, so it goes into one more dimension of both, and no attention of its own is needed. A second
one carries the score of the token itself for queries that see none of ``L_CMT``.

Here landmarks are drawn while training only: otherwise those of a text without a cache are all free, as the paper's
in-context landmarks are. With a cache, those in memory are under control (``memstore.attention.landmark``).

Deviation: the landmarks under control are drawn once for all layers of a step, not anew in each layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels import landmark_attention

NOWHERE = -1000.0
"""A score whose exponential is 0; in float16 it can be multiplied by the square root of a head's size."""


# The token is no item of the stream: at position -1 it attends to nothing, so it is a vector that runs through the
# feed-forward layers once per step. Its gate is one more dimension of queries and keys (a number of the query times a
# flag of the key), so the same fused attention trains it. Which landmarks it controls is drawn once per step.
def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_landmark: Tensor,
    context_miss: Tensor,
    controlled: Tensor | None,
    *,
    ramp: float = 1.0,
) -> Tensor:
    """Landmark attention over ``q [B, H, M, D]``, ``k, v [B, G, M, D]`` with a context-miss token -> ``[B, H, M, D]``.

    Args:
        q: queries, rotated.
        k: keys, rotated.
        v: values.
        is_landmark: ``[B, M]``.
        context_miss: ``[1, G, 1, D]``, the token's key, rotated to position -1.
        controlled: ``[B, M]``, the landmarks under its control (``L_CMT``); none if None.
        ramp: that of ``landmark_attention``.
    """
    dim = q.shape[-1]
    scale = dim**-0.5
    gate = _scores(q, context_miss, scale).squeeze(-1)  # [B, H, M]
    share, alone = torch.zeros_like(gate), gate
    if controlled is not None:
        total, some = _total(q, k, is_landmark, controlled, scale)
        share = torch.where(some, gate - total, 0.0)
        alone = torch.where(some, NOWHERE, gate)
    q = torch.cat([q, (torch.stack([share, alone], -1) / scale).to(q.dtype)], -1)
    k = F.pad(k, (0, 2))
    if controlled is not None:
        flags = F.one_hot(torch.tensor(dim, device=k.device), dim + 2).to(k.dtype)
        k = k + controlled[:, None, :, None] * flags
    # The token as a block of its own in front: one item that holds nothing, and its landmark.
    own = F.one_hot(torch.tensor(dim + 1, device=k.device), dim + 2).to(k.dtype).expand(*k.shape[:2], 2, -1)
    k, v = torch.cat([own, k], 2), F.pad(v, (0, 0, 2, 0))
    front = torch.tensor([False, True], device=k.device).expand(len(k), -1)
    return landmark_attention(q, k, v, torch.cat([front, is_landmark], 1), ramp=ramp, scale=scale)


def _total(q: Tensor, k: Tensor, is_landmark: Tensor, controlled: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials of the scores of visible landmarks under control, and where there are any.

    ``[B, H, M]`` and ``[B, 1, M]``. Both are those of regular blocks, the same in all rows.
    """
    places = is_landmark[0].nonzero().flatten()
    block = is_landmark[0].cumsum(0) - is_landmark[0].long()
    earlier = torch.arange(len(places), device=q.device) < block[:, None]  # [M, N]
    visible = (earlier & controlled[:, places].unsqueeze(1)).unsqueeze(1)  # [B, 1, M, N]
    some = visible.any(-1)
    scores = _scores(q, k[:, :, places], scale)
    # Queries that see none get a sum of something, whose gradient nobody asks for, instead of NaN.
    return scores.masked_fill(~visible & some.unsqueeze(-1), -torch.inf).logsumexp(-1), some


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """``q [B, H, M, D]``, ``k [B or 1, G, N, D]`` -> ``[B, H, M, N]`` in float32 at least."""
    grouped: Tensor = q.unflatten(1, (k.shape[1], -1))
    products: Tensor = (grouped @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    return (products if products.dtype == torch.float64 else products.float()) * scale
