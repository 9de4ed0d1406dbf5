"""What a search of an exact index looks at in one chunk: groups by their codes first, other rows directly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from memstore.index.chunk import Chunk
from memstore.index.sieve import Part


class Scan(NamedTuple):
    """A chunk, by its number, and what of it counts."""

    number: int
    chunk: Chunk
    part: Part | None
    """Groups whose codes are read first."""
    rows: Tensor
    """``[n]``: the rows that are scored directly."""

    @classmethod
    def of(cls, number: int, chunk: Chunk, wanted: Tensor | None, *, coded: bool) -> Scan:
        """``wanted [used]`` bool: the rows that count; None: all. ``coded``: whether codes are read first."""
        count = 0 if chunk.codes is None or not coded else chunk.codes.groups * chunk.codes.rows_per_group
        if wanted is None:
            rows = torch.arange(count, chunk.used, device=chunk.ids.device)
            return cls(number, chunk, Part(chunk.codes, None) if chunk.codes is not None and count else None, rows)
        if chunk.codes is None or not count:
            return cls(number, chunk, None, wanted.nonzero().squeeze(1))
        # Groups of which only some blocks count are scored directly: their best product may be that of another block.
        whole = wanted[:count].view(chunk.codes.groups, -1).all(1)
        wanted[:count].view(chunk.codes.groups, -1)[whole] = False
        return cls(number, chunk, Part(chunk.codes, whole), wanted.nonzero().squeeze(1))

    @property
    def whole_groups(self) -> int:
        """Groups whose codes are read first."""
        if self.part is None:
            return 0
        return self.part.codes.groups if self.part.whole is None else int(self.part.whole.sum())

    def coded_rows(self) -> Tensor:
        """The rows that only codes stand for."""
        assert self.part is not None
        codes, whole = self.part
        groups = torch.arange(codes.groups) if whole is None else whole.nonzero().squeeze(1)
        return (groups.unsqueeze(1) * codes.rows_per_group + torch.arange(codes.rows_per_group)).flatten()

    def without_codes(self) -> Scan:
        """The same, all rows scored directly."""
        if self.part is None:
            return self
        return self._replace(part=None, rows=torch.cat([self.coded_rows(), self.rows]).sort().values)
