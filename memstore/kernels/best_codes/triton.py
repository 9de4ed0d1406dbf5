"""The best codes in Triton: stored codes become int8 in registers, and are multiplied as whole numbers.

A program keeps the best products so far of ``BLOCKS`` blocks for ``QUERIES`` queries, and goes from key to key of all
these blocks at once. So no maximum crosses the rows of a tile, however many keys a block has.

The matrix units get a query as three numbers of 8 bits, ``a * 2^14 + b * 2^7 + c``, which hold 22 bits of it. Sums of
whole numbers do not depend on their order, so scores have the same bits for any tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels._tiles import warps

BLOCKS, QUERIES = 64, 32
"""Blocks and queries of one program."""
THREADS = 256
"""Threads of one program."""
DIGIT = 7
"""Bits of the second and the third number of a query."""
MOST = 126 << (2 * DIGIT)
"""The largest whole number that the three numbers hold."""
SMALLEST = 32
"""Numbers of a code that matrix units take at once, in 8 bits."""


@triton.jit
def _best_codes_kernel(
    codes: tl.tensor,  # [N, P, D] int8, or [N, P, D / 8] uint8; strided
    queries: tl.tensor,  # [3, R, BD] int8
    best: tl.tensor,  # [R, N] float32
    cn: tl.tensor, cp: tl.tensor,  # strides
    rows: tl.tensor, count: tl.tensor, keys: tl.tensor, width: tl.tensor,
    BITS: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
) -> None:  # fmt: skip
    """Find the best products of some blocks and queries; for bits, sums of the query's numbers at ones."""
    block = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    dims, bytes_ = tl.arange(0, BD), tl.arange(0, BW)
    there = (block < count)[:, None] & (bytes_ < width)[None, :]
    asked = queries + row[None, :].to(tl.int64) * BD + dims[:, None]  # [BD, BR]
    inside = (row < rows)[None, :]
    step = tl.cast(rows, tl.int64) * BD
    first = tl.load(asked, mask=inside, other=0)
    second = tl.load(asked + step, mask=inside, other=0)
    third = tl.load(asked + 2 * step, mask=inside, other=0)
    highest = tl.full([BN, BR], float("-inf"), tl.float32)
    for key in range(keys):
        code = tl.load(codes + block[:, None] * cn + key * cp + bytes_[None, :], mask=there, other=0)
        if BITS:
            code = (code[:, :, None] >> tl.arange(0, 8).to(tl.uint8)[None, None, :]) & 1
            code = tl.reshape(code, [BN, BD]).to(tl.int8)
        score = tl.dot(code, first, out_dtype=tl.int32).to(tl.float32) * 16384.0
        score += tl.dot(code, second, out_dtype=tl.int32).to(tl.float32) * 128.0
        score += tl.dot(code, third, out_dtype=tl.int32).to(tl.float32)
        highest = tl.maximum(highest, score)
    places = best + row[None, :].to(tl.int64) * count + block[:, None]
    tl.store(places, highest, mask=(block < count)[:, None] & inside)


def best_codes(codes: Tensor, queries: Tensor) -> Tensor:
    """Take ``codes [n, P, ...]``, ``queries [R, D]`` float32, neither empty: see the public function."""
    count, keys, width = codes.shape
    rows, dim = queries.shape
    bits = codes.dtype == torch.uint8
    if codes.stride(2) != 1:
        codes = codes.contiguous()
    side = max(SMALLEST, triton.next_power_of_2(dim))
    parts, scales, sums = _parts(queries, side)
    best = queries.new_empty(rows, count)
    with torch.cuda.device_of(queries):
        _best_codes_kernel[triton.cdiv(count, BLOCKS), triton.cdiv(rows, QUERIES)](
            codes, parts, best, *codes.stride()[:2], rows, count, keys, width,
            BITS=bits, BD=side, BW=side // 8 if bits else side, BN=BLOCKS, BR=QUERIES, num_warps=warps(THREADS),
        )  # fmt: skip
    # The matrix units see bits as 1 and 0, but they mean +1 and -1.
    return best.mul_(2).sub_(sums).mul_(scales) if bits else best.mul_(scales)


def _parts(queries: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``queries [R, D]`` as int8 ``[3, R, side]``, their scales and their earlier sums, ``[R, 1]`` each."""
    longest = queries.abs().amax(1, keepdim=True)
    whole = (queries == queries.round()).all(1, keepdim=True) & (longest <= MOST)
    scales = torch.where(whole, 1.0, longest.clamp(min=1e-30) / MOST)
    left = torch.nn.functional.pad((queries / scales).round().int(), (0, side - queries.shape[1]))
    sums, parts = left.sum(1, keepdim=True).float(), []
    for _ in range(2):
        lowest = (left + (1 << DIGIT - 1)) % (1 << DIGIT) - (1 << DIGIT - 1)  # from -64 to 63
        parts.append(lowest)
        left = (left - lowest) >> DIGIT
    return torch.stack([left, *reversed(parts)]).to(torch.int8), scales, sums
