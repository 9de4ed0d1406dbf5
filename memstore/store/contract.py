"""The contract of a block store: typed records under ordered keys, written in atomic batches.

A store knows bytes, shapes and checksums, and nothing of attention. The memory above it decides what the records mean.
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
    """Reads that are best under way at once: more than one where each waits for a network."""
    reads_rows: bool = False
    """``rows`` reads no more than what is asked for, once a value was verified."""


Progress = Callable[[int, int], None]
"""Is told how many bytes of how many are done."""


class Compaction(NamedTuple):
    """What ``compact`` did: bytes taken before and after."""

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
        """Apply ``batch`` in one transaction, durable on return (where the store is durable).

        Raises ``StoreFull`` or ``ReadOnlyMemory``; nothing of the batch is visible then.
        """

    @abstractmethod
    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        """Fill row ``i`` of each ``out[f]`` (uint8 ``[len(keys), layouts[f].nbytes]``): record ``f`` of ``keys[i]``.

        All keys are read in one snapshot. Every record is verified first: checksums, identity, dtype and shape.
        Raises ``NotFound`` or ``DamagedError``, which names the key.
        """

    def gather(self, keys: Sequence[Key], layouts: Sequence[Layout]) -> list[Bytes]:
        """What ``read`` fills arrays with, in arrays made by the store, whose rows may have gaps between them."""
        out = [np.empty((len(keys), layout.nbytes), np.uint8) for layout in layouts]
        self.read(keys, layouts, out)
        return out

    def rows(self, keys: Sequence[Key], layout: Layout, which: Numbers, rows: Numbers) -> Bytes:
        """Rows of values of one record: row ``rows[i]`` of ``keys[which[i]]``, uint8 ``[n, bytes of a row]``.

        ``which [n]`` ascends and names every key; a row is what the first dimension of ``layout`` counts. Verified as
        in ``read``; where ``Capabilities.reads_rows`` a value at least once since the store was opened, and then no
        more of it is read than its rows. Raises ``NotFound`` or ``DamagedError``, which names the key.
        """
        whole = self.gather(keys, [layout])[0]
        return whole.reshape(len(keys), layout.shape[0], -1)[which, rows]

    @abstractmethod
    def get(self, key: Key) -> tuple[Record, ...] | None:
        """The verified records under ``key``, copied, or None. Raises ``DamagedError``."""

    def checksums(self, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        """xxh3-64 of the payload of each record under ``keys``, to tell whether values are the same.

        A store that keeps them may tell what it keeps, without reading the payloads. This one reads them. Raises
        ``NotFound`` or ``DamagedError``.
        """
        found: list[tuple[int, ...]] = []
        for key in keys:
            records = self.get(key)
            if records is None:
                raise NotFound(f"there is nothing under {key}")
            found.append(tuple(xxh3_64_intdigest(record.payload.tobytes()) for record in records))
        return found

    @abstractmethod
    def keys(self, first: Key, last: Key) -> list[Key]:
        """Existing keys from ``first`` to ``last`` (of one table), in order."""

    def walk(self, first: Key, last: Key) -> Iterator[tuple[Key, tuple[Record, ...]]]:
        """Existing keys from ``first`` to ``last`` (of one table) and their verified records, in order.

        A store that can does it in one snapshot and one pass. Raises ``DamagedError``.
        """
        for key in self.keys(first, last):
            records = self.get(key)
            if records is not None:
                yield key, records

    @abstractmethod
    def scan(self) -> Iterator[ScannedValue]:
        """Every value of every table in one snapshot, in order, verified; damaged ones are reported, not raised."""

    def delete(self, document: int) -> None:
        """Delete everything of one document, in one transaction."""
        self.write(Batch(deletes=document_ranges(document)))

    def sync(self) -> None:
        """Return when everything committed so far is on disk. This one is for stores whose ``write`` waits for it."""
        self.version()

    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes taken (on disk, for a durable store)."""

    def used_bytes(self) -> int:
        """Bytes that the values of the last commit take, rounded as they are stored: what a limit is compared with.

        What deleted values leave behind is not counted, where the store uses it again.
        """
        return self.size_bytes()

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        """Apply ``batch``, after as many of ``evictions``, in order, as keep ``used_bytes`` within ``max_bytes``.

        Returns how many that were. Raises ``StoreFull`` where all of them are not enough, and what ``write`` raises;
        nothing of ``batch`` is visible then. A store that can do it does everything in one transaction; this one evicts
        first, and goes by the payloads.
        """
        needed = sum(record.payload.nbytes for _, records in batch.puts for record in records)
        if needed > max_bytes:
            raise beyond_limit(max_bytes, needed)
        evicted = evict(evictions, max_bytes, lambda: self.used_bytes() + needed, self.write)
        self.write(batch)
        return evicted

    def compact(self, progress: Progress | None = None) -> Compaction:  # noqa: ARG002 - for stores that need it
        """Erase what deleted values have left, and give its space back. Readers may go on; writers wait.

        Raises ``ReadOnlyMemory``, ``MemoryInUse`` where somebody still reads what is to be erased, and ``DamagedError``
        where that cannot be told for certain. This one is for stores that keep nothing of what they delete.
        """
        size = self.size_bytes()
        return Compaction(size, size)

    @abstractmethod
    def version(self) -> int:
        """A number that grows with every committed batch, also those of other processes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing twice is allowed."""


def evict(evictions: Iterable[Batch], max_bytes: int, used: Callable[[], int], apply: Callable[[Batch], object]) -> int:
    """Apply ``evictions`` until what is ``used`` keeps within ``max_bytes``; how many. Raises ``StoreFull``."""
    waiting, evicted = iter(evictions), 0
    while (now := used()) > max_bytes:
        eviction = next(waiting, None)
        if eviction is None:
            raise beyond_limit(max_bytes, now)
        apply(eviction)
        evicted += 1
    return evicted


def beyond_limit(max_bytes: int, needed: int) -> StoreFull:
    """The error for a batch that a limit has no room for."""
    return StoreFull(
        f"the memory's limit of {max_bytes:,} bytes has no room for this batch: with it there would be {needed:,}; "
        "nothing of it was stored, what was committed before stands. Forget documents, or raise the limit",
        remedy="limit",
    )


@contextmanager
def translated(*, closed: type[Exception], full: type[Exception]) -> Iterator[None]:
    """Errors of the library below a store as those of the contract.

    ``closed`` is what it raises after it was closed, ``full`` what it raises where it cannot store something.
    """
    try:
        yield
    except closed as error:
        raise InvalidArgument(f"this store is closed; open the memory again ({error})") from None
    except full as error:
        raise StoreFull(f"nothing of this batch was stored ({error}), what was committed before stands") from error


def document_ranges(document: int) -> list[tuple[Key, Key]]:
    """The ranges of keys that belong to one document. META belongs to the memory, so it is not among them."""
    tables = [table for table in Table if table != Table.META]
    return [(Key(table, document), Key(table, document, MAX_LAYER, MAX_ITEM)) for table in tables]
