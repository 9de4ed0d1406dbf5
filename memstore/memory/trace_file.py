"""The parts of a trace, and the file of all traces.

The file is SQLite's, ``traces.sqlite`` beside a memory. It is not part of the store. So a memory that is open for
reading can be traced, and a fault in the file never harms the memory. Deleting it loses only the traces. Its journal is
a write-ahead log, so that other processes can read everything recorded up to a moment ago. Memories without a folder
have one connection to a database in host memory.

A step is one compressed value: a count, the lists of documents, and a head of fixed length for each look. Then come the
arrays field by field. Equal lists of blocks in many layers then lie near each other and take hardly any space. Weights
are stored in float16, which rounds a sum of weights by less than 0.0005.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from memstore import paths
from memstore.errors import DamagedError, ForeignMemory, MemoryInUse, MemstoreError, ReadOnlyMemory, StoreFull
from memstore.json_checks import array, fit, parse, text

MOST_BYTES = 256 * 1024 * 1024
"""Most bytes of one recorded step, unpacked."""

Array = npt.NDArray[Any]

TIERS = ("device", "host", "disk", "own")
"""The tiers of states at the time of a gather; "own" are tensors of the call itself, which were never stored."""
ELSEWHERE = ("sink", "window", "question", "answer")
"""Targets of attention beside the retrieved blocks; the rest of 1 went to other tokens.

