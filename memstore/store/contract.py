"""The contract of a block store: typed records under ordered keys, written in atomic batches.

A store knows bytes, shapes and checksums, and nothing of attention. The memory above it decides what the records mean.
"""

from __future__ import annotations

import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from memstore import stored
from memstore.errors import DamagedError, InvalidArgument, NotFound, StoreFull

Bytes = npt.NDArray[np.uint8]

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "json": 1,
}
"""Size of one element of each dtype that a record can have, in bytes. ``json`` is UTF-8 text."""

MAX_DIMENSIONS = 8
MAX_DOCUMENT = 2**32 - 2  # the number after it is the store's own, see ``lmdb/values.py``
MAX_LAYER = 2**32 - 1
MAX_ITEM = 2**32 - 1


class Table(IntEnum):
    """The seven tables of a memory."""

    META = 0
    DOCUMENTS = 1
    TOKENS = 2
    BLOCKS = 3
    LANDMARKS = 4
    HISTORY = 5
    RECURRENT = 6


_KEY = struct.Struct(">BIII")
_ITEM_BYTES = 4


class Key(NamedTuple):
    """Address of one value. Values are ordered by table, document, layer, item."""

    table: Table
    document: int = 0
    layer: int = 0
    item: int = 0
    """Block, run of blocks, or number of an entry, depending on the table."""

    def to_bytes(self) -> bytes:
        """13 bytes, big-endian, so that they sort as keys do."""
        return _KEY.pack(*self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Key:
        """The inverse of ``to_bytes``. Raises ``ValueError`` or ``struct.error``."""
        table, *numbers = _KEY.unpack(raw)
        return cls(Table(table), *numbers)


def describe(key: Key) -> str:
    """Name a value in words, for messages."""
    place = f"table {Table(key.table).name.lower()}, document {key.document}, layer {key.layer}"
    return f"{place}, {'block' if key.table in (Table.BLOCKS, Table.TOKENS) else 'item'} {key.item}"


class BlockKeys(Sequence[Key]):
    """Keys of states, each made when it is asked for: what finds values needs only their bytes."""

    def __init__(self, layers: Sequence[int], owners: Sequence[int], blocks: Sequence[int]) -> None:
        """``blocks``, their layers, and the numbers of the documents under which they lie."""
        self._layers, self._owners, self._blocks = layers, owners, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, place: int) -> Key: ...

    @overload
    def __getitem__(self, place: slice) -> BlockKeys: ...

    def __getitem__(self, place: int | slice) -> Key | BlockKeys:
        if isinstance(place, slice):
            return BlockKeys(self._layers[place], self._owners[place], self._blocks[place])
        return Key(Table.BLOCKS, self._owners[place], self._layers[place], self._blocks[place])

    def __iter__(self) -> Iterator[Key]:
        return map(Key, repeat(Table.BLOCKS), self._owners, self._layers, self._blocks)

    def to_bytes(self) -> list[bytes]:
        """As ``Key.to_bytes`` of each."""
        places = list(zip(self._owners, self._layers, strict=True))
        first = {place: _KEY.pack(Table.BLOCKS, *place, 0)[:-_ITEM_BYTES] for place in set(places)}
        return [first[place] + block.to_bytes(_ITEM_BYTES) for place, block in zip(places, self._blocks, strict=True)]


