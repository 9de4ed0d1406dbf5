"""Landmark attention in Triton: one pass over the keys forward, and no statistics of blocks in memory.

Mohtashami & Jaggi, *Random-Access Infinite Context Length for Transformers* (NeurIPS 2023), equations 1-4. All weights
are ``W_b P_b``: ``P_b`` is the softmax within block ``b``, and ``W`` a softmax over blocks of ``g_b``. For the own
block ``g_b`` is its log-sum-exp, and for an earlier one ``ramp * s_landmark + (1 - ramp) * LSE_b``. A tile of keys is
one whole block of any length. So ``P_b`` and ``g_b`` are known as soon as the scores are, and the online softmax of
flash attention runs over blocks. One number per query is saved for the backward pass: ``L``, the log-sum-exp of ``g``
(to the base 2).

With ``G`` the gradient of the output, ``dP = G V^T``, ``delta_b = rowsum(P_b dP)`` and ``Delta = G . out``,

    dS = W_b P_b (dP - Delta)                                     in the own block
    dS = W_b P_b (dP - Delta - ramp * (delta_b - Delta))          in an earlier one
    ds_landmark = ramp * W_b (delta_b - Delta)

in which ``P_b``, ``W_b`` and ``delta_b`` are computed again from the tile. Two kernels, as usual: a tile of queries
walks over blocks for ``dQ``, a block walks over tiles of queries for ``dK`` and ``dV``.

An incomplete block, which only its own queries see, may be longer than a tile, because in the own block ``g`` is a
log-sum-exp, which can be computed in parts. A complete block must fit into a tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from memstore.kernels._tiles import (
    ANY,
    LOG2_E,
    LOWEST,
    TileTable,
    grid,
    load_rows,
    padded,
    precision,
    store_rows,
    strides,
)
from memstore.kernels.landmark_attention import layout

LONGEST = 256
"""Most tokens of a complete block."""


# fmt: off
TABLE = TileTable(
    ("forward", "queries", "keys"), ("BM",), [
        ("sm_90", 2, 32, 128, 64, ((4, 2, 16), (4, 2, 16), (8, 1, 16))),
        ("sm_90", 2, ANY, 128, 64, ((8, 3, 128), (8, 3, 128), (8, 3, 32))),
        ("sm_90", 2, ANY, 256, 64, ((8, 2, 32), (8, 2, 32), (8, 2, 16))),
        ("sm_90", 2, ANY, 64, 128, ((8, 2, 64), (8, 2, 64), (8, 2, 32))),
        ("sm_90", 2, ANY, 128, 128, ((8, 2, 32), (8, 2, 32), (8, 2, 16))),
        ("sm_90", 2, ANY, 64, 256, ((8, 2, 32), (8, 2, 16), (8, 1, 16))),
        ("sm_90", 2, ANY, 128, 256, ((8, 2, 32), (8, 2, 16), (8, 2, 16))),
        ("sm_90", 2, ANY, 256, 256, ((8, 1, 16), (8, 1, 16), (8, 1, 16))),
        ("sm_90", 4, ANY, 64, 64, ((4, 2, 16), (4, 2, 16), (8, 1, 16))),
        ("sm_90", 4, ANY, 128, 64, ((8, 2, 16), (8, 2, 16), (4, 2, 16))),
        ("sm_90", 4, ANY, 256, 256, ((8, 1, 16), (8, 1, 16), (8, 1, 16))),
        ("sm_80", 2, 32, 128, 64, ((4, 2, 16), (4, 2, 16), (8, 1, 16))),
        ("sm_80", 2, ANY, 64, 64, ((8, 2, 128), (8, 2, 128), (4, 2, 32))),
        ("sm_80", 2, ANY, 128, 64, ((4, 2, 64), (8, 2, 64), (8, 2, 32))),
        ("sm_80", 2, ANY, 256, 64, ((8, 2, 32), (8, 1, 16), (8, 2, 16))),
        ("sm_80", 2, ANY, 64, 128, ((8, 2, 64), (8, 2, 32), (8, 2, 32))),
        ("sm_80", 2, ANY, 128, 128, ((8, 2, 64), (8, 2, 32), (8, 1, 16))),
        ("sm_80", 2, ANY, 64, 256, ((8, 2, 32), (8, 2, 32), (8, 2, 16))),
        ("sm_80", 2, ANY, 256, 256, ((8, 1, 16), (8, 1, 16), (8, 1, 16))),
        ("sm_80", 4, ANY, 64, 64, ((4, 2, 16), (8, 2, 16), (8, 1, 16))),
        ("sm_80", 4, ANY, 128, 64, ((8, 2, 16), (8, 2, 16), (8, 1, 16))),
        ("sm_80", 4, ANY, 256, 256, ((8, 1, 16), (8, 1, 16), (8, 1, 16))),
        ("gfx942", 2, 32, 128, 64, ((4, 2, 16), (4, 1, 16), (8, 1, 16))),
        ("gfx942", 2, ANY, 64, 64, ((4, 2, 64), (4, 2, 64), (4, 2, 32))),
        ("gfx942", 2, ANY, 128, 64, ((4, 2, 64), (4, 2, 64), (8, 2, 16))),
        ("gfx942", 2, ANY, 128, 128, ((8, 2, 16), (8, 1, 16), (8, 2, 16))),
        ("gfx942", 2, ANY, 64, 256, ((8, 1, 16), (8, 1, 16), (8, 2, 16))),
        ("gfx942", 2, ANY, 256, 256, ((8, 1, 16), (8, 1, 16), (8, 1, 16))),
        ("gfx942", 4, ANY, 64, 64, ((8, 2, 16), (4, 1, 16), (8, 2, 16))),
        ("gfx942", 4, ANY, 128, 64, ((8, 1, 16), (8, 1, 16), (4, 2, 16))),
        ("gfx942", 4, ANY, 256, 256, ((8, 1, 16), (8, 1, 16), (8, 1, 16))),
    ],
)
# fmt: on


_tiled = partial(TABLE.tiled, block="BS", BM=64)


@triton.jit
def _block(
    n: tl.tensor, starts: tl.tensor, ordinary: tl.tensor, tokens: tl.tensor,
    SIZE: tl.constexpr, BS: tl.constexpr, EDGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return a block's begin and end, and of its keys ``[BS]`` the positions, ordinary tokens and landmark.

    For regular blocks (``SIZE`` tokens each) nothing is read, because loads that wait for a table cannot run ahead.
    """
    index = tl.arange(0, BS)
    if SIZE == 0:
        start, end = tl.load(starts + n), tl.load(starts + n + 1)
        there = tl.load(ordinary + start + index, mask=start + index < end, other=0) != 0
        mark = start + index == end - 1
    else:
        start = n * SIZE
        end = start + SIZE
        there = index < SIZE - 1
        mark = index == SIZE - 1  # known when compiled: only the thread that has it works
        if EDGE:
            end = tl.minimum(end, tokens)
            there = there & (start + index < end)
    return start, end, start + index, there, mark