The document has a sink and a window. The call has the tokens of its first forward pass, and the later ones.
"""

_COUNTS = struct.Struct("<II")  # looks, bytes of JSON
_HEAD = struct.Struct("<IIHIHIBff")  # layer, row, number of its documents, R, H, K, which of _OPTIONAL, search, gather
_FIELDS = {
    "document": "<i2",
    "blocks": "<i8",
    "offsets": "<i8",
    "scores": "<f4",
    "weights": "<f2",
    "tiers": "i1",
    "elsewhere": "<f2",
}
_OPTIONAL = ("offsets", "elsewhere")


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """The retrieval of one layer at one step, for one row of the batch: ``R`` lists of ``K``, for ``H`` query heads."""

    layer: int
    row: int
    documents: Sequence[str]
    """Document names that ``document`` indexes."""
    document: Array
    """``[R, K]`` int16: index into ``documents``, -1 for none. Query head ``h`` uses list ``h * R // H``."""
    blocks: Array
    """``[R, K]`` int64: block ids, best score first; -1 for missing entries."""
    offsets: Array | None = None
    """``[R, K]`` int64: the token within the block, if single tokens are retrieved."""
    scores: Array
    """``[R, K]`` float32: comparable within a list; NaN if there was no choice."""
    weights: Array
    """``[H, K]`` float32: each entry's share of the layer's attention, for the step's last token.

    It is measured after local attention was merged in. For grouped cross attention: the weights of the blocks. NaN if
    unknown.
    """
    tiers: Array
    """``[R, K]`` int8: index into ``TIERS`` (device, host, disk, own), the tier of the states when they were gathered.

    -1 for none.
    """
    elsewhere: Array | None = None
    """``[H, 4]`` float32: the share of attention for each of ``ELSEWHERE``: sink, window, question and answer.

    None if unknown.
    """
    search_us: float = 0.0
    """Microseconds of searching; 0 if another layer or an earlier step did the search."""
    gather_us: float = 0.0
    """Microseconds of gathering; 0 if an earlier step has gathered the states."""

    @property
    def fetched(self) -> bool:
        """Whether the states were fetched for this step; an unchanged list keeps them from the step before."""
        return self.gather_us > 0

    def by_list(self, head: int | None = None) -> tuple[Array, Array]:
        """Return lists ``[n]``, and the summed weights ``[n, K]`` of each list's query heads, or those of ``head``.

        Unknown weights count as zero. A head that the layer does not have gives no list.
        """
        weights, of_head = np.nan_to_num(self.weights), self.by_head()
        if head is not None:
            return of_head[head : head + 1], weights[head : head + 1]
        lists = np.arange(len(self.blocks))
        return lists, np.add.reduceat(weights, np.searchsorted(of_head, lists), axis=0)

    def by_head(self) -> Array:
        """Return ``[H]``: the list that each query head uses."""
        heads = len(self.weights)
        lists: Array = np.arange(heads) * len(self.blocks) // max(1, heads)
        return lists


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass: its retrieved blocks, and the token that it chose."""

    number: int
    """0 is the prefill pass, which chose the first token."""
    token: int | None
    """Id of the token that this step chose for the first row; None if no step followed."""
    seconds: float
    """Seconds since the trace began."""
    looks: Sequence[Look]
    """Empty if nothing was retrieved, or if the looks were removed to make room for later ones."""


def encode(looks: Sequence[Look]) -> bytes:
    """Return the bytes for ``decode``."""
    lists = {tuple(look.documents): None for look in looks}
    places = {names: place for place, names in enumerate(lists)}
    names = json.dumps(list(lists)).encode()
    heads = [_head(look, places[tuple(look.documents)]) for look in looks]
    arrays = [
        np.ascontiguousarray(array, dtype).tobytes()
        for field, dtype in _FIELDS.items()
        for look in looks
        if (array := getattr(look, field)) is not None
    ]
    return zlib.compress(b"".join([_COUNTS.pack(len(looks), len(names)), names, *heads, *arrays]), 1)


def decode(data: bytes) -> list[Look]:
    """Return the looks in ``data``. Raises ``ValueError`` for bytes that are not from ``encode``."""
    try:
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(data, MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise ValueError("it is far larger than any step")
        return _decode(plain)
    except (zlib.error, struct.error, LookupError, TypeError, DamagedError) as error:
        raise ValueError(str(error)) from error


def _head(look: Look, documents: int) -> bytes:
    (lists, entries), heads = look.blocks.shape, len(look.weights)
    has = sum(1 << place for place, field in enumerate(_OPTIONAL) if getattr(look, field) is not None)
    return _HEAD.pack(look.layer, look.row, documents, lists, heads, entries, has, look.search_us, look.gather_us)


def _decode(data: bytes) -> list[Look]:
    count, length = _COUNTS.unpack_from(data)
    at = _COUNTS.size + length
    lists = fit(parse(data[_COUNTS.size : at], "a step"), array(array(text(511), 2**20), 2**20), "a step")
    heads = [_HEAD.unpack_from(data, at + n * _HEAD.size) for n in range(count)]
    at += count * _HEAD.size
    arrays: list[dict[str, Array | None]] = [dict.fromkeys(_FIELDS) for _ in heads]
    for field, dtype in _FIELDS.items():
        for head, found in zip(heads, arrays, strict=True):
            _, _, _, rows, query_heads, entries, has, _, _ = head
            if field in _OPTIONAL and not has & 1 << _OPTIONAL.index(field):
                continue
            shape = (query_heads if field == "weights" else rows, entries)
            if field == "elsewhere":
                shape = (query_heads, len(ELSEWHERE))
            found[field] = np.frombuffer(data, dtype, shape[0] * shape[1], at).reshape(shape)
            at += shape[0] * shape[1] * np.dtype(dtype).itemsize
    return [_look(head, lists, found) for head, found in zip(heads, arrays, strict=True)]


def _look(head: tuple[Any, ...], lists: list[list[str]], arrays: dict[str, Any]) -> Look:
    layer, row, documents, _, _, _, _, search_us, gather_us = head
    for field in ("weights", "elsewhere"):
        if arrays[field] is not None:
            arrays[field] = arrays[field].astype(np.float32)
    return Look(layer=layer, row=row, documents=lists[documents], search_us=search_us, gather_us=gather_us, **arrays)


assert set(_FIELDS) <= {field.name for field in fields(Look)}


NAME = "traces.sqlite"
VERSION = 2
"""Version 1 is the same without ``Look.elsewhere``."""
_ROOM = 64 << 10  # bytes; a log and its table begin with half of that
WAIT = 5.0
"""Seconds to wait for another writing process."""

# SQLite keeps its journal in memory until the file has a log. So a file "-journal" is never ours.
_TABLES = f"""
PRAGMA journal_mode = MEMORY;
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS traces (
    number INTEGER PRIMARY KEY AUTOINCREMENT, info TEXT NOT NULL, ended INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    trace INTEGER NOT NULL, number INTEGER NOT NULL, token INTEGER, seconds REAL NOT NULL, looks BLOB,
    PRIMARY KEY (trace, number)) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
