"""A store whose old blocks are Zarr arrays: any Zarr tool can read them, and object storage can hold them.

Small and recent values are in an ``LmdbStore`` in the folder ``tail``: every table except BLOCKS, and recent blocks.
When the blocks of a layer fill a whole shard of 4 to 16 MB, and another block follows, they are *sealed*: the shard is
written and synced first. After it, one transaction of the tail names it in the manifest and deletes the blocks from the
tail. A process that dies at any instruction leaves the blocks in one of the two places. A shard is never written in
part and never changed. If no manifest names a shard, it does not exist.

Sealing is housekeeping: it comes after the commit of the batch that made it due. If it fails (on a full disk, say), the
blocks stay in the tail, where they are as safe, until the next try.
"""

from __future__ import annotations

import heapq
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any, Self

import numpy as np

from memstore import paths
from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
)
from memstore.store.contract import BlockStore, Capabilities, Compaction, Progress, evict
from memstore.store.encryption_keys import KEYS_NAME, keys_of_documents
from memstore.store.lmdb.environment import DATA_NAME
from memstore.store.lmdb.values import used_bytes
from memstore.store.records import (
    Batch,
    Bytes,
    Key,
    Layout,
    Record,
    ScannedValue,
    Table,
    check_batch,
    check_key,
    check_out,
    check_range,
)
from memstore.store.zarr.extents import COUNTERS, SHARD_BYTES, Extent, Series
from memstore.store.zarr.objects import READS_AHEAD, BucketObjects, FileObjects, Objects, RangeRead, absent
from memstore.store.zarr.published import NOTE, Publisher, last_version
from memstore.store.zarr.tail import (
    Cut,
    Deletes,
    Failure,
    Garbage,
    Puts,
    SealedBlocks,
    Sealer,
    Snapshot,
    Tail,
    cuts_of,
    items,
    manifest_changes,
    shard_paths,
)

TAIL_NAME = "tail"
_OWN_NAMES = {TAIL_NAME, "zarr.json", "blocks", NOTE, "published", KEYS_NAME}
_OWN_NAMES |= {f".{name}.part" for name in ("zarr.json", NOTE, KEYS_NAME)}

logger = logging.getLogger(__name__)


