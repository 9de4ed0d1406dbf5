"""The LMDB part of a Zarr memory, and reading the sealed blocks that its manifest names.

The tail has the small tables, the blocks that are not sealed yet, and the manifest: where sealed blocks are, and their
checksums.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import DamagedError, MemstoreError, ReadOnlyMemory
from memstore.json_checks import fit
from memstore.store.lmdb.environment import Environment, WriterLock
from memstore.store.lmdb.store import TAIL_FORMATS, LmdbStore
from memstore.store.lmdb.values import used_bytes
from memstore.store.records import (
    MAX_LAYER,
    Key,
    Layout,
    Record,
    ScannedValue,
    Table,
    damaged,
    decode_value,
    value_reader,
)
from memstore.store.zarr.extents import (
    COUNTERS,
    COUNTERS_VALUE,
    STORE,
    Extent,
    Place,
    Series,
    find_place,
    from_record,
    shard_index,
)
from memstore.store.zarr.objects import Objects, RangeRead

_CACHED_SHARDS = 1024  # whose checksums are kept: 8 bytes for each block and field

Sums = npt.NDArray[np.uint64]
Deletes = list[tuple[Key, Key]]
Puts = list[tuple[Key, tuple[Record, ...]]]

CHECKSUM_ROOM = 1000
"""Blocks of a layer that are believed without a look at the size of the tail."""
_SUM_BYTES = 8


class Tail(LmdbStore):
    """An ``LmdbStore`` that also knows which blocks are sealed. Its format number keeps it from being opened alone."""

    _formats = TAIL_FORMATS

    def __init__(self, environment: Environment, writer: WriterLock | None, url: str) -> None:
        """Not for callers: see ``LmdbStore``."""
        super().__init__(environment, writer, url)
        self.extents: dict[Series, tuple[bytes, tuple[Extent, ...]]] = {}
        """Extents that were read of the manifest before, and the value that said so: good while it is the same."""
        self.sums: OrderedDict[tuple[int, int], Sums] = OrderedDict()
        """Checksums of shards that were read before, good for ever."""

    def commit(self, deletes: Deletes, puts: Puts, then: Callable[[Any], None] | None = None) -> None:
        """``write`` for checked changes, those of the manifest among them; ``then`` may refuse or do more."""
        self._commit(deletes, puts, then)

    def apply(self, txn: Any, deletes: Deletes, puts: Puts) -> None:
        """More changes of the same kind, in a transaction that ``then`` was called with."""
        self._changes.apply(txn, deletes, puts)

    def check_writable(self) -> None:
        """Raise ``InvalidArgument`` for a closed store, ``ReadOnlyMemory`` for one that only reads."""
        self._check_open()
        if self.read_only:
            raise ReadOnlyMemory.opened(self.path.parent)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """One state of the tail and its manifest, whatever is written meanwhile."""
        with self._reading() as txn:
            yield Snapshot(self, txn)


class Snapshot:
    """Reads of one transaction."""

    def __init__(self, tail: Tail, txn: Any) -> None:
        self._tail = tail
        self._txn = txn

    def extents(self, series: Series) -> tuple[Extent, ...]:
        """What is sealed of one layer of a document. Raises ``DamagedError``."""
        raw = self._raw(series.manifest)
        if raw is None:
            self._tail.extents.pop(series, None)
            return ()
        known = self._tail.extents.get(series)
        if known is None or known[0] != raw:
            records, _ = decode_value(memoryview(raw), 0, series.manifest)
            extents = from_record(series, records[0])
            # Each block has checksums here: what says that there are more blocks is not to be counted through.
            blocks = sum(stop - start for extent in extents for start, stop in extent.live)
            if blocks > CHECKSUM_ROOM and blocks * _SUM_BYTES > used_bytes(self._txn):
                raise DamagedError(
                    f"the list of shards of document {series.document}, layer {series.layer} is damaged: {blocks:,} "
                    "blocks are more than there are checksums; restore it from a copy",
                    remedy="restore",
                )
            known = self._tail.extents[series] = (raw, extents)
        return known[1]

    def sums(self, extent: Extent, shard: int) -> Sums:
        """Checksums of the blocks of a shard, ``[shard_blocks, fields]``. Raises ``DamagedError``."""
        name = (extent.number, shard)
        if (sums := self._tail.sums.get(name)) is None:
            key = extent.sums(shard)
            records, _ = decode_value(memoryview(self._raw(key) or b""), 0, key)
            if records[0].payload.size != _SUM_BYTES * extent.shard_blocks * len(extent.layouts):
                raise damaged(key, "it has not as many checksums as its shard has blocks")
            sums = records[0].payload.view("<u8").reshape(extent.shard_blocks, len(extent.layouts))
            known = self._tail.sums
            known[name] = sums
            if len(known) > _CACHED_SHARDS:
                known.popitem(last=False)
        return sums

    def series(self, first: Series, last: Series) -> list[Series]:
        """The layers that have something sealed, from ``first`` to ``last`` (included), in order."""
        keys = self._tail.values.keys(self._txn, first.manifest, last.manifest)
        return [Series(key.layer, key.item) for key in keys]

    def all_series(self) -> list[Series]:
        """Every layer of every document that has something sealed."""
        return self.series(Series(0, 0), Series(STORE, MAX_LAYER))

    def counters(self) -> dict[str, Any]:
        """The next number of an extent, the bytes of all shards, and the owner of shards that lie elsewhere."""
        raw = self._raw(COUNTERS)
        if raw is None:
            return {"next_extent": 1, "bytes": 0}
        counters = decode_value(memoryview(raw), 0, COUNTERS)[0][0].to_json()
        return fit(counters, COUNTERS_VALUE, "the value that counts shards")  # type: ignore[no-any-return]

    def keys(self, first: Key, last: Key) -> list[Key]:
        """Keys in the tail, in order. Raises ``DamagedError``."""
        return self._tail.values.keys(self._txn, first, last)

    def scan(self) -> Iterator[ScannedValue]:
        """Every value of the tail; of the manifest's own only damaged ones."""
        return (entry for entry in self._tail.values.scan(self._txn) if entry.key.document != STORE or entry.damage)

    def read(self, keys: Mapping[int, Key], layouts: tuple[Layout, ...], rows: Sequence[Sequence[memoryview]]) -> None:
        """Fill ``rows[i]`` with the value of ``keys[i]``, verified. Raises ``NotFound`` or ``DamagedError``."""
        reader = value_reader(layouts)
        values = self._tail.values.take(self._txn, list(keys.values()), reader, waits=self._tail._waits)
        for row, *payloads in zip(keys, *reader.payloads(values), strict=True):
            for target, payload in zip(rows[row], payloads, strict=True):
                target[:] = payload.data

    def _raw(self, key: Key) -> bytes | None:
        view = self._tail.values.value(self._txn, key)
        return None if view is None else bytes(view)


