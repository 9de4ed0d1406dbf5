"""A store whose old blocks are Zarr arrays: any Zarr tool can read them, and object storage can hold them.

What is small or recent lies in an ``LmdbStore`` in the folder ``tail``: every table but BLOCKS, and the blocks of each
layer until there are enough of them, behind which another follows, for a whole shard of 4 to 16 MB. Then they are
*sealed*: the shard is written and synced first, and after it one transaction of the tail names it in the manifest and
deletes the blocks from the tail. A process that dies at any instruction leaves the blocks in one of the two places. A
shard is never written in part and never changed; what no manifest names does not exist.

Sealing is housekeeping: it comes after the commit of the batch that made it due, and when it fails (a full disk, say)
the blocks stay in the tail, where they are as safe, until it is tried again.
"""

from __future__ import annotations

import heapq
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import DamagedError, ForeignMemory, MemstoreError, NotAMemory, NotFound
from memstore.store import manifest
from memstore.store.checks import MAX_ITEM, check_batch, check_key, check_out, check_range, document_ranges
from memstore.store.contract import (
    Batch,
    BlockStore,
    Bytes,
    Capabilities,
    Compacted,
    Key,
    Layout,
    Progress,
    Record,
    Scanned,
    Table,
    beyond_limit,
)
from memstore.store.environment import DATA_NAME
from memstore.store.lmdb_values import used_bytes
from memstore.store.manifest import COUNTERS, Extent, Place, Series
from memstore.store.objects import FileObjects, Objects, Piece, ZarrObjects
from memstore.store.records import damaged
from memstore.store.shards import SHARD_BYTES, array_json, blocks_per_shard, group_json, shard_index, shard_object
from memstore.store.tail import Cache, Deletes, Puts, Snapshot, Tail

if TYPE_CHECKING:
    from zarr.abc.store import Store

TAIL_NAME = "tail"
_OWN_NAMES = {TAIL_NAME, "zarr.json", ".zarr.json.part", "blocks"}

logger = logging.getLogger(__name__)


class _Sealed(NamedTuple):
    """A sealed block that is wanted, and the rows it goes to."""

    key: Key
    place: Place
    sums: list[int]
    rows: list[memoryview]


class _Failed(NamedTuple):
    """A sealed block that could not be read."""

    sealed: _Sealed
    error: DamagedError


class _Cut(NamedTuple):
    """An extent that loses blocks."""

    old: Extent
    new: Extent

    def dead_shards(self) -> set[int]:
        """Shards in which nothing lives any more."""
        return self.old.live_shards() - self.new.live_shards()


