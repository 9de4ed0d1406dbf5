"""Tokens ``[B, T]`` with padding anywhere, cut into segments that end where blocks end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


# Cut by the tokens of each row, not by columns: a padded row gets the segments that it would get alone.
class Segments:
    """The same tokens segment by segment, and what was computed for each of them put back in place.

    Rows are cut by their own tokens: a row with padding is cut as it would be alone.
    """

    def __init__(self, input_ids: Tensor, mask: Tensor | None, offsets: Sequence[int], size: int) -> None:
        """``offsets``: tokens of each row that wait in its incomplete block. ``size``: tokens of a segment."""
        rows, tokens = input_ids.shape
        self.mask = None if mask is None or bool(mask.all()) else mask
        self.ids, self.counts = input_ids, [tokens] * rows
        if self.mask is not None:
            self.ids = input_ids.gather(1, (~self.mask).byte().argsort(dim=1, stable=True))
            self.counts = self.mask.sum(1).tolist()
        self.offsets, self.size = list(offsets), size
        self.uniform = self.mask is None and len(set(self.offsets)) == 1
        self._spans: list[tuple[Tensor, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Ids ``[B, t]`` of one segment after the other, with a mask where rows differ."""
        rows_end = [o + n for o, n in zip(self.offsets, self.counts, strict=True)]
        for number in range(-(-max(rows_end) // self.size)):
            starts, ends = (
                [
                    min(max((number + step) * self.size - o, 0), n)
                    for o, n in zip(self.offsets, self.counts, strict=True)
                ]
                for step in (0, 1)
            )
            if self.uniform:
                yield self.ids[:, starts[0] : ends[0]], None
                continue
            first, last = (torch.tensor(each, device=self.ids.device)[:, None] for each in (starts, ends))
            width = max(end - start for start, end in zip(starts, ends, strict=True))
            at = first + torch.arange(width, device=self.ids.device)
            there = at < last
            self._spans.append((torch.where(there, at, self.ids.shape[1]), there))
            yield self.ids.gather(1, at.clamp(max=self.ids.shape[1] - 1)), there

    def _cut(self, place: int) -> list[int]:
        """How many tokens of each row come before ``place``, counted from the beginning of its incomplete block."""
        return [min(max(place - offset, 0), count) for offset, count in zip(self.offsets, self.counts, strict=True)]

    def joined(self, pieces: list[Tensor]) -> Tensor:
        """What was computed for each segment, ``[B, t, d]``, as ``[B, T, d]``; zeros for padding."""
        if self.uniform:
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        rows, tokens = self.ids.shape
        out = pieces[0].new_zeros(rows, tokens + 1, pieces[0].shape[-1])
        for piece, (at, _) in zip(pieces, self._spans, strict=True):
            out = out.scatter(1, at.unsqueeze(-1).expand_as(piece), piece)
        out = out[:, :tokens]
        if self.mask is None:
            return out
        rank = (self.mask.long().cumsum(1) - 1).clamp(min=0)
        placed = out.gather(1, rank.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
        return placed * self.mask.unsqueeze(-1)
