"""The choice in slices of the keys, for any function that scores a slice; also the merge of choices.

A candidate is one number of 64 bits. Its upper half is the score, as an integer of the same order; its lower half is
the position, counted down. No two are equal, so a selection cannot break ties by the layout of its input. Among equal
scores, the smaller position is the larger number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Scores in memory at a time, by the kind of device."""
PRODUCTS = 1 << 18
"""Products of heads in memory at a time on a CPU: they stay in its cache until they are added up."""
ROWS = 256
"""Queries at a time."""
LAST = 0xFFFFFFFF
"""Largest position."""
NONE = -(1 << 63)

Scores = Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor]
"""Score ``queries [S, H, D]``, ``weights [S, H]``, ``keys [n, D]``, with scale and relu; return scores ``[S, n]``
float32.
"""


def choose(
    scores: Scores, queries: Tensor, weights: Tensor | None, chunks: Sequence[Tensor], limit: Tensor, *,
    scale: float, k: int, relu: bool, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See the public function; ``scores`` scores a slice of keys."""
    found = []
    for start in range(0, len(queries), ROWS):
        some = slice(start, start + ROWS)
        few, factors, sees = queries[some], None if weights is None else weights[some], limit[some]
        most = int(sees.max()) if sees.device.type == "cpu" else LAST  # on a GPU this would wait for the device
        step = -(-max(1, SCORES.get(queries.device.type, 1 << 24) // len(few)) // block) * block
        kept = torch.full((len(few), 0), NONE, dtype=torch.int64, device=queries.device)
        first = 0
        for keys in chunks:
            for slice_ in keys.split(step):
                if first < most:
                    more = scores(few, factors, slice_, scale, relu)
                    positions = torch.arange(first, first + len(slice_), device=queries.device)
                    more = more.masked_fill((positions >= sees[:, None]) | more.isnan(), -torch.inf)
                    if block > 1:
                        more = F.pad(more, (0, -len(slice_) % block), value=-torch.inf).unflatten(1, (-1, block))
                        more, positions = more.amax(2), positions[::block] // block
                    kept = best(torch.cat([kept, packed(more, positions.expand_as(more))], 1), k)
                first += len(slice_)
        found.append(unpacked(kept, k))
    ids, chosen = zip(*found, strict=True)
    return torch.cat(ids), torch.cat(chosen)


def scores(queries: Tensor, weights: Tensor | None, keys: Tensor, scale: float, relu: bool) -> Tensor:
    """Score by matrix products, some keys at a time."""
    rows, heads, _ = queries.shape
    flat = queries.float().flatten(0, 1) * scale
    factors = flat.new_ones(rows, 1, heads) if weights is None else weights.float().unsqueeze(1)
    out = flat.new_empty(rows, 1, len(keys))
    step = max(64, PRODUCTS // len(flat)) if keys.device.type == "cpu" else len(keys)
    for some, into in zip(keys.split(step), out.split(step, 2), strict=True):
        products = flat @ some.float().T
        if relu:
            products.relu_()
        into.copy_(torch.bmm(factors, products.view(rows, heads, -1)))
    return out.squeeze(1)


def packed(scores: Tensor, positions: Tensor) -> Tensor:
    """Pack ``scores`` in float32 and ``positions``, int64 of the same shape, into candidates."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as integers they sort like the numbers
    return torch.where(scores == -torch.inf, NONE, (ordered << 32) + (LAST - positions))


def best(candidates: Tensor, k: int) -> Tensor:
    """Return the ``k`` largest of ``candidates [S, n]``, in order, or all if there are fewer."""
    return candidates.topk(min(k, candidates.shape[1]), 1).values


def unpacked(candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and scores ``[S, k]`` of ``candidates [S, n]``."""
    candidates = F.pad(candidates, (0, k - candidates.shape[1]), value=NONE)
    none, bits = candidates == NONE, (candidates >> 32).int()
    scores = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
    return (LAST - (candidates & LAST)).masked_fill(none, -1), scores.masked_fill(none, -torch.inf)
