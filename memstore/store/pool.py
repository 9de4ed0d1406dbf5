"""Blocks in memory: pages of one slab, in host memory or on an accelerator, within a budget of bytes.

A page holds all records of a block, so that a list of blocks is one copy. In host memory NumPy does the copying and the
viewing: PyTorch takes half as long again for the one, and three times as long for the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstore.store.contract import ITEM_BYTES, Bytes, Layout
from memstore.store.eviction import S3Fifo

BOOKKEEPING_BYTES = 512
"""What the name of a page, and of one that has left, take beside the page: part of a budget."""
UNKEPT = -1
"""The name of every block that is not complete, which is never kept."""

_NUMBERS = {name: np.dtype("int16" if name == "bfloat16" else name) for name in ITEM_BYTES if name != "json"}
"""The types of records in NumPy, which knows no bfloat16: what has the same size stands for it."""

_Numbers = npt.NDArray[np.int64]


def as_tensor(rows: Bytes, layout: Layout) -> Tensor:
    """Bytes ``[n, bytes]``, between whose rows there may be gaps, seen as a tensor ``[n, *shape]``."""
    numbers = rows.view(_NUMBERS[layout.dtype]).reshape(len(rows), *layout.shape)
    return _seen(torch.from_numpy(numbers), layout)


def _seen(numbers: Tensor, layout: Layout) -> Tensor:
    return numbers.view(torch.bfloat16) if layout.dtype == "bfloat16" else numbers


@dataclass
class Counts:
    """What one tier has done since the memory was opened."""

    hits: int = 0
    """Blocks found here."""
    misses: int = 0
    """Blocks asked for and not found here; on disk, those that could not be read."""
    bytes: int = 0
    """Bytes of the blocks found here, as stored."""
    microseconds: int = 0
    """Time it took to find and copy them."""
    prefetched: int = 0
    """Blocks that were brought here before they were asked for."""

    def found(self, blocks: int, nbytes: int, begun: float) -> None:
        """Count blocks that were here, ``nbytes`` in all, since ``perf_counter`` was ``begun``."""
        self.hits += blocks
        self.bytes += nbytes
        self.microseconds += round(1e6 * (time.perf_counter() - begun))


class _Slab(Protocol):
    """As many pages as a budget allows; a block is a tensor for each record, lists of blocks are ``[n, *shape]``."""

    def select(self, pages: _Numbers) -> list[Tensor]:
        """Copies of pages."""

    def fill(self, pages: _Numbers, rows: Sequence[Tensor], chosen: _Numbers) -> None:
        """Copy the rows ``chosen`` to ``pages``."""


class _HostSlab:
    def __init__(self, pages: int, layouts: Sequence[Layout], *, pinned: bool) -> None:
        fields = [(str(number), _NUMBERS[layout.dtype], layout.shape) for number, layout in enumerate(layouts)]
        page = np.dtype(fields, align=True)
        self._layouts = dict(zip(page.names or (), layouts, strict=True))
        # NumPy leaves what it allocates untouched, always: memory is taken as pages are used.
        self._pages = _pinned(pages, page) if pinned else np.empty(pages, page)

    def select(self, pages: _Numbers) -> list[Tensor]:
        # As fast as copying memory, where index_select of bytes takes half as long again.
        rows = self._pages.take(pages)
        return [_seen(torch.from_numpy(rows[name]), layout) for name, layout in self._layouts.items()]

    def fill(self, pages: _Numbers, rows: Sequence[Tensor], chosen: _Numbers) -> None:
        # Not by PyTorch: a slab made in inference mode may not be changed outside of it, such as by another thread.
        for (name, layout), source in zip(self._layouts.items(), rows, strict=True):
            numbers = source.cpu().view(torch.int16) if layout.dtype == "bfloat16" else source.cpu()
            self._pages[name][pages] = numbers.numpy()[chosen]


def _pinned(pages: int, page: np.dtype[Any]) -> npt.NDArray[Any]:
    memory: Bytes = torch.empty(pages * page.itemsize, dtype=torch.uint8, pin_memory=True).numpy()
    return memory.view(page)


class _DeviceSlab:
    def __init__(self, pages: int, layouts: Sequence[Layout], device: torch.device) -> None:
        self._device = device
        kinds = [(layout.shape, getattr(torch, layout.dtype)) for layout in layouts]
        self._records = [torch.empty(pages, *shape, dtype=dtype, device=device) for shape, dtype in kinds]

    def select(self, pages: _Numbers) -> list[Tensor]:
        at = torch.from_numpy(pages).to(self._device)
        return [records.index_select(0, at) for records in self._records]

    def fill(self, pages: _Numbers, rows: Sequence[Tensor], chosen: _Numbers) -> None:
        at = torch.from_numpy(pages).to(self._device)
        for records, source in zip(self._records, rows, strict=True):
            with torch.inference_mode(records.is_inference()):
                records.index_copy_(0, at, source.to(self._device)[chosen])


class Pool:
    """Named blocks in the pages of one slab, allocated when the first comes. Not for several threads at once."""

    def __init__(self, budget: int, layouts: Sequence[Layout], device: torch.device, *, pinned: bool = False) -> None:
        """``layouts`` are those of the records of a block; ``pinned`` keeps host memory where a GPU can fetch it."""
        self.device = device
        self.counts = Counts()
        self._layouts = list(layouts)
        self._pinned = pinned
        self._block_bytes = sum(layout.nbytes for layout in layouts)
        self._kept = S3Fifo(budget // (self._block_bytes + BOOKKEEPING_BYTES))
        self._slab: _Slab | None = None

    def __contains__(self, name: int) -> bool:
        return name in self._kept

    @property
    def capacity(self) -> int:
        """Pages."""
        return self._kept.pages

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are here."""
        return len(self._kept) * self._block_bytes

    # Bytes are cached as stored, after they were verified; what decodes them comes after the cache. A cached block is
    # one page with all its records, and its name is one number, so a list of blocks is one copy.
    def take(self, names: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Copies of the blocks that are here, ``[n, *shape]`` for each record, and the places of the others."""
        begun = time.perf_counter()
        pages, missing = self._kept.find(names), []
        if None in pages:
            missing = [place for place, page in enumerate(pages) if page is None]
            pages = [page for page in pages if page is not None]
            self.counts.misses += len(missing)
        if not pages or self._slab is None:
            return [], missing
        rows = self._slab.select(np.array(pages, np.int64))
        self.counts.found(len(pages), len(pages) * self._block_bytes, begun)
        return rows, missing

    def put(self, names: Sequence[int], rows: Sequence[Tensor], *, ahead: bool = False) -> None:
        """Keep blocks: ``rows`` are ``[n, *shape]`` for each record. ``ahead``: nobody has asked for them yet."""
        new = {name: row for row, name in enumerate(names) if name != UNKEPT and name not in self._kept}
        if not new or not self._kept.pages:
            return
        if self._slab is None:
            self._slab = self._allocate()
        # A page that was given twice belongs to the one that got it last.
        of_page = dict(zip(self._kept.place(new, ahead=ahead), new.values(), strict=True))
        try:
            self._slab.fill(np.array(list(of_page)), rows, np.array(list(of_page.values())))
        except BaseException:
            # Names have their pages already, and nobody knows what is in these: nothing of the pool is to be trusted.
            self._kept = S3Fifo(self._kept.pages)
            raise
        self.counts.prefetched += len(new) if ahead else 0

    def _allocate(self) -> _Slab:
        if self.device.type == "cpu":
            return _HostSlab(self.capacity, self._layouts, pinned=self._pinned)
        return _DeviceSlab(self.capacity, self._layouts, self.device)
