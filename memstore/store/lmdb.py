"""The store on disk: one LMDB environment in a folder. One process writes, any number read, none waits.

A batch is one LMDB transaction, synced to disk before ``write`` returns. LMDB never overwrites a page that a committed
transaction refers to, so a process that dies at any instruction leaves the last commit whole, and recovery is nothing.
``docs/format.md`` describes every byte; this folder's files ``records.py`` and ``runs.py`` implement it.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import tee
from pathlib import Path
from shlex import quote
from typing import Any, Self

import lmdb
import numpy as np

from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    NotAMemory,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
)
from memstore.store import environment as environments
from memstore.store import paging, runs, tree
from memstore.store.checks import MAX_DOCUMENT, check_batch, check_key, check_out, check_range, document_ranges
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
from memstore.store.environment import DATA_NAME, MAP_BYTES, Environment
from memstore.store.pages import erase_unused
from memstore.store.records import (
    HEADER_BYTES,
    ValueReader,
    damaged,
    decode_value,
    describe,
    encode_value,
    value_reader,
)
from memstore.store.space import Reserve, free_bytes
from memstore.store.writer import WriterLock

FORMAT = 1
TAIL_FORMAT = 1001
"""Of the LMDB part of a memory in Zarr, which is no memory by itself: every LmdbStore refuses it."""
STORE_KEY = Key(Table.META, MAX_DOCUMENT + 1)
"""Where the store keeps its own facts, as JSON: out of reach of callers, for no document can have this number."""

READER_PATIENCE = 10.0
"""Seconds that ``compact`` waits for those who still read an older commit."""

_SMALL_BYTES = 64 << 10  # a batch that deletes and writes no more than this may use the reserve
_KEY = struct.Struct(">BIIQ")  # table, document, layer, item; big-endian: bytes sort as keys do
_PIECE_BYTES = 8 << 20  # verified at a time where values are copied on to arrays of the caller
_ATTEMPTS = 5
_Txn = Any  # lmdb.Transaction[memoryview]: generic in the stubs only
_Deletes = Sequence[tuple[Key, Key]]
_Puts = Sequence[tuple[Key, tuple[Record, ...]]]


class LmdbStore(BlockStore):
    """A store in the folder ``path``; made by ``create`` or ``open``. Several in one process may share a folder."""

    capabilities = Capabilities(durable=True, shared=True)
    _format = FORMAT

    def __init__(self, environment: Environment, writer: WriterLock | None) -> None:
        """Not for callers: use ``create`` or ``open``."""
        self.path = environment.folder
        self.read_only = writer is None
        self._environment = environment
        self._env = environment.env
        self._lengths = [1] * len(Table)  # items per LMDB value, by table
        self._waits = True  # the last read had to wait for the disk, so the next one probably will
        self._reserve = None if writer is None else Reserve(self.path)
        self._close = weakref.finalize(self, _release, environment, writer)

    @classmethod
    def create(
        cls, path: str | Path, *, blocks_per_value: int = 1, batch: Batch | None = None, map_bytes: int = MAP_BYTES
    ) -> Self:
        """Make a new memory folder and open it for writing.

        ``blocks_per_value`` consecutive blocks share one LMDB value. ``batch`` is written in the transaction that makes
        the memory exist: after a kill there is either nothing, which can be created again, or all of it.

        Raises ``InvalidArgument`` if there is a memory already, ``NotAMemory`` if the folder holds something else,
        ``MemoryInUse``, ``ReadOnlyMemory`` or ``StoreFull``.
        """
        if blocks_per_value < 1:
            raise InvalidArgument(f"blocks_per_value is a positive number of blocks, not {blocks_per_value}")
        folder = _make_folder(Path(path))
        writer = WriterLock(folder)
        store = cls._attach(folder, writer, create=True, map_bytes=map_bytes)
        try:
            store._initialise(blocks_per_value, batch or Batch())
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False, map_bytes: int = MAP_BYTES, check: bool = True) -> Self:
        """Open an existing memory folder. ``check=False`` does not look whether its tree is damaged, see ``tree.py``.

        Raises ``NotFound`` (nothing there, or its creation was interrupted: it can be created), ``NotAMemory``,
        ``ForeignMemory``, ``DamagedError``, and for writing ``MemoryInUse`` or ``ReadOnlyMemory``.
        """
        folder = Path(path)
        environments.check_exists(folder)
        writer = None if read_only else WriterLock(folder)
        store = cls._attach(folder, writer, create=False, map_bytes=map_bytes)
        try:
            if check and (what := store._tree_problem()):
                if not environments.looks_like_ours(folder):
                    raise NotAMemory(f"{folder} holds an LMDB environment of something else, not a memory")
                raise DamagedError(
                    f"memory {folder} is damaged: the pages that lead to its values are not those of a last commit "
                    f"({what}). None of it was used. "
                    f"To save what can be read: memstore repair {quote(cls._url(folder))} --to NEW"
                )
            store._read_facts()
            if store._reserve:
                store._env.reader_check()  # frees the slots of readers that died
                store._reserve.keep(store.used_bytes())
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def _url(cls, folder: Path) -> str:
        """What to call the memory that lies in ``folder``."""
        return str(folder)

    @classmethod
    def _attach(cls, folder: Path, writer: WriterLock | None, *, create: bool, map_bytes: int) -> Self:
        try:
            environment = environments.acquire(folder, create=create, map_bytes=map_bytes)
            if writer and environment.read_only:
                environments.release(environment)
                raise ReadOnlyMemory(
                    f"the files of memory {folder} cannot be written, or could not when this process first opened it; "
                    "close it and open it again, or use mode='r'"
                )
            return cls(environment, writer)
        except BaseException:
            if writer:
                writer.release()
            raise

    def _initialise(self, blocks_per_value: int, batch: Batch) -> None:
        if self._raw(STORE_KEY) is not None:
            raise InvalidArgument(f"{self.path} holds a memory already; open it, or choose another folder")
        if self._env.stat()["entries"]:
            raise self._without_facts()
        check_batch(batch)
        self._lengths[Table.BLOCKS] = blocks_per_value
        self._commit(batch.deletes, [(STORE_KEY, (self._facts(),)), *batch.puts])
        for folder in (self.path, self.path.absolute().parent):
            environments.sync_folder(folder)

    def _read_facts(self) -> None:
        value = self._raw(STORE_KEY)
        if value is None:
            raise self._without_facts()
        facts = decode_value(memoryview(value), 0, STORE_KEY)[0][0].to_json()
        if facts["format"] != self._format:
            raise self._other_format(facts["format"])
        self._lengths[Table.BLOCKS] = facts["blocks_per_value"]

    def _other_format(self, number: int) -> ForeignMemory:
        if number == TAIL_FORMAT:
            return ForeignMemory(f"{self.path} is a part of a memory in Zarr; open that as zarr:{self.path.parent}")
        return ForeignMemory(f"memory {self.path} was written by a newer memstore (format {number}); upgrade")

    def _tree_problem(self) -> str | None:
        """What is wrong with the pages that lead to the values, or None."""
        for _ in range(_ATTEMPTS):
            with self._env.begin() as txn:
                transaction = txn.id()
                what = tree.problem(self.path / DATA_NAME, transaction, self._env.stat()["psize"], _KEY.size)
            # A reader that may not even lock can be overtaken by a writer; then it looks again.
            if what is None or self.version() == transaction:
                return what
        return None

    def _without_facts(self) -> NotFound | NotAMemory:
        if self._env.stat()["entries"]:
            return NotAMemory(f"{self.path} holds an LMDB environment of something else, not a memory")
        return environments.unfinished(self.path)

    @property
    def blocks_per_value(self) -> int:
        """How many consecutive blocks share one LMDB value."""
        return self._lengths[Table.BLOCKS]

    def write(self, batch: Batch) -> None:
        """Apply ``batch`` in one durable transaction.

        Raises ``StoreFull``, ``ReadOnlyMemory``, ``InvalidArgument``, or ``DamagedError`` when blocks that share a
        value with what is written are damaged. Nothing of the batch is visible then, and the store stays usable.
        """
        self._check_writable()
        check_batch(batch)
        self._commit(batch.deletes, batch.puts)

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        """Apply ``batch`` and as many of ``evictions`` as are needed, in one transaction. See ``BlockStore``."""
        self._check_writable()
        check_batch(batch)
        evicted, rest = 0, iter(evictions)

        def evict(txn: _Txn) -> None:
            nonlocal evicted, rest
            waiting, rest = tee(rest)  # a transaction may be tried twice
            evicted = 0
            while (used := used_bytes(txn)) > max_bytes:
                eviction = next(waiting, None)
                if eviction is None:
                    raise beyond_limit(max_bytes, used)
                self._apply(txn, eviction.deletes, eviction.puts)
                evicted += 1

        self._commit(batch.deletes, batch.puts, evict)
        return evicted

    def _commit(self, deletes: _Deletes, puts: _Puts, then: Callable[[_Txn], None] | None = None) -> None:
        """One transaction: the changes, and what ``then`` does after them."""
        needed = sum(HEADER_BYTES + record.payload.nbytes for _, records in puts for record in records)
        try:
            self._attempt(deletes, puts, then, needed)
        except StoreFull:
            if not deletes or needed > _SMALL_BYTES or not (self._reserve and self._reserve.give()):
                raise
            self._attempt(deletes, puts, then, needed)
        finally:
            if self._reserve and self._close.alive:
                self._reserve.keep(self.used_bytes())

    def _attempt(self, deletes: _Deletes, puts: _Puts, then: Callable[[_Txn], None] | None, needed: int) -> None:
        if needed > _SMALL_BYTES:
            self._check_room(needed)
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                self._apply(txn, deletes, puts)
                if then:
                    then(txn)
        except lmdb.Error as error:
            raise self._failure(error, needed) from error

    def _apply(self, txn: _Txn, deletes: _Deletes, puts: _Puts) -> None:
        changes: dict[Key, dict[int, tuple[Key, tuple[Record, ...]]]] = {}
        for key, records in puts:
            changes.setdefault(self._run(key), {})[key.item] = (key, records)
        for first, last in deletes:
            self._delete_range(txn, first, last)
        for run in sorted(changes):
            self._put_run(txn, run, changes[run])

    def _check_room(self, needed: int) -> None:
        """Raise ``StoreFull`` before anything is written, where it can be known: free space, and what the file has."""
        try:
            free = free_bytes(self.path)
            spare = (self.path / environments.DATA_NAME).stat().st_blocks * 512 - self.used_bytes()
        except OSError:
            return  # then LMDB finds out
        if needed > free + max(spare, 0):
            raise environments.full(self.path, f"{needed:,} bytes are needed, the disk has {free:,}")

    def _put_run(self, txn: _Txn, run: Key, changes: dict[int, tuple[Key, tuple[Record, ...]]]) -> None:
        """Write values of one run, keeping its other items."""
        values: dict[int, bytes] = {}
        if self._lengths[run.table] > 1 and (old := txn.get(_pack(run))):
            values = runs.split(old, run, self._lengths[run.table], without=changes)
        for item, (key, records) in changes.items():
            values[item] = encode_value(key, records)
        self._replace(txn, run, values)

    def _replace(self, txn: _Txn, run: Key, values: dict[int, bytes]) -> None:
        if values:
            txn.put(_pack(run), b"".join(values[item] for item in sorted(values)))
        else:
            txn.delete(_pack(run))

    def _delete_range(self, txn: _Txn, first: Key, last: Key) -> None:
        """Delete the runs inside the range; of runs that its ends cut through, keep the rest."""
        if first > last:
            return  # nothing lies between them, and a run that both cut through must not lose what is outside
        cut = {run for run in (self._run(first), self._run(last)) if run < first or self._run_end(run) > last}
        for run in cut:
            self._trim(txn, run, first, last)
        stop, whole = _pack(self._run(last)), self._run(last) not in cut
        with txn.cursor() as cursor:
            cursor.set_range(_pack(first))
            while (raw := bytes(cursor.key())) and (raw < stop or (whole and raw == stop)):
                cursor.delete()

    def _trim(self, txn: _Txn, run: Key, first: Key, last: Key) -> None:
        """Delete the items of one run that lie in the range."""
        if old := txn.get(_pack(run)):
            self._replace(txn, run, runs.outside(old, run, self._lengths[run.table], first, last))

    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        """Fill row ``i`` of each ``out[f]`` (uint8 ``[len(keys), layouts[f].nbytes]``): record ``f`` of ``keys[i]``.

        One snapshot, verified. Raises ``NotFound`` or ``DamagedError``.
        """
        self._check_open()
        check_out(keys, layouts, out)
        reader = value_reader(tuple(layouts))
        step = max(1, _PIECE_BYTES // max(1, reader.size))
        with self._reading() as txn:
            for start in range(0, len(keys), step):
                piece = slice(start, start + step)
                for rows, payloads in zip(out, reader.payloads(self._take(txn, keys[piece], reader)), strict=True):
                    rows[piece] = payloads

    def gather(self, keys: Sequence[Key], layouts: Sequence[Layout]) -> list[Bytes]:
        """Record ``f`` of each of ``keys``, uint8 ``[len(keys), layouts[f].nbytes]``: views of one array of values.

        One snapshot, one pass, one copy, verified. Raises ``NotFound`` or ``DamagedError``.
        """
        self._check_open()
        reader = value_reader(tuple(layouts))
        try:  # written out: ``_reading`` would take a twentieth of a gather
            with self._env.begin(buffers=True) as txn:
                values = self._take(txn, keys, reader)
        except lmdb.Error as error:
            raise self._failure(error) from error
        self._waits = paging.waited()
        return reader.payloads(values)

    @contextmanager
    def _reading(self) -> Iterator[_Txn]:
        """A transaction to read in; notes whether the disk was waited for."""
        try:
            with self._env.begin(buffers=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise self._failure(error) from error
        self._waits = paging.waited()

    def _take(self, txn: _Txn, keys: Sequence[Key], reader: ValueReader) -> Bytes:
        """Copies of values, one to each row ``[len(keys), reader.size]``, verified."""
        values = np.empty((len(keys), reader.size), np.uint8)
        single = max(self._lengths) == 1
        places = [_KEY.pack(*key) for key in keys] if single else [_pack(self._run(key)) for key in keys]
        if self._waits:
            self._fetch(txn, dict(sorted(zip(places, keys, strict=True))))
        flat, size, find, holds = values.reshape(-1).data, reader.size, txn.get, reader.holds
        for at, place, key in zip(range(0, len(flat), size), places, keys, strict=True):
            view = find(place)
            if view is None or len(view) != size:
                view = self._part(view, key, reader)
            copy = flat[at : at + size]
            copy[:] = view
            if not holds(copy, key):
                reader.explain(self._part(find(place), key, reader), 0, key)
        return values

    def _part(self, view: memoryview | None, key: Key, reader: ValueReader) -> memoryview:
        """What the LMDB value ``view`` has of ``key``: as many bytes as there should be, yet to be verified."""
        length = self._lengths[key.table]
        start: int | None = 0
        if view is not None and length > 1:
            start = runs.find(view, key, runs.run_start(key, length), length, reader)
        if view is None or start is None:
            raise NotFound(f"there is no {describe(key)} in memory {self.path}")
        if len(view) < start + reader.size or (length == 1 and len(view) > reader.size):
            reader.explain(view, start, key)
        return view[start : start + reader.size]

    def _fetch(self, txn: _Txn, values: Mapping[bytes, Key]) -> None:
        """Let the disk bring all values at once; read one after the other, each would wait for the one before it.

        Also turns an I/O error into one of ours: met in the map, it would end the process.
        """
        with txn.cursor() as cursor:
            # Unlike a transaction's ``get``, a cursor does not touch the pages of what it finds.
            places = [(values[bytes(raw)], *_place(value)) for raw, value in cursor.getmulti(values)]
        for _, address, length in places:
            paging.will_need(address, length)
        for key, address, length in places:
            if not paging.bring(address, length):
                raise damaged(key, "the disk failed to read it (I/O error)")

    def get(self, key: Key) -> tuple[Record, ...] | None:
        """The verified records under ``key``, copied, or None. Raises ``DamagedError``."""
        self._check_open()
        check_key(key)
        value = self._raw(self._run(key))
        if value is None:
            return None
        view = memoryview(value)
        start = next((entry.start for entry in self._entries(view, self._run(key)) if entry.key == key), None)
        return None if start is None else decode_value(view, start, key)[0]

    def checksums(self, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        """See ``BlockStore``: those of the headers, which are verified; the payloads are not read."""
        found: dict[Key, tuple[int, ...]] = {}
        with self._reading() as txn:
            for run in dict.fromkeys(map(self._run, keys)):
                value = txn.get(_pack(run))
                if value is not None:
                    found |= runs.checksums(memoryview(value), run, self._lengths[run.table])
        if missing := [key for key in keys if key not in found]:
            raise NotFound(f"there is no {describe(missing[0])}")
        return [found[key] for key in keys]

    def keys(self, first: Key, last: Key) -> list[Key]:
        """Existing keys from ``first`` to ``last``, in order. Raises ``DamagedError``."""
        self._check_open()
        check_range(first, last)
        try:
            with self._env.begin(buffers=True) as txn:
                return self._keys(txn, first, last)
        except lmdb.Error as error:
            raise self._failure(error) from error

    def _keys(self, txn: _Txn, first: Key, last: Key) -> list[Key]:
        found: list[Key] = []
        with txn.cursor() as cursor:
            valid = cursor.set_range(_pack(self._run(first)))
            while valid and (run := _unpack(cursor.key())) <= last:
                found += [run] if self._lengths[run.table] == 1 else self._items(cursor.value(), run)
                valid = cursor.next()
        return [key for key in found if first <= key <= last]

    def scan(self) -> Iterator[Scanned]:
        """Every value of every table in one snapshot, in order, verified; damaged ones are reported, not raised.

        The walk goes from leaf to leaf, a read goes down from the root: a value that a read would not find is damaged
        too. Damage of the tree as a whole is reported under ``STORE_KEY``.
        """
        self._check_open()
        if what := self._tree_problem():
            yield Scanned(STORE_KEY, (), DamagedError(f"the tree of memory {self.path} is damaged: {what}"))
        try:
            with self._env.begin(buffers=True) as txn:
                yield from self._scan(txn)
        except lmdb.Error as error:
            raise self._failure(error) from error

    def _scan(self, txn: _Txn) -> Iterator[Scanned]:
        run, before, met = Key(Table.META), b"", 0
        try:
            with txn.cursor() as cursor:
                for raw, value in cursor:
                    run = _unpack(raw)
                    lost = _lost(txn, before, bytes(raw), value)
                    before, met = bytes(raw), met + 1
                    for scanned in runs.scan(value, run, self._lengths[run.table]):
                        if lost:
                            yield Scanned(scanned.key, (), scanned.damage or damaged(scanned.key, lost))
                        elif scanned.key != STORE_KEY or scanned.damage:
                            yield scanned
                if met != (entries := txn.stat()["entries"]):
                    what = f"the tree of memory {self.path} is damaged: {met} of its {entries} values can be reached"
                    yield Scanned(STORE_KEY, (), DamagedError(what))
        except (lmdb.Error, struct.error, ValueError) as error:
            yield Scanned(run, (), damaged(run, f"behind it the tree cannot be walked: {error}"))

    def delete(self, document: int) -> None:
        """Delete everything of one document in one transaction; META belongs to the memory and stays."""
        self.write(Batch(deletes=document_ranges(document)))

    def sync(self) -> None:
        """Every commit is synced already; this asks the disk once more."""
        self._check_open()
        if not self._environment.read_only:
            self._env.sync(True)

    def size_bytes(self) -> int:
        """Bytes allocated on disk by the files of the folder."""
        self._check_open()
        return sum(map(_allocated, self.path.iterdir()))

    def used_bytes(self) -> int:
        """Bytes of the pages that the values of the last commit lie on."""
        self._check_open()
        with self._env.begin() as txn:
            return used_bytes(txn)

    def compact(self, progress: Progress | None = None) -> Compacted:
        """Erase what deleted values have left in the file, in place, and give the space back: see ``pages.py``.

        Readers go on; those that began two commits ago or earlier are waited for. Raises ``MemoryInUse`` where they do
        not end, ``DamagedError`` where the file is not understood, ``ReadOnlyMemory`` and ``StoreFull``.
        """
        self._check_writable()
        before = self.size_bytes()
        for _ in range(2):  # so that neither of the last two commits has what was deleted before
            self._commit([(STORE_KEY, STORE_KEY)], [(STORE_KEY, (self._facts(),))])
        try:
            with self._env.begin(write=True) as txn:  # nothing changes now
                self._wait_for_readers(txn.id() - 2)
                self._erase(progress)
        except lmdb.Error as error:
            raise self._failure(error) from error
        if self._reserve:
            self._reserve.keep(self.used_bytes())
        return Compacted(before, self.size_bytes())

    def _wait_for_readers(self, oldest: int) -> None:
        """Return when nobody reads a commit before ``oldest``."""
        until = time.monotonic() + READER_PATIENCE
        while late := self._readers_before(oldest):
            if time.monotonic() > until:
                raise MemoryInUse(
                    f"nothing was erased: process {late[0]} has been reading an older state of memory {self.path} for "
                    f"more than {READER_PATIENCE:g} seconds; let it finish, then compact again"
                )
            time.sleep(0.01)
            self._env.reader_check()

    def _readers_before(self, oldest: int) -> list[int]:
        """Processes that read a commit before ``oldest``."""
        lines = [line.split() for line in self._env.readers().splitlines()]
        rows = [line for line in lines if len(line) == 3 and line[0].isdigit() and line[2].isdigit()]
        return [int(pid) for pid, _, commit in rows if int(commit) < oldest]

    def _erase(self, progress: Progress | None) -> None:
        try:
            handle = os.open(self.path / environments.DATA_NAME, os.O_RDWR | os.O_CLOEXEC)
            try:
                erase_unused(handle, progress)
            finally:
                os.close(handle)
        except OSError as error:
            if isinstance(error, DamagedError):
                raise
            raise DamagedError(
                f"memory {self.path} could not be compacted ({error.strerror}); what is stored is whole, but bytes of "
                "what was deleted are still in the file. Check the disk, then compact again"
            ) from error

    def _facts(self) -> Record:
        return Record.from_json({"format": self._format, "blocks_per_value": self.blocks_per_value})

    def version(self) -> int:
        """Number of the last committed transaction, of whichever process."""
        self._check_open()
        # Not env.info(): while a commit is under way it names the new transaction already, and reads still see the old.
        with self._env.begin() as txn:
            return int(txn.id())

    def close(self) -> None:
        """Release the environment and the right to write. Closing twice is allowed."""
        self._close()

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise ReadOnlyMemory(f"memory {self.path} is open for reading only; open it with mode='a' to write")

    def _check_open(self) -> None:
        if not self._close.alive:
            raise InvalidArgument(f"this store of memory {self.path} is closed; open the memory again")
        self._environment.check_process()

    def _raw(self, run: Key) -> bytes | None:
        try:
            with self._env.begin() as txn:
                return txn.get(_pack(run))
        except lmdb.Error as error:
            raise self._failure(error) from error

    def _run(self, key: Key) -> Key:
        return runs.run_start(key, self._lengths[key.table])

    def _run_end(self, run: Key) -> Key:
        return run._replace(item=run.item + self._lengths[run.table] - 1)

    def _entries(self, view: memoryview, run: Key) -> Iterator[runs.Entry]:
        return runs.entries(view, run, self._lengths[run.table])

    def _items(self, view: memoryview, run: Key) -> list[Key]:
        return [entry.key for entry in self._entries(view, run)]

    def _failure(self, error: lmdb.Error, needed: int = 0) -> Exception:
        """The error to raise for one of LMDB's; ``needed`` are the bytes that were to be written."""
        if not self._close.alive:
            return InvalidArgument(f"this store of memory {self.path} was closed while it was in use")
        # LMDB reports a write that was cut short as EIO, and a nearly full disk cuts writes short.
        if needed and error.code == errno.EIO and not environments.has_room(self.path, needed):
            return environments.full(self.path, "the disk took only part of it")
        return environments.translate(error, self.path)