class Layout(NamedTuple):
    """Element type and shape of one record."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Payload length in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Record(NamedTuple):
    """One typed array as stored: its layout and its raw little-endian bytes."""

    layout: Layout
    payload: Bytes

    @classmethod
    def from_json(cls, value: Any) -> Record:
        """Wrap a JSON-serialisable value."""
        payload = np.frombuffer(json.dumps(value, sort_keys=True).encode(), np.uint8)
        return cls(Layout("json", (payload.size,)), payload)

    def to_json(self) -> Any:
        """Unwrap a value made by ``from_json``. Raises ``DamagedError`` for one that is no JSON, or far too large."""
        return stored.parse(self.payload.tobytes(), "a stored JSON value")


@dataclass
class Batch:
    """Changes that become visible together or not at all. Deletions come first, then puts, in order."""

    deletes: list[tuple[Key, Key]] = field(default_factory=list)
    puts: list[tuple[Key, tuple[Record, ...]]] = field(default_factory=list)

    def put(self, key: Key, *records: Record) -> None:
        """Write a value of one or several records, replacing what was under ``key``."""
        self.puts.append((key, records))

    def delete(self, first: Key, last: Key | None = None) -> None:
        """Delete every value from ``first`` to ``last``, both included. Both must be of one table."""
        self.deletes.append((first, first if last is None else last))


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a store can do beyond the contract."""

    durable: bool
    """Committed batches survive the process."""
    shared: bool
    """Other processes can read while one writes."""
    reads_ahead: int = 1
    """Reads that are best under way at once: more than one where each waits for a network."""


class ScannedValue(NamedTuple):
    """One value met by ``scan``: its records, or what is wrong with it."""

    key: Key
    records: tuple[Record, ...]
    damage: DamagedError | None


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
        evicted = 0
        waiting = iter(evictions)
        while self.used_bytes() + needed > max_bytes:
            eviction = next(waiting, None)
            if eviction is None:
                raise beyond_limit(max_bytes, self.used_bytes() + needed)
            self.write(eviction)
            evicted += 1
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


def check_key(key: Key) -> None:
    """Raise ``InvalidArgument`` for a key whose numbers are out of range."""
    if not (0 <= key.document <= MAX_DOCUMENT and 0 <= key.layer <= MAX_LAYER and 0 <= key.item <= MAX_ITEM):
        raise InvalidArgument(f"document, layer and item are numbers of 32 bits; {key} does not fit")


def check_range(first: Key, last: Key) -> None:
    """Raise ``InvalidArgument`` unless both ends are keys of one table."""
    check_key(first)
    check_key(last)
    if first.table != last.table:
        raise InvalidArgument(f"a range lies in one table; {describe(first)} and {describe(last)} do not")


def check_batch(batch: Batch) -> None:
    """Raise ``InvalidArgument`` for anything in a batch that cannot be stored."""
    for first, last in batch.deletes:
        check_range(first, last)
    good: dict[int, int] = {}  # records of one kind share their layout: checked once, by identity
    for key, records in batch.puts:
        check_key(key)
        if not 0 < len(records) < 256:
            raise InvalidArgument(f"a value has 1 to 255 records; {describe(key)} was given {len(records)}")
        for record in records:
            if good.get(id(record.layout)) != record.payload.nbytes:
                _check_record(key, record)
                good[id(record.layout)] = record.payload.nbytes


def _check_record(key: Key, record: Record) -> None:
    layout = record.layout
    if layout.dtype not in ITEM_BYTES or len(layout.shape) > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"a record is one of {list(ITEM_BYTES)} of up to {MAX_DIMENSIONS} dimensions, not {layout}"
        )
    if any(not 0 <= size < 2**32 for size in layout.shape):
        raise InvalidArgument(f"{describe(key)}: a dimension has 32 bits; {layout} does not fit")
    if record.payload.nbytes != layout.nbytes:
        raise InvalidArgument(
            f"{describe(key)}: {layout} takes {layout.nbytes} bytes, the payload has {record.payload.nbytes}"
        )


def check_out(keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
    """Raise ``InvalidArgument`` unless ``out`` has a row of the right length for each key and layout."""
    expected = [(len(keys), layout.nbytes) for layout in layouts]
    found = [rows.shape for rows in out]
    if found != expected or any(rows.dtype != np.uint8 or rows.strides[1] != 1 for rows in out if rows.size):
        raise InvalidArgument(f"out must be uint8 arrays of shapes {expected} with contiguous rows, not {found}")


def document_ranges(document: int) -> list[tuple[Key, Key]]:
    """The ranges of keys that belong to one document. META belongs to the memory, so it is not among them."""
    tables = [table for table in Table if table != Table.META]
    return [(Key(table, document), Key(table, document, MAX_LAYER, MAX_ITEM)) for table in tables]
