"""A fixed piece of an exact index: preallocated keys that are never copied again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """Some blocks of a chunk, small enough that their scores stay in the processor's cache."""

    keys: Tensor
    """``[G, n, P, D]``"""
    ids: Tensor
    """``[n]`` int64"""
    rows: Tensor
    """``[n]`` int64: where the blocks lie in their chunk."""


class Chunk:
    """Room for ``capacity`` blocks: ``keys [G, capacity, P, D]``, of which rows ``< used`` are filled."""

    def __init__(self, capacity: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        heads, keys_per_block, dim = sizes
        with torch.inference_mode(False):  # what is made inside of it could not be filled outside of it
            self.keys = torch.empty(heads, capacity, keys_per_block, dim, dtype=dtype, device=device)
            self.ids = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.used = 0

    @property
    def room(self) -> int:
        """Blocks that can still be added."""
        return self.ids.numel() - self.used

    @property
    def nbytes(self) -> int:
        """Bytes allocated, filled or not."""
        return self.keys.nbytes + self.ids.nbytes

    def live(self) -> Tensor:
        """Ids ``[n]`` of the blocks in this chunk, in the order they were added."""
        ids = self.ids[: self.used]
        return ids[ids >= 0]

    def fill(self, ids: Tensor, keys: Tensor) -> None:
        """Copy blocks ``ids [n]`` with ``keys [n, G, P, D]`` to the next free rows."""
        rows = slice(self.used, self.used + ids.numel())
        self.keys[:, rows].copy_(keys.transpose(0, 1))
        self.ids[rows] = ids
        self.used += ids.numel()

    def drop(self, ids: Tensor) -> None:
        """Forget those of ``ids`` that are here; rows at the end become free again."""
        used = self.ids[: self.used]
        used[torch.isin(used, ids)] = -1
        alive = (used >= 0).nonzero()
        self.used = int(alive[-1]) + 1 if alive.numel() else 0

    def tiles(self, rows_per_tile: int, allowed: range | Tensor | None) -> Iterator[Tile]:
        """The live, allowed blocks, at most ``rows_per_tile`` at a time: views where they are adjacent, else copies."""
        rows = self._rows(allowed)
        for start in range(0, rows.numel(), rows_per_tile):
            piece = rows[start : start + rows_per_tile]
            first, last = int(piece[0]), int(piece[-1])
            if last - first + 1 == piece.numel():
                yield Tile(self.keys[:, first : last + 1], self.ids[first : last + 1], piece)
            else:
                yield Tile(self.keys.index_select(1, piece), self.ids[piece], piece)

    def _rows(self, allowed: range | Tensor | None) -> Tensor:
        ids = self.ids[: self.used]
        wanted = ids >= 0
        match allowed:
            case Tensor():
                wanted &= torch.isin(ids, allowed.to(ids.device))
            case range(step=1):
                wanted &= (ids >= allowed.start) & (ids < allowed.stop)
            case range():
                wanted &= torch.isin(ids, torch.tensor(allowed, dtype=torch.int64, device=ids.device))
        return wanted.nonzero().squeeze(1)
