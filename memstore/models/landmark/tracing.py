"""What a landmark model retrieves, step by step, as a trace has it.

A look is of one layer: one list for every query head, or for those that share one. The weight of a block is its part of
the grouped softmax (equations 1-4) that the last token's head computed over own tokens, local landmarks and retrieved
blocks: what the tokens of the block have together. With a context-miss token it is the block's part of what that token
let through. Local layers always see the latest blocks, which nobody retrieves, and are left out.

Scores are those of landmarks where their blocks stand when they are attended to; where heads share a list, the largest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstore.memory import Document
from memstore.memory.look import Array, Look
from memstore.memory.recorder import Recorder
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.lists import Lists
from memstore.models.landmark.tables import BlockTable
from memstore.models.packing import Packing
from memstore.models.tracing import Tracing, last_tokens, numbers


class Attended(NamedTuple):
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


class Noted(NamedTuple):
    """A row of what was attended to, whose weights are yet to be computed."""

    step: int
    row: int
    layer: int
    what: Attended
    tiers: Array
    """``[B, X, K]``"""
    spent: tuple[float, float]
    """Microseconds of searching, and of gathering."""


class LandmarkTracing(Tracing):
    """Follows the lists that a cache uses; of a call's segments each row's last one counts.

    Weights are computed when the recorder writes, for many steps at once: one by one they would cost more.
    """

    def __init__(
        self, recorder: Recorder, document: Document, table: BlockTable, config: LandmarkConfig, device: torch.device
    ) -> None:
        super().__init__(recorder, document, device)
        assert config.head_dim is not None
        # The latest blocks of a document are at hand in tensors.
        self._held = [range(own.first, self.stored) for own in table.own]
        self._scale = config.head_dim**-0.5
        self._counts: Sequence[int] = ()
        self._last: list[int] = []
        self._lists: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._tiers: dict[int, Array] = {}
        self._spent = (0.0, 0.0)
        self._call: dict[tuple[int, int], Noted] = {}
        self._waiting: list[Noted] = []
        recorder.before_writing = self._write

    def begin(self, ids: Tensor) -> None:
        """See ``Tracing``."""
        super().begin(ids)
        self._call.clear()

    def end(self) -> None:
        """See ``Tracing``."""
        self._waiting += self._call.values()

    def segment(self, packing: Packing) -> None:
        """A segment of the call comes."""
        self._counts, self._last = packing.counts, last_tokens(packing)
        if self._call:
            self._call = {where: noted for where, noted in self._call.items() if not self._counts[where[1]]}

    def searched(self, layer: int, blocks: Tensor, search_us: float) -> None:
        """Lists ``blocks [B, X, R, K]`` were chosen, and will be fetched now."""
        self._tiers[layer] = self.tiers_of(layer, numbers(self._of_last(blocks)), self._held[layer])
        self._spent = (search_us, 0.0)

    def fetched(self, layer: int, lists: Lists, gather_us: float) -> None:
        """They were fetched, each for a token of its own or one for all."""
        self._spent = (self._spent[0], gather_us)
        groups, heads = lists.keys.shape[1], lists.heads
        group = torch.arange(heads, device=lists.at.device)[:, None] // (heads // groups)
        at = self._of_last(lists.at).expand(-1, heads, -1)
        landmarks = lists.keys[:, :, -1][at, group]
        self._lists[layer] = (self._of_last(lists.blocks), self._of_last(lists.there), landmarks)

    def attended(self, layer: int, queries: Tensor, local: Tensor, found: Tensor, opened: Tensor | None) -> None:
        """What ``queries [B, H, M, D]``, turned, gave in a layer whose lists were ``fetched``, now or before.

        ``local`` and ``found [B, H, M]`` are log-sum-exps, ``opened [B, H, M]`` what the context-miss token lets
        through.
        """
        rest = [self._of_last(x) for x in (queries, local, found, found[..., :0] if opened is None else opened)]
        what = Attended(*self._lists[layer], *rest)
        for row, count in enumerate(self._counts):
            if count:
                self._call[layer, row] = Noted(self.recorder.step, row, layer, what, self._tiers[layer], self._spent)
        self._spent = (0.0, 0.0)

    def _of_last(self, x: Tensor) -> Tensor:
        """``x [B, X, R, ...]`` at the last token of each row: ``[B, X, ...]``; R is 1 where it is the same for all."""
        if x.shape[2] < 2:
            return x[:, :, 0] if x.shape[2] else x.flatten(2)
        if len(x) == 1:
            return x[:, :, self._last[0]].clone()  # so that the rest of a long call can go
        return x[torch.arange(len(x)), :, torch.tensor(self._last)]

    @torch.no_grad()
    def _write(self) -> None:
        """Give the recorder the looks that wait for their weights."""
        alike: defaultdict[tuple[torch.Size, ...], list[Noted]] = defaultdict(list)
        for noted in self._waiting:
            alike[tuple(x.shape for x in noted.what)].append(noted)
        self._waiting.clear()
        for notes in alike.values():
            rows = zip(*([x[noted.row] for x in noted.what] for noted in notes), strict=True)
            computed = zip(*map(numbers, weighed(Attended(*map(torch.stack, rows)), self._scale)), strict=True)
            for noted, (blocks, scores, weights) in zip(notes, computed, strict=True):
                if (blocks >= 0).any():
                    self.recorder.look(self._look(noted, blocks, scores, weights), step=noted.step)

    def _look(self, noted: Noted, blocks: Array, scores: Array, weights: Array) -> Look:
        """Of lists ``[X, K]`` in any order."""
        order = np.argsort(-scores, axis=1, kind="stable")
        by_head = order.repeat(len(weights) // len(blocks), 0)
        blocks, tiers = (np.take_along_axis(x, order, 1) for x in (blocks, noted.tiers[noted.row]))
        search_us, gather_us = noted.spent
        return Look(
            layer=noted.layer,
            row=noted.row,
            documents=self.names,
            document=self.documents_of(blocks),
            blocks=blocks,
            scores=np.take_along_axis(scores, order, 1),
            weights=np.take_along_axis(weights, by_head, 1),
            tiers=np.where(blocks < 0, -1, tiers),
            search_us=search_us,
            gather_us=gather_us,
        )


def weighed(what: Attended, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks and scores ``[n, X, K]`` and weights ``[n, H, K]``; -1, -inf and 0 where there is none."""
    blocks = what.blocks.masked_fill(~what.there, -1)
    asking = what.queries.unflatten(1, (what.landmarks.shape[1], -1)).to(what.landmarks.dtype)
    scores = (asking @ what.landmarks.transpose(-1, -2)).flatten(1, 2).float() * scale
    hidden = (blocks < 0).repeat_interleave(scores.shape[1] // blocks.shape[1], 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    gated = what.opened.numel() > 0
    total = what.found if gated else torch.logaddexp(what.local, what.found)
    weights = torch.exp(scores - total.unsqueeze(-1)).masked_fill(hidden, 0.0)
    if gated:
        weights = weights * what.opened.unsqueeze(-1)
    return blocks, scores.unflatten(1, (blocks.shape[1], -1)).amax(2), weights
