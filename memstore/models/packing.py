"""A segment of tokens with landmarks inserted.

The stream of a row is its tokens without padding, with a landmark after every ``block_size - 1`` of them. Rows may have
padding anywhere and may be at different places in their blocks. If neither is the case, everything here is views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.device_copies import numbers


# Rows are packed to the left and filled up at their end, where causal attention does not look. So training needs no
# padding mask, wherever the padding was. The landmark belongs to the model, not to the tokenizer: users pass plain
# tokens, any tokenizer works, and so does `resize_token_embeddings`.
class Packing:
    """One segment ``[B, T]`` as a stream ``[B, M]``. Shorter rows are filled up at their end."""

    def __init__(self, input_ids: Tensor, mask: Tensor | None, offsets: Sequence[int], block_size: int) -> None:
        """``offsets``: tokens of each row that wait in its incomplete block. ``mask [B, T]``: False for padding."""
        device = input_ids.device
        rows, tokens = input_ids.shape
        text = block_size - 1
        self.block_size = block_size
        self.offsets = list(offsets)
        if mask is not None and bool(mask.all()):
            mask = None
        self.counts = [tokens] * rows if mask is None else mask.sum(1).tolist()
        """Tokens of each row."""
        self.lengths = [n + (o + n) // text for n, o in zip(self.counts, self.offsets, strict=True)]
        """Stream items of each row."""
        self.blocks = [(o + n) // text for n, o in zip(self.counts, self.offsets, strict=True)]
        """Blocks of each row that this segment completes."""
        self.aligned = len(set(self.offsets)) == 1
        """Whether all rows are at the same place of a block before the segment."""
        self.uniform = self.aligned and mask is None
        """Whether all rows have the same length and place."""
        self.rows = rows
        self.items = max(self.lengths, default=0)
        """``M``, the items of the longest row."""
        starts = numbers(self.offsets[:1] if self.aligned else self.offsets, device).unsqueeze(1)
        rank = torch.arange(tokens, device=device).unsqueeze(0) if mask is None else mask.long().cumsum(1) - 1
        self.slots = rank + (starts + rank).div(text, rounding_mode="floor")
        """``[B or 1, T]``: place of each token in the stream."""
        if mask is not None:
            self.slots = torch.where(mask, self.slots, self.items)
        self.ids = torch.full((rows, self.items + (mask is not None)), -1, device=device, dtype=input_ids.dtype)
        """``[B, M]``; -1 marks a landmark, or a place that is not used."""
        self.ids.scatter_(1, self.slots.expand(rows, -1), input_ids)
        if mask is not None:
            self.ids[:, -1] = -1
            self.ids = self.ids[:, : self.items]

    def tokens(self, stream: Tensor) -> Tensor:
        """Return the entries of ``stream [B, M, d]`` at the tokens, ``[B, T, d]``, in input order; 0 for padding."""
        if self.uniform:
            return stream if stream.shape[1] == self.slots.shape[1] else stream[:, self.slots[0]]
        padded = F.pad(stream, (0, 0, 0, 1))
        return padded.gather(1, self.slots.expand(self.rows, -1).unsqueeze(-1).expand(-1, -1, stream.shape[-1]))

    def landmarks(self, stream: Tensor) -> Tensor:
        """Return entries of ``stream [B, M, d]`` at the landmarks, ``[B, max(blocks), d]`` (undefined elsewhere)."""
        most = max(self.blocks)
        if self.aligned:
            return stream[:, self.block_size - 1 - self.offsets[0] :: self.block_size][:, :most]
        first = self.block_size - 1 - numbers(self.offsets, stream.device)
        at = first[:, None] + self.block_size * torch.arange(most, device=stream.device)
        at = at.clamp(max=stream.shape[1] - 1)
        return stream.gather(1, at.unsqueeze(-1).expand(-1, -1, stream.shape[-1]))

    def joined(self, partial: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks that are complete now ``[B, max(blocks), S, d]``, and the waiting items ``[B, < S, d]``.

        ``partial [B, P, d]`` are the items that waited before. Entries beyond the blocks of a row are undefined.
        """
        if partial is not None and max(self.offsets):
            if self.aligned:
                stream = torch.cat([partial[:, : self.offsets[0]], stream], 1)
            else:
                stream = self._behind(partial, stream)
        most = max(self.blocks)
        short = most * self.block_size - stream.shape[1]
        whole = F.pad(stream, (0, 0, 0, short)) if short > 0 else stream[:, : most * self.block_size]
        return whole.unflatten(1, (most, self.block_size)), self._waiting(stream)

    def _behind(self, partial: Tensor, stream: Tensor) -> Tensor:
        """Return each row's waiting items, then its stream, without a gap."""
        both = torch.cat([partial, stream], 1)
        starts = numbers(self.offsets, stream.device)[:, None]
        place = torch.arange(max(self.offsets) + stream.shape[1], device=stream.device)[None]
        at = torch.where(place < starts, place, place - starts + partial.shape[1]).clamp(max=both.shape[1] - 1)
        return both.gather(1, at.unsqueeze(-1).expand(-1, -1, both.shape[-1]))

    def _waiting(self, stream: Tensor) -> Tensor:
        done = [blocks * self.block_size for blocks in self.blocks]
        left = [o + n - d for o, n, d in zip(self.offsets, self.lengths, done, strict=True)]
        if len(set(done)) == 1:
            return stream[:, done[0] : done[0] + max(left)]
        at = numbers(done, stream.device)[:, None] + torch.arange(max(left), device=stream.device)
        at = at.clamp(max=stream.shape[1] - 1)
        return stream.gather(1, at.unsqueeze(-1).expand(-1, -1, stream.shape[-1]))

    @property
    def real(self) -> Tensor:
        """``[B, M]``: False for the filling at the end of a row."""
        lengths = numbers(self.lengths, self.ids.device)
        return torch.arange(self.items, device=self.ids.device) < lengths[:, None]

    @property
    def is_landmark(self) -> Tensor:
        """``[B, M]``: True for landmarks."""
        return (self.ids < 0) & self.real
