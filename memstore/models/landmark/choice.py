"""What a landmark model retrieves, as an observer is told of it.

A look is of one layer: one list for every query head, or for those that share one. The weight of a block is its part of
the grouped softmax (equations 1-4) that the last token's head computed over own tokens, local landmarks and retrieved
blocks: what the tokens of the block have together. With a context-miss token it is the block's part of what that token
let through. Local layers always see the latest blocks, which nobody retrieves, and are left out.

Scores are those of landmarks where their blocks stand when they are attended to; where heads share a list, the largest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from memstore.attention.landmark import Questions, memory_weights
from memstore.memory.trace_file import Array, Look
from memstore.models.landmark.lists import Lists
from memstore.models.landmark.tables import LayerBlocks
from memstore.models.packing import Packing
from memstore.readers.observer import Choice, Draft, Origin, numbers
from memstore.transfer import to_device


class LastLists(NamedTuple):
    """The lists that the last token of each row uses, as they were fetched."""

    blocks: Tensor
    """``[B, X, K]``; -1 for none."""
    there: Tensor
    """``[B, X, K]``: where there is a block that could be read."""
    landmarks: Tensor
    """``[B, Y, K, D]``, turned to where they stand."""
    tiers: Array
    """``[B, X, K]``: where the blocks were before."""


class LastAttention(NamedTuple):
    """What the last token of each row attended to in one layer."""

    blocks: Tensor
    """``[B, X, K]``: the lists; -1 for none."""
    there: Tensor
    """``[B, X, K]``: where there is a block that could be read."""
    landmarks: Tensor
    """``[B, Y, K, D]``, turned to where they stand."""
    queries: Tensor
    """``[B, H, D]``, turned."""
    local: Tensor
    """``[B, H]``: log-sum-exp of own tokens and local landmarks."""
    found: Tensor
    """``[B, H]``: that of the landmarks in the list."""
    opened: Tensor
    """``[B, H]``: the part that the context-miss token lets through; 0 numbers where the model has none."""


class LastTokens:
    """Where the last tokens of a segment's rows stand in its stream."""

    def __init__(self, packing: Packing, rows: Sequence[int]) -> None:
        """``rows``: those that have no more tokens after the segment."""
        self.rows = rows
        if packing.uniform:
            self.at = [int(packing.slots[0, -1])] * packing.rows
        else:  # 0 for a row without tokens
            at: list[int] = packing.slots.masked_fill(packing.slots >= packing.items, 0).amax(1).tolist()
            self.at = at if len(at) == packing.rows else at * packing.rows

    def of(self, x: Tensor) -> Tensor:
        """``x [B, X, R, ...]`` at the last token of each row: ``[B, X, ...]``; R is 1 where it is the same for all."""
        if x.shape[2] < 2:
            return x[:, :, 0] if x.shape[2] else x.flatten(2)
        if len(x) == 1:
            return x[:, :, self.at[0]].clone()  # so that the rest of a long call can go
        rows, at = to_device([torch.arange(len(x)), torch.tensor(self.at)], x.device)
        return x[rows, :, at]

    def lists(self, lists: Lists, tiers: Array) -> LastLists:
        """Those of ``lists`` that they use."""
        groups, heads = lists.keys.shape[1], lists.heads
        group = torch.arange(heads, device=lists.at.device)[:, None] // (heads // groups)
        at = self.of(lists.at).expand(-1, heads, -1)
        blocks, there = to_device([self.of(lists.blocks), self.of(lists.there)], at.device)
        return LastLists(blocks, there, lists.keys[:, :, -1][at, group], tiers)