class ZarrStore(BlockStore):
    """A store in the folder ``path``; made by ``create`` or ``open``.

    ``shards`` is a store of the ``zarr`` library for the arrays, such as an ``ObjectStore`` on object storage; without
    it they lie beside the tail. It is given each time the memory is opened.
    """

    capabilities = Capabilities(durable=True, shared=True)

    def __init__(self, path: Path, tail: Tail, objects: Objects, shard_bytes: int | None) -> None:
        """Not for callers: use ``create`` or ``open``."""
        self.path = path
        self.read_only = tail.read_only
        self._tail = tail
        self._objects = objects
        self._shard_bytes = SHARD_BYTES if shard_bytes is None else shard_bytes
        self._cache = Cache()
        self._writing = threading.RLock()
        self._waiting: dict[Series, int] = {}  # blocks in the tail, at most: those rewritten are counted twice
        self._garbage: list[str] = []  # objects, and folders with a slash at the end
        self._scans = 0
        self._close = weakref.finalize(self, _release, tail, objects)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        shards: Store | None = None,
        shard_bytes: int | None = None,
        blocks_per_value: int = 1,
        batch: Batch | None = None,
    ) -> Self:
        """Make a new memory folder and open it for writing.

        ``shard_bytes`` is how long shards of the largest field are, 8 MiB by default. ``blocks_per_value`` consecutive
        blocks of the tail share one LMDB value. ``batch`` is there when the memory is, or there is no memory.

        Raises what ``LmdbStore.create`` raises.
        """
        folder = _check_folder(Path(path))
        tail = Tail.create(folder / TAIL_NAME, blocks_per_value=blocks_per_value, batch=batch)
        return cls(folder, tail, _objects(folder, shards), shard_bytes)._started()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        shards: Store | None = None,
        shard_bytes: int | None = None,
        read_only: bool = False,
        check: bool = True,
    ) -> Self:
        """Open an existing memory folder; ``check`` as in ``LmdbStore.open``.

        Raises what ``LmdbStore.open`` raises, and ``ForeignMemory`` for the shards of another memory.
        """
        folder = Path(path)
        if not (folder / TAIL_NAME).is_dir():
            raise _no_memory(folder)
        tail = Tail.open(folder / TAIL_NAME, read_only=read_only, check=check)
        return cls(folder, tail, _objects(folder, shards), shard_bytes)._started()

    def write(self, batch: Batch) -> None:
        """Apply ``batch`` in one durable transaction, then seal what is due.

        Raises ``StoreFull``, ``ReadOnlyMemory``, ``InvalidArgument``, or ``DamagedError`` when values that have to be
        read for it are damaged. Nothing of the batch is visible then, and the store stays usable.
        """
        self._write(batch)

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        """Apply ``batch`` and as many of ``evictions`` as are needed, in one transaction. See ``BlockStore``."""
        evicted, cuts, rest = 0, list[_Cut](), iter(evictions)

        def evict(txn: Any) -> None:
            nonlocal evicted, rest
            waiting, rest = tee(rest)  # a transaction may be tried twice
            evicted, snapshot = 0, Snapshot(self._tail, txn)
            cuts.clear()
            while (used := snapshot.counters()["bytes"] + used_bytes(txn)) > max_bytes:
                eviction = next(waiting, None)
                if eviction is None:
                    raise beyond_limit(max_bytes, used)
                lost, deletes, puts = self._changes(eviction, snapshot)
                self._tail.apply(txn, deletes, puts)
                cuts.extend(lost)
                evicted += 1

        self._write(batch, evict, cuts)
        return evicted

    def _write(self, batch: Batch, then: Callable[[Any], None] | None = None, more: Sequence[_Cut] = ()) -> None:
        """Apply ``batch`` and what ``then`` does, which cuts ``more`` extents, in one transaction; seal what is due."""
        self._tail.check_writable()
        check_batch(batch)
        with self._writing:
            with self._tail.snapshot() as snapshot:
                cuts, deletes, puts = self._changes(batch, snapshot)
            self._tail.commit(deletes, puts, then)
            for cut in (*cuts, *more):
                self._drop(cut)
            self._sweep()
            self._seal_what_is_due(batch)

    def _changes(self, batch: Batch, snapshot: Snapshot) -> tuple[list[_Cut], Deletes, Puts]:
        """What ``batch`` does to the extents that ``snapshot`` shows, and to the tail with its manifest."""
        cuts = self._cuts(batch, snapshot)
        deletes, puts = self._manifest_changes(cuts, snapshot)
        return cuts, [*batch.deletes, *deletes], [*batch.puts, *puts]

    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        """Fill row ``i`` of each ``out[f]`` (uint8 ``[len(keys), layouts[f].nbytes]``): record ``f`` of ``keys[i]``.

        One snapshot, verified. Raises ``NotFound`` or ``DamagedError``.
        """
        check_out(keys, layouts, out)
        rows = [[field[row].data for field in out] for row in range(len(keys))]
        lost: _Failed | None = None
        while True:
            with self._tail.snapshot() as snapshot:
                sealed = self._read_tail(snapshot, keys, layouts, rows)
            failed = self._read_sealed(sealed)
            if failed is None:
                return
            # A writer may have deleted a shard after the snapshot. Then a newer manifest does not name it.
            if lost and (lost.sealed.key, lost.sealed.place) == (failed.sealed.key, failed.sealed.place):
                raise failed.error
            lost = failed

    def _read_tail(
        self, snapshot: Snapshot, keys: Sequence[Key], layouts: Sequence[Layout], rows: list[list[memoryview]]
    ) -> list[_Sealed]:
        """Fill the rows of what is not sealed; return what is."""
        sealed: list[_Sealed] = []
        unsealed: dict[int, Key] = {}
        extents: dict[Series, tuple[Extent, ...]] = {}
        for row, key in enumerate(keys):
            place = self._place(snapshot, key, extents)
            if place is None:
                unsealed[row] = key
            else:
                _check_sealed(key, place, layouts)
                sums = snapshot.sums(place.extent, place.shard, self._cache)[place.slot].tolist()
                sealed.append(_Sealed(key, place, sums, rows[row]))
        snapshot.read(unsealed, tuple(layouts), rows)
        return sealed

    def _place(self, snapshot: Snapshot, key: Key, known: dict[Series, tuple[Extent, ...]]) -> Place | None:
        if key.table != Table.BLOCKS:
            return None
        series = Series(key.document, key.layer)
        if series not in known:
            known[series] = snapshot.extents(series, self._cache)
        return manifest.find(known[series], key.item)

    def _read_sealed(self, sealed: list[_Sealed]) -> _Failed | None:
        """Fill the rows of sealed blocks: per shard and field one read for each row of neighbours, then checksums."""
        order = sorted(sealed, key=lambda one: (one.place.extent.number, one.place.shard, one.place.slot))
        pieces: list[Piece] = []
        blocks: list[list[_Sealed]] = []
        for run in _neighbours(order):
            for record in range(len(run[0].rows)):
                pieces.append(_piece(run, record))
                blocks.append(run)
        for problem, run in zip(self._objects.read(pieces), blocks, strict=True):
            if problem:
                return _Failed(run[0], damaged(run[0].key, problem))
        for one in order:
            for record, (row, expected) in enumerate(zip(one.rows, one.sums, strict=True)):
                if checksum(row) != expected:
                    path = one.place.extent.shard_path(record, one.place.shard)
                    what = f"the checksum of record {record} does not match (slot {one.place.slot} of shard {path})"
                    return _Failed(one, damaged(one.key, what))
        return None

    def get(self, key: Key) -> tuple[Record, ...] | None:
        """The verified records under ``key``, copied, or None. Raises ``DamagedError``."""
        check_key(key)
        while True:
            with self._tail.snapshot() as snapshot:
                place = self._place(snapshot, key, {})
            if place is None:
                return self._tail.get(key)
            out = [np.empty((1, layout.nbytes), np.uint8) for layout in place.extent.layouts]
            try:
                self.read([key], place.extent.layouts, out)
            except (NotFound, DamagedError):
                with self._tail.snapshot() as snapshot:
                    if self._place(snapshot, key, {}) == place:
                        raise
                continue  # it was replaced or deleted in the meantime
            return tuple(Record(layout, rows[0]) for layout, rows in zip(place.extent.layouts, out, strict=True))

    def keys(self, first: Key, last: Key) -> list[Key]:
        """Existing keys from ``first`` to ``last``, in order. Raises ``DamagedError``."""
        check_range(first, last)
        with self._tail.snapshot() as snapshot:
            found = snapshot.keys(first, last)
            if first.table != Table.BLOCKS:
                return found
            ends = Series(first.document, first.layer), Series(last.document, last.layer)
            sealed = [
                series.block(item)
                for series in snapshot.series(*ends)
                for extent in snapshot.extents(series, self._cache)
                for item in _items(extent)
            ]
        return sorted(found + [key for key in sealed if first <= key <= last])

    def scan(self) -> Iterator[Scanned]:
        """Every value of every table, in order, verified; damaged ones are reported, not raised."""
        self._scans += 1
        try:
            with self._tail.snapshot() as snapshot:
                yield from heapq.merge(snapshot.scan(), self._scan_sealed(snapshot), key=lambda scanned: scanned.key)
        finally:
            self._scans -= 1

    def _scan_sealed(self, snapshot: Snapshot) -> Iterator[Scanned]:
        for series in snapshot.all_series():
            try:
                extents = snapshot.extents(series, self._cache)
            except MemstoreError:
                continue  # the scan of the tail has met it
            places = ((item, extent.place(item)) for extent in extents for item in _items(extent))
            for item, place in sorted(places, key=lambda pair: pair[0]):
                if place and (scanned := self._scan_block(snapshot, series.block(item), place)):
                    yield scanned

    def _scan_block(self, snapshot: Snapshot, key: Key, place: Place) -> Scanned | None:
        """One sealed block, and with the first of a shard the shard's index; None for one that has been deleted."""
        layouts = place.extent.layouts
        rows = [np.empty(layout.nbytes, np.uint8) for layout in layouts]
        try:
            sums = snapshot.sums(place.extent, place.shard, self._cache)[place.slot].tolist()
        except MemstoreError as error:
            return Scanned(key, (), damaged(key, f"its checksums are lost ({error})"))
        failed = self._read_sealed([_Sealed(key, place, sums, [row.data for row in rows])])
        if failed is None and (place.slot == 0 or key.item in {start for start, _ in place.extent.live}):
            failed = self._check_index(_Sealed(key, place, sums, []))
        if failed is None:
            return Scanned(key, tuple(Record(*pair) for pair in zip(layouts, rows, strict=True)), None)
        with self._tail.snapshot() as newer:
            gone = self._place(newer, key, {}) != place
        return None if gone else Scanned(key, (), failed.error)

    def _check_index(self, sealed: _Sealed) -> _Failed | None:
        """What Zarr tools find blocks by; nothing here depends on it."""
        extent, shard, _ = sealed.place
        for record, layout in enumerate(extent.layouts):
            expected = shard_index(extent.shard_blocks, layout.nbytes)
            found = bytearray(len(expected))
            path = extent.shard_path(record, shard)
            piece = Piece(path, extent.shard_blocks * layout.nbytes, (memoryview(found),))
            (problem,) = self._objects.read([piece])
            if problem or found != expected:
                return _Failed(
                    sealed, damaged(sealed.key, problem or f"the index of its shard {path} is not as written")
                )
        return None

    def delete(self, document: int) -> None:
        """Delete everything of one document in one transaction; META belongs to the memory and stays."""
        self.write(Batch(deletes=document_ranges(document)))

    def sync(self) -> None:
        """Every commit is synced already; this asks the disk once more."""
        self._tail.sync()

    def size_bytes(self) -> int:
        """Bytes allocated on disk by the tail, and those of all shards that the manifest names."""
        return self._tail.size_bytes() + self._sealed_bytes()

    def used_bytes(self) -> int:
        """Bytes that the values of the tail take, and those of all shards that the manifest names."""
        return self._tail.used_bytes() + self._sealed_bytes()

    def compact(self, progress: Progress | None = None) -> Compacted:
        """Erase what deleted values have left in the tail, and in shards that they share with living ones.

        Shards of which nothing is alive are deleted at once anyway. Living blocks beside dead ones are written to the
        tail again, and from there into new shards when there are enough of them; so this takes the room of one shard
        at a time. Raises what ``LmdbStore.compact`` raises, ``StoreFull``, and ``DamagedError`` for a living block.
        """
        before = self._sealed_bytes() + self._tail.size_bytes()
        with self._writing:
            for extent in self._extents():
                for shard in sorted(extent.live_shards()):
                    self._leave(extent, shard)
        _, after = self._tail.compact(progress)
        return Compacted(before, after + self._sealed_bytes())

    def _extents(self) -> list[Extent]:
        with self._tail.snapshot() as snapshot:
            return [each for series in snapshot.all_series() for each in snapshot.extents(series, self._cache)]

    def _leave(self, extent: Extent, shard: int) -> None:
        """Move the living blocks of a shard to the tail, if there are dead ones in it; the shard is deleted then."""
        first = extent.first + shard * extent.shard_blocks
        living = [block for block in range(first, first + extent.shard_blocks) if extent.place(block)]
        if len(living) == extent.shard_blocks:
            return
        batch = Batch()
        for key in map(extent.series.block, living):
            batch.put(key, *(self.get(key) or ()))
        self._write(batch)

    def _sealed_bytes(self) -> int:
        with self._tail.snapshot() as snapshot:
            return int(snapshot.counters()["bytes"])

    def version(self) -> int:
        """Number of the last committed transaction, of whichever process. Sealing counts as one."""
        return self._tail.version()

    def close(self) -> None:
        """Release the tail and the right to write. Closing twice is allowed."""
        if self._close.alive and not self.read_only:
            self._sweep()
        self._close()

    def _cuts(self, batch: Batch, snapshot: Snapshot) -> list[_Cut]:
        """The extents that lose blocks by ``batch``: what is written again lives in the tail from then on."""
        pairs = [
            _Cut(extent, _without(extent, ranges))
            for series, ranges in _gone(batch, snapshot).items()
            for extent in snapshot.extents(series, self._cache)
        ]
        return [cut for cut in pairs if cut.new != cut.old]

    def _manifest_changes(self, cuts: list[_Cut], snapshot: Snapshot) -> tuple[Deletes, Puts]:
        """What has to be deleted and put in the manifest, in the transaction of the batch."""
        deletes: Deletes = []
        puts: Puts = []
        after = {cut.old.number: cut.new for cut in cuts}
        counters = snapshot.counters()
        for series in sorted({cut.old.series for cut in cuts}):
            extents = [after.get(one.number, one) for one in snapshot.extents(series, self._cache)]
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

    def _drop(self, cut: _Cut) -> None:
        """Let go of shards that the manifest does not name any more, and shorten the arrays that other tools see."""
        old, new = cut
        if not new.live:
            self._garbage.append(f"{old.folder}/")
            return
        dead = cut.dead_shards()
        self._garbage += _shard_paths(old, dead)
        if dead or new.blocks() != old.blocks():
            self._try(lambda: self._write_arrays(new), old.folder)

    def _sweep(self) -> None:
        """Delete what no manifest names, unless a scan of this process still goes through it."""
        if self._scans:
            return
        garbage, self._garbage = self._garbage, []
        for path in garbage:
            delete = self._objects.delete_folder if path.endswith("/") else self._objects.delete
            self._try(partial(delete, path.rstrip("/")), path)

    def _try(self, work: Callable[[], None], what: str) -> None:
        """Do what may fail without harm: the next opening for writing deletes what is left."""
        try:
            work()
        except OSError as error:
            logger.warning("memory %s: %s could not be brought up to date: %s", self.path, what, error)

    def _seal_what_is_due(self, batch: Batch) -> None:
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
                self.path,
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
        self._write_arrays(new)
        counters["bytes"] += new.shard_bytes
        sums = np.array([[checksum(record.payload.data) for record in value] for value in values], "<u8")
        puts: Puts = [
            (new.sums(shard), (Record(Layout("int64", sums.shape), sums.view(np.uint8).reshape(-1)),)),
            (series.manifest, (manifest.to_record([*(one for one in extents if one is not old), new]),)),
            (COUNTERS, (Record.from_json(counters),)),
        ]
        self._tail.commit([(series.block(start), series.block(start + len(values) - 1))], puts)

    def _write_arrays(self, extent: Extent) -> None:
        """Write the ``zarr.json`` of the arrays of an extent: as long as what is alive in it.

        They are for other tools, and follow from the manifest: so they are not worth a sync.
        """
        for record, layout in enumerate(extent.layouts):
            values = array_json(layout, extent.blocks(), extent.shard_blocks, extent.facts(record))
            self._objects.put(f"{extent.folder}/{record}/zarr.json", [values], durable=False)

    def _started(self) -> Self:
        """The store, once its shards are known to be its own."""
        try:
            self._check_owner()
        except BaseException:
            self.close()
            raise
        if not self.read_only:
            self._clean()
        return self

    def _check_owner(self) -> None:
        """Raise ``ForeignMemory`` unless the shards are those of this memory: others must not be touched."""
        with self._tail.snapshot() as snapshot:
            counters = snapshot.counters()
        owner = counters.get("owner")
        if isinstance(self._objects, FileObjects):
            if owner:
                raise ForeignMemory(f"the shards of memory {self.path} do not lie in it; open it with shards=...")
            return
        if owner is None and counters["next_extent"] == 1 and not self.read_only:
            self._claim(counters)
            return
        problem = owner and self._objects.read([Piece(f"owner.{owner}", 0, (memoryview(bytearray(1)),))])[0]
        if problem and not problem.endswith("is not there"):
            raise OSError(problem)
        if owner is None or problem:
            raise ForeignMemory(f"the shards that were given are not those of memory {self.path}; nothing was touched")

    def _claim(self, counters: dict[str, Any]) -> None:
        """Make shards that lie elsewhere this memory's own, before the first of them is written."""
        if next(self._objects.names("blocks"), None):
            raise ForeignMemory("the shards that were given belong to another memory; choose an empty place")
        counters["owner"] = uuid.uuid4().hex
        self._objects.put(f"owner.{counters['owner']}", [b"\n"])
        self._tail.commit([], [(COUNTERS, (Record.from_json(counters),))])

    def _clean(self) -> None:
        """Delete what an interrupted process left, which is what the manifest does not name; make what it lacks."""
        try:
            named = self._named()
            names = set(self._objects.names("blocks"))
        except (MemstoreError, OSError) as error:  # what cannot be told from garbage stays
            logger.warning("memory %s was not cleaned of what an interruption may have left: %s", self.path, error)
            return
        if "blocks/zarr.json" not in names:
            for path in ("zarr.json", "blocks/zarr.json"):
                self._try(partial(self._objects.put, path, [group_json()], durable=False), path)
        folders = {_folder(name) for name in named}
        for name in names - named:
            self._garbage.append(name if _folder(name) in folders else f"{_folder(name)}/")
        self._garbage = sorted(set(self._garbage))
        self._sweep()

    def _named(self) -> set[str]:
        """Every object that there should be below ``blocks``. Raises ``DamagedError``."""
        named = {"blocks/zarr.json"}
        with self._tail.snapshot() as snapshot:
            for series in snapshot.all_series():
                for extent in snapshot.extents(series, self._cache):
                    named.update(_shard_paths(extent, extent.live_shards()))
                    named.add(f"{extent.folder}/zarr.json")
                    named.update(f"{extent.folder}/{record}/zarr.json" for record in range(len(extent.layouts)))
        return named


