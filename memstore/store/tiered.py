"""Tiers above a store: pages on the accelerator, pages in host memory, then the disk.

Pages are named by what is in them, never by a place whose content can change, so nothing ever has to be invalidated:
a name that is found is right, and what is out of date is not asked for again and leaves in its turn. Bytes are kept as
they are stored, and were verified when they were read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstore.store.contract import BlockKeys, BlockStore, Layout
from memstore.store.pool import UNKEPT, Counts, Pool, as_tensor

PIECE_BYTES = 8 << 20
"""Bytes that are read ahead at a time: a bound for the buffer between store and pages."""


class Wanted(NamedTuple):
    """Blocks of one layer of a document, what is in them, and where they are in the store."""

    document: int
    edits: int
    """Number of truncations of the document: while it is the same, complete blocks never change."""
    layer: int
    blocks: Sequence[int]
    owners: Sequence[int]
    """The numbers under which they lie: those of other documents, where they are shared."""
    stop: int
    """Blocks from here on are not complete."""

    @property
    def names(self) -> list[int]:
        """A name of the content of each block: the same name is the same bytes, as long as the store exists."""
        # One number, not a tuple: a gather from memory looks every name up, and that is to take less than the copying.
        first = (self.edits << 128) + (self.document << 96) + (self.layer << 64)
        stop = self.stop
        return [first + block if block < stop else UNKEPT for block in self.blocks]

    @property
    def keys(self) -> BlockKeys:
        """Where each block is in the store."""
        return BlockKeys(self.layer, self.owners, self.blocks)

    def only(self, places: Sequence[int]) -> Wanted:
        """Those of the blocks that are at ``places`` in the list."""
        blocks, owners = ([each[place] for place in places] for each in (self.blocks, self.owners))
        return self._replace(blocks=blocks, owners=owners)


class Changed(Exception):
    """A document was truncated while its blocks were read, so that they may be of two moments: to be read again."""


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
        self._block_bytes = sum(layout.nbytes for layout in layouts)
        self._workers = workers
        on_gpu = device is not None and device.type == "cuda"
        self._host = Pool(host_bytes, layouts, torch.device("cpu"), pinned=on_gpu)
        self._device = Pool(device_bytes, layouts, device or torch.device("cpu"))
        self._disk = Counts()
        self._executor: Executor | None = None
        self._coming: dict[int, Future[None]] = {}
        self._lock = threading.RLock()
        self._closed = False

    def read(self, wanted: Wanted, still: Callable[[], bool], device: torch.device | None) -> list[Tensor]:
        """The blocks: ``[n, *shape]`` for each record, on ``device``; None is the CPU.

        ``still()`` says whether the names are still right, after what they stand for was read from the store.
        Raises ``Changed`` where they are not, ``NotFound`` or ``DamagedError``.
        """
        if device is not None and self._device.capacity and device == self._device.device:
            return self._through(self._device, wanted, lambda missing: self._from_host(missing, still))
        rows = self._from_host(wanted, still)
        return rows if device is None else [each.to(device, non_blocking=True) for each in rows]

    def where(self, wanted: Wanted) -> list[str]:
        """The tier that each block would be read from now: "device", "host" or "disk". Nothing is counted or moved."""
        below = "disk" if self._store.capabilities.durable else "host"
        with self._lock:
            held = {"device": self._device, "host": self._host}
            return [next((tier for tier, pool in held.items() if name in pool), below) for name in wanted.names]

    @property
    def prefetches(self) -> bool:
        """Whether there is room for what is brought ahead."""
        return self._host.capacity > 0 and not self._closed

    def prefetch(self, wanted: Wanted, still: Callable[[], bool]) -> None:
        """Let a thread bring blocks into host memory; returns at once. Without a host tier it does nothing.

        What cannot be read is left to whoever asks for it: reading it again there gives the error.
        """
        count = max(1, PIECE_BYTES // max(1, self._block_bytes))
        with self._lock:
            if not self.prefetches:
                return
            places = {name: place for place, name in enumerate(wanted.names) if not self._expected(name)}
            # More than that would push out what was brought before anybody has seen it.
            new = list(places.items())[: max(0, self._host.capacity // 2 - len(self._coming))]
            if new and self._executor is None:
                self._executor = self._workers()
            for start in range(0, len(new), count):
                names, at = zip(*new[start : start + count], strict=True)
                assert self._executor is not None
                self._coming |= dict.fromkeys(names, self._executor.submit(self._bring, wanted.only(at), still))

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

    def _expected(self, name: int) -> bool:
        return name == UNKEPT or name in self._host or name in self._coming

    def _bring(self, wanted: Wanted, still: Callable[[], bool]) -> None:
        names = wanted.names
        try:
            rows = self._from_disk(wanted, still)
            with self._lock:
                self._host.put(names, rows, ahead=True)
        finally:
            with self._lock:
                for name in names:
                    del self._coming[name]

    def _from_host(self, wanted: Wanted, still: Callable[[], bool]) -> list[Tensor]:
        if not self._host.capacity:
            return self._from_disk(wanted, still)
        if self._coming:
            for future in self._awaited(wanted.names):
                # An error in the thread is met again, and named, when the block is read here.
                with suppress(Exception):
                    future.result()
        return self._through(self._host, wanted, lambda missing: self._from_disk(missing, still))

    def _awaited(self, names: Sequence[int]) -> set[Future[None]]:
        with self._lock:
            return {self._coming[name] for name in names if name in self._coming}

    def _through(self, pool: Pool, wanted: Wanted, below: Callable[[Wanted], list[Tensor]]) -> list[Tensor]:
        """The blocks from ``pool``, and those that it has not from ``below``."""
        names = wanted.names
        with self._lock:
            found, missing = pool.take(names)
        if not missing:
            return found
        rows = [each.to(pool.device, non_blocking=True) for each in below(wanted.only(missing) if found else wanted)]
        with self._lock:
            pool.put([names[place] for place in missing], rows)
        return rows if not found else [_merged(*pair, missing) for pair in zip(found, rows, strict=True)]

    def _from_disk(self, wanted: Wanted, still: Callable[[], bool]) -> list[Tensor]:
        begun = time.perf_counter()
        try:
            rows = self._store.gather(wanted.keys, self._layouts)
        except Exception:
            with self._lock:
                self._disk.misses += 1
            raise
        with self._lock:
            self._disk.found(len(wanted.blocks), len(wanted.blocks) * self._block_bytes, begun)
        if not still():
            raise Changed
        return list(map(as_tensor, rows, self._layouts))


def _merged(found: Tensor, others: Tensor, places: list[int]) -> Tensor:
    """Rows of both, in order: ``others`` at ``places``, ``found`` at all other places."""
    total = len(found) + len(others)
    at = torch.tensor(places)
    rest = torch.ones(total, dtype=torch.bool)
    rest[at] = False
    rows = found.new_empty(total, *found.shape[1:])
    rows[at.to(rows.device)] = others
    rows[rest.nonzero()[:, 0].to(rows.device)] = found
    return rows
