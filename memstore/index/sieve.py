"""Which groups of an exact index can hold one of the best blocks: the first step of a search, in 8 bits.

What is left out is proven to hold none, by the bounds of ``codes.py``; so the few groups that remain, scored in
float32, give the true top k. Where too many remain, as among many equal keys, the sieve says that it did not help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.index.codes import CodedQueries, Codes, encode_queries, products

TILE_KEYS = 4096
NEIGHBOURS = 32
"""Groups whose best product stands for all of them, once more."""
LARGEST_SHARE = 8
"""At most one of so many groups is worth scoring; beyond that a plain scan is as fast."""


class Part(NamedTuple):
    """The codes of a chunk, and which of their groups count."""

    codes: Codes
    whole: Tensor | None
    """``[groups]`` bool: all blocks of the group are there and allowed. None: of every group."""


class Sieved(NamedTuple):
    """Groups left for each query, in pairs ordered by query."""

    query: Tensor
    """``[W]``"""
    part: Tensor
    """``[W]``"""
    group: Tensor
    """``[W]``: its number in its part."""
    helped: Tensor
    """``[R]`` bool; no pairs are given for the other queries."""


def sieve(parts: Sequence[Part], queries: Tensor, head: int, k: int) -> Sieved:
    """For ``queries [R, D]`` float32 of key head ``head``. There must be more than ``k`` whole groups."""
    coded = encode_queries(queries)
    scores = _best_of_groups(parts, coded, head)  # [n, R]
    lost = _padded(torch.cat([part.codes.lost[head, : part.codes.groups] for part in parts]), 0.0)
    longest = _padded(torch.cat([part.codes.longest[head, : part.codes.groups] for part in parts]), 0.0)
    centre = parts[0].codes.centre[head]
    doubt = _Doubt(coded, lost, longest, _rounding(coded, lost, longest, centre))
    limit = _limit(scores, doubt, k)
    query, group = _at_least(scores, doubt, limit)
    counts = torch.bincount(query, minlength=len(queries))
    helped = counts * LARGEST_SHARE <= len(scores)
    kept = helped[query]
    starts = torch.tensor([0, *(part.codes.groups for part in parts)]).cumsum(0)
    query, group = query[kept], group[kept]
    part = torch.searchsorted(starts, group, right=True) - 1
    return Sieved(query, part, group - starts[part], helped)


class _Doubt(NamedTuple):
    """How far a group's product can be from the truth, in units of each query's scale."""

    queries: CodedQueries
    lost: Tensor  # [n]
    longest: Tensor  # [n]
    rounding: Tensor  # [R]

    def of(self, query: Tensor, lost: Tensor, longest: Tensor) -> Tensor:
        """Of groups with these lengths, for the queries at rows ``query``; all of shapes that broadcast."""
        bound = self.queries.lengths[query] * lost + self.queries.lost[query] * longest
        return bound * 1.0001 + self.rounding[query]


def _best_of_groups(parts: Sequence[Part], queries: CodedQueries, head: int) -> Tensor:
    """Best product of each group with each query: ``[n, R]`` float32, -inf for groups that do not count."""
    total = sum(part.codes.groups for part in parts)
    scores = torch.empty(-(-total // NEIGHBOURS) * NEIGHBOURS, len(queries.values))
    scores[total:] = -torch.inf
    start = 0
    for codes, whole in parts:
        step = max(1, TILE_KEYS // codes.keys_per_group)
        for first in range(0, codes.groups, step):
            last = min(first + step, codes.groups)
            out = scores[start + first : start + last]
            counting = None if whole is None else whole[first:last].unsqueeze(1)
            if counting is not None and not bool(counting.any()):
                out.fill_(-torch.inf)
                continue
            out.copy_(products(codes.values[head, first:last], queries.values))
            out.mul_(codes.scales[head, first:last].unsqueeze(1))
            if counting is not None:
                out.masked_fill_(~counting, -torch.inf)
        start += codes.groups
    return scores


def _padded(values: Tensor, value: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % NEIGHBOURS), value=value)


def _rounding(queries: CodedQueries, lost: Tensor, longest: Tensor, centre: Tensor) -> Tensor:
    """What sums in float32 can differ by, here and where the winners are scored: ``[R]``."""
    reach = float(longest.max()) + float(lost.max()) + float(centre.norm())
    return queries.lengths * (4 * (len(centre) + 8) * 2.0**-24 * reach)


def _limit(scores: Tensor, doubt: _Doubt, k: int) -> Tensor:
    """``[R]``: at least ``k`` blocks are truly as good as this."""
    rows = scores.shape[1]
    query = torch.arange(rows).unsqueeze(1)
    near = scores.view(-1, NEIGHBOURS, rows).amax(1).T  # [R, n / NEIGHBOURS]
    places = near.topk(min(k, near.shape[1]), dim=1, sorted=False).indices  # [R, K]
    groups = (places.unsqueeze(2) * NEIGHBOURS + torch.arange(NEIGHBOURS)).flatten(1)
    best, column = scores[groups, query].topk(k, dim=1, sorted=False)
    chosen = groups.gather(1, column)  # [R, k]
    return (best - doubt.of(query, doubt.lost[chosen], doubt.longest[chosen])).amin(1)


def _at_least(scores: Tensor, doubt: _Doubt, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs ``query [W], group [W]``, ordered by query, of groups that may reach the limit of their query."""
    rows = scores.shape[1]
    near = scores.view(-1, NEIGHBOURS, rows)
    lost, longest = (each.view(-1, NEIGHBOURS) for each in (doubt.lost, doubt.longest))
    highest = near.amax(1).T + doubt.of(torch.arange(rows).unsqueeze(1), lost.amax(1), longest.amax(1))
    query, place = (highest >= limit.unsqueeze(1)).nonzero().unbind(1)
    highest = near[place, :, query] + doubt.of(query.unsqueeze(1), lost[place], longest[place])  # [V, NEIGHBOURS]
    row, column = (highest >= limit[query].unsqueeze(1)).nonzero().unbind(1)
    return query[row], place[row] * NEIGHBOURS + column
