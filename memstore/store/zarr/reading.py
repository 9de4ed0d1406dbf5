"""Reading the sealed blocks of a memory in Zarr: where the manifest says they are, verified by its checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import DamagedError, MemstoreError
from memstore.store.records import Key, Layout, Record, ScannedValue, Table, damaged
from memstore.store.zarr.extents import Extent, Place, Series, find_place, shard_index
from memstore.store.zarr.objects import Objects, RangeRead
from memstore.store.zarr.tail import ManifestCache, Snapshot, Tail


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
        self.cache = ManifestCache()
        """What was read of the manifest."""

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
                sums = snapshot.sums(place.extent, place.shard, self.cache)[place.slot].tolist()
                sealed.append(BlockRead(key, place, sums, rows[row]))
        snapshot.read(unsealed, tuple(layouts), rows)
        return sealed

    def place(self, snapshot: Snapshot, key: Key, known: dict[Series, tuple[Extent, ...]]) -> Place | None:
        """Where a sealed block lies, None for what is not sealed; ``known`` are extents that were looked up before."""
        if key.table != Table.BLOCKS:
            return None
        series = Series(key.document, key.layer)
        if series not in known:
            known[series] = snapshot.extents(series, self.cache)
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
                extents = snapshot.extents(series, self.cache)
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
            sums = snapshot.sums(place.extent, place.shard, self.cache)[place.slot].tolist()
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
