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

TILE_KEYS = 8192
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
    scores = _best_of_groups(parts, coded, head)  # [R, n]
    lost = _padded(torch.cat([part.codes.lost[head, : part.codes.groups] for part in parts]), 0.0)
    longest = _padded(torch.cat([part.codes.longest[head, : part.codes.groups] for part in parts]), 0.0)
    centre = parts[0].codes.centre[head]
    doubt = _Doubt(coded, lost, longest, _rounding(coded, lost, longest, centre))
    limit = _limit(scores, doubt, k)
    query, group = _at_least(scores, doubt, limit)
    counts = torch.bincount(query, minlength=len(queries))
    helped = counts * LARGEST_SHARE <= scores.shape[1]
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
    """Best product of each group with each query: ``[R, n]`` float32, -inf for groups that do not count."""
    total = sum(part.codes.groups for part in parts)
    scores = torch.full((len(queries.values), -(-total // NEIGHBOURS) * NEIGHBOURS), -torch.inf)
    start = 0
    for codes, whole in parts:
        step = max(1, TILE_KEYS // codes.keys_per_group)
        for first in range(0, codes.groups, step):
            last = min(first + step, codes.groups)
            if whole is not None and not bool(whole[first:last].any()):
                continue
            best = products(codes.values[head, first:last], queries.values)
            out = scores[:, start + first : start + last]
            torch.mul(best, codes.scales[head, first:last], out=out)
            if whole is not None:
                out.masked_fill_(~whole[first:last], -torch.inf)
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
    rows = len(scores)
    near = scores.view(rows, -1, NEIGHBOURS)
    places = near.amax(2).topk(min(k, near.shape[1]), dim=1, sorted=False).indices  # [R, K]
    groups = (places.unsqueeze(2) * NEIGHBOURS + torch.arange(NEIGHBOURS)).flatten(1)
    columns = groups.gather(1, scores.gather(1, groups).topk(k, dim=1, sorted=False).indices)  # [R, k]
    query = torch.arange(rows).unsqueeze(1)
    return (scores.gather(1, columns) - doubt.of(query, doubt.lost[columns], doubt.longest[columns])).amin(1)


def _at_least(scores: Tensor, doubt: _Doubt, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs ``query [W], group [W]``, ordered by query, of groups that may reach the limit of their query."""
    rows = len(scores)
    near = scores.view(rows, -1, NEIGHBOURS)
    lost, longest = (each.view(-1, NEIGHBOURS) for each in (doubt.lost, doubt.longest))
    all_queries = torch.arange(rows).unsqueeze(1)
    highest = near.amax(2) + doubt.of(all_queries, lost.amax(1), longest.amax(1))
    query, place = (highest >= limit.unsqueeze(1)).nonzero().unbind(1)
    highest = near[query, place] + doubt.of(query.unsqueeze(1), lost[place], longest[place])  # [V, NEIGHBOURS]
    row, column = (highest >= limit[query].unsqueeze(1)).nonzero().unbind(1)
    return query[row], place[row] * NEIGHBOURS + column