class ZarrStore(BlockStore):
    """A store in the folder ``path``; made by ``create`` or ``open``.

    ``shards`` is another folder for the arrays, which exists, or a bucket. Without it the arrays lie beside the tail.
    Pass it each time the memory is opened.
    """

    capabilities = Capabilities(durable=True)

    def __init__(self, path: Path, tail: Tail, objects: Objects, shard_bytes: int | None) -> None:
        """Not for callers: use ``create`` or ``open``."""
        self.path = path
        self.read_only = tail.read_only
        self._tail = tail
        self._objects = objects
        self._sealed = SealedBlocks(tail, objects)
        self._sealer = Sealer(path, tail, objects, SHARD_BYTES if shard_bytes is None else shard_bytes)
        self._garbage = Garbage(path, objects)
        self._writing = threading.RLock()
        self._publisher: Publisher | None = None
        if isinstance(objects, BucketObjects):
            self.capabilities = replace(self.capabilities, reads_ahead=READS_AHEAD)
            self._publisher = None if self.read_only else Publisher(path, objects)
        self._overtaken: MemoryInUse | None = None
        self._unclean = False
        """Whether objects of interrupted processes may exist, until the first write has looked for them."""
        self._close = weakref.finalize(self, _release, tail, objects)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        shards: Objects | Path | None = None,
        shard_bytes: int | None = None,
        blocks_per_value: int = 1,
        tokens_per_value: int = 1,
        batch: Batch | Callable[[], Batch] | None = None,
        url: str | None = None,
    ) -> Self:
        """Make a new memory folder and open it for writing.

        ``shard_bytes`` is the length of shards of the largest field, 8 MiB by default. ``blocks_per_value`` and
        ``tokens_per_value`` apply to the tail. Errors call the memory ``url``, as in ``LmdbStore.create``. The memory
        exists with ``batch``, or not at all.

        Raises what ``LmdbStore.create`` raises, and ``DamagedError`` for shards whose tail is missing.
        """
        folder = _check_folder(Path(path))
        paths.check_names(folder)
        _check_tail(folder)
        tail = Tail.create(
            folder / TAIL_NAME,
            blocks_per_value=blocks_per_value,
            tokens_per_value=tokens_per_value,
            batch=batch,
            url=url or f"zarr:{folder}",
        )
        store = cls(folder, tail, _objects(folder, shards), shard_bytes)._started()
        store._clean()
        return store

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        shards: Objects | Path | None = None,
        shard_bytes: int | None = None,
        read_only: bool = False,
        check: bool = True,
        url: str | None = None,
    ) -> Self:
        """Open an existing memory folder; ``check`` and ``url`` as in ``LmdbStore.open``.

        Raises what ``LmdbStore.open`` raises, and ``ForeignMemory`` for the shards of another memory.
        """
        folder = Path(path)
        if not (folder / TAIL_NAME).is_dir():
            _check_tail(folder)
            raise _no_memory(folder)
        paths.check_names(folder)
        _check_tail(folder)
        tail = Tail.open(folder / TAIL_NAME, read_only=read_only, check=check, url=url or f"zarr:{folder}")
        return cls(folder, tail, _objects(folder, shards), shard_bytes)._started()

    def write(self, batch: Batch) -> None:
        """Apply ``batch`` in one durable transaction, then seal what is due.

        Raises ``StoreFull``, ``ReadOnlyMemory``, ``InvalidArgument``, or ``DamagedError`` if values that it must read
        are damaged. Then no part of the batch is visible, and the store stays usable.
        """
        self._write(batch)

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        # A transaction may be tried twice: with the room of the reserve, it repeats its evictions.
        evicted, cuts, tries = 0, list[Cut](), iter(tee(evictions))

        def make_room(txn: Any) -> None:
            nonlocal evicted
            # From the open transaction: each eviction uses the manifest that the previous one left.
            snapshot = Snapshot(self._tail, txn)
            cuts.clear()

            def apply(eviction: Batch) -> None:
                lost, deletes, puts = self._changes(eviction, snapshot)
                self._tail.changes.apply(txn, deletes, puts)
                cuts.extend(lost)

            evicted = evict(next(tries), max_bytes, lambda: snapshot.counters()["bytes"] + used_bytes(txn), apply)

        self._write(batch, make_room, cuts)
        return evicted

    def _write(self, batch: Batch, then: Callable[[Any], None] | None = None, more: Sequence[Cut] = ()) -> None:
        """Apply ``batch`` and ``then``, which cuts ``more`` extents, in one transaction; then seal due blocks."""
        self._tail.check_writable()
        check_batch(batch)
        if self._overtaken:
            raise self._overtaken
        with self._writing:
            with self._tail.snapshot() as snapshot:
                cuts, deletes, puts = self._changes(batch, snapshot)
            self._tail.commit(deletes, puts, then)
            if self._unclean:
                self._clean()
            for cut in (*cuts, *more):
                self._garbage.drop(cut)
            if self._publisher is None:
                self._garbage.sweep()
            self._sealer.seal_due(batch)
            if self._publisher and self._publisher.due(self._tail.version()):
                self._publish_soon()

    def _changes(self, batch: Batch, snapshot: Snapshot) -> tuple[list[Cut], Deletes, Puts]:
        """Return the changes by ``batch`` to the extents in ``snapshot``, and to the tail with its manifest."""
        cuts = cuts_of(batch, snapshot)
        deletes, puts = manifest_changes(cuts, snapshot)
        return cuts, [*batch.deletes, *deletes], [*batch.puts, *puts]

    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        check_out(keys, layouts, out)
        rows = [[field[row].data for field in out] for row in range(len(keys))]
        lost: Failure | None = None
        while True:
            with self._tail.snapshot() as snapshot:
                sealed = self._sealed.from_tail(snapshot, keys, layouts, rows)
            failure = self._sealed.fill(sealed)
            if failure is None:
                return
            # A writer may have deleted a shard after the snapshot. Then a newer manifest does not name it.
            if lost and (lost.read.key, lost.read.place) == (failure.read.key, failure.read.place):
                raise failure.error
            lost = failure

    def get(self, key: Key) -> tuple[Record, ...] | None:
        check_key(key)
        while True:
            with self._tail.snapshot() as snapshot:
                place = self._sealed.place(snapshot, key, {})
                if place is None:  # read here: after this transaction, another process may seal the block
                    return snapshot.get(key)
            out = [np.empty((1, layout.nbytes), np.uint8) for layout in place.extent.layouts]
            try:
                self.read([key], place.extent.layouts, out)
            except (NotFound, DamagedError):
                with self._tail.snapshot() as snapshot:
                    if self._sealed.place(snapshot, key, {}) == place:
                        raise
                continue  # it was replaced or deleted in the meantime
            return tuple(Record(layout, rows[0]) for layout, rows in zip(place.extent.layouts, out, strict=True))

    def keys(self, first: Key, last: Key) -> list[Key]:
        check_range(first, last)
        with self._tail.snapshot() as snapshot:
            found = snapshot.keys(first, last)
            if first.table != Table.BLOCKS:
                return found
            ends = Series(first.document, first.layer), Series(last.document, last.layer)
            sealed = [
                series.block(item)
                for series in snapshot.series(*ends)
                for extent in snapshot.extents(series)
                for item in items(extent)
            ]
        return sorted(found + [key for key in sealed if first <= key <= last])

    def walk(self, first: Key, last: Key) -> Iterator[tuple[Key, tuple[Record, ...]]]:
        return super().walk(first, last) if first.table == Table.BLOCKS else self._tail.walk(first, last)

    def scan(self) -> Iterator[ScannedValue]:
        self._garbage.scans += 1
        try:
            with self._tail.snapshot() as snapshot:
                yield from heapq.merge(snapshot.scan(), self._sealed.scan(snapshot), key=lambda scanned: scanned.key)
        finally:
            self._garbage.scans -= 1

    def sync(self) -> None:
        """Sync once more, although every commit is synced already, and publish a memory in a bucket.

        Raises ``MemoryInUse`` if another writer has published, ``MemstoreError`` if the bucket is not reachable.
        """
        self._tail.sync()
        self._publish()

    def _publish(self, *, prune: bool = False) -> None:
        """Publish the last commit to other computers, then delete objects that no version names any more."""
        if self._publisher is None:
            return
        with self._writing:
            try:
                self._publisher.publish(self._tail.version(), prune=prune)
            except MemoryInUse as error:
                self._overtaken = error
                raise
            except OSError as error:
                if isinstance(error, MemstoreError):
                    raise
                raise MemstoreError(
                    f"memory {self.path} was not published ({error}). Your commits are safe on this disk. They "
                    "are published when the memory is next opened here for writing",
                    memory=self.path,
                ) from error
            self._garbage.sweep()

    def _publish_soon(self) -> None:
        """Publish beside other work: errors are logged, and the next write raises those that must stop it."""
        try:
            self._publish()
        except MemstoreError as error:
            logger.warning("%s", error)

    def size_bytes(self) -> int:
        return self._tail.size_bytes() + self._sealed_bytes()

    def used_bytes(self) -> int:
        return self._tail.used_bytes() + self._sealed_bytes()

    def compact(self, progress: Progress | None = None) -> Compaction:
        """Erase the remains of deleted values in the tail, and in shards that also have living ones.

        Shards without living blocks are always deleted at once. Living blocks beside dead ones are written to the tail
        again, and from there into new shards when they are enough. So this needs space for one shard at a time. Raises
        what ``LmdbStore.compact`` raises, ``StoreFull``, and ``DamagedError`` for a living block.
        """
        before = self._sealed_bytes() + self._tail.size_bytes()
        with self._writing:
            with self._tail.snapshot() as snapshot:
                extents = [each for series in snapshot.all_series() for each in snapshot.extents(series)]
            for extent in extents:
                for shard in sorted(extent.live_shards()):
                    self._leave(extent, shard)
            _, after = self._tail.compact(progress)
            self._publish(prune=True)
        return Compaction(before, after + self._sealed_bytes())

    def _leave(self, extent: Extent, shard: int) -> None:
        """If a shard has dead blocks, move its living ones to the tail and delete the shard."""
        first = extent.first + shard * extent.shard_blocks
        living = [block for block in range(first, first + extent.shard_blocks) if extent.place(block)]
        # A shard with a single dead block is deleted too: forgotten states must not stay. The living blocks are a batch
        # like any other, so a kill leaves a whole memory, and new shards follow automatically.
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
        return self._tail.version()

    def close(self) -> None:
        try:
            if self._close.alive and not self.read_only:
                self._publish()
                self._garbage.sweep()
                if self._publisher and not self._unclean:
                    self._publisher.close()
        finally:
            self._close()

    def _started(self) -> Self:
        """Return the store, once its shards are known to belong to it."""
        try:
            self._check_owner()
        except BaseException:
            self._close()
            raise
        # Listing a bucket takes a request for each thousand shards, so a place that was left clean is not listed.
        if not self.read_only and not (self._publisher and self._publisher.swept()):
            self._unclean = True
            self._publish_soon()
        return self

    def _check_owner(self) -> None:
        """Raise ``ForeignMemory`` unless the shards belong to this memory: others must not be touched."""
        with self._tail.snapshot() as snapshot:
            counters = snapshot.counters()
        owner = counters.get("owner")
        if not self._objects.elsewhere:
            if owner:
                raise ForeignMemory(f"the shards of memory {self.path} are stored elsewhere; pass shards=...")
            return
        if owner is None and counters["next_extent"] == 1 and not self.read_only:
            self._claim(counters)
            return
        if owner is None or not self._owned(owner, fresh=counters["next_extent"] == 1):
            raise ForeignMemory(
                f"these shards do not belong to memory {self.path}; nothing was changed. Pass the right shards="
            )

    def _owned(self, owner: str, *, fresh: bool) -> bool:
        """Return whether the place of the shards belongs to this memory; a ``fresh`` one has sealed none yet."""
        if isinstance(self._objects, BucketObjects) and (version := last_version(self._objects)):
            if self._publisher and version.owner == owner:
                self._publisher.found(version, owner)
            return version.owner == owner
        if isinstance(self._objects, BucketObjects) and fresh:  # its creator was killed before claiming the place
            if self._publisher:
                self._publisher.claim(owner)
            return True
        problem = self._objects.read([RangeRead(f"owner.{owner}", 0, (memoryview(bytearray(1)),))])[0]
        if problem and problem != absent(f"owner.{owner}"):
            raise OSError(problem)
        if self._publisher and not problem:
            self._publisher.found(None, owner)
        return not problem

    def _claim(self, counters: dict[str, Any]) -> None:
        """Claim the place of shards elsewhere for this memory, before the first shard is written."""
        if next(self._objects.names("blocks"), None):
            raise ForeignMemory("these shards belong to another memory; choose an empty place")
        owned = {**counters, "owner": uuid.uuid4().hex}
        if self._publisher is None:
            self._objects.put(f"owner.{owned['owner']}", [b"\n"])
        self._tail.commit([], [(COUNTERS, (Record.from_json(owned),))])
        if self._publisher:
            try:
                self._publisher.claim(owned["owner"])
            except BaseException:
                self._tail.commit([], [(COUNTERS, (Record.from_json(counters),))])
                raise

    def _clean(self) -> None:
        """Delete the objects of interrupted processes, which the manifest does not name; make missing ones.

        Not when the memory is opened: its tail may be an older copy, put here by mistake.
        """
        self._unclean = self._objects.doubtful = False
        try:
            self._publish()  # first, because the version that others read may name objects that this manifest does not
            named = self._named()
            names = set(self._objects.names("blocks"))
            strays = self._publisher.strays(self._objects.names("tail")) if self._publisher else []
        except (MemstoreError, OSError) as error:  # keep objects that may not be garbage
            self._objects.doubtful = True
            logger.warning("memory %s: remains of an interruption could not be removed: %s", self.path, error)
            return
        self._garbage.collect(named, names, strays)

    def _named(self) -> set[str]:
        """Return every object that should exist below ``blocks``. Raises ``DamagedError``."""
        named = {"blocks/zarr.json"}
        with self._tail.snapshot() as snapshot:
            for series in snapshot.all_series():
                for extent in snapshot.extents(series):
                    named.update(shard_paths(extent, extent.live_shards()))
                    named.add(f"{extent.folder}/zarr.json")
                    named.update(f"{extent.folder}/{record}/zarr.json" for record in range(len(extent.arrays)))
        return named