@dataclass(eq=False)
class LandmarkChoice(Choice):
    """The lists of blocks that one layer uses in one segment. Local layers, which see the latest, tell of none."""

    layer: int
    searched: bool
    table: LayerBlocks
    """Where the layer searches."""
    ask: Callable[[], Questions]
    """What the segment's queries ask, worked out only for who wants to know."""
    blocks: Tensor
    """``[B, X, R, K]``, in host memory: the lists, -1 where there is no block."""
    queries: Tensor
    """``[B, H, M, D]``, turned."""
    local: Tensor
    """``[B, H, M]``: log-sum-exp of the scores of own tokens and local landmarks."""
    found: Tensor
    """``[B, H, M]``: that of the landmarks in the lists."""
    opened: Tensor | None
    """``[B, H, M]``: what the context-miss token lets through; None where the model has none."""
    last: LastTokens
    lists: LastLists | None
    """None where nobody was watching as they were fetched."""
    origin: Origin
    spent: tuple[float, float]
    """Microseconds of searching, and of gathering."""

    @property
    def rows(self) -> Sequence[int]:  # type: ignore[override]  # nobody sets it
        """See ``Choice``."""
        return self.last.rows

    def weights(self) -> tuple[Tensor, Tensor]:
        """How the last item of the segment weighs every block in memory, in the first row.

        Weights ``[H, N]`` from 0 to 1, and the blocks ``[N]``.
        """
        weights, blocks = memory_weights(self.table, self.ask().tokens(slice(-1, None)))
        return weights[0, :, 0], blocks[0]

    def draft(self) -> Draft:
        """See ``Choice``."""
        assert self.lists is not None, "lists are traced from the beginning of a cache"
        *lists, tiers = self.lists
        opened = self.found[..., :0] if self.opened is None else self.opened
        what = LastAttention(*lists, *(self.last.of(x) for x in (self.queries, self.local, self.found, opened)))
        return LandmarkDraft(self.layer, self.rows, what, tiers, self.origin, self.spent)


@dataclass(eq=False)
class LandmarkDraft(Draft):
    """What one layer attended to."""

    layer: int
    rows: Sequence[int]
    what: LastAttention
    tiers: Array
    origin: Origin
    spent: tuple[float, float]

    @classmethod
    @torch.no_grad()
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        """See ``Draft``; rows of one shape are computed together."""
        # One by one, as they are told, they would cost 5 to 8 % of a token; so it is 2 %.
        alike: defaultdict[tuple[torch.Size, ...], list[tuple[int, int]]] = defaultdict(list)
        for place, draft in enumerate(drafts):
            for row in draft.rows:
                alike[tuple(x.shape for x in draft.what)].append((place, row))
        looks: list[list[Look]] = [[] for _ in drafts]
        for places in alike.values():
            rows = zip(*([x[row] for x in drafts[place].what] for place, row in places), strict=True)
            computed = zip(*map(numbers, weighed(LastAttention(*map(torch.stack, rows)))), strict=True)
            for (place, row), (blocks, scores, weights) in zip(places, computed, strict=True):
                if (blocks >= 0).any():
                    looks[place].append(drafts[place]._look(row, blocks, scores, weights))
        return looks

    def _look(self, row: int, blocks: Array, scores: Array, weights: Array) -> Look:
        """Of lists ``[X, K]`` in any order."""
        order = np.argsort(-scores, axis=1, kind="stable")
        by_head = order.repeat(len(weights) // len(blocks), 0)
        blocks, tiers = (np.take_along_axis(x, order, 1) for x in (blocks, self.tiers[row]))
        search_us, gather_us = self.spent
        return Look(
            layer=self.layer,
            row=row,
            documents=self.origin.names,
            document=self.origin.documents(blocks),
            blocks=blocks,
            scores=np.take_along_axis(scores, order, 1),
            weights=np.take_along_axis(weights, by_head, 1),
            tiers=np.where(blocks < 0, -1, tiers),
            search_us=search_us,
            gather_us=gather_us,
        )


def weighed(what: LastAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks and scores ``[n, X, K]`` and weights ``[n, H, K]``; -1, -inf and 0 where there is none."""
    blocks = what.blocks.masked_fill(~what.there, -1)
    asking = what.queries.unflatten(1, (what.landmarks.shape[1], -1)).to(what.landmarks.dtype)
    scores = (asking @ what.landmarks.transpose(-1, -2)).flatten(1, 2).float() * asking.shape[-1] ** -0.5
    hidden = (blocks < 0).repeat_interleave(scores.shape[1] // blocks.shape[1], 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    gated = what.opened.numel() > 0
    total = what.found if gated else torch.logaddexp(what.local, what.found)
    weights = torch.exp(scores - total.unsqueeze(-1)).masked_fill(hidden, 0.0)
    if gated:
        weights = weights * what.opened.unsqueeze(-1)
    return blocks, scores.unflatten(1, (blocks.shape[1], -1)).amax(2), weights
