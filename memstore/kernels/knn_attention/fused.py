"""kNN attention in PyTorch's own operations, a few queries at a time: gathered states stay in the cache.

The backward pass gathers again instead of keeping ``[B, H, T, K, D]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

GATHERED_NUMBERS = 1 << 19
"""Numbers of keys, and of values, gathered at a time."""


def knn_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the public function; constant in ``k`` and ``v``."""
    out, lse = _KnnAttention.apply(q, k, v, ids, scale)  # type: ignore[no-untyped-call]
    if local is not None and gate is not None:
        opened = torch.where(lse.detach() > -torch.inf, gate.sigmoid()[:, None], 0).unsqueeze(-1)
        out = torch.lerp(local.to(opened.dtype), out.to(opened.dtype), opened).to(q.dtype)
    return out, lse


class _KnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
        for place, keys, values, there in _tiles(k, v, ids, dtype):
            scores = _scores(q[place].to(dtype), keys, there) * scale[place[1]].to(dtype)
            lse[place] = scores.logsumexp(-1)
            weights = _weights(scores, lse[place])
            out[place] = torch.bmm(weights.unsqueeze(1), values).squeeze(1).to(out.dtype)
        ctx.save_for_backward(q, k, v, ids, scale, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ids, scale, lse = ctx.saved_tensors
        dtype = lse.dtype
        dq, dscale = torch.empty_like(q), torch.zeros_like(scale, dtype=dtype)
        for place, keys, values, there in _tiles(k, v, ids, dtype):
            products = _scores(q[place].to(dtype), keys, there)
            factor = scale[place[1]].to(dtype)
            weights = _weights(products * factor, lse[place])
            gradient = torch.bmm(values, dout[place].to(dtype).unsqueeze(2)).squeeze(2)
            rest = (weights * gradient).sum(-1, keepdim=True) - dlse[place].unsqueeze(-1)
            dscores = weights * (gradient - rest)
            dq[place] = (factor * torch.bmm(dscores.unsqueeze(1), keys).squeeze(1)).to(q.dtype)
            dscale[place[1]] += (dscores * products.masked_fill(~there, 0)).sum()
        return dq, None, None, None, dscale.to(scale.dtype)


Place = tuple[int, int, slice]
"""A row, a head, and some of its queries."""


def _tiles(k: Tensor, v: Tensor, ids: Tensor, dtype: torch.dtype) -> Iterator[tuple[Place, Tensor, Tensor, Tensor]]:
    """Yield keys and values ``[t, K, D]`` of ``t`` queries at a time, zeros for missing ones, and a mask."""
    batch, heads, tokens, chosen = ids.shape
    per_group = heads // k.shape[1]
    step = max(1, GATHERED_NUMBERS // max(1, chosen * max(k.shape[-1], v.shape[-1])))
    for row in range(batch):
        for head in range(heads):
            for start in range(0, tokens, step):
                place = (row, head, slice(start, min(start + step, tokens)))
                there = ids[place] >= 0
                wanted = ids[place].clamp(min=0).flatten()
                keys, values = (x[row, head // per_group].index_select(0, wanted).to(dtype) for x in (k, v))
                if not bool(there.all()):  # states in unused places must not reach the sums
                    keys, values = (x.masked_fill(~there.view(-1, 1), 0) for x in (keys, values))
                yield place, keys.view(*there.shape, -1), values.view(*there.shape, -1), there


def _scores(q: Tensor, keys: Tensor, there: Tensor) -> Tensor:
    products = torch.bmm(keys, q.unsqueeze(2)).squeeze(2)
    return products.masked_fill(~there, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax; 0 for a query that found nothing."""
    return torch.exp(scores - torch.where(lse == -torch.inf, 0, lse).unsqueeze(-1))
