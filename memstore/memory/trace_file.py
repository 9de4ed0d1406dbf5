"""The SQLite file ``traces.sqlite`` that lies beside a memory: its tables, and how they are opened.

It is no part of the store: a memory that is open for reading can be traced, what is wrong with the file never harms the
memory, and whoever deletes it loses the traces alone. Its journal is a write-ahead log, so that other processes read
what was recorded up to a moment ago. Memories without a folder have one connection to a database in host memory.
"""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from weakref import finalize

from memstore.errors import DamagedError, ForeignMemory, MemoryInUse, MemstoreError, ReadOnlyMemory, StoreFull
from memstore.store import paths
from memstore.store.paths import free_bytes

NAME = "traces.sqlite"
VERSION = 1
_ROOM = 64 << 10  # bytes; a log and its table begin with half of that
WAIT = 5.0
"""Seconds to wait for another process that writes."""

_TABLES = f"""
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


MOST_BYTES = 64 * 1024 * 1024
"""Of one text or blob."""
MOST_TURNS = 1000
"""Times 100,000 steps of SQLite's machine, for all that a connection is asked: some seconds."""


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Type, name and text of all that is defined."""
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
        """``folder`` is that of the memory; None keeps the traces in host memory. Nothing is opened or made yet."""
        self.path = None if folder is None else folder / NAME
        self._url = url
        self._lock = threading.RLock()
        self._users = 0
        self._connection: sqlite3.Connection | None = None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection for queries, None where nothing was ever recorded. Errors come as ours."""
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
        """A transaction of whoever has called ``acquire``. Errors come as ours, and undo it."""
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
        """Open the file for writing, and make it where there is none, until as many calls of ``release``."""
        with self._explained(), self._lock:
            if self._connection is None:
                self._connection = self._open_to_write()
            self._users += 1

    def release(self) -> None:
        """Close the file unless somebody else of this process is writing."""
        with self._lock:
            self._users -= 1
            if self._connection is not None and self.path is not None and not self._users:
                self._connection.close()
                self._connection = None

    def shrink(self) -> None:
        """Give what was deleted back to the disk, where nobody is reading; for whoever has called ``acquire``."""
        with self._explained(), self._lock:
            assert self._connection is not None, "shrinking without acquire"
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def explained(self, error: Exception) -> MemstoreError:
        """What ``error``, of SQLite or of decoding, means for somebody who looks at traces."""
        if not isinstance(error, sqlite3.OperationalError) or "no such" in str(error) or "malformed" in str(error):
            return DamagedError(
                f"the traces of memory {self._url} are damaged ({error}). The memory itself does not need them: "
                f"delete {self.path}, and record them again.",
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
        # On a full disk SQLite fails wherever it happens to want room: for the log, or for what it shares.
        if (
            self.path is not None
            and code in ("SQLITE_IOERR", "SQLITE_CANTOPEN")
            and free_bytes(self.path.parent) < _ROOM
        ):
            kind = StoreFull
        return kind(
            f"the traces of memory {self._url} cannot be used ({error}): {self.path} and its folder must be writable, "
            "with room on the disk, and no other process may hold them for long."
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
            place = str(self.path)
        connection = sqlite3.connect(place, timeout=WAIT, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = ON")
            if not self._version(connection):
                connection.executescript(_TABLES)
            connection.set_progress_handler(None, 0)  # its tables are ours, and it may live long
        except BaseException:
            connection.close()
            raise
        if self.path is None:
            finalize(self, connection.close)
        return connection

    def _exists(self, path: Path) -> bool:
        """Whether there is a file. Raises ``NotAMemory`` where SQLite would follow a link: it opens by path."""
        for end in ("-wal", "-shm", "-journal"):
            paths.find(path.with_name(path.name + end))
        return paths.find(path) is not None

    def _open_to_read(self, path: Path) -> sqlite3.Connection:
        """Where the folder cannot be written, what a writer has left in the log cannot be read either."""
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
        """The version of the file, 0 where it is empty. Raises ``ForeignMemory`` for a newer one."""
        # Whoever made the file may have put a view in place of a table, or rows that lead back to themselves.
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
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
                f"{self.path} has other tables, views or triggers than traces of a memory; delete it, or move it away."
            )
        return version
