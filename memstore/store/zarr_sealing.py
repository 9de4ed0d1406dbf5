"""Sealing: blocks of a layer leave the tail for a shard of their own, as soon as there are enough of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import MemstoreError
from memstore.store import manifest
from memstore.store.checks import MAX_ITEM
from memstore.store.contract import Batch, Layout, Record, Table
from memstore.store.manifest import COUNTERS, Extent, Series
from memstore.store.objects import Objects
from memstore.store.shards import array_json, blocks_per_shard, group_json, shard_object
from memstore.store.tail import Cache, Puts, Tail

logger = logging.getLogger(__name__)


class Sealer:
    """Seals what the tail of the memory in the folder ``path`` has too much of. Whoever calls it holds its lock."""

    def __init__(self, path: Path, tail: Tail, objects: Objects, cache: Cache, shard_bytes: int) -> None:
        self._path = path
        self._tail = tail
        self._objects = objects
        self._cache = cache
        self._shard_bytes = shard_bytes
        self._waiting: dict[Series, int] = {}  # blocks in the tail, at most: those rewritten are counted twice

    def what_is_due(self, batch: Batch) -> None:
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
            needed = blocks_per_shard([record.layout for record in records], self._shard_bytes)
            if needed and self._waiting[series] > needed:
                self._seal_series(series)

    def _seal_series(self, series: Series) -> None:
        """Seal all whole shards of one layer. What goes wrong is said in the log, and tried again a shard later."""
        self._waiting[series] = 0
        try:
            keys = self._tail.keys(series.block(0), series.block(MAX_ITEM))
            for run in _runs([key.item for key in keys[:-1]]):  # the newest block may be written again
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

    def _seal_run(self, series: Series, run: range) -> None:
        start = run.start
        while start < run.stop:
            layouts = _layouts(self._tail.get(series.block(start)))
            count = blocks_per_shard(layouts, self._shard_bytes)
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
            extents = snapshot.extents(series, self._cache)
            counters = snapshot.counters()
        layouts = _layouts(values[0])
        old = next((extent for extent in extents if _continues(extent, start, len(values), layouts)), None)
        if old is None:
            old = Extent(counters["next_extent"], series, start, len(values), 0, layouts, ())
            counters["next_extent"] += 1
            self._objects.put(f"{old.folder}/zarr.json", [group_json()], durable=False)
        new, shard = old.grown(), old.shards
        for record in range(len(layouts)):
            payloads = [value[record].payload for value in values]
            self._objects.put(new.shard_path(record, shard), shard_object(payloads))
        write_arrays(self._objects, new)
        counters["bytes"] += new.shard_bytes
        sums = np.array([[checksum(record.payload.data) for record in value] for value in values], "<u8")
        puts: Puts = [
            (new.sums(shard), (Record(Layout("int64", sums.shape), sums.view(np.uint8).reshape(-1)),)),
            (series.manifest, (manifest.to_record([*(one for one in extents if one is not old), new]),)),
            (COUNTERS, (Record.from_json(counters),)),
        ]
        self._tail.commit([(series.block(start), series.block(start + len(values) - 1))], puts)


def write_arrays(objects: Objects, extent: Extent) -> None:
    """Write the ``zarr.json`` of the arrays of an extent: as long as what is alive in it.

    They are for other tools, and follow from the manifest: so they are not worth a sync.
    """
    for record, layout in enumerate(extent.layouts):
        values = array_json(layout, extent.blocks(), extent.shard_blocks, extent.facts(record))
        objects.put(f"{extent.folder}/{record}/zarr.json", [values], durable=False)


def _layouts(value: tuple[Record, ...] | None) -> tuple[Layout, ...]:
    return tuple(record.layout for record in value or ())


def _continues(extent: Extent, start: int, blocks: int, layouts: tuple[Layout, ...]) -> bool:
    """Whether a shard of ``blocks`` blocks from block ``start`` on is the next one of this extent."""
    return (extent.stop, extent.shard_blocks, extent.layouts) == (start, blocks, layouts)


def _runs(items: list[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    start = 0
    for stop in range(1, len(items) + 1):
        if stop == len(items) or items[stop] != items[stop - 1] + 1:
            yield range(items[start], items[stop - 1] + 1)
            start = stop