class BlockRead(NamedTuple):
    """A sealed block to be read, and the rows it goes to."""

    key: Key
    place: Place
    sums: list[int]
    rows: list[memoryview]


class Failure(NamedTuple):
    """A sealed block that could not be read."""

    read: BlockRead
    error: DamagedError


class SealedBlocks:
    """Reads of sealed blocks, as snapshots of ``tail`` name them."""

    def __init__(self, tail: Tail, objects: Objects) -> None:
        self._tail = tail
        self._objects = objects

    def from_tail(
        self, snapshot: Snapshot, keys: Sequence[Key], layouts: Sequence[Layout], rows: list[list[memoryview]]
    ) -> list[BlockRead]:
        """Fill the rows of what is not sealed; return what is."""
        sealed: list[BlockRead] = []
        unsealed: dict[int, Key] = {}
        extents: dict[Series, tuple[Extent, ...]] = {}
        for row, key in enumerate(keys):
            place = self.place(snapshot, key, extents)
            if place is None:
                unsealed[row] = key
            else:
                _check_sealed(key, place, layouts)
                sums = snapshot.sums(place.extent, place.shard)[place.slot].tolist()
                sealed.append(BlockRead(key, place, sums, rows[row]))
        snapshot.read(unsealed, tuple(layouts), rows)
        return sealed

    def place(self, snapshot: Snapshot, key: Key, known: dict[Series, tuple[Extent, ...]]) -> Place | None:
        """Where a sealed block lies, None for what is not sealed; ``known`` are extents that were looked up before."""
        if key.table != Table.BLOCKS:
            return None
        series = Series(key.document, key.layer)
        if series not in known:
            known[series] = snapshot.extents(series)
        return find_place(known[series], key.item)

    def fill(self, sealed: list[BlockRead]) -> Failure | None:
        """Fill the rows of sealed blocks: per shard and field one read for each row of neighbours, then checksums."""
        order = sorted(sealed, key=lambda one: (one.place.extent.number, one.place.shard, one.place.slot))
        reads: list[RangeRead] = []
        blocks: list[list[BlockRead]] = []
        for run in _neighbours(order):
            for record in range(len(run[0].place.extent.arrays)):
                reads.append(_range_read(run, record))
                blocks.append(run)
        for problem, run in zip(self._objects.read(reads), blocks, strict=True):
            if problem:
                return Failure(run[0], damaged(run[0].key, problem))
        for one in order:
            for record, (row, expected) in enumerate(zip(one.rows, one.sums, strict=True)):
                if checksum(row) != expected:
                    path = one.place.extent.shard_path(record, one.place.shard)
                    what = f"the checksum of record {record} does not match (slot {one.place.slot} of shard {path})"
                    return Failure(one, damaged(one.key, what))
        return None

    def scan(self, snapshot: Snapshot) -> Iterator[ScannedValue]:
        """Every sealed block, in order, verified; damaged ones are reported, not raised."""
        for series in snapshot.all_series():
            try:
                extents = snapshot.extents(series)
            except MemstoreError:
                continue  # the scan of the tail has met it
            places = ((item, extent.place(item)) for extent in extents for item in items(extent))
            for item, place in sorted(places, key=lambda pair: pair[0]):
                if place and (scanned := self._scan_block(snapshot, series.block(item), place)):
                    yield scanned

    def _scan_block(self, snapshot: Snapshot, key: Key, place: Place) -> ScannedValue | None:
        """One sealed block, and with the first of a shard the shard's index; None for one that has been deleted."""
        layouts = place.extent.layouts
        rows = [np.empty(layout.nbytes, np.uint8) for layout in layouts]
        try:
            sums = snapshot.sums(place.extent, place.shard)[place.slot].tolist()
        except MemstoreError as error:
            return ScannedValue(key, (), damaged(key, f"its checksums are lost ({error})"))
        failure = self.fill([BlockRead(key, place, sums, [row.data for row in rows])])
        if failure is None and (place.slot == 0 or key.item in {start for start, _ in place.extent.live}):
            failure = self._check_index(BlockRead(key, place, sums, []))
        if failure is None:
            return ScannedValue(key, tuple(Record(*pair) for pair in zip(layouts, rows, strict=True)), None)
        with self._tail.snapshot() as newer:
            gone = self.place(newer, key, {}) != place
        return None if gone else ScannedValue(key, (), failure.error)

    def _check_index(self, read: BlockRead) -> Failure | None:
        """What Zarr tools find blocks by; nothing here depends on it."""
        extent, shard, _ = read.place
        for record, layout in enumerate(extent.arrays):
            expected = shard_index(extent.shard_blocks, layout.nbytes)
            found = bytearray(len(expected))
            path = extent.shard_path(record, shard)
            index = RangeRead(path, extent.shard_blocks * layout.nbytes, (memoryview(found),))
            (problem,) = self._objects.read([index])
            if problem or found != expected:
                return Failure(read, damaged(read.key, problem or f"the index of its shard {path} is not as written"))
        return None


def items(extent: Extent) -> Iterator[int]:
    """The living blocks of an extent."""
    return (item for start, stop in extent.live for item in range(start, stop))


def _neighbours(order: list[BlockRead]) -> Iterator[list[BlockRead]]:
    """Blocks in order of their places, those side by side together."""
    run: list[BlockRead] = []
    for one in order:
        if run and not _follows(run[-1].place, one.place):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _follows(before: Place, after: Place) -> bool:
    return (before.extent.number, before.shard, before.slot + 1) == (after.extent.number, after.shard, after.slot)


def _range_read(run: list[BlockRead], record: int) -> RangeRead:
    """The bytes of one array of neighbours."""
    extent, shard, slot = run[0].place
    start = slot * extent.arrays[record].nbytes
    rows = (one.rows if extent.joined else one.rows[record : record + 1] for one in run)
    return RangeRead(extent.shard_path(record, shard), start, tuple(row for each in rows for row in each))


def _check_sealed(key: Key, place: Place, layouts: Sequence[Layout]) -> None:
    """Raise ``DamagedError`` unless a sealed block is of these layouts."""
    if place.extent.layouts != tuple(layouts):
        raise damaged(key, f"it holds {list(place.extent.layouts)}, and {list(layouts)} was expected")
