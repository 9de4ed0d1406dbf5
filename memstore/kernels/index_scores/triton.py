"""Index scores in Triton: products, ReLU and the weighted sum over heads in one kernel, which writes one score per key.

A program holds some keys and walks over queries and, in tiles, over their heads. So products of heads exist only in
registers. The package chooses from the scores of a slice.

Inputs of matrix units have the type of the keys. A query in float32 becomes a sum of three numbers of that type, which
holds all of its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels._tiles import SMALLEST, padded, split, warps

KEYS = 64
"""Keys of a program."""
QUERIES = 16
"""Queries of a program that share the keys it reads, if there are so many."""
THREADS = 256
"""Threads of one program: with fewer, a tile of float32 does not fit into registers."""


@triton.jit
def _scores_kernel(
    queries: tl.tensor,  # [PARTS, S, H, D]
    weights: tl.tensor,  # [S, H] float32
    keys: tl.tensor,  # [n, D], strided
    scores: tl.tensor,  # [S, n] float32
    stride: tl.tensor,  # from one key to the next
    scale: tl.tensor,
    rows: tl.tensor, heads: tl.tensor, count: tl.tensor, each: tl.tensor,
    D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, RELU: tl.constexpr,
) -> None:  # fmt: skip
    """Score BK keys for ``each`` queries."""
    key = tl.program_id(0).to(tl.int64) * BK + tl.arange(0, BK)
    dims = tl.arange(0, BD)
    inside = (key[:, None] < count) & (dims[None, :] < D)
    tile = tl.trans(tl.load(keys + key[:, None] * stride + dims[None, :], mask=inside, other=0.0))
    first = tl.program_id(1).to(tl.int64) * each
    for row in range(first, tl.minimum(first + each, rows)):
        total = tl.zeros([BK], tl.float32)
        for start in range(0, heads, BH):
            head = start + tl.arange(0, BH)
            products = tl.zeros([BH, BK], tl.float32)
            for part in tl.static_range(PARTS):
                places = queries + ((part * rows + row) * heads + head[:, None]) * D + dims[None, :]
                query = tl.load(places, mask=(head[:, None] < heads) & (dims[None, :] < D), other=0.0)
                products = tl.dot(query, tile, products, input_precision="ieee")
            products = products * scale
            if RELU:
                products = tl.where(products < 0, 0.0, products)  # keeps NaN
            weight = tl.load(weights + row * heads + head, mask=head < heads, other=0.0)
            total += tl.sum(tl.where(head[:, None] < heads, products * weight[:, None], 0.0), 0)
        tl.store(scores + row * count + key, total, mask=key < count)


def scores(queries: Tensor, weights: Tensor | None, keys: Tensor, scale: float, relu: bool) -> Tensor:
    """Score ``queries [S, H, D]``, ``weights [S, H]``, ``keys [n, D]``: return ``[S, n]`` float32."""
    rows, heads, dim = queries.shape
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    factors = queries.new_ones(rows, heads) if weights is None else weights
    out = torch.empty(rows, len(keys), dtype=torch.float32, device=keys.device)
    each = QUERIES if rows >= 4 * QUERIES else 1
    parts = split(queries, keys.dtype)
    with torch.cuda.device_of(keys):
        _scores_kernel[triton.cdiv(len(keys), KEYS), triton.cdiv(rows, each)](
            parts, factors.float().contiguous(), keys, out, keys.stride(0), scale, rows, heads, len(keys), each,
            D=dim, BD=padded(dim), BH=SMALLEST, BK=KEYS, PARTS=len(parts), RELU=relu, num_warps=warps(THREADS),
        )  # fmt: skip
    return out
