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

    ``mask`` is additive, in the dtype of ``q``, and broadcasts to ``[B, 1, T, N]``.
    """
    batch, heads, tokens, dim = q.shape
    groups = k.shape[1]
    packed = q.reshape(batch, groups, heads // groups * tokens, dim)
    if mask is not None and heads != groups:
        mask = mask.repeat(*([1] * (mask.dim() - 2)), heads // groups, 1)
    out = _products(packed, k, v, mask, scale) if _products_are_faster(q) else _sdpa(packed, k, v, mask, scale)
    return out.reshape(batch, heads, tokens, v.shape[-1])


def _products_are_faster(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] > 1


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (q * scale) @ k.transpose(-1, -2)
    if mask is not None:
        scores += mask
    return torch.softmax(scores, dim=-1) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
