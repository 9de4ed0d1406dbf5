"""Block attention without the log-sum-exp, through what PyTorch does fastest on the device at hand.

Measured on CPUs without matrix units for bfloat16 (256 queries, 9 heads of 64, 1,088 keys): the fused SDPA kernel takes
3.7 ms in either precision, two matrix products and a softmax take 12 ms in float32 and 1.5 ms in bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of ``q [B, H, T, D]`` over ``k, v [B, G, N, D]``; returns ``[B, H, T, Dv]``.

    ``mask`` is additive, in the dtype of ``q``, and broadcasts to ``[B, heads, T, M]``, heads being 1, G or H. It is
    for the last ``M`` keys; those before are visible to all queries.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] > 1:
        return _products(q, k, v, mask, scale)
    if q.shape[2] == 1 and mask is None:
        return _packed_sdpa(q, k, v, scale)
    mask = None if mask is None else whole_mask(mask, q.shape[1], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def whole_mask(mask: Tensor, heads: int, keys: int) -> Tensor:
    """An additive ``mask [B, 1 or G or H, T, M]`` for the last ``M`` keys, as ``[B, 1 or H, T, keys]``."""
    if mask.shape[1] not in (1, heads):
        mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
    return F.pad(mask, (keys - mask.shape[-1], 0))


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, tokens, dim = q.shape
    groups = k.shape[1]
    packed = (q * scale).reshape(batch, groups, heads // groups * tokens, dim)
    scores = packed @ k.transpose(-1, -2)
    if mask is not None:
        masked = scores.view(batch, groups, heads // groups, tokens, -1)[..., k.shape[2] - mask.shape[-1] :]
        masked += mask[:, :, None] if mask.shape[1] in (1, groups) else mask.unflatten(1, (groups, -1))
    out = torch.softmax(scores, dim=-1) @ v
    return out.reshape(batch, heads, tokens, v.shape[-1])


def _packed_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query token: the heads of a group are the rows of one product."""
    batch, heads, _, dim = q.shape
    packed = q.reshape(batch, k.shape[1], heads // k.shape[1], dim)
    out = F.scaled_dot_product_attention(packed, k, v, scale=scale)
    return out.reshape(batch, heads, 1, v.shape[-1])
