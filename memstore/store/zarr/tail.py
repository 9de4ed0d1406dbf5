"""The LMDB part of a Zarr memory; how blocks move from it to shards, are read and are deleted there.

The tail has the small tables, the unsealed blocks, and the manifest with the places and checksums of sealed blocks.
Blocks of a layer are sealed in a separate shard as soon as they fill one. Objects that no manifest names any more are
deleted, at the latest with the first write after the memory is next opened.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import DamagedError, MemstoreError, NotAMemory
from memstore.json_checks import fit
from memstore.store.lmdb.environment import Environment, WriterLock
from memstore.store.lmdb.store import TAIL_FORMATS, LmdbStore
from memstore.store.lmdb.values import used_bytes
from memstore.store.records import (
    MAX_ITEM,
    MAX_LAYER,
    Batch,
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
    OBJECT,
    STORE,
    Extent,
    Place,
    Series,
    array_json,
    blocks_per_shard,
    find_place,
    from_record,
    group_json,
    shard_index,
    shard_object,
    to_record,
)
from memstore.store.zarr.objects import Objects, RangeRead

_CACHED_SHARDS = 1024  # shards whose checksums are kept: 8 bytes for each block and field

T = TypeVar("T")
Sums = npt.NDArray[np.uint64]
Deletes = list[tuple[Key, Key]]
Puts = list[tuple[Key, tuple[Record, ...]]]

CHECKSUM_ROOM = 1000
"""Blocks of a layer that are accepted without comparing them with the size of the tail."""
_SUM_BYTES = 8


class Tail(LmdbStore):
    """An ``LmdbStore`` with a manifest of sealed blocks. Its format number keeps it from being opened alone."""

    _formats = TAIL_FORMATS

    def __init__(self, environment: Environment, writer: WriterLock | None, url: str) -> None:
        """Not for callers: see ``LmdbStore``."""
        super().__init__(environment, writer, url)
        self.extents: dict[Series, tuple[bytes, tuple[Extent, ...]]] = {}
        """Extents read from the manifest, and the value they came from; valid while that is unchanged."""
        self.sums: OrderedDict[tuple[int, int], Sums] = OrderedDict()
        """Checksums of shards that were read before; valid forever."""

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Give one state of the tail and its manifest, unaffected by later writes."""
        with self._reading() as txn:
            yield Snapshot(self, txn)


class Snapshot:
    """Reads of one transaction."""

    def __init__(self, tail: Tail, txn: Any) -> None:
        self._tail = tail
        self._txn = txn

    def extents(self, series: Series) -> tuple[Extent, ...]:
        """Return the extents of one layer of a document. Raises ``DamagedError``."""
        raw = self._raw(series.manifest)
        if raw is None:
            self._tail.extents.pop(series, None)
            return ()
        known = self._tail.extents.get(series)
        if known is None or known[0] != raw:
            records, _ = decode_value(memoryview(raw), 0, series.manifest)
            extents = from_record(series, records[0])
            # Each block has checksums here, so a larger number of blocks is damage, and must not be counted through.
            blocks = sum(stop - start for extent in extents for start, stop in extent.live)
            if blocks > CHECKSUM_ROOM and blocks * _SUM_BYTES > used_bytes(self._txn):
                raise DamagedError(
                    f"the list of shards of document {series.document}, layer {series.layer} is damaged: it names "
                    f"{blocks:,} blocks, more than there are checksums; restore it from a copy",
                    remedy="restore",
                )
            known = self._tail.extents[series] = (raw, extents)
        return known[1]

    def sums(self, extent: Extent, shard: int) -> Sums:
        """Return the checksums of the blocks of a shard, ``[shard_blocks, fields]``. Raises ``DamagedError``."""
        name = (extent.number, shard)
        if (sums := self._tail.sums.get(name)) is None:
            key = extent.sums(shard)
            records, _ = decode_value(memoryview(self._raw(key) or b""), 0, key)
            if records[0].payload.size != _SUM_BYTES * extent.shard_blocks * len(extent.layouts):
                raise damaged(key, "it does not have one checksum for each block of its shard")
            sums = records[0].payload.view("<u8").reshape(extent.shard_blocks, len(extent.layouts))
            known = self._tail.sums
            known[name] = sums
            if len(known) > _CACHED_SHARDS:
                known.popitem(last=False)
        return sums

    def series(self, first: Series, last: Series) -> list[Series]:
        """Return the layers with sealed blocks, from ``first`` to ``last`` (included), in order."""
        keys = self._tail.values.keys(self._txn, first.manifest, last.manifest)
        return [Series(key.layer, key.item) for key in keys]

    def all_series(self) -> list[Series]:
        """Return every layer of every document that has sealed blocks."""
        return self.series(Series(0, 0), Series(STORE, MAX_LAYER))

    def counters(self) -> dict[str, Any]:
        """Return the next number of an extent, the bytes of all shards, and the owner of shards that lie elsewhere."""
        raw = self._raw(COUNTERS)
        if raw is None:
            return {"next_extent": 1, "bytes": 0}
        counters = decode_value(memoryview(raw), 0, COUNTERS)[0][0].to_json()
        return fit(counters, COUNTERS_VALUE, "the value that counts shards")  # type: ignore[no-any-return]

    def get(self, key: Key) -> tuple[Record, ...] | None:
        """Return the verified records under ``key`` in the tail, or None. Raises ``DamagedError``."""
        return self._tail.values.get(self._txn, key)

    def keys(self, first: Key, last: Key) -> list[Key]:
        """Return keys in the tail, in order. Raises ``DamagedError``."""
        return self._tail.values.keys(self._txn, first, last)

    def scan(self) -> Iterator[ScannedValue]:
        """Yield every value of the tail; of the manifest's own values, only damaged ones."""
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