def _pack(key: Key) -> bytes:
    return _KEY.pack(*key)


def used_bytes(txn: _Txn) -> int:
    """Bytes of the pages of the tree of values, as this transaction sees it."""
    stat = txn.stat()
    return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))


def _unpack(raw: memoryview) -> Key:
    table, document, layer, item = _KEY.unpack(raw)
    return Key(Table(table), document, layer, item)


def _lost(txn: _Txn, before: bytes, raw: bytes, value: memoryview) -> str | None:
    """Why reads will not find the value that a walk met at key ``raw``, after key ``before``; None if they will."""
    if raw <= before:
        return "its key is out of order"
    found = txn.get(raw)
    # Both views are of the map, so the same place is the same bytes.
    return None if found is not None and _place(found) == _place(value) else "the tree does not lead to it"


def _place(view: memoryview) -> tuple[int, int]:
    """Address and length in bytes."""
    return np.asarray(view).__array_interface__["data"][0], view.nbytes


def _release(environment: Environment, writer: WriterLock | None) -> None:
    environments.release(environment)
    if writer:
        writer.release()


def _make_folder(folder: Path) -> Path:
    """Make the folder, or accept one that is empty or holds what an interrupted creation left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = environments.strangers(folder)
    except (FileExistsError, NotADirectoryError):
        raise NotAMemory(f"{folder} is a file; a memory is a folder, choose another path") from None
    except OSError as error:
        raise ReadOnlyMemory(f"memory {folder} cannot be created ({error.strerror}); choose another folder") from None
    if strange:
        raise NotAMemory(f"{folder} is not empty (it has {strange[0]}); choose a folder of its own for the memory")
    return folder


def _allocated(path: Path) -> int:
    """Bytes on disk of a file, 0 for anything else, and for what has left since it was listed."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return 0
    return facts.st_blocks * 512 if stat.S_ISREG(facts.st_mode) else 0