def _release(tail: Tail, objects: Objects) -> None:
    objects.close()
    tail.close()


def _objects(folder: Path, shards: Objects | Path | None) -> Objects:
    if isinstance(shards, Path):
        paths.check_names(shards)
        return FileObjects(shards, elsewhere=True)
    if shards is not None and not isinstance(shards, Objects):
        raise InvalidArgument(f"shards must be a folder (a Path) or BucketObjects, not {type(shards).__name__}")
    return FileObjects(folder) if shards is None else shards


def _check_folder(folder: Path) -> Path:
    """Accept a folder that is missing, empty, or the remains of an interrupted creation."""
    if folder.is_dir() and (strange := sorted({file.name for file in folder.iterdir()} - _OWN_NAMES)):
        if DATA_NAME in strange:
            raise NotAMemory(f"{folder} holds a memory in LMDB; open it without zarr:, or choose another folder")
        raise NotAMemory(f"{folder} is not empty (it contains {strange[0]}); choose an empty folder for the memory")
    return folder


def _check_tail(folder: Path) -> None:
    """Raise ``DamagedError`` for shards or keys without their tail: a new memory would delete them."""
    # A half-copied folder looks like this; an interrupted creation never leaves it.
    if (folder / TAIL_NAME / DATA_NAME).exists():
        return
    if (shards := any(each.is_dir() for each in (folder / "blocks").glob("*"))) or keys_of_documents(folder):
        raise DamagedError(
            f"memory zarr:{folder} has {'blocks in shards' if shards else 'keys'}, but {TAIL_NAME}/{DATA_NAME}, which "
            "lists them, was deleted or not copied. Nothing was changed. Restore it from a copy, or choose another "
            "folder for a new memory",
            memory=f"zarr:{folder}",
            remedy="restore",
        )


def _no_memory(folder: Path) -> MemstoreError:
    """Return the error for a folder without a tail."""
    if not folder.exists():
        return NotFound(f"there is no memory at {folder}: check the path, or create one (memstore read TEXT MEMORY)")
    if folder.is_dir():
        try:
            _check_folder(folder)
        except NotAMemory as error:
            return error
        return NotFound(f"{folder} has no memory in Zarr, or its creation was interrupted; create it")
    return NotAMemory(f"{folder} is a file; a memory is a folder. Choose another path")