COMMIT;
"""


MOST_VALUE_BYTES = 64 * 1024 * 1024
"""Most bytes of one text or blob."""
MOST_TURNS = 1000
"""Most work for all queries of a connection, in units of 100,000 steps of SQLite's machine: some seconds."""


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Return type, name and text of all definitions."""
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(str(kind), str(name), " ".join(str(sql).split())) for kind, name, sql in rows}


@cache
def _own_schema() -> set[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return _schema(connection)


class TraceFile:
    """Opens the traces of one memory. Safe to use from several threads."""

    def __init__(self, folder: Path | None, url: str) -> None:
        """``folder`` is that of the memory; None keeps the traces in host memory. Opens and creates nothing yet."""
        self.path = None if folder is None else folder / NAME
        self._url = url
        self._lock = threading.RLock()
        self._users = 0
        self._connection: sqlite3.Connection | None = None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection for queries, None if nothing was ever recorded. SQLite's errors are raised as ours."""
        with self._explained():
            if self.path is None:
                with self._lock:
                    yield self._connection
            elif not self._exists(self.path):
                yield None
            else:
                with closing(self._open_to_read(self.path)) as connection:
                    yield connection if self._version(connection) else None

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction after ``acquire``. SQLite's errors are raised as ours, and undo it."""
        with self._explained(), self._lock:
            assert self._connection is not None, "writing without acquire"
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def acquire(self) -> None:
        """Open the file for writing, and create it if it is missing. Each call needs a ``release``."""
        with self._explained(), self._lock:
            if self._connection is None:
                self._connection = self._open_to_write()
            self._users += 1

    def release(self) -> None:
        """Close the file unless another part of this process is writing."""
        with self._lock:
            self._users -= 1
            if self._connection is not None and self.path is not None and not self._users:
                self._connection.close()
                self._connection = None

    def shrink(self) -> None:
        """Give deleted space back to the disk unless somebody is reading. Call ``acquire`` first."""
        with self._explained(), self._lock:
            assert self._connection is not None, "shrinking without acquire"
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def explained(self, error: Exception) -> MemstoreError:
        """Return our error for ``error``, from SQLite or from decoding."""
        if not isinstance(error, sqlite3.OperationalError) or "no such" in str(error) or "malformed" in str(error):
            return DamagedError(
                f"the traces of memory {self._url} are damaged ({error}). The memory itself is not affected: "
                f"delete {self.path}, and record the traces again.",
                remedy="repair",
            )
        kinds: dict[str, type[MemstoreError]] = {
            "SQLITE_BUSY": MemoryInUse,
            "SQLITE_LOCKED": MemoryInUse,
            "SQLITE_FULL": StoreFull,
            "SQLITE_READONLY": ReadOnlyMemory,
            "SQLITE_CANTOPEN": ReadOnlyMemory,
        }
        code = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
        kind = kinds.get(code, MemstoreError)
        # On a full disk SQLite fails wherever it needs room: for the log, or for its shared memory.
        if (
            self.path is not None
            and code in ("SQLITE_IOERR", "SQLITE_CANTOPEN")
            and paths.free_bytes(self.path.parent) < _ROOM
        ):
            kind = StoreFull
        return kind(
            f"the traces of memory {self._url} cannot be used ({error}). Make {self.path} and its folder "
            "writable, free some space, and close other processes that hold the file."
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self.explained(error) from error

    def _open_to_write(self) -> sqlite3.Connection:
        place = ":memory:"
        if self.path is not None:
            self._exists(self.path)
            paths.check_single(self.path.parent, NAME, f"{NAME}-wal", f"{NAME}-shm")
            place = str(self.path)
        connection = sqlite3.connect(place, timeout=WAIT, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = ON")
            version = self._version(connection)
            if not version:
                connection.executescript(_TABLES)
            elif version < VERSION:
                connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.set_progress_handler(None, 0)  # its tables are ours, and it may stay open for long
        except BaseException:
            connection.close()
            raise
        if self.path is None:
            finalize(self, connection.close)
        return connection

    def _exists(self, path: Path) -> bool:
        """Whether the file exists. Raises ``NotAMemory`` if SQLite would follow a link, because it opens by path.

        Raises ``DamagedError`` if a journal lies beside it.
        """
        for end in ("-wal", "-shm"):
            paths.find(path.with_name(path.name + end))
        journal = path.with_name(path.name + "-journal")
        # A journal can name any file by its path, which SQLite then reads and deletes. Our log names none.
        if paths.find(journal) is not None:
            raise DamagedError(
                f"{journal} was not written by memstore, and SQLite would follow its instructions on other files. "
                f"The memory itself does not need it: delete {journal}",
                remedy="repair",
            )
        return paths.find(path) is not None

    def _open_to_read(self, path: Path) -> sqlite3.Connection:
        """Open for reading. In a read-only folder, data that a writer left in the log cannot be read."""
        try:
            return self._opened(f"{path.absolute().as_uri()}?mode=ro")
        except sqlite3.OperationalError:
            return self._opened(f"{path.absolute().as_uri()}?mode=ro&immutable=1")

    def _opened(self, uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(uri, timeout=WAIT, isolation_level=None, check_same_thread=False, uri=True)
        try:
            self._version(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the file, 0 if it is empty. Raises ``ForeignMemory`` for a newer one."""
        # A hostile file may have a view in place of a table, or rows that refer to themselves.
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
        turns = itertools.count()
        connection.set_progress_handler(lambda: next(turns) > MOST_TURNS, 100_000)
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise ForeignMemory(
                f"a newer memstore recorded the traces of memory {self._url} (version {version}, this one reads "
                f"{VERSION}); upgrade, or delete {self.path}"
            )
        found = _schema(connection)
        if found and found != _own_schema():
            raise DamagedError(
                f"{self.path} has other tables, views or triggers than a trace file of memstore; delete it, or "
                "move it away."
            )
        return version


def make_room(connection: Any, current: int, max_bytes: int) -> None:
    """Remove the oldest other traces until at most ``max_bytes`` are taken, then the oldest looks of this one."""
    taken = dict(connection.execute("SELECT number, bytes FROM traces ORDER BY number").fetchall())
    excess = sum(taken.values()) - max_bytes
    for number, nbytes in taken.items():
        if excess > 0 and number != current:
            delete(connection, number)
            excess -= nbytes
    if excess <= 0:
        return
    # Looks are removed, tokens stay: so steps keep their numbers, and the answer stays whole even without explanation.
    oldest = "SELECT number, length(looks) FROM steps WHERE trace = ? AND looks IS NOT NULL ORDER BY number"
    gone, freed = [], 0
    for step, nbytes in connection.execute(oldest, [current]):
        if freed >= excess:
            break
        gone.append((current, step))
        freed += nbytes
    connection.executemany("UPDATE steps SET looks = NULL WHERE trace = ? AND number = ?", gone)
    connection.execute("UPDATE traces SET bytes = bytes - ? WHERE number = ?", [freed, current])


def delete(connection: Any, number: int) -> bool:
    """Delete a trace; return whether it existed."""
    connection.execute("DELETE FROM steps WHERE trace = ?", [number])
    return bool(connection.execute("DELETE FROM traces WHERE number = ?", [number]).rowcount)
