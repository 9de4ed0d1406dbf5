"""Grouped cross attention in Triton: forward, backward and decoding without copies of the chosen blocks.

Hu et al. 2025, *Efficient Length-Generalizable Attention via Causal Retrieval for Long-Context Language Modeling*,
algorithms 1 (forward) and 2 (backward). Symbols: their chunk is one of our lists, and their ``Q`` is ``q`` of ``M``
rows. ``K_k, V_k`` is block ``blocks[..., k]``, and ``w_k`` is ``weights[..., k]``. ``O_k`` is ``attended``, the
attention to one block, and ``O = sum_k w_k O_k`` is ``out``. ``L_k`` is ``lse``, here to the base 2.

With ``P_k`` the probabilities in block ``k`` and ``G`` the gradient of ``out``, the gradients are

    delta_k = rowsum(P_k * (G V_k^T))          equal to G . O_k
    dS_k    = P_k * (G V_k^T - delta_k)        times w_k, applied in float32 after the product it enters
    dQ      = scale * sum_k w_k dS_k K_k
    dK_k    = scale * w_k dS_k^T Q             dV_k = w_k P_k^T G
    dw_k    = sum of delta_k over queries and heads

Softmax-off-by-one is a key with score 0 and value 0: it only changes ``L_k``, so the gradients keep their form.

Deliberate deviations:

- The ``R = H / G`` query heads of a key-value head are more queries, ``M = R * T`` rows: a view, by which keys and
  values are read once for all of them. Decoding is therefore the same kernel with few rows; where there are too few
  programs to fill the device, several share the blocks of a list, and their parts are added.
- Blocks are looked up by index, and several lists may choose one. The gradients of keys and values are summed by one
  program for each block, over the list entries that chose it (found by sorting). Atomic additions would need a float32
  buffer of the size of all blocks, cleared for each call, and would give other bits in every run. The price is that a
  block chosen by very many lists keeps one program busy.
- ``delta_k`` is recomputed while walking over the blocks, since saving ``O_k`` would take ``K`` times the output.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from memstore.kernels._tiles import ANY, LOG2_E, TileTable, grid, padded, precision, strides

SIMULATED_PROCESSORS = 8
"""Processors that the interpreter counts as, so that small inputs are shared by several programs, others not."""


# fmt: off
TABLE = TileTable(
    ("forward", "queries", "blocks"), ("BM", "BS"), [
        ("sm_90", 2, 32, 128, 64, ((4, 3, 16, 64), (4, 3, 16, 64), (4, 1, 16, 16))),
        ("sm_90", 2, ANY, 128, ANY, ((4, 3, 64, 64), (4, 3, 64, 64), (8, 3, 64, 64))),
        ("sm_90", 2, ANY, 256, ANY, ((8, 2, 32, 64), (8, 2, 32, 64), (8, 2, 32, 32))),
        ("sm_90", 4, ANY, 64, ANY, ((8, 2, 32, 32), (8, 2, 16, 32), (8, 2, 32, 32))),
        ("sm_90", 4, ANY, 128, ANY, ((8, 2, 32, 32), (8, 2, 16, 32), (4, 1, 16, 16))),
        ("sm_90", 4, ANY, 256, ANY, ((4, 1, 16, 16), (4, 1, 16, 16), (4, 1, 16, 16))),
        ("sm_80", 2, 32, 128, 64, ((4, 3, 16, 64), (4, 3, 16, 64), (4, 1, 16, 16))),
        ("sm_80", 2, ANY, 64, ANY, ((4, 2, 64, 64), (4, 2, 64, 64), (8, 2, 64, 64))),
        ("sm_80", 2, ANY, 128, ANY, ((8, 2, 64, 64), (4, 2, 64, 64), (8, 2, 64, 64))),
        ("sm_80", 2, ANY, 256, ANY, ((8, 2, 32, 64), (8, 2, 32, 32), (8, 2, 32, 32))),
        ("sm_80", 4, ANY, 64, ANY, ((8, 2, 32, 32), (8, 2, 32, 32), (8, 2, 32, 32))),
        ("sm_80", 4, ANY, 128, ANY, ((8, 2, 32, 32), (8, 2, 16, 32), (4, 1, 16, 16))),
        ("sm_80", 4, ANY, 256, ANY, ((4, 1, 16, 16), (4, 1, 16, 16), (4, 1, 16, 16))),
        ("gfx942", 2, 32, 128, 64, ((4, 3, 16, 64), (4, 3, 16, 64), (4, 1, 16, 16))),
        ("gfx942", 2, ANY, 64, ANY, ((4, 2, 64, 64), (4, 2, 64, 64), (8, 2, 32, 64))),
        ("gfx942", 2, ANY, 128, ANY, ((4, 2, 64, 64), (4, 2, 64, 64), (4, 2, 32, 64))),
        ("gfx942", 2, ANY, 256, ANY, ((4, 2, 32, 64), (4, 2, 16, 32), (8, 2, 16, 32))),
        ("gfx942", 4, ANY, 64, ANY, ((8, 2, 32, 32), (8, 2, 32, 32), (8, 2, 16, 32))),
        ("gfx942", 4, ANY, 128, ANY, ((8, 2, 32, 32), (4, 2, 16, 32), (8, 2, 16, 32))),
        ("gfx942", 4, ANY, 256, ANY, ((4, 1, 16, 16), (4, 1, 16, 16), (4, 1, 16, 16))),
    ],
)
# fmt: on


_tiled = partial(TABLE.tiled, block="S", BM=32, BS=32)


@triton.jit
def _rows(
    base: tl.tensor, index: tl.tensor, count: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr
) -> tl.tensor:
    """Load rows ``index`` of a matrix ``[count, SIZE]``, with 0 beyond its edges."""
    dims = tl.arange(0, PADDED)
    mask = (index[:, None] < count) & (dims[None, :] < SIZE)
    return tl.load(base + index[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(
    base: tl.tensor, tile: tl.tensor, index: tl.tensor, count: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr
) -> None:
    """Write a tile to rows ``index`` of a contiguous matrix ``[count, SIZE]``."""
    dims = tl.arange(0, PADDED)
    mask = (index[:, None] < count) & (dims[None, :] < SIZE)
    tl.store(base + index[:, None] * SIZE + dims[None, :], tile.to(base.dtype.element_ty), mask=mask)


@_tiled("forward")
@triton.jit
def _forward_kernel(
    q: tl.tensor,  # [L, G, M, D], L = B * C lists
    k: tl.tensor,  # [B, N, G, S, D], strided
    v: tl.tensor,  # [B, N, G, S, DV], strided
    blocks: tl.tensor,  # [L, K]
    weights: tl.tensor,  # [L, K]
    out: tl.tensor,  # [parts, L, G, M, DV]
    lse: tl.tensor,  # [L, G, K, M]
    kb: tl.tensor, kn: tl.tensor, kg: tl.tensor, ks: tl.tensor,  # strides
    vb: tl.tensor, vn: tl.tensor, vg: tl.tensor, vs: tl.tensor,
    lists: tl.tensor, lists_per_row: tl.tensor, groups: tl.tensor, rows: tl.tensor, chosen: tl.tensor, count: tl.tensor,
    share: tl.tensor,  # number of a list's blocks for each part
    scale: tl.tensor,
    ROWS: tl.constexpr,  # informs the choice of tiles of the number of rows
    S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr,
    OFF_BY_ONE: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BS: tl.constexpr,  # rows of a tile of queries, and of keys
) -> None:  # fmt: skip
    """Walk a tile of queries over ``share`` blocks of its list; an online softmax runs over each."""
    tiles = tl.cdiv(rows, BM)
    program = tl.program_id(0)
    part = tl.program_id(1)
    group = (program // tiles) % groups
    one = (program // tiles // groups).to(tl.int64)  # the list
    row = (program % tiles) * BM + tl.arange(0, BM)
    first = (one * groups + group) * rows  # of the queries of this list and group
    queries = _rows(q + first * D, row, rows, D, D, BD)
    k += one // lists_per_row * kb + group.to(tl.int64) * kg
    v += one // lists_per_row * vb + group.to(tl.int64) * vg
    total = tl.zeros([BM, BDV], tl.float32)
    blocks += one * chosen
    last = tl.minimum(part * share + share, chosen)
    # Ids are read a step ahead, so that loads of keys and values do not wait for them in their own step.
    coming = tl.load(blocks + part * share, mask=part * share < last, other=-1)
    for i in range(part * share, last):
        block = coming.to(tl.int64)
        coming = tl.load(blocks + i + 1, mask=i + 1 < last, other=-1)
        if block >= count:
            total += float("nan")  # an error that cannot be raised here must not look like a result
        there = (block >= 0) & (block < count)
        block = tl.where(there, block, 0)
        size = tl.where(there, S, 0)  # no keys to read; a branch would keep the loop from being pipelined
        weight = tl.load(weights + one * chosen + i, mask=there, other=0.0).to(tl.float32)
        if OFF_BY_ONE:
            highest = tl.zeros([BM], tl.float32)
            summed = tl.full([BM], 1.0, tl.float32)
        else:
            highest = tl.full([BM], float("-inf"), tl.float32)
            summed = tl.zeros([BM], tl.float32)
        attended = tl.zeros([BM, BDV], tl.float32)
        for start in range(0, S, BS):
            key = start + tl.arange(0, BS)
            keys = _rows(k + block * kn, key, size, ks, D, BD)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            if S % BS != 0:
                scores = tl.where(key[None, :] < S, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            shrink = tl.exp2(highest - higher)
            p = tl.exp2(scores - higher[:, None])  # [BM, BS]
            values = _rows(v + block * vn, key, size, vs, DV, BDV)
            product = tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
            attended = attended * shrink[:, None] + product
            summed = summed * shrink + tl.sum(p, 1)
            highest = higher
        total += (weight / summed)[:, None] * attended
        if SAVE:
            tl.store(lse + first * chosen + i * rows + row, highest + tl.log2(summed), mask=row < rows)
    _store_rows(out + (part.to(tl.int64) * lists * groups * rows + first) * DV, total, row, rows, DV, BDV)


@_tiled("queries")
@triton.jit
def _queries_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, blocks: tl.tensor, weights: tl.tensor,
    dout: tl.tensor,  # [L, G, M, DV]
    lse: tl.tensor, delta: tl.tensor,  # [L, G, K, M]
    dq: tl.tensor,  # [L, G, M, D]
    kb: tl.tensor, kn: tl.tensor, kg: tl.tensor, ks: tl.tensor,  # strides
    vb: tl.tensor, vn: tl.tensor, vg: tl.tensor, vs: tl.tensor,
    lists_per_row: tl.tensor, groups: tl.tensor, rows: tl.tensor, chosen: tl.tensor, count: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a tile of queries over the blocks of its list, for the gradient of the queries and ``delta``."""
    tiles = tl.cdiv(rows, BM)
    program = tl.program_id(0)
    group = (program // tiles) % groups
    one = (program // tiles // groups).to(tl.int64)
    row = (program % tiles) * BM + tl.arange(0, BM)
    first = (one * groups + group) * rows
    queries = _rows(q + first * D, row, rows, D, D, BD)
    gradient = _rows(dout + first * DV, row, rows, DV, DV, BDV)
    k += one // lists_per_row * kb + group.to(tl.int64) * kg
    v += one // lists_per_row * vb + group.to(tl.int64) * vg
    total = tl.zeros([BM, BD], tl.float32)
    blocks += one * chosen
    coming = tl.load(blocks)
    for i in range(chosen):
        block = coming.to(tl.int64)
        coming = tl.load(blocks + i + 1, mask=i + 1 < chosen, other=-1)  # a step ahead, as in the forward pass
        there = (block >= 0) & (block < count)
        block = tl.where(there, block, 0)
        size = tl.where(there, S, 0)  # no keys to read; a branch would keep the loop from being pipelined
        weight = tl.load(weights + one * chosen + i, mask=there, other=0.0).to(tl.float32)
        place = first * chosen + i * rows + row
        normaliser = tl.load(lse + place, mask=row < rows, other=0.0)
        dots = tl.zeros([BM], tl.float32)
        if S > BS:  # delta is needed before the first tile, so it takes a separate walk
            for start in range(0, S, BS):
                key = start + tl.arange(0, BS)
                keys = _rows(k + block * kn, key, size, ks, D, BD)
                values = _rows(v + block * vn, key, size, vs, DV, BDV)
                scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
                p = tl.where(key[None, :] < S, tl.exp2(scores - normaliser[:, None]), 0.0)
                dp = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
                dots += tl.sum(p * dp, 1)
        for start in range(0, S, BS):
            key = start + tl.arange(0, BS)
            keys = _rows(k + block * kn, key, size, ks, D, BD)
            values = _rows(v + block * vn, key, size, vs, DV, BDV)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            p = tl.where(key[None, :] < S, tl.exp2(scores - normaliser[:, None]), 0.0)
            dp = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
            if S <= BS:
                dots = tl.sum(p * dp, 1)
            ds = p * (dp - dots[:, None])
            total += weight * tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
        tl.store(delta + place, dots, mask=row < rows)
    _store_rows(dq + first * D, total * scale, row, rows, D, BD)


@_tiled("blocks")
@triton.jit
def _blocks_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, weights: tl.tensor,
    entries: tl.tensor,  # [L * K], places in weights, ordered by the block that they chose
    starts: tl.tensor,  # [B * N + 1], the first entry of each block
    dout: tl.tensor, lse: tl.tensor, delta: tl.tensor,
    dk: tl.tensor,  # [B, N, G, S, D], contiguous
    dv: tl.tensor,  # [B, N, G, S, DV], contiguous
    kb: tl.tensor, kn: tl.tensor, kg: tl.tensor, ks: tl.tensor,  # strides
    vb: tl.tensor, vn: tl.tensor, vg: tl.tensor, vs: tl.tensor,
    groups: tl.tensor, rows: tl.tensor, chosen: tl.tensor, count: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a tile of a block's keys over the queries of the lists that chose the block, in order."""
    tiles: tl.constexpr = (S + BS - 1) // BS
    program = tl.program_id(0)
    group = (program // tiles) % groups
    block = (program // tiles // groups).to(tl.int64)  # among all rows
    key = (program % tiles) * BS + tl.arange(0, BS)
    first_entry = tl.load(starts + block)
    last_entry = tl.load(starts + block + 1)
    keys_gradient = tl.zeros([BS, BD], tl.float32)
    values_gradient = tl.zeros([BS, BDV], tl.float32)
    if last_entry > first_entry:
        k += block // count * kb + block % count * kn + group.to(tl.int64) * kg
        v += block // count * vb + block % count * vn + group.to(tl.int64) * vg
        keys = _rows(k, key, S, ks, D, BD)
        values = _rows(v, key, S, vs, DV, BDV)
        tiles_of_rows = tl.cdiv(rows, BM)
        steps = (last_entry - first_entry) * tiles_of_rows
        coming = tl.load(entries + first_entry)
        for step in range(steps):  # one loop, so that it is pipelined
            entry = coming
            ahead = tl.minimum(step + 1, steps - 1)
            coming = tl.load(entries + first_entry + ahead // tiles_of_rows)
            weight = tl.load(weights + entry).to(tl.float32)
            first = (entry // chosen * groups + group) * rows
            row = (step % tiles_of_rows * BM).to(tl.int32) + tl.arange(0, BM)
            place = first * chosen + entry % chosen * rows + row
            queries = _rows(q + first * D, row, rows, D, D, BD)
            gradient = _rows(dout + first * DV, row, rows, DV, DV, BDV)
            normaliser = tl.load(lse + place, mask=row < rows, other=0.0)
            dots = tl.load(delta + place, mask=row < rows, other=0.0)
            # Transposed: [BS, BM]. Rows beyond the edge have gradient 0; keys beyond it are not stored.
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (scale * LOG2_E)
            p = tl.exp2(scores - normaliser[None, :])
            dp = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
            ds = p * (dp - dots[None, :])
            values_gradient += weight * tl.dot(p.to(gradient.dtype), gradient, input_precision=PRECISION)
            keys_gradient += weight * tl.dot(ds.to(queries.dtype), queries, input_precision=PRECISION)
    place = block * groups + group
    _store_rows(dk + place * S * D, keys_gradient * scale, key, S, D, BD)
    _store_rows(dv + place * S * DV, values_gradient, key, S, DV, BDV)


def grouped_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, weights: Tensor, *, scale: float, off_by_one: bool
) -> Tensor:
    """Take ``q [B, C, H, T, D]``, ``k, v [B, N, G, S, D]``, ``blocks, weights [B, C, K]`` -> ``[B, C, H, T, Dv]``.

    A list with a block that does not exist gets NaN, because a check would wait for the device.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, weights)):
        out: Tensor = _GroupedCrossAttention.apply(q, k, v, blocks, weights, scale, off_by_one)  # type: ignore[no-untyped-call]
        return out
    q, k, v, blocks, weights = _dense(q, k, v, blocks, weights)
    return _forward(q, k, v, blocks, weights, scale, off_by_one, lse=None)


class _GroupedCrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, weights: Tensor, scale: float, off_by_one: bool
    ) -> Tensor:
        q, k, v, blocks, weights = _dense(q, k, v, blocks, weights)
        groups, chosen = k.shape[2], blocks.shape[2]
        rows = q.shape[2] // groups * q.shape[3]
        lse = torch.empty(*q.shape[:2], groups, chosen, rows, dtype=torch.float32, device=q.device)
        out = _forward(q, k, v, blocks, weights, scale, off_by_one, lse)
        ctx.save_for_backward(q, k, v, blocks, weights, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, blocks, weights, lse = ctx.saved_tensors
        dq, delta = torch.empty_like(q), torch.empty_like(lse)  # delta is undefined for entries without a block
        dk = dv = dweights = None
        told = {"q": q, "k": k, "v": v, "weights": weights, "dout": dout.contiguous(), "lse": lse, "delta": delta}
        told |= {"scale": ctx.scale, **_shape(q, k, v, blocks)}
        queries = grid(len(q) * q.shape[1] * k.shape[2], told["rows"], "BM")
        _queries_kernel[queries](blocks=blocks, dq=dq, lists_per_row=q.shape[1], **told)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            entries, starts = chosen_by(blocks, k.shape[1])
            dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
            keys = grid(len(k) * k.shape[1] * k.shape[2], k.shape[3], "BS")
            _blocks_kernel[keys](entries=entries, starts=starts, dk=dk, dv=dv, **told)
        if ctx.needs_input_grad[4]:
            there = (blocks >= 0) & (blocks < k.shape[1])
            dweights = torch.where(there, delta.sum((2, 4)), 0).to(weights.dtype)
        return dq, dk, dv, None, dweights, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, weights: Tensor, scale: float, off_by_one: bool, lse: Tensor | None
) -> Tensor:
    """Return the output; fill ``lse`` if it is given."""
    shape = _shape(q, k, v, blocks)
    lists, chosen = len(q) * q.shape[1], blocks.shape[2]
    share = -(-chosen // _parts(lists * k.shape[2] * -(-shape["rows"] // 64), chosen, q.device))
    parts = -(-chosen // share)
    out = q.new_empty((parts, *q.shape[:-1], v.shape[-1]), dtype=q.dtype if parts == 1 else torch.float32)
    _forward_kernel[grid(lists * k.shape[2], shape["rows"], "BM", parts)](
        q=q, k=k, v=v, blocks=blocks, weights=weights, out=out, lse=lse,
        lists=lists, lists_per_row=q.shape[1], share=share, scale=scale,
        OFF_BY_ONE=off_by_one, SAVE=lse is not None, **shape,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0).to(q.dtype)


def chosen_by(blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the entries of ``blocks [B, C, K]`` that chose each of the ``count`` blocks of each row.

    Returns:
        ``entries [B * C * K]``, places in ``blocks``, and ``starts [B * count + 1]``: block ``n`` of row ``b`` was
        chosen by ``entries[starts[b * count + n] : starts[b * count + n + 1]]``, in the order of their places.
    """
    total = len(blocks) * count
    rows = torch.arange(0, total, count, device=blocks.device)[:, None, None]
    there = (blocks >= 0) & (blocks < count)
    ordered, entries = torch.where(there, blocks + rows, total).flatten().sort(stable=True)
    return entries, torch.searchsorted(ordered, torch.arange(total + 1, device=blocks.device))


def _shape(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> dict[str, Any]:
    """Return the arguments common to all kernels."""
    rows = q.shape[2] // k.shape[2] * q.shape[3]
    return {
        **strides("kb kn kg ks", k),
        **strides("vb vn vg vs", v),
        "groups": k.shape[2],
        "rows": rows,
        "chosen": blocks.shape[2],
        "count": k.shape[1],
        "ROWS": min(padded(rows), 128),
        "S": k.shape[3],
        "D": k.shape[4],
        "DV": v.shape[4],
        "BD": padded(k.shape[4]),
        "BDV": padded(v.shape[4]),
        "PRECISION": precision(q.dtype),
    }


def _parts(programs: int, chosen: int, device: torch.device) -> int:
    """Return how many programs share the blocks of a list, so that a few lists fill the device."""
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else SIMULATED_PROCESSORS
    return max(1, min(chosen, 2 * processors // programs))


def _dense(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Make queries, blocks and weights contiguous; keys and values only in their last dimension."""
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    return q.contiguous(), keys, values, blocks.contiguous(), weights.contiguous()
