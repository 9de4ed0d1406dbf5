"""Grouped cross attention as in the paper.

Hu et al. 2025, *Efficient Length-Generalizable Attention via Causal Retrieval for Long-Context Language Modeling*,
equations 2-3: a query attends to each retrieved block by itself, and the results are summed with the weights of the
blocks (in the paper: ``w_k``, the softmax of the retrieval scores). ``off_by_one`` is ``exp(s) / (1 + sum exp(s))``,
which lets a query find nothing in a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, weights: Tensor, *, scale: float, off_by_one: bool
) -> Tensor:
    """Take ``q [B, C, H, T, D]``, ``k, v [B, N, G, S, D]``, ``blocks, weights [B, C, K]`` -> ``[B, C, H, T, Dv]``."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_per_group = q.shape[2] // k.shape[2]
    rows = torch.arange(len(q), device=q.device).unsqueeze(1)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    for i in range(blocks.shape[2]):
        chosen, there = blocks[:, :, i].clamp(min=0), (blocks[:, :, i] >= 0)[..., None, None, None]
        keys = torch.where(there, k[rows, chosen], 0).repeat_interleave(heads_per_group, 2).to(dtype)  # [B, C, H, S, D]
        values = torch.where(there, v[rows, chosen], 0).repeat_interleave(heads_per_group, 2).to(dtype)
        probabilities = softmax(scale * q.to(dtype) @ keys.transpose(-1, -2), off_by_one)
        weight = torch.where(there, weights[:, :, i, None, None, None], 0).to(dtype)
        out = out + weight * (probabilities @ values)
    return out.to(q.dtype)


def softmax(scores: Tensor, off_by_one: bool) -> Tensor:
    """Compute softmax over the last dimension; ``off_by_one`` adds 1 to the denominator, like a key with score 0."""
    if not off_by_one:
        return scores.softmax(-1)
    none = scores.new_zeros((*scores.shape[:-1], 1))
    return torch.cat([scores, none], -1).softmax(-1)[..., :-1]
