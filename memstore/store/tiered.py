"""Tiers above a store: pages on the accelerator, pages in host memory, then the disk.

Pages are named by what is in them, never by a place whose content can change, so nothing ever has to be invalidated:
a name that is found is right, and what is out of date is not asked for again and leaves in its turn. Bytes are kept as
they are stored, and were verified when they were read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstore.store.contract import BlockStore, Key, Layout, Table
from memstore.store.eviction import S3Fifo

BOOKKEEPING_BYTES = 512
"""What the name of a page, and of one that has left, take beside the page: part of a budget."""
PIECE_BYTES = 8 << 20
"""Bytes that are read ahead at a time: a bound for the buffer between store and pages."""


UNKEPT = -1
"""In place of ``Name.edits``: a block that is not complete, which is never kept."""


class Name(NamedTuple):
    """The content of a block: the same name is the same bytes, as long as the store exists."""

    document: int
    edits: int
    """Number of truncations of the document: while it is the same, complete blocks never change. Or ``UNKEPT``."""
    layer: int
    block: int
    owner: int
    """The number under which it lies: that of another document, where it is shared."""

    @property
    def key(self) -> Key:
        """Where it is in the store."""
        return Key(Table.BLOCKS, self.owner, self.layer, self.block)


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

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of a ``with`` block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.microseconds += round(1e6 * (time.perf_counter() - begun))


class Pool:
    """Blocks in the pages of one slab, allocated when the first comes, within a budget of bytes.

    A slab is one tensor per record of a block. Not safe to use from several threads at once.
    """

    def __init__(self, budget: int, sizes: Sequence[int], device: torch.device, *, pinned: bool = False) -> None:
        """``sizes`` are the bytes of each record of a block; ``pinned`` keeps host memory where a GPU can fetch it."""
        self.device = device
        self.counts = Counts()
        self._sizes = list(sizes)
        self._pinned = pinned
        self._kept = S3Fifo(budget // (sum(sizes) + BOOKKEEPING_BYTES))
        self._slab: list[Tensor] = []

    def __contains__(self, name: Name) -> bool:
        return name in self._kept

    @property
    def capacity(self) -> int:
        """Pages."""
        return self._kept.pages

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use."""
        return len(self._kept) * sum(self._sizes)

    def take(self, names: Sequence[Name]) -> tuple[list[Tensor], list[int]]:
        """Copies of the blocks that are here, uint8 ``[n, bytes]`` for each record, and the places of the others."""
        with self.counts.timed():
            pages = self._kept.find(names)
            held = pages[pages >= 0]
            missing = np.flatnonzero(pages < 0).tolist() if len(held) < len(pages) else []
            self.counts.hits += len(held)
            self.counts.misses += len(missing)
            self.counts.bytes += len(held) * sum(self._sizes)
            if not len(held):
                return [], missing
            return [self._select(records, held) for records in self._slab], missing

    def _select(self, records: Tensor, pages: npt.NDArray[np.int64]) -> Tensor:
        if self.device.type == "cpu":
            # As fast as copying memory, where index_select of bytes takes half as long again.
            return torch.from_numpy(records.numpy().take(pages, axis=0))
        return records.index_select(0, torch.from_numpy(pages).to(self.device))

    def put(self, names: Sequence[Name], rows: Sequence[Tensor], *, ahead: bool = False) -> None:
        """Keep blocks: ``rows`` are uint8 ``[n, bytes]`` for each record. ``ahead``: nobody has asked for them yet."""
        new = {name: row for row, name in enumerate(names) if name.edits != UNKEPT and name not in self._kept}
        if not new or not self._kept.pages:
            return
        if not self._slab:
            self._slab = [self._allocate(size) for size in self._sizes]
        # A page that was given twice belongs to the one that got it last.
        of_page = dict(zip(self._kept.place(new, ahead=ahead), new.values(), strict=True))
        pages, chosen = np.array(list(of_page)), np.array(list(of_page.values()))
        try:
            for records, source in zip(self._slab, rows, strict=True):
                self._copy(source, chosen, records, pages)
        except BaseException:
            # Names have their pages already, and nobody knows what is in these: nothing of the pool is to be trusted.
            self._kept = S3Fifo(self._kept.pages)
            raise
        self.counts.prefetched += len(new) if ahead else 0

    def _copy(
        self, source: Tensor, chosen: npt.NDArray[np.int64], records: Tensor, pages: npt.NDArray[np.int64]
    ) -> None:
        if self.device.type == "cpu":
            # Not by PyTorch: a slab made in inference mode may not be changed outside of it, such as by another thread.
            records.numpy()[pages] = source.cpu().numpy()[chosen]
            return
        with torch.inference_mode(records.is_inference()):
            records.index_copy_(0, torch.from_numpy(pages).to(self.device), source.to(self.device)[chosen])

    def _allocate(self, size: int) -> Tensor:
        shape = (self._kept.pages, size)
        if self.device.type == "cpu" and not self._pinned:
            # NumPy leaves what it allocates untouched, always: memory is taken as pages are used.
            return torch.from_numpy(np.empty(shape, np.uint8))
        return torch.empty(shape, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)


