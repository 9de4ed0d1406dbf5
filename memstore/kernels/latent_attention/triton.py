"""Attention over chosen rows in Triton: gather, score, softmax and sum in one pass.

A program takes some heads of one query, which share the rows that it reads; a latent is read once, as key and value.
The softmax is an online softmax. If there are few queries, their rows are split among programs, and the parts are
merged by their log-sum-exps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels._tiles import SMALLEST, padded, precision, warps
from memstore.kernels.block_attention import merge_attention
from memstore.kernels.latent_attention.fused import inside

ROWS = 16
"""Chosen rows at a time."""
PROGRAMS = 128
"""With fewer programs, rows are split, so that no part of a device waits."""
LEAST = 128
"""Rows of a part."""
THREADS = 256
"""Threads of one program."""


@triton.jit
def _attend_kernel(
    q: tl.tensor,  # [S, H, D]
    keys: tl.tensor,  # [N, G, D], strided
    values: tl.tensor,  # [N, G, DV], strided, if they are not in the keys
    ids: tl.tensor,  # [S, choices, k]
    out: tl.tensor,  # [parts, S, H, DV]
    lse: tl.tensor,  # [parts, S, H] float32
    kn: tl.tensor, kg: tl.tensor, vn: tl.tensor, vg: tl.tensor,  # strides
    scale: tl.tensor,
    count: tl.tensor, queries: tl.tensor, heads: tl.tensor, groups: tl.tensor, choices: tl.tensor, k: tl.tensor,
    length: tl.tensor,  # of a part
    D: tl.constexpr, DV: tl.constexpr, BEGIN: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, INSIDE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with BH heads of one query to one part of its rows. BV covers a value; BR a key from BEGIN on."""
    query = tl.program_id(0).to(tl.int64) // groups
    group = tl.program_id(0).to(tl.int64) % groups
    part = tl.program_id(2).to(tl.int64)
    each = heads // groups
    local = tl.program_id(1) * BH + tl.arange(0, BH)
    head = group * each + local
    dims, rest = tl.arange(0, BV), tl.arange(0, BR)
    place = q + (query * heads + head[:, None]) * D
    if INSIDE:
        first = tl.load(place + dims[None, :], mask=(local[:, None] < each) & (dims[None, :] < DV), other=0.0)
    second = tl.load(
        place + BEGIN + rest[None, :], mask=(local[:, None] < each) & (rest[None, :] < D - BEGIN), other=0.0
    )
    most = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    sums = tl.zeros([BH, BV], tl.float32)
    chosen = ids + (query * choices + tl.minimum(group, choices - 1)) * k
    for start in range(part * length, tl.minimum(part * length + length, k), BK):
        at = start + tl.arange(0, BK)
        row = tl.load(chosen + at, mask=(at < k) & (at < part * length + length), other=-1).to(tl.int64)
        there = (row >= 0) & (row < count)
        key = keys + row * kn + group * kg
        more = tl.load(
            key[:, None] + BEGIN + rest[None, :], mask=there[:, None] & (rest[None, :] < D - BEGIN), other=0.0
        )
        scores = tl.dot(second, tl.trans(more), input_precision=PRECISION)
        if INSIDE:
            value = tl.load(key[:, None] + dims[None, :], mask=there[:, None] & (dims[None, :] < DV), other=0.0)
            scores = tl.dot(first, tl.trans(value), scores, input_precision=PRECISION)
        else:
            base = values + row * vn + group * vg
            value = tl.load(base[:, None] + dims[None, :], mask=there[:, None] & (dims[None, :] < DV), other=0.0)
        scores = tl.where(there[None, :], scores * scale, float("-inf"))
        scores = tl.where((row < count)[None, :], scores, float("nan"))  # a row that does not exist
        new = tl.maximum(most, tl.max(scores, 1))
        base_score = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp(most - base_score)
        weights = tl.exp(scores - base_score[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
        most = new
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    logs = tl.where(total == 0, float("-inf"), most + tl.log(tl.where(total == 0, 1.0, total)))
    here = (part * queries + query) * heads + head
    tl.store(out + here[:, None] * DV + dims[None, :], sums, mask=(local[:, None] < each) & (dims[None, :] < DV))
    tl.store(lse + here, logs, mask=local < each)


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the public function; queries must not be empty."""
    (queries, heads, dim), size, k = q.shape, values.shape[2], ids.shape[2]
    groups = keys.shape[1]
    within = inside(keys, values)
    keys = keys if keys.stride(2) == 1 else keys.contiguous()
    values = keys if within else values if values.stride(2) == 1 else values.contiguous()
    begin = size if within else 0
    tiles = triton.cdiv(heads // groups, SMALLEST)
    parts = max(1, min(triton.cdiv(PROGRAMS, queries * groups * tiles), k // LEAST))
    length = triton.cdiv(triton.cdiv(k, parts), ROWS) * ROWS
    out = torch.empty(parts, queries, heads, size, dtype=torch.float32 if parts > 1 else q.dtype, device=q.device)
    lse = torch.empty(parts, queries, heads, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _attend_kernel[queries * groups, tiles, parts](
            q.to(keys.dtype).contiguous(), keys, values, ids.contiguous(), out, lse, *keys.stride()[:2],
            *values.stride()[:2], scale, len(keys), queries, heads, groups, ids.shape[1], k, length,
            D=dim, DV=size, BEGIN=begin, BV=padded(size), BR=padded(max(1, dim - begin)), BH=SMALLEST, BK=ROWS,
            INSIDE=within, PRECISION=precision(keys.dtype), num_warps=warps(THREADS),
        )  # fmt: skip
    result, logs = (out[0], lse[0]) if parts == 1 else merge_attention(list(out), list(lse))
    if sinks is not None:
        more = torch.logaddexp(logs, sinks.float())
        result = result * torch.where(more == -torch.inf, 0, logs - more).exp().unsqueeze(-1)
        logs = more
    return result.to(q.dtype), logs