def _release(tail: Tail, objects: Objects) -> None:
    objects.close()
    tail.close()


def _objects(folder: Path, shards: Store | None) -> Objects:
    return FileObjects(folder) if shards is None else ZarrObjects(shards)


def _check_folder(folder: Path) -> Path:
    """Accept a folder that is not there, is empty, or holds what an interrupted creation left."""
    if folder.is_dir() and (strange := sorted({file.name for file in folder.iterdir()} - _OWN_NAMES)):
        if DATA_NAME in strange:
            raise NotAMemory(f"{folder} holds a memory in LMDB; open it without zarr:, or choose another folder")
        raise NotAMemory(f"{folder} is not empty (it has {strange[0]}); choose a folder of its own for the memory")
    return folder


def _no_memory(folder: Path) -> MemstoreError:
    """The error for a folder without a tail."""
    if not folder.exists():
        return NotFound(f"there is no memory at {folder}; create one, or check the path")
    if folder.is_dir():
        try:
            _check_folder(folder)
        except NotAMemory as error:
            return error
        return NotFound(f"{folder} holds no memory in Zarr, or its creation was interrupted; create it")
    return NotAMemory(f"{folder} is a file; a memory is a folder, choose another path")


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


def _shard_paths(extent: Extent, shards: Iterable[int]) -> list[str]:
    return [extent.shard_path(record, shard) for shard in shards for record in range(len(extent.layouts))]


def _folder(path: str) -> str:
    """The folder of the extent that an object belongs to."""
    return "/".join(path.split("/")[:2])


def _items(extent: Extent) -> Iterator[int]:
    return (item for start, stop in extent.live for item in range(start, stop))


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


def _neighbours(order: list[_Sealed]) -> Iterator[list[_Sealed]]:
    """Sealed blocks in order of their places, those side by side together."""
    run: list[_Sealed] = []
    for one in order:
        if run and not _follows(run[-1].place, one.place):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _follows(before: Place, after: Place) -> bool:
    return (before.extent.number, before.shard, before.slot + 1) == (after.extent.number, after.shard, after.slot)


def _piece(run: list[_Sealed], record: int) -> Piece:
    """The bytes of one field of neighbours."""
    extent, shard, slot = run[0].place
    start = slot * extent.layouts[record].nbytes
    return Piece(extent.shard_path(record, shard), start, tuple(one.rows[record] for one in run))


def _check_sealed(key: Key, place: Place, layouts: Sequence[Layout]) -> None:
    """Raise ``DamagedError`` unless a sealed block is of these layouts."""
    if place.extent.layouts != tuple(layouts):
        raise damaged(key, f"it holds {list(place.extent.layouts)}, and {list(layouts)} was expected")
