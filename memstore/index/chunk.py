"""A fixed piece of an exact index: preallocated keys that are never copied again, and their codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.index.checks import allows
from memstore.index.codes import Codes
from memstore.index.frame import Frame


class Tile(NamedTuple):
    """Some blocks of a chunk, small enough that their scores stay in the processor's cache."""

    keys: Tensor
    """``[G, n, P, D]``"""
    ids: Tensor
    """``[n]`` int64"""
    rows: Tensor
    """``[n]`` int64: where the blocks lie in their chunk."""


class Chunk:
    """Room for ``capacity`` blocks: ``keys [G, capacity, P, D]``, of which rows ``< used`` are filled.

    With a ``frame``, complete groups of blocks are also kept as int8 codes in it.
    """

    def __init__(
        self,
        capacity: int,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        frame: Frame | None = None,
    ) -> None:
        heads, keys_per_block, dim = sizes
        with torch.inference_mode(False):  # what is made inside of it could not be filled outside of it
            self.keys = torch.empty(heads, capacity, keys_per_block, dim, dtype=dtype, device=device)
            self.ids = torch.empty(capacity, dtype=torch.int64, device=device)
            self.alive = torch.zeros(capacity, dtype=torch.bool, device=device)
            self.codes = None if frame is None else Codes(capacity, sizes, frame)
        self.used = 0
        self.count = 0
        """Blocks that are there."""
        self.ascending = True
        """Whether ids grow with the rows."""
        self._sealed = False

    @classmethod
    def of(cls, ids: Tensor, keys: Tensor, codes: Codes | None) -> Chunk:
        """A chunk around ``ids [n]``, ``keys [G, n, P, D]`` and their codes; nothing is copied, nor ever written to."""
        heads, n, keys_per_block, dim = keys.shape
        chunk = cls(0, (heads, keys_per_block, dim), keys.dtype, keys.device)
        chunk.ids, chunk.keys, chunk.codes = ids, keys, codes
        chunk.alive = torch.ones(n, dtype=torch.bool)
        chunk.used = chunk.count = n
        chunk._sealed = True
        chunk.ascending = bool((ids[1:] > ids[:-1]).all())
        return chunk

    @property
    def room(self) -> int:
        """Blocks that can still be added."""
        return 0 if self._sealed else self.ids.numel() - self.used

    @property
    def nbytes(self) -> int:
        """Bytes allocated, filled or not."""
        return self.keys.nbytes + self.ids.nbytes + self.alive.nbytes + (self.codes.nbytes if self.codes else 0)

    @property
    def smallest_id(self) -> int:
        """Of the blocks that are there, or of one that was removed."""
        ids = self.ids[: self.used]
        return int(ids[0] if self.ascending else ids.min())

    @property
    def largest_id(self) -> int:
        """Of the blocks that are there."""
        return int(self.ids[self.used - 1] if self.ascending else self.live().max())

    def live(self) -> Tensor:
        """Ids ``[n]`` of the blocks in this chunk, in the order they were added."""
        return self.ids[: self.used][self.alive[: self.used]]

    def fill(self, ids: Tensor, keys: Tensor) -> None:
        """Copy blocks ``ids [n]``, ascending, with ``keys [n, G, P, D]`` to the next free rows."""
        rows = slice(self.used, self.used + ids.numel())
        self.ascending &= not self.used or int(ids[0]) > int(self.ids[self.used - 1])
        self.keys[:, rows].copy_(keys.transpose(0, 1))
        self.ids[rows] = ids
        self.alive[rows] = True
        self.used += ids.numel()
        self.count += ids.numel()
        if self.codes is not None:
            self.codes.extend(self.keys, self.used)

    def holds(self, ids: Tensor) -> Tensor:
        """Which of the ascending ``ids [n]`` are here."""
        return self._find(ids)[1]

    def drop(self, ids: Tensor) -> None:
        """Forget those of the ascending ``ids [n]`` that are here; rows at the end become free again."""
        rows, here = self._find(ids)
        self.alive[rows[here]] = False
        self.count -= int(here.sum())
        if not self.alive[self.used - 1 : self.used].any():
            alive = self.alive[: self.used].nonzero()
            self.used = int(alive[-1]) + 1 if alive.numel() else 0
        self.ascending |= not self.used
        if self.codes is not None:
            self.codes.cut(self.used)

    def tiles(self, rows_per_tile: int, rows: Tensor) -> Iterator[Tile]:
        """The blocks at ascending ``rows [n]``, some at a time: views where they are adjacent, else copies."""
        for start in range(0, rows.numel(), rows_per_tile):
            piece = rows[start : start + rows_per_tile]
            first, last = int(piece[0]), int(piece[-1])
            if last - first + 1 == piece.numel():
                yield Tile(self.keys[:, first : last + 1], self.ids[first : last + 1], piece)
            else:
                yield Tile(self.keys.index_select(1, piece), self.ids[piece], piece)

    def wanted(self, allowed: range | Tensor | None) -> Tensor:
        """Which rows ``[used]`` hold a block that is ``allowed``."""
        ids = self.ids[: self.used]
        alive = self.alive[: self.used]
        return alive.clone() if allowed is None else alive & allows(allowed, ids)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[n]`` of ``ids [n]``, and which of them are right: the others are not here."""
        if not self.used or not ids.numel():
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        held, order = self.ids[: self.used], None
        if not self.ascending:
            held, order = held.sort(stable=True)
        if int(ids[0]) > int(held[-1]) or int(ids[-1]) < int(held[0]):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        # The last of equal ids: where one was removed and added again, the row before it is dead.
        rows = (torch.searchsorted(held, ids, right=True) - 1).clamp(min=0)
        same = held[rows] == ids
        rows = rows if order is None else order[rows]
        return rows, same & self.alive[rows]