class Tiers:
    """Reads blocks from the highest tier that has them. Safe to use from several threads."""

    def __init__(
        self,
        store: BlockStore,
        layouts: Sequence[Layout],
        workers: Callable[[], Executor],
        *,
        host_bytes: int,
        device_bytes: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """``layouts`` are those of the records of a block; ``workers`` makes the thread that reads ahead."""
        self._store = store
        self._layouts = list(layouts)
        self._workers = workers
        sizes = [layout.nbytes for layout in layouts]
        on_gpu = device is not None and device.type == "cuda"
        self._host = Pool(host_bytes, sizes, torch.device("cpu"), pinned=on_gpu)
        self._device = Pool(device_bytes, sizes, device or torch.device("cpu"))
        self._disk = Counts()
        self._executor: Executor | None = None
        self._coming: dict[Name, Future[None]] = {}
        self._lock = threading.RLock()
        self._closed = False

    def read(self, names: Sequence[Name], still: Callable[[], bool], device: torch.device | None) -> list[Tensor]:
        """The blocks: uint8 ``[n, bytes]`` for each record, on ``device``; None is the CPU.

        ``still()`` says whether the names are still right, after what they stand for was read: else it is not kept.
        Raises ``NotFound`` or ``DamagedError``.
        """
        if device is not None and self._device.capacity and device == self._device.device:
            return self._through(self._device, names, still, lambda missing: self._from_host(missing, still))
        rows = self._from_host(names, still)
        return rows if device is None else [each.to(device, non_blocking=True) for each in rows]

    @property
    def prefetches(self) -> bool:
        """Whether there is room for what is brought ahead."""
        return self._host.capacity > 0 and not self._closed

    def prefetch(self, names: Sequence[Name], still: Callable[[], bool]) -> None:
        """Let a thread bring blocks into host memory; returns at once. Without a host tier it does nothing.

        What cannot be read is left to whoever asks for it: reading it again there gives the error.
        """
        count = max(1, PIECE_BYTES // max(1, sum(layout.nbytes for layout in self._layouts)))
        with self._lock:
            if not self.prefetches:
                return
            new = [name for name in dict.fromkeys(names) if name.edits != UNKEPT and not self._expected(name)]
            # More than that would push out what was brought before anybody has seen it.
            new = new[: max(0, self._host.capacity // 2 - len(self._coming))]
            if new and self._executor is None:
                self._executor = self._workers()
            for start in range(0, len(new), count):
                piece = new[start : start + count]
                assert self._executor is not None
                self._coming |= dict.fromkeys(piece, self._executor.submit(self._bring, piece, still))

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counts of each tier, and the bytes that it holds."""
        with self._lock:
            held = {"device": self._device, "host": self._host}
            pools = {tier: asdict(pool.counts) | {"held_bytes": pool.nbytes} for tier, pool in held.items()}
            return pools | {"disk": asdict(self._disk)}

    def close(self) -> None:
        """Stop reading ahead; returns when the thread has ended. Closing twice is allowed."""
        with self._lock:
            self._closed, executor = True, self._executor
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def _expected(self, name: Name) -> bool:
        return name in self._host or name in self._coming

    def _bring(self, names: list[Name], still: Callable[[], bool]) -> None:
        try:
            rows = self._from_disk(names)
            if still():
                with self._lock:
                    self._host.put(names, rows, ahead=True)
        finally:
            with self._lock:
                for name in names:
                    del self._coming[name]

    def _from_host(self, names: Sequence[Name], still: Callable[[], bool]) -> list[Tensor]:
        if not self._host.capacity:
            return self._from_disk(names)
        for future in self._awaited(names):
            # An error in the thread is met again, and named, when the block is read here.
            with suppress(Exception):
                future.result()
        return self._through(self._host, names, still, self._from_disk)

    def _awaited(self, names: Sequence[Name]) -> set[Future[None]]:
        with self._lock:
            return {self._coming[name] for name in names if name in self._coming} if self._coming else set()

    def _through(
        self,
        pool: Pool,
        names: Sequence[Name],
        still: Callable[[], bool],
        below: Callable[[list[Name]], list[Tensor]],
    ) -> list[Tensor]:
        """The blocks from ``pool``, and those that it has not from ``below``."""
        with self._lock:
            found, missing = pool.take(names)
        if not missing:
            return found
        absent = [names[place] for place in missing]
        rows = [each.to(pool.device, non_blocking=True) for each in below(absent)]
        if still():
            with self._lock:
                pool.put(absent, rows)
        return rows if not found else [_merged(*pair, missing) for pair in zip(found, rows, strict=True)]

    def _from_disk(self, names: Sequence[Name]) -> list[Tensor]:
        keys = list(map(Key._make, ((Table.BLOCKS, owner, layer, block) for _, _, layer, block, owner in names)))
        begun = time.perf_counter()
        try:
            rows = self._store.gather(keys, self._layouts)
        except Exception:
            with self._lock:
                self._disk.misses += 1
            raise
        with self._lock:
            self._disk.microseconds += round(1e6 * (time.perf_counter() - begun))
            self._disk.hits += len(names)
            self._disk.bytes += sum(each.nbytes for each in rows)
        return [torch.from_numpy(each) for each in rows]


def _merged(found: Tensor, others: Tensor, places: list[int]) -> Tensor:
    """Rows of both, in order: ``others`` at ``places``, ``found`` at all other places."""
    total = len(found) + len(others)
    at = torch.tensor(places)
    rest = torch.ones(total, dtype=torch.bool)
    rest[at] = False
    rows = found.new_empty(total, found.shape[1])
    rows[at.to(rows.device)] = others
    rows[rest.nonzero()[:, 0].to(rows.device)] = found
    return rows
