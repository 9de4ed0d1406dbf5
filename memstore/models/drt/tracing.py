"""What a DRT retrieves, step by step, as a trace has it.

Each group of upper layers chooses one list of blocks at the end of a block of text, which serves all tokens of the next
block, all layers of the group and all heads. So a look has one list, and the number of the *first* layer of its group;
its weights, those of the blocks in grouped cross attention, are the same for every head. They say nothing of the part
that sliding-window attention has, which is added, not shared. With ``fusion="chunked"`` blocks have no weights: NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from memstore.attention.gca import Chosen, Retrieved
from memstore.memory import Document
from memstore.memory.look import Look
from memstore.memory.recorder import Recorder
from memstore.models.drt.configuration import DRTConfig
from memstore.models.drt.packing import Packing
from memstore.models.tracing import Tracing, numbers, timed

Rows = list[Look | None]
"""The list of each row, None where it has none yet."""


class DRTTracing(Tracing):
    """Follows the lists that a cache of ``rows`` rows uses."""

    def __init__(
        self, recorder: Recorder, document: Document, config: DRTConfig, rows: int, device: torch.device
    ) -> None:
        super().__init__(recorder, document, device)
        self._heads = config.num_attention_heads
        self._weighs = config.fusion == "grouped"
        self._text = config.tokens_per_block
        self._layers = group_layers(config)
        self._last: list[Rows] = [[None] * rows for _ in self._layers]
        """What the next call begins with."""
        self._used: list[Rows] = self._last[:]
        """What the last tokens of the call in hand use."""

    def look_up(
        self,
        group: int,
        packing: Packing,
        choose: Callable[[], Chosen],
        fetch: Callable[[Chosen], Retrieved | None],
    ) -> tuple[Chosen, Retrieved | None]:
        """Both, one after the other, and a note of what came of them."""
        chosen, search_us = timed(choose)
        blocks, scores, weights = (numbers(x) for x in (chosen.blocks, chosen.scores, chosen.weights))
        tiers = self.tiers_of(0, blocks)
        fetched, gather_us = timed(lambda: fetch(chosen))

        @cache  # the list that is used may be the last one too, and is one look then
        def look(row: int, number: int) -> Look | None:
            if not (blocks[row, number] >= 0).any():
                return None
            weighing = weights[row, number] if self._weighs else np.full_like(weights[row, number], np.nan)
            return Look(
                layer=self._layers[group],
                row=row,
                documents=self.names,
                document=self.documents_of(blocks[row, number][None]),
                blocks=blocks[row, number][None],
                scores=scores[row, number][None],
                weights=np.repeat(weighing[None], self._heads, 0),
                tiers=tiers[row, number][None],
                search_us=search_us,
                gather_us=gather_us,
            )

        before = self._last[group]
        used, last = before[:], before[:]
        for row, (offset, count, new) in enumerate(zip(packing.offsets, packing.counts, packing.blocks, strict=True)):
            # List 0 is that of before, list 1 + j the one that the j-th block completed here has chosen.
            number = (offset + max(count, 1) - 1) // self._text
            used[row] = before[row] if not number else look(row, number - 1)
            last[row] = before[row] if not new else look(row, new - 1)
        self._used[group], self._last[group] = used, last
        return chosen, fetched

    def begin(self, ids: Tensor) -> None:
        """See ``Tracing``."""
        super().begin(ids)
        self._used = [rows[:] for rows in self._last]

    def end(self) -> None:
        """See ``Tracing``."""
        for group, used in enumerate(self._used):
            for row, look in enumerate(used):
                if look is not None:
                    self.recorder.look(look)
                    if look.search_us and self._last[group][row] is look:
                        self._last[group][row] = replace(look, search_us=0.0, gather_us=0.0)


def group_layers(config: DRTConfig) -> list[int]:
    """The number of the first layer of each group of upper layers."""
    return [config.lower_layers + sum(config.upper_layers[:group]) for group in range(len(config.upper_layers))]
