"""How blocks come to shards and leave them: sealing, what a batch cuts out of extents, and sweeping what is left.

Blocks of a layer leave the tail for a shard of their own as soon as there are enough of them. Objects that no manifest
names any more are deleted, at the latest when the memory is next opened to write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import MemstoreError, NotAMemory
from memstore.store.records import MAX_ITEM, Batch, Layout, Record, Table
from memstore.store.zarr.extents import (
    COUNTERS,
    OBJECT,
    Extent,
    Series,
    array_json,
    blocks_per_shard,
    group_json,
    shard_object,
    to_record,
)
from memstore.store.zarr.objects import Objects
from memstore.store.zarr.tail import Deletes, Puts, Snapshot, Tail

logger = logging.getLogger(__name__)


class Sealer:
    """Seals what the tail of the memory in the folder ``path`` has too much of. Whoever calls it holds its lock."""

    def __init__(self, path: Path, tail: Tail, objects: Objects, shard_bytes: int) -> None:
        self._path = path
        self._tail = tail
        self._objects = objects
        self._shard_bytes = shard_bytes
        self._waiting: dict[Series, int] = {}  # blocks in the tail, at most: those rewritten are counted twice

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
        """Seal all whole shards of one layer. What goes wrong is said in the log, and tried again a shard later."""
        self._waiting[series] = 0
        try:
            keys = self._tail.keys(series.block(0), series.block(MAX_ITEM))
            # The newest block of a layer stays in the tail: it may be incomplete, and a store cannot know.
            for run in _runs([key.item for key in keys[:-1]]):
                self._seal_run(series, run)
            self._waiting[series] = len(self._tail.keys(series.block(0), series.block(MAX_ITEM)))
        except (MemstoreError, OSError) as error:
            logger.warning(
                "memory %s: blocks of document %d, layer %d were not sealed and stay in the tail: %s",
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
        old = next((extent for extent in extents if _continues(extent, start, len(values), layouts, joined)), None)
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
    """Write the ``zarr.json`` of the arrays of an extent: as long as what is alive in it.

    They are for other tools, and follow from the manifest.
    """
    # Not worth a sync, nor a new file for each block that leaves: the manifest is the truth.
    for record, layout in enumerate(extent.arrays):
        values = array_json(layout, extent.blocks(), extent.shard_blocks, extent.facts(record))
        objects.put(f"{extent.folder}/{record}/zarr.json", [values], durable=False)


def _layouts(value: tuple[Record, ...] | None) -> tuple[Layout, ...]:
    return tuple(record.layout for record in value or ())


def _continues(extent: Extent, start: int, blocks: int, layouts: tuple[Layout, ...], joined: bool) -> bool:
    """Whether a shard of ``blocks`` blocks from block ``start`` on is the next one of this extent."""
    return (extent.stop, extent.shard_blocks, extent.layouts, extent.joined) == (start, blocks, layouts, joined)


def _runs(items: list[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    start = 0
    for stop in range(1, len(items) + 1):
        if stop == len(items) or items[stop] != items[stop - 1] + 1:
            yield range(items[start], items[stop - 1] + 1)
            start = stop


class Cut(NamedTuple):
    """An extent that loses blocks."""

    old: Extent
    new: Extent

    def dead_shards(self) -> set[int]:
        """Shards in which nothing lives any more."""
        return self.old.live_shards() - self.new.live_shards()


def cuts_of(batch: Batch, snapshot: Snapshot) -> list[Cut]:
    """The extents that lose blocks by ``batch``: what is written again lives in the tail from then on."""
    pairs = [
        Cut(extent, _without(extent, ranges))
        for series, ranges in _gone(batch, snapshot).items()
        for extent in snapshot.extents(series)
    ]
    return [cut for cut in pairs if cut.new != cut.old]


def manifest_changes(cuts: Sequence[Cut], snapshot: Snapshot) -> tuple[Deletes, Puts]:
    """What has to be deleted and put in the manifest, in the transaction of the batch."""
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
    """Ranges of blocks (both ends included) that are deleted or written again, by layer."""
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
    """What is to be deleted among the objects of the memory in the folder ``path``."""

    def __init__(self, path: Path, objects: Objects) -> None:
        self._path = path
        self._objects = objects
        self._garbage: list[str] = []  # objects, and folders with a slash at the end
        self.scans = 0
        """Scans of this process that are under way."""

    def drop(self, cut: Cut) -> None:
        """Let go of shards that the manifest does not name any more, and shorten the arrays that other tools see."""
        old, new = cut
        if not new.live:
            self._garbage.append(f"{old.folder}/")
            return
        dead = cut.dead_shards()
        self._garbage += shard_paths(old, dead)
        if dead or new.blocks() != old.blocks():
            self._try(lambda: write_arrays(self._objects, new), old.folder)

    def sweep(self) -> None:
        """Delete what no manifest names, unless a scan of this process still goes through it."""
        if self.scans:
            return
        garbage, self._garbage = self._garbage, []
        for path in garbage:
            delete = self._objects.delete_folder if path.endswith("/") else self._objects.delete
            self._try(partial(delete, path.rstrip("/")), path)

    def _try(self, work: Callable[[], None], what: str) -> None:
        """Do what may fail without harm: the next opening for writing deletes what is left."""
        try:
            work()
        except (OSError, NotAMemory) as error:
            self._objects.doubtful = True
            logger.warning("memory %s: %s could not be brought up to date: %s", self._path, what, error)

    def collect(self, named: set[str], names: set[str], strays: Sequence[str] = ()) -> None:
        """Delete what an interrupted process left: of ``names``, what the manifest has not ``named``; make groups.

        ``strays`` are deleted too.
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
    """The objects of some shards of an extent."""
    return [extent.shard_path(record, shard) for shard in shards for record in range(len(extent.arrays))]


def _folder(path: str) -> str:
    """The folder of the extent that an object belongs to."""
    return "/".join(path.split("/")[:2])
