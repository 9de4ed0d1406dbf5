"""The contract of a block store: typed records under ordered keys, written in atomic batches.

A store knows bytes, shapes and checksums, but not attention. The memory above it decides what the records mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.errors import InvalidArgument, NotFound, StoreFull
from memstore.store.records import MAX_ITEM, MAX_LAYER, Batch, Bytes, Key, Layout, Numbers, Record, ScannedValue, Table


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a store can do beyond the contract."""

    durable: bool
    """Committed batches survive the process."""
    reads_ahead: int = 1
    """How many reads should run at once; more than one if each waits for a network."""
    reads_rows: bool = False
    """``rows`` reads only the requested rows, once a value was verified."""


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class Compaction(NamedTuple):
    """The result of ``compact``: bytes taken before and after."""

    before: int
    after: int


class BlockStore(ABC):
    """Ordered, checksummed values with atomic batches.

    A store instance is used by one process; reads may come from several threads, writes from one thread at a time.
    """

    capabilities: Capabilities
    read_only: bool

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Apply ``batch`` in one transaction, durable on return (if the store is durable).

        Raises ``StoreFull`` or ``ReadOnlyMemory``; then no part of the batch is visible.
        """

    @abstractmethod
    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        """Fill row ``i`` of each ``out[f]`` (uint8 ``[len(keys), layouts[f].nbytes]``): record ``f`` of ``keys[i]``.

        All keys are read in one snapshot. Every record is verified first: checksums, identity, dtype and shape.
        Raises ``NotFound`` or ``DamagedError``, which names the key.
        """

    def gather(self, keys: Sequence[Key], layouts: Sequence[Layout]) -> list[Bytes]:
        """Return what ``read`` would fill in, in arrays of the store; their rows may have gaps between them."""
        out = [np.empty((len(keys), layout.nbytes), np.uint8) for layout in layouts]
        self.read(keys, layouts, out)
        return out

    def rows(self, keys: Sequence[Key], layout: Layout, which: Numbers, rows: Numbers) -> Bytes:
        """Return row ``rows[i]`` of the one record of ``keys[which[i]]``, uint8 ``[n, bytes of a row]``.

        ``which [n]`` ascends and names every key; the first dimension of ``layout`` counts the rows. Values are
        verified as in ``read``. With ``Capabilities.reads_rows``, each is verified at least once since the store was
        opened; later only its rows are read. Raises ``NotFound`` or ``DamagedError``, which names the key.
        """
        whole = self.gather(keys, [layout])[0]
        return whole.reshape(len(keys), layout.shape[0], -1)[which, rows]

    @abstractmethod
    def get(self, key: Key) -> tuple[Record, ...] | None:
        """Return the verified records under ``key``, copied, or None. Raises ``DamagedError``."""

    def checksums(self, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        """Return the xxh3-64 of the payload of each record under ``keys``, to compare values.

        A store that keeps checksums may return those without reading the payloads. This default reads them. Raises
        ``NotFound`` or ``DamagedError``.
        """
        found: list[tuple[int, ...]] = []
        for key in keys:
            records = self.get(key)
            if records is None:
                raise NotFound(f"there is no {key} in the store")
            found.append(tuple(xxh3_64_intdigest(record.payload.tobytes()) for record in records))
        return found

    @abstractmethod
    def keys(self, first: Key, last: Key) -> list[Key]:
        """Return existing keys from ``first`` to ``last`` (of one table), in order."""

    def walk(self, first: Key, last: Key) -> Iterator[tuple[Key, tuple[Record, ...]]]:
        """Yield existing keys from ``first`` to ``last`` (of one table) and their verified records, in order.

        If a store can, it does this in one snapshot and one pass. Raises ``DamagedError``.
        """
        for key in self.keys(first, last):
            records = self.get(key)
            if records is not None:
                yield key, records

    @abstractmethod
    def scan(self) -> Iterator[ScannedValue]:
        """Yield every value of every table in one snapshot, in order, verified; damage is reported, not raised."""

    def delete(self, document: int) -> None:
        """Delete all values of one document, in one transaction."""
        self.write(Batch(deletes=document_ranges(document)))

    def sync(self) -> None:
        """Return when everything committed so far is on disk.

        This default is for stores whose ``write`` waits for the disk.
        """
        self.version()

    @abstractmethod
    def size_bytes(self) -> int:
        """Return the bytes taken (on disk, for a durable store)."""

    def used_bytes(self) -> int:
        """Return the bytes of the values of the last commit, rounded as stored; limits are compared with this.

        Space of deleted values is not counted if the store uses it again.
        """
        return self.size_bytes()

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        """Apply ``evictions`` in order until ``batch`` fits within ``max_bytes`` of ``used_bytes``, then ``batch``.

        Returns how many evictions were applied. Raises ``StoreFull`` if all of them are not enough, and the errors of
        ``write``; then no part of ``batch`` is visible. If a store can, it does everything in one transaction. This
        default evicts first, and counts the payloads.
        """
        needed = sum(record.payload.nbytes for _, records in batch.puts for record in records)
        if needed > max_bytes:
            raise beyond_limit(max_bytes, needed)
        evicted = evict(evictions, max_bytes, lambda: self.used_bytes() + needed, self.write)
        self.write(batch)
        return evicted

    def compact(self, progress: Progress | None = None) -> Compaction:  # noqa: ARG002 - for stores that need it
        """Erase the remains of deleted values, and free their space. Readers may go on; writers wait.

        Raises ``ReadOnlyMemory``, ``MemoryInUse`` if a process still reads the remains, and ``DamagedError`` if that is
        uncertain. This default is for stores that keep nothing of deleted values.
        """
        size = self.size_bytes()
        return Compaction(size, size)

    @abstractmethod
    def version(self) -> int:
        """Return a number that grows with every committed batch, including those of other processes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing twice is allowed."""


def evict(evictions: Iterable[Batch], max_bytes: int, used: Callable[[], int], apply: Callable[[Batch], object]) -> int:
    """Apply ``evictions`` until the bytes ``used`` are within ``max_bytes``; return how many. Raises ``StoreFull``."""
    waiting, evicted = iter(evictions), 0
    while (now := used()) > max_bytes:
        eviction = next(waiting, None)
        if eviction is None:
            raise beyond_limit(max_bytes, now)
        apply(eviction)
        evicted += 1
    return evicted


def beyond_limit(max_bytes: int, needed: int) -> StoreFull:
    """Return the error for a batch that exceeds a limit."""
    return StoreFull(
        f"the memory's limit of {max_bytes:,} bytes has no room for this batch: it would need {needed:,}. Nothing "
        "of the batch was stored; earlier commits are intact. Forget documents, or raise the limit",
        remedy="limit",
    )


@contextmanager
def translated(*, closed: type[Exception], full: type[Exception]) -> Iterator[None]:
    """Translate errors of the library below a store into errors of the contract.

    The library raises ``closed`` after it was closed, and ``full`` if it cannot store something.
    """
    try:
        yield
    except closed as error:
        raise InvalidArgument(f"this store is closed; open the memory again ({error})") from None
    except full as error:
        raise StoreFull(f"nothing of this batch was stored ({error}); earlier commits are intact") from error


def document_ranges(document: int) -> list[tuple[Key, Key]]:
    """Return the ranges of keys that belong to one document. META belongs to the memory, so it is not included."""
    tables = [table for table in Table if table != Table.META]
    return [(Key(table, document), Key(table, document, MAX_LAYER, MAX_ITEM)) for table in tables]