class _BlockRead(NamedTuple):
    """A sealed block to read, and its row in the result."""

    key: Key
    place: Place
    sums: list[int]
    rows: list[memoryview]


class Failure(NamedTuple):
    """A sealed block that could not be read."""

    read: _BlockRead
    error: DamagedError


class SealedBlocks:
    """Reads of sealed blocks, as snapshots of ``tail`` name them."""

    def __init__(self, tail: Tail, objects: Objects) -> None:
        self._tail = tail
        self._objects = objects

    def from_tail(
        self, snapshot: Snapshot, keys: Sequence[Key], layouts: Sequence[Layout], rows: list[list[memoryview]]
    ) -> list[_BlockRead]:
        """Fill the rows of unsealed blocks; return the sealed ones."""
        sealed: list[_BlockRead] = []
        unsealed: dict[int, Key] = {}
        extents: dict[Series, tuple[Extent, ...]] = {}
        for row, key in enumerate(keys):
            place = self.place(snapshot, key, extents)
            if place is None:
                unsealed[row] = key
            else:
                if place.extent.layouts != tuple(layouts):
                    raise damaged(key, f"it holds {list(place.extent.layouts)}, expected {list(layouts)}")
                sums = snapshot.sums(place.extent, place.shard)[place.slot].tolist()
                sealed.append(_BlockRead(key, place, sums, rows[row]))
        snapshot.read(unsealed, tuple(layouts), rows)
        return sealed

    def place(self, snapshot: Snapshot, key: Key, known: dict[Series, tuple[Extent, ...]]) -> Place | None:
        """Return the place of a sealed block, None for an unsealed one; ``known`` are extents looked up before."""
        if key.table != Table.BLOCKS:
            return None
        series = Series(key.document, key.layer)
        if series not in known:
            known[series] = snapshot.extents(series)
        return find_place(known[series], key.item)

    def fill(self, sealed: list[_BlockRead]) -> Failure | None:
        """Fill the rows of sealed blocks: one read per shard, field and run of neighbours, then check the sums."""
        order = sorted(sealed, key=lambda one: (one.place.extent.number, one.place.shard, one.place.slot))
        reads: list[RangeRead] = []
        blocks: list[list[_BlockRead]] = []
        for run in _neighbours(order, _beside):
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
        """Yield every sealed block, in order, verified; damage is reported, not raised."""
        for series in snapshot.all_series():
            try:
                extents = snapshot.extents(series)
            except MemstoreError:
                continue  # the scan of the tail has reported it
            places = ((item, extent.place(item)) for extent in extents for item in items(extent))
            for item, place in sorted(places, key=lambda pair: pair[0]):
                if place and (scanned := self._scan_block(snapshot, series.block(item), place)):
                    yield scanned

    def _scan_block(self, snapshot: Snapshot, key: Key, place: Place) -> ScannedValue | None:
        """Scan one sealed block, and with the first of a shard its index; None for a deleted block."""
        layouts = place.extent.layouts
        rows = [np.empty(layout.nbytes, np.uint8) for layout in layouts]
        try:
            sums = snapshot.sums(place.extent, place.shard)[place.slot].tolist()
        except MemstoreError as error:
            return ScannedValue(key, (), damaged(key, f"its checksums are lost ({error})"))
        failure = self.fill([_BlockRead(key, place, sums, [row.data for row in rows])])
        if failure is None and (place.slot == 0 or key.item in {start for start, _ in place.extent.live}):
            failure = self._check_index(_BlockRead(key, place, sums, []))
        if failure is None:
            return ScannedValue(key, tuple(Record(*pair) for pair in zip(layouts, rows, strict=True)), None)
        with self._tail.snapshot() as newer:
            gone = self.place(newer, key, {}) != place
        return None if gone else ScannedValue(key, (), failure.error)

    def _check_index(self, read: _BlockRead) -> Failure | None:
        """Check the index by which Zarr tools find blocks; memstore does not depend on it."""
        extent, shard, _ = read.place
        for record, layout in enumerate(extent.arrays):
            expected = shard_index(extent.shard_blocks, layout.nbytes)
            found = bytearray(len(expected))
            path = extent.shard_path(record, shard)
            index = RangeRead(path, extent.shard_blocks * layout.nbytes, (memoryview(found),))
            (problem,) = self._objects.read([index])
            if problem or found != expected:
                return Failure(read, damaged(read.key, problem or f"the index of its shard {path} has changed"))
        return None


