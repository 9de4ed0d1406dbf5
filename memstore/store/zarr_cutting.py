"""What a batch takes out of the sealed blocks of a memory in Zarr, and what the manifest says after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memstore.store import manifest
from memstore.store.checks import MAX_ITEM
from memstore.store.contract import Batch, Record, Table
from memstore.store.manifest import COUNTERS, Extent, Series
from memstore.store.tail import Cache, Deletes, Puts, Snapshot


class Cut(NamedTuple):
    """An extent that loses blocks."""

    old: Extent
    new: Extent

    def dead_shards(self) -> set[int]:
        """Shards in which nothing lives any more."""
        return self.old.live_shards() - self.new.live_shards()


def cuts_of(batch: Batch, snapshot: Snapshot, cache: Cache) -> list[Cut]:
    """The extents that lose blocks by ``batch``: what is written again lives in the tail from then on."""
    pairs = [
        Cut(extent, _without(extent, ranges))
        for series, ranges in _gone(batch, snapshot).items()
        for extent in snapshot.extents(series, cache)
    ]
    return [cut for cut in pairs if cut.new != cut.old]


def manifest_changes(cuts: Sequence[Cut], snapshot: Snapshot, cache: Cache) -> tuple[Deletes, Puts]:
    """What has to be deleted and put in the manifest, in the transaction of the batch."""
    deletes: Deletes = []
    puts: Puts = []
    after = {cut.old.number: cut.new for cut in cuts}
    counters = snapshot.counters()
    for series in sorted({cut.old.series for cut in cuts}):
        extents = [after.get(one.number, one) for one in snapshot.extents(series, cache)]
        if left := [extent for extent in extents if extent.live]:
            puts.append((series.manifest, (manifest.to_record(left),)))
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