@triton.jit
def _weigh(
    scores: tl.tensor,  # [BM, BS], or [BS, BM]
    scale: tl.tensor,  # of scores, to the base 2; more than 0, so it can be applied late
    key: tl.tensor,  # [BS], positions
    ordinary: tl.tensor,  # [BS], whether keys are
    mark: tl.tensor,  # [BS], whether they are landmarks
    position: tl.tensor,  # [BM]
    own: tl.tensor,  # [BM], the first tile of the query's own block
    first: tl.tensor,  # [BM], the first tile that is visible
    n: tl.tensor,  # this tile
    ramp: tl.tensor,
    window: tl.tensor,
    EDGE: tl.constexpr,  # keys may come after queries
    LIMITED: tl.constexpr,
    KEYS: tl.constexpr,  # the axis of keys: 1, or 0
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return ``P`` of a block before the division by its sum; one over this sum, and ``g``, ``[BM]`` each."""
    keys, positions = tl.expand_dims(key, 1 - KEYS), tl.expand_dims(position, KEYS)
    landmark = tl.sum(tl.where(tl.expand_dims(mark, 1 - KEYS), scores, 0.0), KEYS) * scale
    seen = tl.expand_dims(ordinary, 1 - KEYS)
    if EDGE:
        seen = seen & (keys <= positions)
    if LIMITED:
        seen = seen & (keys > positions - window) & tl.expand_dims(n >= first, KEYS)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(tl.max(scores, KEYS) * scale, LOWEST)
    p = tl.exp2(scores * scale - tl.expand_dims(highest, KEYS))
    summed = tl.sum(p, KEYS)
    found = summed > 0
    summed = tl.where(found, summed, 1.0)
    inside = highest + tl.log2(summed)
    group = tl.where(n >= own, inside, ramp * landmark + (1 - ramp) * inside)
    return p, 1 / summed, tl.where(found, group, float("-inf"))


@triton.jit
def _attend(
    attended: tl.tensor,  # [BM, BDV]
    highest: tl.tensor,  # [BM]
    total: tl.tensor,  # [BM]
    n: tl.tensor, queries: tl.tensor, k: tl.tensor, v: tl.tensor, ks: tl.tensor, vs: tl.tensor,
    starts: tl.tensor, ordinary: tl.tensor, tokens: tl.tensor,
    position: tl.tensor, own: tl.tensor, first: tl.tensor,
    scale: tl.tensor, ramp: tl.tensor, window: tl.tensor, SIZE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr,
    EDGE: tl.constexpr, LIMITED: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attend to one block more."""
    start, end, key, there, mark = _block(n, starts, ordinary, tokens, SIZE, BS, EDGE)
    keys = load_rows(k, start, end, ks, BS, D, BD)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    p, share, group = _weigh(
        scores, scale * LOG2_E, key, there, mark,
        position, own, first, n, ramp, window, EDGE, LIMITED, 1,
    )  # fmt: skip
    higher = tl.maximum(highest, group)
    shrink = tl.exp2(highest - higher)
    weight = tl.exp2(group - higher)
    values = load_rows(v, start, end, vs, BS, DV, BDV)
    product = tl.dot((p * (weight * share)[:, None]).to(values.dtype), values, input_precision=PRECISION)
    return attended * shrink[:, None] + product, higher, total * shrink + weight


@_tiled("forward")
@triton.jit
def _forward_kernel(
    q: tl.tensor,  # [B, H, Tq, D], strided
    k: tl.tensor,  # [B, G, Tk, D], strided
    v: tl.tensor,  # [B, G, Tk, DV], strided
    starts: tl.tensor,  # [B, N + 1]
    ordinary: tl.tensor,  # [B, Tk]
    tile: tl.tensor,  # [B, Tk]
    own: tl.tensor,  # [B, Tk]
    first: tl.tensor,  # [B, Tk]
    out: tl.tensor,  # [B, H, Tq, DV], contiguous
    lse: tl.tensor,  # [B, H, Tq]
    qb: tl.tensor, qh: tl.tensor, qs: tl.tensor,  # strides
    kb: tl.tensor, kg: tl.tensor, ks: tl.tensor,
    vb: tl.tensor, vg: tl.tensor, vs: tl.tensor,
    sb: tl.tensor, tb: tl.tensor,  # of starts, and of tensors with one number per token
    heads: tl.tensor, groups: tl.tensor, rows: tl.tensor, before: tl.tensor,  # number of keys before the first query
    scale: tl.tensor, ramp: tl.tensor, window: tl.tensor,
    ROWS: tl.constexpr,  # informs the choice of tiles of the number of rows
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr,
    SIZE: tl.constexpr,  # tokens of a block if all are alike, else 0
    LIMITED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr,  # rows of a tile of queries
) -> None:  # fmt: skip
    """Walk a tile of queries over the blocks that it sees."""
    many = tl.cdiv(rows, BM)
    at = (many - 1 - tl.program_id(0) % many) * BM  # tiles with the most work begin
    row = at + tl.arange(0, BM)
    head = tl.program_id(0) // many % heads
    b = (tl.program_id(0) // many // heads).to(tl.int64)
    group = head // (heads // groups)
    position = before + row
    starts += b * sb
    ordinary += b * tb
    mine = tl.load(tile + b * tb + position, mask=row < rows, other=0)
    own_first = tl.load(own + b * tb + position, mask=row < rows, other=0)
    sees = tl.load(first + b * tb + position, mask=row < rows, other=0)
    last = tl.max(mine, 0)
    edge = tl.min(tl.where(row < rows, mine, last), 0)
    begin = tl.min(tl.where(row < rows, sees, last), 0)
    queries = load_rows(q + b * qb + head.to(tl.int64) * qh, at, rows, qs, BM, D, BD)
    k += b * kb + group.to(tl.int64) * kg
    v += b * vb + group.to(tl.int64) * vg
    attended = tl.zeros([BM, BDV], tl.float32)
    highest = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    for late in tl.static_range(2):
        for n in range(edge if late else begin, last + 1 if late else edge):
            attended, highest, total = _attend(
                attended, highest, total, n, queries, k, v, ks, vs, starts, ordinary, before + rows,
                position, own_first, sees, scale, ramp, window, SIZE, D, DV, BD, BDV, BS, late, LIMITED, PRECISION,
            )  # fmt: skip
    place = (b * heads + head) * rows
    found = total > 0
    total = tl.where(found, total, 1.0)
    tl.store(lse + place + row, tl.where(found, highest + tl.log2(total), float("inf")), mask=row < rows)
    store_rows(out + place * DV, attended / total[:, None], at, rows, BM, DV, BDV)


@triton.jit
def _differentiate(
    scores: tl.tensor,  # [BM, BS], or [BS, BM]
    dp: tl.tensor,  # likewise
    normaliser: tl.tensor,  # [BM]
    delta: tl.tensor,  # [BM]
    key: tl.tensor, there: tl.tensor, mark: tl.tensor, position: tl.tensor, own: tl.tensor, first: tl.tensor,
    n: tl.tensor, scale: tl.tensor, ramp: tl.tensor, window: tl.tensor,
    EDGE: tl.constexpr, LIMITED: tl.constexpr, KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the weights of a block and the gradient of its scores, both shaped like ``scores``."""
    p, share, group = _weigh(
        scores, scale * LOG2_E, key, there, mark,
        position, own, first, n, ramp, window, EDGE, LIMITED, KEYS,
    )  # fmt: skip
    weight = tl.exp2(group - normaliser)
    influence = tl.where(n >= own, 0.0, ramp)
    handed = influence * (tl.sum(p * dp, KEYS) * share - delta)
    w = p * tl.expand_dims(weight * share, KEYS)
    ds = w * (dp - tl.expand_dims(delta + handed, KEYS))
    return w, tl.where(tl.expand_dims(mark, 1 - KEYS), ds + tl.expand_dims(weight * handed, KEYS), ds)


@triton.jit
def _queries_step(
    total: tl.tensor,  # [BM, BD]
    n: tl.tensor, queries: tl.tensor, gradient: tl.tensor, normaliser: tl.tensor, delta: tl.tensor,
    k: tl.tensor, v: tl.tensor, ks: tl.tensor, vs: tl.tensor,
    starts: tl.tensor, ordinary: tl.tensor, tokens: tl.tensor,
    position: tl.tensor, own: tl.tensor, first: tl.tensor,
    scale: tl.tensor, ramp: tl.tensor, window: tl.tensor, SIZE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr,
    EDGE: tl.constexpr, LIMITED: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add one more block to the gradient of the queries."""
    start, end, key, there, mark = _block(n, starts, ordinary, tokens, SIZE, BS, EDGE)
    keys = load_rows(k, start, end, ks, BS, D, BD)
    values = load_rows(v, start, end, vs, BS, DV, BDV)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    dp = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
    _, ds = _differentiate(
        scores, dp, normaliser, delta, key, there, mark, position, own, first, n, scale, ramp, window,
        EDGE, LIMITED, 1,
    )  # fmt: skip
    return total + tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)


@_tiled("queries")
@triton.jit
def _queries_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor,
    starts: tl.tensor, ordinary: tl.tensor, tile: tl.tensor, own: tl.tensor, first: tl.tensor,
    out: tl.tensor, dout: tl.tensor,  # [B, H, Tq, DV], contiguous
    lse: tl.tensor, delta: tl.tensor,  # [B, H, Tq]
    dq: tl.tensor,  # [B, H, Tq, D], contiguous
    qb: tl.tensor, qh: tl.tensor, qs: tl.tensor,  # strides
    kb: tl.tensor, kg: tl.tensor, ks: tl.tensor,
    vb: tl.tensor, vg: tl.tensor, vs: tl.tensor,
    sb: tl.tensor, tb: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, rows: tl.tensor, before: tl.tensor,
    scale: tl.tensor, ramp: tl.tensor, window: tl.tensor,
    ROWS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr,
    SIZE: tl.constexpr, LIMITED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a tile of queries over the blocks that it sees, for the gradient of the queries and ``Delta``."""
    many = tl.cdiv(rows, BM)
    at = (many - 1 - tl.program_id(0) % many) * BM
    row = at + tl.arange(0, BM)
    head = tl.program_id(0) // many % heads
    b = (tl.program_id(0) // many // heads).to(tl.int64)
    group = head // (heads // groups)
    position = before + row
    starts += b * sb
    ordinary += b * tb
    mine = tl.load(tile + b * tb + position, mask=row < rows, other=0)
    own_first = tl.load(own + b * tb + position, mask=row < rows, other=0)
    sees = tl.load(first + b * tb + position, mask=row < rows, other=0)
    last = tl.max(mine, 0)
    edge = tl.min(tl.where(row < rows, mine, last), 0)
    begin = tl.min(tl.where(row < rows, sees, last), 0)
    place = (b * heads + head) * rows
    queries = load_rows(q + b * qb + head.to(tl.int64) * qh, at, rows, qs, BM, D, BD)
    gradient = load_rows(dout + place * DV, at, rows, DV, BM, DV, BDV)
    attended = load_rows(out + place * DV, at, rows, DV, BM, DV, BDV)
    dots = tl.sum(gradient.to(tl.float32) * attended.to(tl.float32), 1)
    tl.store(delta + place + row, dots, mask=row < rows)
    normaliser = tl.load(lse + place + row, mask=row < rows, other=float("inf"))
    k += b * kb + group.to(tl.int64) * kg
    v += b * vb + group.to(tl.int64) * vg
    total = tl.zeros([BM, BD], tl.float32)
    for late in tl.static_range(2):
        for n in range(edge if late else begin, last + 1 if late else edge):
            total = _queries_step(
                total, n, queries, gradient, normaliser, dots, k, v, ks, vs, starts, ordinary, before + rows,
                position, own_first, sees, scale, ramp, window, SIZE, D, DV, BD, BDV, BS, late, LIMITED, PRECISION,
            )  # fmt: skip
    store_rows(dq + place * D, total * scale, at, rows, BM, D, BD)


@_tiled("keys")
@triton.jit
def _keys_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, starts: tl.tensor,
    until: tl.tensor,  # [B, N]
    ordinary: tl.tensor, own: tl.tensor, first: tl.tensor, dout: tl.tensor, lse: tl.tensor, delta: tl.tensor,
    dk: tl.tensor,  # [B, G, Tk, D], contiguous
    dv: tl.tensor,  # [B, G, Tk, DV], contiguous
    qb: tl.tensor, qh: tl.tensor, qs: tl.tensor,  # strides
    kb: tl.tensor, kg: tl.tensor, ks: tl.tensor,
    vb: tl.tensor, vg: tl.tensor, vs: tl.tensor,
    sb: tl.tensor, ub: tl.tensor, tb: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, rows: tl.tensor, before: tl.tensor, tokens: tl.tensor, count: tl.tensor,
    scale: tl.tensor, ramp: tl.tensor, window: tl.tensor,
    ROWS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr,
    SIZE: tl.constexpr, LIMITED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a block over the tiles of queries that see it, one head of its group after the other."""
    n = tl.program_id(0) % count  # the first have the most work
    group = tl.program_id(0) // count % groups
    b = (tl.program_id(0) // count // groups).to(tl.int64)
    start, end, key, there, mark = _block(n, starts + b * sb, ordinary + b * tb, tokens, SIZE, BS, True)
    if end > start:
        matrix = b * groups + group
        keys = load_rows(k + b * kb + group.to(tl.int64) * kg, start, end, ks, BS, D, BD)
        values = load_rows(v + b * vb + group.to(tl.int64) * vg, start, end, vs, BS, DV, BDV)
        own += b * tb
        first += b * tb
        begin = tl.maximum(start - before, 0)  # rows of queries
        stop = tl.minimum(tl.load(until + b * ub + n) - before, rows)
        keys_gradient = tl.zeros([BS, BD], tl.float32)
        values_gradient = tl.zeros([BS, BDV], tl.float32)
        per_head = tl.cdiv(tl.maximum(stop - begin, 0), BM)
        for step in range(heads // groups * per_head):  # one loop, so that it is pipelined
            head = group * (heads // groups) + step // per_head
            place = (b * heads + head) * rows
            at = begin + step % per_head * BM
            row = at + tl.arange(0, BM)
            queries = load_rows(q + b * qb + head.to(tl.int64) * qh, at, rows, qs, BM, D, BD)
            gradient = load_rows(dout + place * DV, at, rows, DV, BM, DV, BDV)
            normaliser = tl.load(lse + place + row, mask=row < rows, other=float("inf"))
            dots = tl.load(delta + place + row, mask=row < rows, other=0.0)
            own_first = tl.load(own + before + row, mask=row < rows, other=0)
            sees = tl.load(first + before + row, mask=row < rows, other=0)
            # Transposed, [BS, BM]: results from the scores enter the next products as they lie in registers.
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            dp = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
            w, ds = _differentiate(
                scores, dp, normaliser, dots, key, there, mark, before + row, own_first, sees, n, scale, ramp,
                window, True, LIMITED, 0,
            )  # fmt: skip
            values_gradient += tl.dot(w.to(gradient.dtype), gradient, input_precision=PRECISION)
            keys_gradient += tl.dot(ds.to(queries.dtype), queries, input_precision=PRECISION)
        store_rows(dk + matrix * tokens * D, keys_gradient * scale, start, end, BS, D, BD)
        store_rows(dv + matrix * tokens * DV, values_gradient, start, end, BS, DV, BDV)


@layout.remembered
def tiles(rows: layout.Rows, *, window: int | None) -> layout.Tiles:
    """Return the tiles for these rows."""
    return layout.tiles(layout.find(*rows), window)


def landmark_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: layout.Rows, *, window: int | None, ramp: float, scale: float
) -> Tensor:
    """See the public function; states of padding are 0."""
    found = tiles(rows, window=window)
    if scale <= 0:  # kernels take the largest score before they scale it
        q, scale = q * scale, 1.0
    settings = {"window": k.shape[2] if window is None else window, "ramp": ramp, "scale": scale}
    out: Tensor = _LandmarkAttention.apply(q, k, v, found, settings)  # type: ignore[no-untyped-call]
    return out


class _LandmarkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: layout.Tiles, settings: dict[str, Any]) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        told = _told(q, k, v, found, settings)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        queries = grid(q.shape[0] * q.shape[1], q.shape[2], "BM")
        _forward_kernel[queries](q=q, k=k, v=v, out=out, lse=lse, tile=found.tile, **told)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.found, ctx.settings = found, settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found = ctx.found
        told = _told(q, k, v, found, ctx.settings) | {"dout": dout.contiguous(), "lse": lse}
        delta, dq = torch.empty_like(lse), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        queries = grid(q.shape[0] * q.shape[1], q.shape[2], "BM")
        _queries_kernel[queries](q=q, k=k, v=v, out=out, delta=delta, dq=dq, tile=found.tile, **told)
        _keys_kernel[(k.shape[0] * k.shape[1] * found.count,)](
            q=q, k=k, v=v, delta=delta, dk=dk, dv=dv, until=found.until, ub=_stride(found.until),
            tokens=k.shape[2], count=found.count, **told,
        )  # fmt: skip
        return dq, dk, dv, None, None


def _told(q: Tensor, k: Tensor, v: Tensor, found: layout.Tiles, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments common to all kernels."""
    return {
        **strides("qb qh qs", q),
        **strides("kb kg ks", k),
        **strides("vb vg vs", v),
        "starts": found.starts,
        "ordinary": found.ordinary,
        "own": found.own,
        "first": found.first,
        "sb": _stride(found.starts),
        "tb": _stride(found.tile),
        "heads": q.shape[1],
        "groups": k.shape[1],
        "rows": q.shape[2],
        "before": k.shape[2] - q.shape[2],
        **settings,
        "ROWS": min(padded(q.shape[2]), 128),
        "D": k.shape[3],
        "DV": v.shape[3],
        "BD": padded(k.shape[3]),
        "BDV": padded(v.shape[3]),
        "BS": padded(found.size),
        "SIZE": found.size if found.regular else 0,
        "LIMITED": found.limited,
        "PRECISION": precision(q.dtype),
    }


def _stride(x: Tensor) -> int:
    """Return the stride from row to row; 0 if all rows are the same."""
    return 0 if len(x) == 1 else x.stride(0)