def items(extent: Extent) -> Iterator[int]:
    """Yield the living blocks of an extent."""
    return (item for start, stop in extent.live for item in range(start, stop))


def _neighbours(order: Iterable[T], follows: Callable[[T, T], bool]) -> Iterator[list[T]]:
    """Split ordered items into runs, in which each item follows the one before."""
    run: list[T] = []
    for one in order:
        if run and not follows(run[-1], one):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _beside(first: _BlockRead, second: _BlockRead) -> bool:
    """Whether a block lies right after another one, in the same shard."""
    (extent, shard, slot), after = first.place, second.place
    return (extent.number, shard, slot + 1) == (after.extent.number, after.shard, after.slot)


def _range_read(run: list[_BlockRead], record: int) -> RangeRead:
    """Return the read of one array for neighbouring blocks."""
    extent, shard, slot = run[0].place
    start = slot * extent.arrays[record].nbytes
    rows = (one.rows if extent.joined else one.rows[record : record + 1] for one in run)
    return RangeRead(extent.shard_path(record, shard), start, tuple(row for each in rows for row in each))


logger = logging.getLogger(__name__)


class Sealer:
    """Seals excess blocks in the tail of the memory in the folder ``path``. Callers hold its lock."""

    def __init__(self, path: Path, tail: Tail, objects: Objects, shard_bytes: int) -> None:
        self._path = path
        self._tail = tail
        self._objects = objects
        self._shard_bytes = shard_bytes
        self._waiting: dict[Series, int] = {}  # blocks in the tail, at most: rewritten ones are counted twice

    def seal_due(self, batch: Batch) -> None:
        """Seal the layers that have enough blocks in the tail, now that ``batch`` is committed."""
        puts: dict[Series, tuple[int, tuple[Record, ...]]] = {}
        for key, records in batch.puts:
            if key.table == Table.BLOCKS:
                series = Series(key.document, key.layer)
                puts[series] = (puts[series][0] + 1 if series in puts else 1, records)
        for series, (count, records) in puts.items():
            if series in self._waiting:
                self._waiting[series] += count
            else:
                self._waiting[series] = len(self._tail.keys(series.block(0), series.block(MAX_ITEM)))
            needed = self._shard_blocks([record.layout for record in records])
            if needed and self._waiting[series] > needed:
                self._seal_series(series)

    def _seal_series(self, series: Series) -> None:
        """Seal all whole shards of one layer. Errors are logged, and sealing is tried again a shard later."""
        self._waiting[series] = 0
        try:
            keys = self._tail.keys(series.block(0), series.block(MAX_ITEM))
            # The newest block of a layer stays in the tail: it may be incomplete, which a store cannot know.
            for run in _neighbours(keys[:-1], lambda key, after: after.item == key.item + 1):
                self._seal_run(series, range(run[0].item, run[-1].item + 1))
            self._waiting[series] = len(self._tail.keys(series.block(0), series.block(MAX_ITEM)))
        except (MemstoreError, OSError) as error:
            logger.warning(
                "memory %s: blocks of document %d, layer %d could not be sealed, and stay in the tail: %s",
                self._path,
                series.document,
                series.layer,
                error,
            )

    def _shard_blocks(self, layouts: Sequence[Layout]) -> int:
        return blocks_per_shard(layouts, self._shard_bytes, joined=self._objects.joined)

    def _seal_run(self, series: Series, run: range) -> None:
        start = run.start
        while start < run.stop:
            layouts = _layouts(self._tail.get(series.block(start)))
            count = self._shard_blocks(layouts)
            if not count:
                start += 1
                continue
            if start + count > run.stop:
                return
            values = [self._tail.get(series.block(item)) or () for item in range(start, start + count)]
            other = next((number for number, value in enumerate(values) if _layouts(value) != layouts), None)
            if other is None:
                self._seal_shard(series, start, values)
            start += count if other is None else other

    def _seal_shard(self, series: Series, start: int, values: list[tuple[Record, ...]]) -> None:
        """Write one shard of each field, then let the manifest name it and the tail forget its blocks."""
        with self._tail.snapshot() as snapshot:
            extents = snapshot.extents(series)
            counters = snapshot.counters()
        layouts, joined = _layouts(values[0]), self._objects.joined
        wanted = start, len(values), layouts, joined
        old = next((e for e in extents if (e.stop, e.shard_blocks, e.layouts, e.joined) == wanted), None)
        if old is None:
            old = Extent(counters["next_extent"], series, start, len(values), 0, layouts, (), joined)
            counters["next_extent"] += 1
            self._objects.put(f"{old.folder}/zarr.json", [group_json()], durable=False)
        new, shard = old.grown(), old.shards
        parts = new.parts([[record.payload for record in value] for value in values])
        for number, (layout, payloads) in enumerate(zip(new.arrays, parts, strict=True)):
            self._objects.put(new.shard_path(number, shard), shard_object(payloads, len(values), layout.nbytes))
        write_arrays(self._objects, new)
        counters["bytes"] += new.shard_bytes
        sums = np.array([[checksum(record.payload.data) for record in value] for value in values], "<u8")
        puts: Puts = [
            (new.sums(shard), (Record(Layout("int64", sums.shape), sums.view(np.uint8).reshape(-1)),)),
            (series.manifest, (to_record([*(one for one in extents if one is not old), new]),)),
            (COUNTERS, (Record.from_json(counters),)),
        ]
        self._tail.commit([(series.block(start), series.block(start + len(values) - 1))], puts)


