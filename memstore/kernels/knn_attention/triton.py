"""kNN attention in Triton: gather, score, softmax and gate in one pass, forward and backward.

Wu et al. 2022, *Memorizing Transformers*, section 3.1. Every query has its own tokens, so matrix units have nothing to
share. A program takes one query of one head, reads the rows of its ids, and never writes them. The bandwidth of these
reads is the limit.

With ``p`` the weights, ``o`` the sum of values, ``g`` the opened gate, ``G`` the gradient of the output and
``G_m = g G`` the gradient of ``o``, the backward pass needs one walk, because its sums are linear in values known at
its end:

    dp_j  = G_m . v_j            delta = sum_j p_j dp_j
    ds_j  = p_j (dp_j - delta + dlse)
    dq    = scale (sum_j p_j dp_j k_j - (delta - dlse) sum_j p_j k_j)
    dscale = sum_j p_j dp_j s_j - (delta - dlse) sum_j p_j s_j          (s_j before scaling)
    dgate  = g (1 - g) G . (o - local)

Gradients of scale and gate are written for each query and summed afterwards, so that every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from memstore.kernels._tiles import LN_2, LOG2_E, config, strides, tiled


def tiles(arguments: Mapping[str, Any]) -> triton.Config:
    """Return tiles: four warps hold the keys and values of 32 ids in registers, or of 16 ids for larger heads."""
    return config(4, 2, BK=32 if max(arguments["BD"], arguments["BDV"]) <= 128 and arguments["CHOSEN"] > 16 else 16)


_tiled = tiled(tiles, interpreted_config=config(1, 2, BK=16))


@triton.jit
def _gathered(
    base: tl.tensor, index: tl.tensor, there: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr
) -> tl.tensor:
    """Load rows ``index`` of a matrix, in float32, with 0 for rows that are not ``there``."""
    dims = tl.arange(0, PADDED)
    mask = there[:, None] & (dims[None, :] < SIZE)
    return tl.load(base + index[:, None] * stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _row(base: tl.tensor, place: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr) -> tl.tensor:
    """Load one row of a contiguous matrix, in float32."""
    dims = tl.arange(0, PADDED)
    return tl.load(base + place * SIZE + dims, mask=dims < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _store_row(base: tl.tensor, place: tl.tensor, row: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr) -> None:
    dims = tl.arange(0, PADDED)
    tl.store(base + place * SIZE + dims, row.to(base.dtype.element_ty), mask=dims < SIZE)


@_tiled
@triton.jit
def _forward_kernel(
    q: tl.tensor,  # [B, H, T, D]
    k: tl.tensor,  # [B, G, N, D], strided
    v: tl.tensor,  # [B, G, N, DV], strided
    ids: tl.tensor,  # [B, H, T, K]
    scale: tl.tensor,  # [H]
    local: tl.tensor,  # [B, H, T, DV]
    gate: tl.tensor,  # [H]
    out: tl.tensor,  # [B, H, T, DV]
    lse: tl.tensor,  # [B, H, T]
    kb: tl.tensor, kg: tl.tensor, kn: tl.tensor, vb: tl.tensor, vg: tl.tensor, vn: tl.tensor,  # strides
    heads: tl.tensor, per_group: tl.tensor, tokens: tl.tensor, chosen: tl.tensor, count: tl.tensor,
    CHOSEN: tl.constexpr,  # informs the choice of tiles of the number of ids
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    GATED: tl.constexpr,
    BK: tl.constexpr,  # ids of a tile
) -> None:  # fmt: skip
    """Attend with one query of one head: an online softmax over its retrieved tokens, and the gate."""
    place = tl.program_id(0).to(tl.int64)
    head = place // tokens % heads
    group = head // per_group
    k += place // tokens // heads * kb + group * kg
    v += place // tokens // heads * vb + group * vg
    query = _row(q, place, D, BD) * (tl.load(scale + head).to(tl.float32) * LOG2_E)
    highest = tl.full([1], float("-inf"), tl.float32)
    summed = tl.zeros([1], tl.float32)
    total = tl.zeros([BDV], tl.float32)
    missing = tl.zeros([1], tl.int32)
    for start in range(0, chosen, BK):
        at = start + tl.arange(0, BK)
        index = tl.load(ids + place * chosen + at, mask=at < chosen, other=-1).to(tl.int64)
        there = (index >= 0) & (index < count)
        scores = tl.sum(_gathered(k, index, there, kn, D, BD) * query[None, :], 1)
        scores = tl.where(there, scores, float("-inf"))
        missing += tl.sum((index >= count).to(tl.int32), 0)
        higher = tl.maximum(highest, tl.max(scores, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(highest - base)
        p = tl.exp2(scores - base)
        total = total * shrink + tl.sum(p[:, None] * _gathered(v, index, there, vn, DV, BDV), 0)
        summed = summed * shrink + tl.sum(p, 0)
        highest = higher
    something = summed > 0.0
    attended = total / tl.where(something, summed, 1.0)
    if GATED:
        opened = tl.where(something, tl.sigmoid(tl.load(gate + head).to(tl.float32)), 0.0)
        attended = attended * opened + _row(local, place, DV, BDV) * (1.0 - opened)
    # An error that cannot be raised here must not look like a result.
    attended = tl.where(missing > 0, float("nan"), attended)
    _store_row(out, place, attended, DV, BDV)
    logarithm = (highest + tl.log2(tl.where(something, summed, 1.0))) * LN_2
    tl.store(lse + place + tl.arange(0, 1), logarithm)


@_tiled
@triton.jit
def _backward_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, ids: tl.tensor, scale: tl.tensor, local: tl.tensor, gate: tl.tensor,
    lse: tl.tensor,
    dout: tl.tensor, dlse: tl.tensor, dq: tl.tensor, dlocal: tl.tensor,  # shaped like what they are gradients of
    dscale: tl.tensor, dgate: tl.tensor,  # [B, H, T]
    kb: tl.tensor, kg: tl.tensor, kn: tl.tensor, vb: tl.tensor, vg: tl.tensor, vn: tl.tensor,  # strides
    heads: tl.tensor, per_group: tl.tensor, tokens: tl.tensor, chosen: tl.tensor, count: tl.tensor,
    CHOSEN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    GATED: tl.constexpr,
    BK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute all gradients of one query of one head; its retrieved tokens are read once more."""
    place = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    head = place // tokens % heads
    group = head // per_group
    k += place // tokens // heads * kb + group * kg
    v += place // tokens // heads * vb + group * vg
    query = _row(q, place, D, BD)
    factor = tl.load(scale + head).to(tl.float32)
    normaliser = tl.load(lse + place + one)
    something = normaliser != float("-inf")
    normaliser = tl.where(something, normaliser, 0.0)
    gradient = _row(dout, place, DV, BDV)
    opened = tl.full([1], 1.0, tl.float32)
    if GATED:
        opened = tl.where(something, tl.sigmoid(tl.load(gate + head).to(tl.float32)), 0.0)
        _store_row(dlocal, place, gradient * (1.0 - opened), DV, BDV)
    attended = tl.zeros([BDV], tl.float32)  # sum p v
    keys_sum = tl.zeros([BD], tl.float32)  # sum p k
    keys_weighted = tl.zeros([BD], tl.float32)  # sum p dp k
    delta = tl.zeros([1], tl.float32)
    products_sum = tl.zeros([1], tl.float32)  # sum p s
    products_weighted = tl.zeros([1], tl.float32)  # sum p dp s
    for start in range(0, chosen, BK):
        at = start + tl.arange(0, BK)
        index = tl.load(ids + place * chosen + at, mask=at < chosen, other=-1).to(tl.int64)
        there = (index >= 0) & (index < count)
        keys = _gathered(k, index, there, kn, D, BD)
        values = _gathered(v, index, there, vn, DV, BDV)
        products = tl.sum(keys * query[None, :], 1)
        p = tl.where(there, tl.exp2((products * factor - normaliser) * LOG2_E), 0.0)
        dp = tl.sum(values * (gradient * opened)[None, :], 1)
        attended += tl.sum(p[:, None] * values, 0)
        keys_sum += tl.sum(p[:, None] * keys, 0)
        keys_weighted += tl.sum((p * dp)[:, None] * keys, 0)
        delta += tl.sum(p * dp, 0)
        products_sum += tl.sum(p * products, 0)
        products_weighted += tl.sum(p * dp * products, 0)
    rest = delta - tl.load(dlse + place + one)
    _store_row(dq, place, factor * (keys_weighted - rest * keys_sum), D, BD)
    tl.store(dscale + place + one, products_weighted - rest * products_sum)
    if GATED:
        difference = tl.sum(gradient * (attended - _row(local, place, DV, BDV)), 0)
        tl.store(dgate + place + one, opened * (1.0 - opened) * difference)


