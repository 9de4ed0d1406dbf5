"""A segment of tokens with landmarks put in, and which list of blocks each token uses.

The stream itself, tokens with landmarks put in, is that of ``memstore.models.packing``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.models.packing import Packing
from memstore.transfer import numbers

FEW = 4
"""Segments of at most this many stream items are attended item by item, instead of by whole blocks."""


class DRTPacking(Packing):
    """One segment ``[B, T]`` as a stream ``[B, M]``, and the lists that its items use."""

    def __init__(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        offsets: Sequence[int],
        block_size: int,
        *,
        landmark_uses_own: bool,
    ) -> None:
        """``offsets``: tokens of each row that wait in its incomplete block. ``mask [B, T]``: False for padding."""
        super().__init__(input_ids, mask, offsets, block_size)
        self.shift = int(landmark_uses_own)

    @property
    def by_item(self) -> bool:
        """Whether every item gets a list of its own, because there are few or because rows are not aligned."""
        return self.items <= FEW or not self.aligned

    @property
    def grows(self) -> bool:
        """Whether all rows are alike and their blocks still incomplete."""
        return self.uniform and not self.blocks[0]

    @property
    def one_list(self) -> bool:
        """Whether every item uses the list of before, because no row gets to where the next list is used."""
        ends = [o + n for o, n in zip(self.offsets, self.lengths, strict=True)]
        return bool(max(ends) + self.shift <= self.block_size)

    @property
    def lists(self) -> int:
        """How many lists ``C`` a segment uses, in the order of its items."""
        return self.items if self.by_item else self._frames

    def list_numbers(self, device: torch.device) -> Tensor:
        """Which list each place of a segment uses, ``[B or 1, C]``: 0 is that of before, ``1 + j`` its block j's."""
        if not self.by_item:
            return torch.arange(self._frames, device=device)[None]
        starts = numbers(self.offsets[:1] if self.aligned else self.offsets, device)[:, None]
        place = starts + self.shift + torch.arange(self.items, device=device)
        return place.div(self.block_size, rounding_mode="floor")

    @property
    def _first(self) -> int:
        """Place of the first item within its frame, where rows are aligned."""
        return self.offsets[0] + self.shift

    @property
    def _frames(self) -> int:
        return -(-(self._first + self.items) // self.block_size)

    def by_list(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``function`` of ``[B, C, T, d]``, a list ``C`` for every ``T`` items, to ``x [B, M, d]``."""
        if self.by_item:
            return function(x.unsqueeze(2)).squeeze(2)
        right = self._frames * self.block_size - self._first - self.items
        framed = F.pad(x, (0, 0, self._first, right)) if right or self._first else x
        out = function(framed.unflatten(1, (self._frames, self.block_size))).flatten(1, 2)
        return out[:, self._first : self._first + self.items]