def write_arrays(objects: Objects, extent: Extent) -> None:
    """Write the ``zarr.json`` of the arrays of an extent: as long as its living blocks.

    They serve other tools, and are derived from the manifest.
    """
    # Not worth a sync, nor a new file for each deleted block: the manifest is the truth.
    for record, layout in enumerate(extent.arrays):
        values = array_json(layout, extent.blocks(), extent.shard_blocks, extent.facts(record))
        objects.put(f"{extent.folder}/{record}/zarr.json", [values], durable=False)


def _layouts(value: tuple[Record, ...] | None) -> tuple[Layout, ...]:
    return tuple(record.layout for record in value or ())


class Cut(NamedTuple):
    """An extent that loses blocks."""

    old: Extent
    new: Extent

    def dead_shards(self) -> set[int]:
        """Return the shards without living blocks."""
        return self.old.live_shards() - self.new.live_shards()


def cuts_of(batch: Batch, snapshot: Snapshot) -> list[Cut]:
    """Return the extents that lose blocks by ``batch``; rewritten blocks live in the tail from then on."""
    pairs = [
        Cut(extent, _without(extent, ranges))
        for series, ranges in _gone(batch, snapshot).items()
        for extent in snapshot.extents(series)
    ]
    return [cut for cut in pairs if cut.new != cut.old]


