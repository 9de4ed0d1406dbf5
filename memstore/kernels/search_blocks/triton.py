"""Search for blocks in Triton, in two passes, so that not all scores exist at once.

Blocks are in runs of ``RUN``. The best ``k`` blocks are in the ``k`` runs with the largest best scores, because each of
these has a block that is at least as good. So the first kernel reads all landmarks once and writes one number for each
run and query. The second kernel scores the blocks of the remaining ``k`` runs. Equal runs and equal blocks are taken in
their order, so the result equals the reference.

A running top k in registers, or a heap of each program, would need a small ``k`` that the compiler knows. Its ties
would depend on the order of programs.

The first kernel is for matrix units, whose inputs have the type of the landmarks. A query in float32 becomes a sum of
three numbers of that type, which holds all of its bits. So runs are ruled out reliably, up to the order of a sum in
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstore.kernels._largest import filled, largest
from memstore.kernels._tiles import padded, split, warps

RUN = 64
"""Blocks of a run."""
QUERIES = 32
"""Queries that share loaded landmarks."""
THREADS = 256
"""Threads of one program: with fewer, the rows of a tile do not fit into registers."""


@triton.jit
def _best_of_runs_kernel(
    queries: tl.tensor,  # [PARTS, G, R, D]
    landmarks: tl.tensor,  # [G, N, P, D], strided
    wanted: tl.tensor,  # [N]
    best: tl.tensor,  # [G, R, runs]
    lg: tl.tensor, ln: tl.tensor, lp: tl.tensor,  # strides
    groups: tl.tensor, rows: tl.tensor, count: tl.tensor, keys: tl.tensor, runs: tl.tensor,
    D: tl.constexpr, BD: tl.constexpr,
    PARTS: tl.constexpr, FILTERED: tl.constexpr, RUN: tl.constexpr, BR: tl.constexpr,
) -> None:  # fmt: skip
    """Find the best score of one run for some queries of one head."""
    run = tl.program_id(0)
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    dims = tl.arange(0, BD)
    block = run.to(tl.int64) * RUN + tl.arange(0, RUN)
    there = block < count
    if FILTERED:
        there = there & (tl.load(wanted + block, mask=there, other=0) != 0)
    highest = tl.full([BR, RUN], float("-inf"), tl.float32)
    for key in range(keys):
        places = landmarks + group * lg + block[:, None] * ln + key * lp + dims[None, :]
        landmark = tl.load(places, mask=there[:, None] & (dims[None, :] < D), other=0.0)
        scores = tl.zeros([BR, RUN], tl.float32)
        for part in tl.static_range(PARTS):
            base = queries + (part * groups + group) * rows * D
            inside = (row[:, None] < rows) & (dims[None, :] < D)
            query = tl.load(base + row[:, None] * D + dims[None, :], mask=inside, other=0.0)
            scores = tl.dot(query, tl.trans(landmark), scores, input_precision="ieee")
        highest = tl.maximum(highest, scores)
    highest = tl.where(there[None, :], highest, float("-inf"))
    tl.store(best + (group * rows + row) * runs + run, tl.max(highest, 1), mask=row < rows)


@triton.jit
def _score_runs_kernel(
    queries: tl.tensor,  # [G, R, D] float32
    landmarks: tl.tensor,  # [G, N, P, D], strided
    wanted: tl.tensor,  # [N]
    chosen: tl.tensor,  # [G, R, K]: runs
    scores: tl.tensor,  # [G, R, K, RUN]
    lg: tl.tensor, ln: tl.tensor, lp: tl.tensor,  # strides
    rows: tl.tensor, count: tl.tensor, keys: tl.tensor, k: tl.tensor,
    D: tl.constexpr, BD: tl.constexpr, FILTERED: tl.constexpr, RUN: tl.constexpr,
) -> None:  # fmt: skip
    """Score the blocks of one run for one query."""
    place = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    group = place // rows
    dims = tl.arange(0, BD)
    query = tl.load(queries + place * D + dims, mask=dims < D, other=0.0)
    run = tl.load(chosen + place * k + which)
    block = run * RUN + tl.arange(0, RUN)
    there = block < count
    if FILTERED:
        there = there & (tl.load(wanted + block, mask=there, other=0) != 0)
    highest = tl.full([RUN], float("-inf"), tl.float32)
    for key in range(keys):
        places = landmarks + group * lg + block[:, None] * ln + key * lp + dims[None, :]
        landmark = tl.load(places, mask=there[:, None] & (dims[None, :] < D), other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.sum(landmark * query[None, :], 1))
    highest = tl.where(there, highest, float("-inf"))
    tl.store(scores + (place * k + which) * RUN + tl.arange(0, RUN), highest)


def search_blocks(queries: Tensor, landmarks: Tensor, k: int, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """See the public function; queries and landmarks must not be empty."""
    heads, tokens, dim = queries.shape
    groups, count, keys, _ = landmarks.shape
    if landmarks.stride(3) != 1:
        landmarks = landmarks.contiguous()
    flat = queries.float().reshape(groups, -1, dim).contiguous()  # [G, R, D]
    rows, runs = flat.shape[1], triton.cdiv(count, RUN)
    filtered = wanted is not None
    mask = wanted.contiguous().view(torch.uint8) if wanted is not None else flat  # not read if there is no mask
    sizes = {"D": dim, "BD": padded(dim), "FILTERED": filtered, "RUN": RUN}
    parts, launch = split(flat, landmarks.dtype), {"num_warps": warps(THREADS)}
    best = flat.new_empty(groups, rows, runs)
    left = min(k, runs)
    scores = flat.new_empty(groups, rows, left, RUN)
    with torch.cuda.device_of(flat):
        _best_of_runs_kernel[runs, triton.cdiv(rows, QUERIES), groups](
            parts, landmarks, mask, best, *landmarks.stride()[:3],
            groups, rows, count, keys, runs, PARTS=len(parts), BR=QUERIES, **launch, **sizes,
        )  # fmt: skip
        # Runs in order, so that the smaller of equal blocks comes first.
        chosen = largest(best, left).sort(-1).values.contiguous()
        _score_runs_kernel[groups * rows, left](
            flat, landmarks, mask, chosen, scores, *landmarks.stride()[:3],
            rows, count, keys, left, **launch, **sizes,
        )  # fmt: skip
    blocks = (chosen.unsqueeze(-1) * RUN + torch.arange(RUN, device=chosen.device)).flatten(2)
    scores = scores.flatten(2)
    at = largest(scores, min(k, scores.shape[2]))
    found, blocks = filled(scores.gather(2, at), k, -torch.inf), filled(blocks.gather(2, at), k, -1)
    blocks = blocks.masked_fill(found == -torch.inf, -1)
    return found.view(heads, tokens, k), blocks.view(heads, tokens, k)
