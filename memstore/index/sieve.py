"""Which groups of an exact index can hold one of the best blocks: the first look of a search, in 8 bits.

It is taken in three steps. ``Look`` multiplies codes; ``best`` names a few groups that look best; and when their blocks
were scored in float32, ``left`` names those that can still hold better ones, by the bounds of ``codes.py``. All others
are proven to hold none, so what was scored has the true top k. Where too many are left, as among many equal keys, the
look did not help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.index.codes import Codes, encode_queries
from memstore.kernels import best_products

STEP = 1 << 10
"""Groups that are passed over together, where none of them counts."""
NEIGHBOURS = 32
"""Groups whose best product stands for all of them, once more."""
LARGEST_SHARE = 16
"""At most one of so many groups is worth scoring; beyond that a plain scan is as fast."""


class Part(NamedTuple):
    """The codes of a chunk, and which of their groups count."""

    codes: Codes
    whole: Tensor | None
    """``[groups]`` bool: all blocks of the group are there and allowed. None: of every group."""


class Pairs(NamedTuple):
    """Groups to be scored for queries."""

    query: Tensor
    """``[W]``"""
    group: Tensor
    """``[W]``: numbered through all parts."""


class Look:
    """For ``queries [R, D]`` float32 of key head ``head``. Products are in units of each query's scale."""

    def __init__(self, parts: Sequence[Part], queries: Tensor, head: int) -> None:
        frame = parts[0].codes.frame
        centre = frame.centre[head]
        self._queries = encode_queries(frame.queries(queries, head))
        self._apart = queries.double() @ centre.double()
        self._lost, self._longest = (
            _padded(torch.cat([getattr(part.codes, name)[head, : part.codes.groups] for part in parts]))
            for name in ("lost", "longest")
        )
        self.starts = torch.tensor([0, *(part.codes.groups for part in parts)]).cumsum(0)
        """Number of the first group of each part, and behind the last one."""
        self._scores = _best_of_groups(parts, self._queries.values, head, int(self.starts[-1]))  # [n, R]
        self._highest = self._scores.view(-1, NEIGHBOURS, len(queries)).amax(1)  # [n / NEIGHBOURS, R]
        # What sums in float32 can differ by, here and where the winners are scored.
        reach = float(self._longest.max()) + float(self._lost.max())
        apart = reach * float(frame.stretch[head]) + float(centre.norm())
        lengths = queries.norm(dim=1) / self._queries.scales * apart + self._queries.lengths * reach
        self._rounding = lengths * (4 * (len(centre) + 8) * 2.0**-24)

    def best(self, k: int) -> Pairs:
        """The ``k`` groups that look best for each query, ordered by query. There must be at least as many."""
        rows = self._scores.shape[1]
        query = torch.arange(rows).unsqueeze(1)
        places = self._highest.T.topk(min(k, len(self._highest)), dim=1, sorted=False).indices
        groups = (places.unsqueeze(2) * NEIGHBOURS + torch.arange(NEIGHBOURS)).flatten(1)
        columns = self._scores[groups, query].topk(k, dim=1, sorted=False).indices
        return Pairs(query.expand(-1, k).flatten(), groups.gather(1, columns).flatten())

    def left(self, limit: Tensor, but: Pairs) -> tuple[Pairs, Tensor]:
        """The groups that may hold a score of ``limit [R]`` or more, ordered by query, without those in ``but``.

        And for which queries ``[R]`` that helped; no groups are given for the others.
        """
        self._scores[but.group, but.query] = -torch.inf
        limit = ((limit - self._apart) / self._queries.scales - self._rounding).float()
        lost, longest = (each.view(-1, NEIGHBOURS) for each in (self._lost, self._longest))
        every = torch.arange(len(limit)).unsqueeze(1)
        highest = self._highest.T + self._doubt(every, lost.amax(1), longest.amax(1))
        query, place = (highest >= limit.unsqueeze(1)).nonzero().unbind(1)
        highest = self._scores.view(-1, NEIGHBOURS, len(limit))[place, :, query]  # [V, NEIGHBOURS]
        highest += self._doubt(query.unsqueeze(1), lost[place], longest[place])
        row, column = (highest >= limit[query].unsqueeze(1)).nonzero().unbind(1)
        query, group = query[row], place[row] * NEIGHBOURS + column
        helped = torch.bincount(query, minlength=len(limit)) * LARGEST_SHARE <= len(self._scores)
        kept = helped[query]
        return Pairs(query[kept], group[kept]), helped

    def _doubt(self, query: Tensor, lost: Tensor, longest: Tensor) -> Tensor:
        """How far products of groups with these lengths can be from the truth; all of shapes that broadcast."""
        return (self._queries.lengths[query] * lost + self._queries.lost[query] * longest) * 1.0001


def _best_of_groups(parts: Sequence[Part], queries: Tensor, head: int, total: int) -> Tensor:
    """Best product of each group with each of ``queries [R, D]`` int8: ``[n, R]`` float32, -inf where none counts."""
    scores = torch.empty(-(-total // NEIGHBOURS) * NEIGHBOURS, len(queries), dtype=torch.float32)
    scores[total:] = -torch.inf
    start = 0
    for codes, whole in parts:
        values, here = codes.values[head, : codes.groups], scores[start : start + codes.groups]
        pieces = [slice(0, codes.groups)] if whole is None else _steps(whole[: codes.groups])
        for piece in pieces:
            best_products(values[piece], queries, out=here[piece])
        here.mul_(codes.scales[head, : codes.groups].unsqueeze(1))
        if whole is not None:
            here.masked_fill_(~whole[: codes.groups].unsqueeze(1), -torch.inf)
        start += codes.groups
    return scores


def _steps(whole: Tensor) -> list[slice]:
    """Pieces of the groups ``whole [groups]``: those in which some count."""
    firsts = range(0, len(whole), STEP)
    return [slice(first, first + STEP) for first in firsts if bool(whole[first : first + STEP].any())]


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % NEIGHBOURS))