def knn_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the public function; constant in ``k`` and ``v``. A token that does not exist gives NaN."""
    out, lse = _KnnAttention.apply(q, k, v, ids, scale, local, gate)  # type: ignore[no-untyped-call]
    return out, lse


class _KnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, ids, scale = (x.contiguous() for x in (q, ids, scale))
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        local, gate = (None if x is None else x.contiguous() for x in (local, gate))
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if lse.numel():
            _forward_kernel[(lse.numel(),)](
                q=q, k=k, v=v, ids=ids, scale=scale, local=local, gate=gate, out=out, lse=lse,
                **_shape(q, k, v, ids, gate),
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, ids, scale, local, gate, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ids, scale, local, gate, lse = ctx.saved_tensors
        dq, dscale = torch.empty_like(q), torch.zeros_like(lse)
        dlocal, dgate = (None, None) if gate is None else (torch.empty_like(local), torch.zeros_like(lse))
        if lse.numel():
            _backward_kernel[(lse.numel(),)](
                q=q, k=k, v=v, ids=ids, scale=scale, local=local, gate=gate, lse=lse,
                dout=dout.contiguous(), dlse=dlse.contiguous(), dq=dq, dlocal=dlocal, dscale=dscale, dgate=dgate,
                **_shape(q, k, v, ids, gate),
            )  # fmt: skip
        summed = None if dgate is None else dgate.sum((0, 2)).to(gate.dtype)
        return dq, None, None, None, dscale.sum((0, 2)).to(scale.dtype), dlocal, summed


def _shape(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, gate: Tensor | None) -> dict[str, Any]:
    """Return the arguments common to both kernels."""
    return {
        **strides("kb kg kn", k),
        **strides("vb vg vn", v),
        "heads": q.shape[1],
        "per_group": q.shape[1] // k.shape[1],
        "tokens": q.shape[2],
        "chosen": ids.shape[3],
        "count": k.shape[2],
        "CHOSEN": min(triton.next_power_of_2(ids.shape[3]), 256),
        "D": q.shape[3],
        "DV": v.shape[3],
        "BD": triton.next_power_of_2(q.shape[3]),
        "BDV": triton.next_power_of_2(v.shape[3]),
        "GATED": gate is not None,
    }
