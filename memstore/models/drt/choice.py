"""What a DRT retrieves, as an observer is told of it.

Each group of upper layers chooses one list of blocks at the end of a block of text, which serves all tokens of the next
block, all layers of the group and all heads. So a look has one list, and the number of the *first* layer of its group;
its weights, those of the blocks in grouped cross attention, are the same for every head. They say nothing of the part
that sliding-window attention has, which is added, not shared. With ``fusion="chunked"`` blocks have no weights: NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from memstore.attention.gca import TopBlocks
from memstore.memory.trace_file import Array, Look
from memstore.models.drt.configuration import DRTConfig
from memstore.models.drt.packing import DRTPacking
from memstore.readers.observer import Choice, Draft, Looks, Origin, numbers


class GroupSearch(NamedTuple):
    """What a group chose in one segment: a list where each block ends."""

    queries: Tensor
    """``[B, n, e]``"""
    limits: Tensor
    """``[B, n]``: it chose among the blocks below."""
    chosen: TopBlocks
    """``[B, n, K]``"""
    tiers: Array
    """``[B, n, K]``: where the blocks were before they were fetched."""
    search_us: float
    gather_us: float


@dataclass(eq=False)
class DRTChoice(Choice):
    """The lists that one group of upper layers uses in one segment."""

    layer: int
    """The first of the group."""
    searched: bool
    rows: Sequence[int]
    group: int
    lookup: GroupSearch | None
    """None where no block ends in the segment: then its tokens use the list of before."""
    looks: list[Look]
    """What the last token of each row uses."""

    def draft(self) -> Draft:
        """See ``Choice``."""
        return Looks(self.looks)


class ListsInUse:
    """Follows which list each row of a cache uses: the last one of before, until a block ends and the next is read."""

    def __init__(self, config: DRTConfig, rows: int, origin: Origin) -> None:
        self._origin = origin
        self._heads, self._text = config.num_attention_heads, config.tokens_per_block
        self._weighs = config.fusion == "grouped"
        self._layers = group_layers(config)
        self._last: list[list[Look | None]] = [[None] * rows for _ in self._layers]

    def choice(self, group: int, packing: DRTPacking, lookup: GroupSearch | None) -> DRTChoice:
        """What to tell of ``group`` in a segment."""
        last = self._last[group]
        used = last[:]
        if lookup is not None:
            each = zip(packing.offsets, packing.counts, packing.blocks, strict=True)
            for row, (offset, count, ended) in enumerate(each):
                # List 0 is that of before, list 1 + j the one that the j-th block completed here has chosen. Where the
                # last token uses the last list it is one look: a recorder then writes it once for many steps.
                number = (offset + max(count, 1) - 1) // self._text
                fresh = {j: self._look(group, row, j - 1, lookup) for j in {number, ended} if j}
                used[row], last[row] = fresh.get(number, used[row]), fresh.get(ended, last[row])
        told = [look for look in used if look is not None]
        for row, look in enumerate(used):
            if look is not None and look is last[row] and look.search_us:  # from here on nobody searches for it
                last[row] = replace(look, search_us=0.0, gather_us=0.0)
        return DRTChoice(self._layers[group], lookup is not None, range(len(used)), group, lookup, told)

    def _look(self, group: int, row: int, number: int, lookup: GroupSearch) -> Look | None:
        chosen = lookup.chosen
        blocks, scores, weights = (numbers(x[row, number]) for x in (chosen.blocks, chosen.scores, chosen.weights))
        if not (blocks >= 0).any():
            return None
        weights = weights if self._weighs else np.full_like(weights, np.nan)
        return Look(
            layer=self._layers[group],
            row=row,
            documents=self._origin.names,
            document=self._origin.documents(blocks[None]),
            blocks=blocks[None],
            scores=scores[None],
            weights=np.repeat(weights[None], self._heads, 0),
            tiers=lookup.tiers[row, number][None],
            search_us=lookup.search_us,
            gather_us=lookup.gather_us,
        )


def group_layers(config: DRTConfig) -> list[int]:
    """The number of the first layer of each group of upper layers."""
    return [config.lower_layers + sum(config.upper_layers[:group]) for group in range(len(config.upper_layers))]
