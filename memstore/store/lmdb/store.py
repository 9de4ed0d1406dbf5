"""The store on disk: one LMDB environment in a folder. One process writes, any number read, none waits.

A batch is one LMDB transaction, synced to disk before ``write`` returns. LMDB never overwrites a page that a committed
transaction refers to, so a process that dies at any instruction leaves the last commit whole. No recovery is needed.
``docs/format.md`` describes every byte; ``records.py`` and ``values.py`` implement it.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import tee
from pathlib import Path
from shlex import quote
from typing import Any, Self

import lmdb

from memstore import paths
from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    ReadOnlyMemory,
    StoreFull,
)
from memstore.json_checks import fit, table, whole
from memstore.store.contract import BlockStore, Capabilities, Compaction, Progress, evict
from memstore.store.lmdb import environment as environments
from memstore.store.lmdb import pages
from memstore.store.lmdb.environment import DATA_NAME, RESERVE_NAME, Environment, WriterLock
from memstore.store.lmdb.values import (
    KEY_BYTES,
    STORE_KEY,
    Changes,
    Deletes,
    Heads,
    Naming,
    Puts,
    Transaction,
    Values,
    used_bytes,
)
from memstore.store.records import (
    HEADER_BYTES,
    MAX_ITEM,
    Batch,
    Bytes,
    Key,
    Layout,
    Numbers,
    Record,
    ScannedValue,
    Table,
    check_batch,
    check_key,
    check_out,
    check_range,
    decode_value,
    encode_value,
    value_reader,
)

FORMATS = 1, 2, 3
"""Formats that can be read and written; new memories use the last one."""
TAIL_FORMATS = 1001, 1002, 1003
"""The same for the LMDB part of a Zarr memory, which is no memory by itself: every LmdbStore refuses it."""
_ITEMS = whole(1, MAX_ITEM + 1)
FACTS = table(
    {"commit": whole(), "checks": whole(), "tokens_per_value": _ITEMS}, format=whole(), blocks_per_value=_ITEMS
)
READER_PATIENCE = 10.0
"""Seconds that ``compact`` waits for readers of an older commit."""

_SMALL_BYTES = 64 << 10  # a batch that deletes and writes no more than this may use the reserve
_PIECE_BYTES = 8 << 20  # verified at a time when values are copied into the caller's arrays
_LEAST_RESERVED, _MOST_RESERVED = 256 << 10, 64 << 20  # bytes
_SHARE_RESERVED = 256  # of the bytes of the values; a deleted page of 4 KiB is noted with 8 bytes
_PAGE_BYTES = 4096


class LmdbStore(BlockStore):
    """A store in the folder ``path``; made by ``create`` or ``open``. Several in one process may share a folder."""

    capabilities = Capabilities(durable=True, reads_rows=True)
    _formats = FORMATS

    def __init__(self, environment: Environment, writer: WriterLock | None, url: str) -> None:
        self.path = environment.folder
        self.url = url
        self.read_only = writer is None
        self._environment = environment
        self._env = environment.env
        self._naming = Naming()
        self._use_format(self._formats[-1])
        self.values = Values(self.path, self._naming)
        """Reads of values in a transaction; for stores that are built on this one."""
        damage = partial(_tree_damage, self._env, self.path, url)  # not a method, which would never be released
        heads = Heads(environment.data_file, self._env.stat()["psize"], damage)
        self.changes = Changes(self._naming, heads)
        """Changes of values in a transaction, such as that of ``commit``; for stores that are built on this one."""
        self._checked = (-1, 0)  # number of the last commit written here, and its sum of checks
        self._waits = True  # the last read waited for the disk, so the next one probably will
        self._reserve = None if writer is None else _Reserve(self.path)
        self._close = weakref.finalize(self, _release, environment, writer)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        blocks_per_value: int = 1,
        tokens_per_value: int = 1,
        batch: Batch | Callable[[], Batch] | None = None,
        url: str | None = None,
    ) -> Self:
        """Make a new memory folder and open it for writing.

        ``blocks_per_value`` consecutive blocks share one LMDB value, and so do the token ids of ``tokens_per_value`` of
        them. ``batch`` is written in the transaction that makes the memory exist: after a kill the memory exists whole
        or not at all, and can then be created again. If it is a function, it is called once nobody else can make a
        memory there. Errors call the memory ``url`` instead of the path, if it is given.

        Raises ``InvalidArgument`` if there is a memory already, ``NotAMemory`` if the folder holds something else,
        ``MemoryInUse``, ``ReadOnlyMemory`` or ``StoreFull``.
        """
        for name, length in (("blocks_per_value", blocks_per_value), ("tokens_per_value", tokens_per_value)):
            if length < 1:
                raise InvalidArgument(f"{name} must be a positive number of blocks, not {length}")
        folder = environments.make_folder(Path(path))
        writer = WriterLock(folder)
        store = cls._attach(folder, writer, url, create=True)
        try:
            store._initialise(blocks_per_value, tokens_per_value, batch or Batch())
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False, check: bool = True, url: str | None = None) -> Self:
        """Open an existing memory folder. ``check=False`` skips the check for a damaged tree, see ``pages.py``.

        Errors call the memory ``url`` instead of the path, if it is given.

        Raises ``NotFound`` (it is missing, or its creation was interrupted: it can be created), ``NotAMemory``,
        ``ForeignMemory``, ``DamagedError``, and for writing ``MemoryInUse`` or ``ReadOnlyMemory``.
        """
        folder = Path(path)
        environments.check_exists(folder)
        writer = None if read_only else WriterLock(folder)
        store = cls._attach(folder, writer, url, create=False)
        try:
            # A check of a page of each large value is left to ``scan``.
            if check and (what := environments.tree_problem(store._env, folder, KEY_BYTES, _checks)):
                if not environments.looks_like_ours(folder):
                    raise NotAMemory(
                        f"{folder} is the LMDB environment of another program, not a memory. Choose another path"
                    )
                raise DamagedError(
                    f"memory {folder} is damaged: the pages above its values do not belong to the last commit "
                    f"({what}). Nothing was read from it. Save the readable part: memstore repair "
                    f"{quote(store.url)} --to NEW",
                    memory=store.url,
                    remedy="repair",
                )
            store._read_facts()
            if store._reserve:
                store._env.reader_check()  # frees the slots of dead readers
                store._reserve.keep(store.used_bytes())
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def _attach(cls, folder: Path, writer: WriterLock | None, url: str | None, *, create: bool) -> Self:
        try:
            environment = environments.acquire(folder, create=create)
            if writer and environment.read_only:
                environment.release()
                raise ReadOnlyMemory(
                    f"the files of memory {folder} cannot be written, or could not be when this process first "
                    "opened it. Close it and open it again, or use mode='r'",
                    memory=folder,
                )
            return cls(environment, writer, url or str(folder))
        except BaseException:
            if writer:
                writer.release()
            raise

    def _initialise(self, blocks_per_value: int, tokens_per_value: int, given: Batch | Callable[[], Batch]) -> None:
        if self._facts() is not None:
            raise InvalidArgument(f"{self.path} already holds a memory; open it, or choose another folder")
        batch = given() if callable(given) else given
        check_batch(batch)
        self._naming.lengths[Table.BLOCKS] = blocks_per_value
        self._naming.lengths[Table.TOKENS] = tokens_per_value
        self.commit(batch.deletes, batch.puts)
        for folder in (self.path, self.path.absolute().parent):
            paths.sync_folder(folder)

    def _read_facts(self) -> None:
        facts = self._facts()
        if facts is None:
            raise environments.unfinished(self.path)
        if facts["format"] not in self._formats:
            if facts["format"] in TAIL_FORMATS:
                raise ForeignMemory(f"{self.path} is part of a memory in Zarr; open zarr:{self.path.parent}")
            raise ForeignMemory(
                f"memory {self.path} was written by a newer memstore (format {facts['format']}); upgrade memstore"
            )
        self._use_format(facts["format"])
        self._naming.lengths[Table.BLOCKS] = facts["blocks_per_value"]
        self._naming.lengths[Table.TOKENS] = facts.get("tokens_per_value", 1)

    def _use_format(self, number: int) -> None:
        self._format = number
        self._naming.checked = number != self._formats[0]

    def _facts(self) -> dict[str, Any] | None:
        """Read the store's own facts; None if it was never finished. Raises ``DamagedError``, ``NotAMemory``."""
        # From one transaction: while another process makes the memory, ``env.stat`` is ahead of what reads see.
        with self._failing(), self._environment, self._env.begin(buffers=True) as txn:
            facts, entries = _facts(txn), txn.stat()["entries"]
        if facts is None and entries:
            raise NotAMemory(
                f"{self.path} is the LMDB environment of another program, not a memory. Choose another path"
            )
        return facts

    @property
    def blocks_per_value(self) -> int:
        """Return how many consecutive blocks share one LMDB value."""
        return self._naming.lengths[Table.BLOCKS]

    def write(self, batch: Batch) -> None:
        self.check_writable()
        check_batch(batch)
        self.commit(batch.deletes, batch.puts)

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        self.check_writable()
        check_batch(batch)
        evicted, tries = 0, iter(tee(evictions))  # a transaction may be tried twice

        def make_room(txn: Transaction) -> None:
            nonlocal evicted

            def apply(eviction: Batch) -> None:
                self.changes.apply(txn, eviction.deletes, eviction.puts)

            evicted = evict(next(tries), max_bytes, lambda: used_bytes(txn), apply)

        self.commit(batch.deletes, batch.puts, make_room)
        return evicted

    def commit(self, deletes: Deletes, puts: Puts, then: Callable[[Transaction], None] | None = None) -> None:
        """Commit one transaction: the checked changes, and then the work of ``then``, which may refuse."""
        needed = sum(HEADER_BYTES + record.payload.nbytes for _, records in puts for record in records)
        try:
            self._attempt(deletes, puts, then, needed)
        except StoreFull:
            if (puts and not deletes) or needed > _SMALL_BYTES or not (self._reserve and self._reserve.give()):
                raise
            self._attempt(deletes, puts, then, needed)
        finally:
            if self._reserve and self._close.alive:
                self._reserve.keep(self.used_bytes())

    def _attempt(self, deletes: Deletes, puts: Puts, then: Callable[[Transaction], None] | None, needed: int) -> None:
        if needed > _SMALL_BYTES:
            environments.check_room(self.path, needed, self.used_bytes())
        try:
            with self._environment, self._env.begin(write=True, buffers=True) as txn:
                self.changes.begin()
                self.changes.apply(txn, deletes, puts)
                if then:
                    then(txn)
                written = self._put_facts(txn)
            self._checked = written
        except lmdb.Error as error:
            raise self._failure(error, needed) from error

    def _put_facts(self, txn: Transaction) -> tuple[int, int]:
        """Store the number of this commit and the sum of the checks of all values: see ``values.py``."""
        facts, commit, total = {"format": self._format, "blocks_per_value": self.blocks_per_value}, txn.id(), 0
        if self._format == self._formats[-1]:
            facts["tokens_per_value"] = self._naming.lengths[Table.TOKENS]
        if self._naming.checked:
            last, total = self._checked
            if last != commit - 1:  # the first commit of this process; it need not read its own facts again
                total = (_facts(txn) or {"checks": 0})["checks"]
            total += self.changes.added
            facts |= {"commit": commit, "checks": total}
        elif _facts(txn) == facts:
            return commit, total
        key = self._naming.whole(STORE_KEY.to_bytes(), ())
        txn.put(key, encode_value(STORE_KEY, (Record.from_json(facts),)))
        return commit, total

    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        check_out(keys, layouts, out)
        reader = value_reader(tuple(layouts))
        step = max(1, _PIECE_BYTES // max(1, reader.size))
        with self._reading() as txn:
            for start in range(0, len(keys), step):
                piece = slice(start, start + step)
                values = self.values.take(txn, keys[piece], reader, waits=self._waits)
                for rows, payloads in zip(out, reader.payloads(values), strict=True):
                    rows[piece] = payloads

    def gather(self, keys: Sequence[Key], layouts: Sequence[Layout]) -> list[Bytes]:
        """Return record ``f`` of each of ``keys``, uint8 ``[len(keys), layouts[f].nbytes]``, as views of one array.

        One snapshot, one pass, one copy, verified. Raises ``NotFound`` or ``DamagedError``.
        """
        self._check_open()
        reader = value_reader(tuple(layouts))
        try:  # inlined: ``_reading`` would take a twentieth of a gather
            with self._environment, self._env.begin(buffers=True) as txn:
                values = self.values.take(txn, keys, reader, waits=self._waits)
        except lmdb.Error as error:
            raise self._failure(error) from error
        self._waits = environments.waited()
        return reader.payloads(values)

    def rows(self, keys: Sequence[Key], layout: Layout, which: Numbers, rows: Numbers) -> Bytes:
        """See ``BlockStore``; read from the map if a block has its own value."""
        if self.blocks_per_value > 1 or keys[0].table != Table.BLOCKS:
            return super().rows(keys, layout, which, rows)
        with self._reading() as txn:
            return self.values.rows(txn, keys, value_reader((layout,)), which, rows, waits=self._waits)

    @contextmanager
    def _reading(self) -> Iterator[Transaction]:
        """Give a transaction to read in, and note whether it waited for the disk."""
        self._check_open()
        with self._failing(), self._environment, self._env.begin(buffers=True) as txn:
            yield txn
        self._waits = environments.waited()

    def get(self, key: Key) -> tuple[Record, ...] | None:
        self._check_open()
        check_key(key)
        try:  # as ``_reading``, which would take half as long again, and forget whether the last gather had to wait
            with self._environment, self._env.begin(buffers=True) as txn:
                return self.values.get(txn, key)
        except lmdb.Error as error:
            raise self._failure(error) from error

    def checksums(self, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        """See ``BlockStore``: the checksums come from the headers, which are verified; the payloads are not read."""
        with self._reading() as txn:
            return self.values.checksums(txn, keys)

    def keys(self, first: Key, last: Key) -> list[Key]:
        check_range(first, last)
        with self._reading() as txn:
            return self.values.keys(txn, first, last)

    def walk(self, first: Key, last: Key) -> Iterator[tuple[Key, tuple[Record, ...]]]:
        check_range(first, last)
        with self._reading() as txn:
            yield from self.values.walk(txn, first, last)

    def scan(self) -> Iterator[ScannedValue]:
        self._check_open()
        with self._failing(), self._environment:
            damage = _tree_damage(self._env, self.path, self.url)
        if damage:
            yield ScannedValue(STORE_KEY, (), damage)
        with self._reading() as txn:
            yield from self.values.scan(txn)

    def sync(self) -> None:
        self._check_open()
        if not self._environment.read_only:
            with self._failing(), self._environment:
                self._env.sync(True)

    def size_bytes(self) -> int:
        self._check_open()
        return sum(map(environments.allocated, self.path.iterdir()))

    def used_bytes(self) -> int:
        with self._reading() as txn:
            return used_bytes(txn)

    def compact(self, progress: Progress | None = None) -> Compaction:
        """Erase the remains of deleted values in the file, in place, and free the space: see ``pages.py``.

        Readers go on, but it waits for readers that began two commits ago or earlier. Raises ``MemoryInUse`` if they do
        not end, ``DamagedError`` if the file is not understood, ``ReadOnlyMemory`` and ``StoreFull``.
        """
        self.check_writable()
        _check_known(self.path)
        before = self.size_bytes()
        # In place, not as a copy: that would need the space twice, and readers stay on their file. Two commits first:
        # LMDB keeps the last two whole, and then neither has the deleted values.
        for _ in range(2):
            self.commit([] if self._naming.checked else [(STORE_KEY, STORE_KEY)], [])
        with self._failing(), self._environment, self._env.begin(write=True) as txn:  # nothing changes now
            _wait_for_readers(self._env, self.path, txn.id() - 2, READER_PATIENCE)
            _erase(self.path, txn.id() - 1, self._env.stat()["psize"], progress)
        if self._reserve:
            self._reserve.keep(self.used_bytes())
        return Compaction(before, self.size_bytes())

    def version(self) -> int:
        self._check_open()
        # Not env.info(): during a commit it already names the new transaction, and reads still see the old one.
        try:  # inlined: ``_failing`` would take as long again, and every search asks
            with self._environment, self._env.begin() as txn:
                number: int = txn.id()
                return number
        except lmdb.Error as error:
            raise self._failure(error) from error

    def close(self) -> None:
        self._close()

    def check_writable(self) -> None:
        """Raise ``InvalidArgument`` for a closed store, ``ReadOnlyMemory`` for one that only reads."""
        self._check_open()
        if self.read_only:
            raise ReadOnlyMemory.opened(self.url)

    def _check_open(self) -> None:
        if not self._close.alive:
            raise InvalidArgument(f"this store of memory {self.path} is closed; open the memory again")
        self._environment.check_process()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn LMDB's errors into ours."""
        try:
            yield
        except lmdb.Error as error:
            raise self._failure(error) from error

    def _failure(self, error: lmdb.Error, needed: int = 0) -> Exception:
        """Return the error to raise for an LMDB error; ``needed`` bytes were to be written."""
        if not self._close.alive:
            return InvalidArgument(f"this store of memory {self.path} was closed during use")
        return environments.failure(error, self.path, needed)


class _Reserve:
    """The file ``reserve`` of a memory that this process writes: disk space kept for deleting.

    LMDB needs new pages even to delete, because it never overwrites pages of the last commit. So a memory on a full
    disk could not even be made smaller. Therefore this file holds some space, which is freed for a batch that deletes,
    and taken back after it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes = 0

    def keep(self, used_bytes: int) -> None:
        """Make the file, or grow it with the size of the values; on a nearly full disk, as much as is free."""
        wanted = min(max(_LEAST_RESERVED, used_bytes // _SHARE_RESERVED), _MOST_RESERVED)
        if wanted <= self._bytes:
            return
        with (
            suppress(OSError, NotAMemory),  # opening the memory has already refused links
            os.fdopen(paths.open_file(self._folder, RESERVE_NAME, os.O_RDWR | os.O_CREAT), "r+b") as file,
        ):
            if os.fstat(file.fileno()).st_size < wanted:
                _allocate(file.fileno(), min(2 * wanted, _MOST_RESERVED) if self._bytes else wanted)
            self._bytes = os.fstat(file.fileno()).st_size

    def give(self) -> bool:
        self._bytes = 0
        try:
            (self._folder / RESERVE_NAME).unlink()
        except OSError:
            return False
        return True


def _allocate(handle: int, nbytes: int) -> None:
    """Allocate up to ``nbytes`` of disk space for a file."""
    while nbytes >= _PAGE_BYTES:
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError:
            nbytes = nbytes * 7 // 8
        else:
            return


def _release(environment: Environment, writer: WriterLock | None) -> None:
    environment.release()
    if writer:
        writer.release()


def _tree_damage(env: lmdb.Environment, folder: Path, url: str) -> DamagedError | None:
    """Return the error if the tree of the last commit is damaged, or the first page of a large value is wrong."""
    if (what := environments.tree_problem(env, folder, KEY_BYTES, _checks, large=True)) is None:
        return None
    return DamagedError(
        f"the tree of memory {folder} is damaged: {what}. Save the readable part: memstore repair {quote(url)} "
        "--to NEW",
        memory=url,
        remedy="repair",
    )


def _facts(txn: Transaction) -> dict[str, Any] | None:
    """Read the store's own facts in a transaction. Raises ``DamagedError``."""
    value = txn.get(Naming().whole(STORE_KEY.to_bytes(), ()))
    if value is None:
        return None
    facts: dict[str, Any] = fit(decode_value(memoryview(value), 0, STORE_KEY)[0][0].to_json(), FACTS, "the store")
    return facts


def _checks(txn: Transaction) -> int | None:
    """Return the expected sum of the checks in all keys; None in format 1, and if the store's facts are damaged."""
    with suppress(DamagedError, ForeignMemory):
        facts = _facts(txn) or {}
        # A copy compacted by LMDB begins with commit 1.
        return -1 if facts.get("commit", txn.id()) != txn.id() != 1 else facts.get("checks")
    return None


def _wait_for_readers(env: lmdb.Environment, folder: Path, oldest: int, patience: float) -> None:
    """Return when nobody reads a commit before ``oldest``. Raises ``MemoryInUse`` after ``patience`` seconds."""
    until = time.monotonic() + patience
    while late := _readers_before(env, oldest):
        if time.monotonic() > until:
            raise MemoryInUse(
                f"nothing was erased: process {late[0]} has been reading an older state of memory {folder} for "
                f"more than {patience:g} seconds. Let it finish, then compact again",
                memory=folder,
            )
        time.sleep(0.01)
        env.reader_check()


def _readers_before(env: lmdb.Environment, oldest: int) -> list[int]:
    """Return the processes that read a commit before ``oldest``."""
    lines = [line.split() for line in env.readers().splitlines()]
    rows = [line for line in lines if len(line) == 3 and line[0].isdigit() and line[2].isdigit()]
    return [int(pid) for pid, _, commit in rows if int(commit) < oldest]


def _check_known(folder: Path) -> None:
    """Raise ``MemstoreError`` if the LMDB in use may have an unknown page layout."""
    if not pages.is_known():
        raise MemstoreError(
            f"memory {folder} was not compacted, and nothing was erased: compact knows only the pages of LMDB "
            f"0.9, and this is LMDB {pages.version()}. Copy the memory instead: a copy leaves deleted data behind",
            memory=folder,
        )


def _erase(folder: Path, commit: int, page_bytes: int, progress: Progress | None) -> None:
    """Erase what neither ``commit`` nor the one before uses. Raises ``ReadOnlyMemory`` or ``DamagedError``."""
    try:
        with os.fdopen(paths.open_file(folder, DATA_NAME, os.O_RDWR), "r+b") as data:
            pages.erase_unused(data.fileno(), commit, page_bytes, KEY_BYTES, progress)
    except OSError as error:
        if isinstance(error, DamagedError):
            raise
        kept = "the stored values are intact, but deleted data is still in the file"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ReadOnlyMemory(
                f"memory {folder} can no longer be written ({error.strerror}); {kept}. Restore the permission, "
                "then compact again",
                memory=folder,
            ) from error
        raise DamagedError(
            f"memory {folder} could not be compacted ({error.strerror}); {kept}. Check the disk, then compact again"
        ) from error