def manifest_changes(cuts: Sequence[Cut], snapshot: Snapshot) -> tuple[Deletes, Puts]:
    """Return the deletes and puts in the manifest, for the transaction of the batch."""
    deletes: Deletes = []
    puts: Puts = []
    after = {cut.old.number: cut.new for cut in cuts}
    counters = snapshot.counters()
    for series in sorted({cut.old.series for cut in cuts}):
        extents = [after.get(one.number, one) for one in snapshot.extents(series)]
        if left := [extent for extent in extents if extent.live]:
            puts.append((series.manifest, (to_record(left),)))
        else:
            deletes.append((series.manifest, series.manifest))
    for cut in cuts:
        dead = cut.dead_shards()
        deletes += [(cut.old.sums(shard), cut.old.sums(shard)) for shard in dead]
        counters["bytes"] -= len(dead) * cut.old.shard_bytes if dead else 0
    if deletes:
        puts.append((COUNTERS, (Record.from_json(counters),)))
    return deletes, puts


def _gone(batch: Batch, snapshot: Snapshot) -> dict[Series, list[tuple[int, int]]]:
    """Return ranges of blocks (both ends included) that are deleted or rewritten, by layer."""
    gone: dict[Series, list[tuple[int, int]]] = {}
    for first, last in batch.deletes:
        if first.table == Table.BLOCKS and first <= last:
            start, stop = Series(first.document, first.layer), Series(last.document, last.layer)
            for series in snapshot.series(start, stop):
                ends = (first.item if series == start else 0, last.item if series == stop else MAX_ITEM)
                gone.setdefault(series, []).append(ends)
    for key, _ in batch.puts:
        if key.table == Table.BLOCKS:
            gone.setdefault(Series(key.document, key.layer), []).append((key.item, key.item))
    return gone


def _without(extent: Extent, ranges: Iterable[tuple[int, int]]) -> Extent:
    for first, last in ranges:
        if first < extent.stop and last >= extent.first:
            extent = extent.without(first, last)
    return extent


class Garbage:
    """The objects to delete of the memory in the folder ``path``."""

    def __init__(self, path: Path, objects: Objects) -> None:
        self._path = path
        self._objects = objects
        self._garbage: list[str] = []  # objects, and folders with a slash at the end
        self.scans = 0
        """Running scans of this process."""

    def drop(self, cut: Cut) -> None:
        """Drop shards that the manifest does not name any more, and shorten the arrays that other tools see."""
        old, new = cut
        if not new.live:
            self._garbage.append(f"{old.folder}/")
            return
        dead = cut.dead_shards()
        self._garbage += shard_paths(old, dead)
        if dead or new.blocks() != old.blocks():
            self._try(lambda: write_arrays(self._objects, new), old.folder)

    def sweep(self) -> None:
        """Delete objects that no manifest names, unless a scan of this process is running."""
        if self.scans:
            return
        garbage, self._garbage = self._garbage, []
        for path in garbage:
            delete = self._objects.delete_folder if path.endswith("/") else self._objects.delete
            self._try(partial(delete, path.rstrip("/")), path)

    def _try(self, work: Callable[[], None], what: str) -> None:
        """Do work that may fail without harm: the first write after the next opening deletes the rest."""
        try:
            work()
        except (OSError, NotAMemory) as error:
            self._objects.doubtful = True
            logger.warning("memory %s: %s could not be updated: %s", self._path, what, error)

    def collect(self, named: set[str], names: set[str], strays: Sequence[str] = ()) -> None:
        """Delete the remains of an interrupted process: all ``names`` that are not ``named``; make groups.

        Delete ``strays`` too.
        """
        if "blocks/zarr.json" not in names:
            for path in ("zarr.json", "blocks/zarr.json"):
                self._try(partial(self._objects.put, path, [group_json()], durable=False), path)
        folders = {_folder(name) for name in named}
        for name in filter(OBJECT.fullmatch, names - named):
            whole = name.count("/") > 1 and _folder(name) not in folders
            self._garbage.append(f"{_folder(name)}/" if whole else name)
        self._garbage = sorted({*self._garbage, *strays})
        self.sweep()


def shard_paths(extent: Extent, shards: Iterable[int]) -> list[str]:
    """Return the objects of some shards of an extent."""
    return [extent.shard_path(record, shard) for shard in shards for record in range(len(extent.arrays))]


def _folder(path: str) -> str:
    """Return the folder of the extent that an object belongs to."""
    return "/".join(path.split("/")[:2])
