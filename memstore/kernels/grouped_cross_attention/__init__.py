"""Grouped cross attention: a weighted sum of attention to each of the retrieved blocks.

Hu et al. 2025, *Efficient Length-Generalizable Attention via Causal Retrieval for Long-Context Language Modeling*,
equations 2-3: a query attends to each retrieved block by itself, and the results are summed with the weights of the
blocks (in the paper: ``w_k``, the softmax of the retrieval scores). ``off_by_one`` is ``exp(s) / (1 + sum exp(s))``,
which lets a query find nothing in a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import (
    INTEGERS,
    Backend,
    check_device,
    check_grouped,
    nothing,
    pick,
    shapes,
    triton_problem,
)
from memstore.kernels.grouped_cross_attention import fused
from memstore.kernels.grouped_cross_attention.fused import FoldedList as FoldedList
from memstore.kernels.grouped_cross_attention.fused import PreparedList as PreparedList
from memstore.kernels.grouped_cross_attention.fused import Ready as Ready
from memstore.kernels.grouped_cross_attention.fused import attend as attend
from memstore.kernels.grouped_cross_attention.fused import attend_folded as attend_folded
from memstore.kernels.grouped_cross_attention.fused import fold as fold
from memstore.kernels.grouped_cross_attention.fused import prepare as prepare


def grouped_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    blocks: Tensor | None = None,
    *,
    scale: float | None = None,
    off_by_one: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Attend to each retrieved block by itself, and sum with the weights of the blocks.

    There are two forms. With ``blocks``, pass the states of all blocks once; they are looked up, without copies on a
    GPU:

    Args:
        q: queries ``[B, C, H, T, D]``: ``C`` lists of blocks in each row, ``T`` queries for each list.
        k: keys of all blocks ``[B, N, G, S, D]``; ``H`` is a multiple of ``G``.
        v: values, shaped like ``k``.
        weights: of the chosen blocks ``[B, C, K]``, such as the softmax of their scores.
        blocks: the chosen blocks ``[B, C, K]``, integers below ``N``; -1 for none, with any weight. One block may be
            chosen twice.
        scale: factor on the scores; ``D ** -0.5`` if None.
        off_by_one: ``exp(s) / (1 + sum exp(s))`` in each block, so a query can find nothing in a block.
        backend: ``"reference"``, ``"torch"`` (any device), ``"triton"`` (a GPU, or Triton's interpreter), or
            ``"auto"``: ``"triton"`` on a GPU if it can, except for float32, else ``"torch"``.

    Without ``blocks``, pass the states of the chosen blocks: ``q [B, H, T, D]``, ``k, v [B, G, K, S, D]``,
    ``weights [B, K]``.

    Returns:
        ``[B, C, H, T, D]``, or ``[B, H, T, D]``; differentiable in ``q``, ``k``, ``v`` and ``weights``.

    Raises:
        InvalidArgument: shapes, types or devices do not fit, a block does not exist, or the back end is not available.
            On a GPU, missing blocks are not checked beforehand, because this would wait for the device. ``"triton"``
            gives their lists NaN; PyTorch's own operations may fail later.
    """
    if blocks is None:
        _check_gathered(q, k, v, weights)
        ids = torch.arange(k.shape[2], device=q.device).expand(len(q), 1, -1)
        options: dict[str, Any] = {"scale": scale, "off_by_one": off_by_one, "backend": backend}
        states = k.transpose(1, 2), v.transpose(1, 2)
        return grouped_cross_attention(q.unsqueeze(1), *states, weights.unsqueeze(1), ids, **options).squeeze(1)
    _check(q, k, v, weights, blocks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    largest = max(q.shape[-1], v.shape[-1])
    backend = pick(backend, q, lambda: triton_problem(q, k, v, largest=largest))
    if not (q.numel() and blocks.numel() and k.shape[1] and k.shape[3]):
        return nothing(q, v, k, weights)
    match backend:
        case "triton":
            from memstore.kernels.grouped_cross_attention import triton

            return triton.grouped_cross_attention(q, k, v, blocks, weights, scale=scale, off_by_one=off_by_one)
        case "torch":
            return fused.grouped_cross_attention(q, k, v, blocks, weights, scale=scale, off_by_one=off_by_one)
        case _:
            return _reference(q, k, v, blocks, weights, scale=scale, off_by_one=off_by_one)


def _check_gathered(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 5 or v.dim() != 5 or weights.shape != (q.shape[0], k.shape[2]):
        raise InvalidArgument(
            "expected q [B, H, T, D], k and v [B, G, K, S, D] and weights [B, K] (with blocks: the indexed "
            f"form); got {shapes(q=q, k=k, v=v, weights=weights)}"
        )


def _check(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, blocks: Tensor) -> None:
    check_grouped(q, k, v, "q [B, C, H, T, D] and k, v [B, N, G, S, D]", heads=2)
    check_device(q=q, k=k, v=v, weights=weights, blocks=blocks)
    if blocks.dtype not in INTEGERS:
        raise InvalidArgument(f"blocks must be int32 or int64, got {blocks.dtype}")
    if blocks.dim() != 3 or blocks.shape != weights.shape or blocks.shape[:2] != q.shape[:2]:
        raise InvalidArgument(
            f"blocks and weights must be [B, C, K] with B, C = {tuple(q.shape[:2])}, "
            f"got {tuple(blocks.shape)} and {tuple(weights.shape)}"
        )
    if blocks.device.type == "cpu" and blocks.numel() and int(blocks.max()) >= k.shape[1]:
        raise InvalidArgument(f"block {int(blocks.max())} does not exist; there are {k.shape[1]}")


def _reference(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, weights: Tensor, *, scale: float, off_by_one: bool
) -> Tensor:
    """Attend by the definition, one chosen block after the other."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_per_group = q.shape[2] // k.shape[2]
    rows = torch.arange(len(q), device=q.device).unsqueeze(1)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    for i in range(blocks.shape[2]):
        chosen, there = blocks[:, :, i].clamp(min=0), (blocks[:, :, i] >= 0)[..., None, None, None]
        keys = torch.where(there, k[rows, chosen], 0).repeat_interleave(heads_per_group, 2).to(dtype)  # [B, C, H, S, D]
        values = torch.where(there, v[rows, chosen], 0).repeat_interleave(heads_per_group, 2).to(dtype)
        probabilities = _softmax(scale * q.to(dtype) @ keys.transpose(-1, -2), off_by_one)
        weight = torch.where(there, weights[:, :, i, None, None, None], 0).to(dtype)
        out = out + weight * (probabilities @ values)
    return out.to(q.dtype)


def _softmax(scores: Tensor, off_by_one: bool) -> Tensor:
    """Compute softmax over the last dimension; ``off_by_one`` adds 1 to the denominator, like a key with score 0."""
    if not off_by_one:
        return scores.softmax(-1)
    none = scores.new_zeros((*scores.shape[:-1], 1))
    return torch.cat([scores, none], -1).softmax(-1)[..., :-1]
