"""Traces: records of the blocks retrieved during a generation, step by step, kept beside the memory.

A mechanism writes one through a ``Recorder``; ``memstore trace`` and the pictures read it. ``trace_file.py`` has the
parts of a step.

The file is SQLite's, ``traces.sqlite`` beside a memory. It is not part of the store. So a memory that is open for
reading can be traced, and a fault in the file never harms the memory. Deleting it loses only the traces. Its journal is
a write-ahead log, so that other processes can read everything recorded up to a moment ago. Memories without a folder
have one connection to a database in host memory.
"""

from __future__ import annotations

import builtins
import itertools
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import numpy as np

from memstore import paths
from memstore._version import __version__
from memstore.errors import DamagedError, ForeignMemory, MemoryInUse, MemstoreError, NotFound, ReadOnlyMemory, StoreFull
from memstore.json_checks import anything, check_whole, fit, members, parse, storable
from memstore.memory.trace_file import ELSEWHERE, TIERS, Array, Look, Step, decode, encode
from memstore.store.contract import BlockStore

__all__ = ["ELSEWHERE", "KEPT", "MAX_BYTES", "TIERS", "Look", "Recorder", "Step", "Trace", "Traces"]

INFO = members(anything, 1000)
KEPT = "kept"
"""Beside ``TIERS``: entries that a step did not fetch, because the step before had them."""
MAX_BYTES = 64 << 20
"""Most bytes of a memory's traces: the oldest traces are removed first, then the oldest looks of the current one."""
INTERVAL = 1.0
"""Seconds between writes of finished steps: the delayed work is cheaper for many steps at once."""

_log = logging.getLogger("memstore")
_in_memory: WeakKeyDictionary[BlockStore, Traces] = WeakKeyDictionary()
_of_encrypted: WeakValueDictionary[tuple[Path, bytes], Traces] = WeakValueDictionary()
_guard = threading.Lock()


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


def _emptied(connection: sqlite3.Connection) -> bool:
    """Move the log into the file, and return whether that succeeded: not while somebody reads."""
    busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


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

    def rows(self, query: str, values: Sequence[object] = ()) -> Iterator[Any]:
        """Yield the rows of a query, none if nothing was ever recorded. SQLite's errors are raised as ours."""
        with self._explained():
            if self.path is None:
                with self._lock:
                    yield from () if self._connection is None else self._connection.execute(query, values)
            elif self._exists(self.path):
                with closing(self._open_to_read(self.path)) as connection:
                    yield from connection.execute(query, values) if self._version(connection) else ()

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
        """Give deleted space back to the disk, after ``acquire``. Raises ``MemoryInUse`` if somebody is reading."""
        with self._explained(), self._lock:
            assert self._connection is not None, "shrinking without acquire"
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()
            if not _emptied(self._connection):
                raise MemoryInUse(
                    f"the traces are removed, but their bytes stay in {self.path} and its log while another process "
                    f"reads the traces of memory {self._url}. The next recording or removal erases them."
                )

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
            end = time.monotonic() + WAIT
            while not (version := self._version(connection)):
                try:
                    connection.executescript(_TABLES)
                except sqlite3.OperationalError as error:
                    # Another process makes the file too. SQLite does not wait for it while the journal changes.
                    if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > end:
                        raise
                    time.sleep(0.01)
            if version < VERSION:
                connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.set_progress_handler(None, 0)  # its tables are ours, and it may stay open for long
            connection.execute("PRAGMA busy_timeout = 0")
            _emptied(connection)  # a reader may have kept deleted bytes in the log
            connection.execute(f"PRAGMA busy_timeout = {WAIT * 1000:.0f}")
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


class Trace:
    """The record of one generation. ``info`` shows the moment of reading it; steps are read on use.

    ``info`` has ``mechanism`` ("attach", "landmark", "drt", "knn", "hils", "index"), ``model``, ``documents``,
    ``question``, ``prompt`` (token ids), ``layers``, ``heads``, ``top_k``, ``block_size``, ``started`` (ISO 8601),
    ``ended``, ``version``. A turn has ``conversation``: its ``document``, and its number of earlier tokens (``start``).
    An index has ``unit``, the tokens that it chooses together, and ``entries``: whether these are one entry each. An
    audit has ``missed``: lists of step, document, block, offset (the first token of an entry) and share of attention.
    """

    def __init__(self, file: TraceFile, number: int, info: Mapping[str, Any]) -> None:
        self._file = file
        self.number = number
        """Identifies the trace in its memory; never used again."""
        self.info = info

    def __repr__(self) -> str:
        return f"Trace({self.number}, {self.info.get('mechanism')!r}, started {self.info.get('started')})"

    @property
    def unit(self) -> int:
        """The tokens that its index chooses together; 1 if ``info``, which anybody may have written, says nonsense."""
        unit = self.info.get("unit")
        return unit if isinstance(unit, int) and 0 < unit <= 1 << 20 else 1

    def __len__(self) -> int:
        """Return the number of steps so far."""
        return sum(count for (count,) in self._file.rows("SELECT count(*) FROM steps WHERE trace = ?", [self.number]))

    def steps(self, start: int = 0, stop: int | None = None) -> list[Step]:
        """Return the steps from number ``start`` on, up to ``stop``. Raises ``DamagedError``."""
        return list(self._steps(start, stop))

    def tokens(self) -> list[int | None]:
        """Return the token that each step chose."""
        query = "SELECT token FROM steps WHERE trace = ? ORDER BY number"
        return [token for (token,) in self._file.rows(query, [self.number])]

    def used(self, *, layer: int | None = None, head: int | None = None) -> list[tuple[str, int, float]]:
        """Return the retrieved blocks, as (document, block, weight), most weight first.

        Weights are means over all steps, layers and query heads, or only over those of ``layer`` and ``head``. A step
        without the block counts as zero.
        """
        return most_weight(self._steps(0, None), layer=layer, head=head)

    def steps_using(self, document: str, block: int) -> list[tuple[int, float]]:
        """Return the steps that retrieved a block, as (number, weight): means over layers and query heads."""
        used = ((step.number, use) for step in self._steps(0, None) for use in most_weight([step]))
        return [(number, weight) for number, (*of, weight) in used if of == [document, block]]

    def _steps(self, start: int, stop: int | None) -> Iterator[Step]:
        rows = self._file.rows(
            "SELECT number, token, seconds, looks FROM steps WHERE trace = ? AND number >= ? AND number < ? "
            "ORDER BY number",
            [self.number, start, 1 << 62 if stop is None else stop],
        )
        for number, token, seconds, looks in rows:
            yield Step(number=number, token=token, seconds=seconds, looks=self._looks(looks))

    def _looks(self, data: bytes | None) -> list[Look]:
        if data is None:
            return []
        try:
            return decode(data)
        except ValueError as error:
            raise self._file.explained(error) from error


class Traces:
    """The traces of one memory: ``Memory.traces``. Safe to use from several threads."""

    def __init__(self, folder: Path | None, url: str) -> None:
        """``folder`` is that of the memory; None keeps the traces in host memory for the life of this object."""
        self._file = TraceFile(folder, url)
        self._url = url
        self.max_bytes = MAX_BYTES
        """Most bytes of looks that new recorders keep."""

    def list(self) -> builtins.list[Trace]:
        """Return all traces, oldest first. Raises ``DamagedError``."""
        # All rows first: an error about one would keep the lock for as long as somebody keeps the error.
        rows = list(self._file.rows("SELECT number, info, ended FROM traces ORDER BY number"))
        return [self._trace(*row) for row in rows]

    def get(self, number: int) -> Trace:
        """Return the trace ``number``. Raises ``NotFound``, ``DamagedError``."""
        for trace in self.list():
            if trace.number == number:
                return trace
        raise self._missing(number)

    def last(self) -> Trace | None:
        """Return the latest trace, None if there is none."""
        traces = self.list()
        return traces[-1] if traces else None

    def of_conversation(self, document: str, start: int | None = None) -> builtins.list[Trace]:
        """Return a conversation's traces, oldest first; with ``start``, those of the turn after so many tokens."""
        told = [(trace, trace.info.get("conversation")) for trace in self.list()]
        return [
            trace
            for trace, of in told
            if isinstance(of, dict) and of.get("document") == document and start in (None, of.get("start"))
        ]

    def remove(self, *numbers: int) -> None:
        """Delete traces and erase their bytes in the file.

        Raises ``NotFound``, ``ReadOnlyMemory``, and ``MemoryInUse`` if another process writes, or still reads them:
        then they are removed, but their bytes are erased later.
        """
        if not numbers:
            return
        if missing := {*numbers} - {trace.number for trace in self.list()}:
            raise self._missing(min(missing))
        self._file.acquire()
        try:
            with self._file.writing() as connection:
                for number in numbers:
                    delete(connection, number)
            self._file.shrink()
        finally:
            self._file.release()

    def record(self, **info: Any) -> Recorder:
        """Begin a trace with these facts, JSON; use the recorder as a context manager.

        Raises ``InvalidArgument``, ``ReadOnlyMemory`` if the folder cannot be written, ``DamagedError``, ``StoreFull``.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return Recorder(self._file, {**info, "started": now, "version": __version__}, self.max_bytes)

    def _trace(self, number: int, info: str, ended: int) -> Trace:
        try:
            told = fit(parse(info.encode(), "a trace"), INFO, "a trace")
            return Trace(self._file, number, {**told, "ended": bool(ended)})
        except (ValueError, TypeError, AttributeError, DamagedError) as error:
            raise self._file.explained(error) from error

    def _missing(self, number: int) -> NotFound:
        known = ", ".join(str(trace.number) for trace in self.list()) or "none"
        return NotFound(f"memory {self._url} has no trace {number}; it has {known}.")


def traces_of(store: BlockStore, folder: Path | None, url: str, *, identity: bytes | None) -> Traces:
    """Return the traces of the memory on ``store``: beside it in ``folder``, or in host memory.

    In host memory they live as long as the store. Traces of an encrypted memory in a folder live as long as any opening
    of it in this process. Its ``identity`` tells it from earlier memories in that folder.
    """
    if folder is not None and identity is None:
        return Traces(folder, url)
    with _guard:
        if folder is not None and identity is not None:  # each opening has its own store
            return _of_encrypted.setdefault((folder.resolve(), identity), Traces(None, url))
        return _in_memory.setdefault(store, Traces(None, url))


def counted(step: Step) -> list[int]:
    """Count the entries of a step's lists that came from each of ``TIERS``, and those kept from the step before."""
    counts, own = [0] * (len(TIERS) + 1), TIERS.index("own")
    for look in step.looks:
        tiers = look.tiers[(look.blocks >= 0) & (look.tiers >= 0) & (look.tiers < len(TIERS))]
        for tier, number in enumerate(np.bincount(tiers, minlength=len(TIERS)).tolist()):
            counts[tier if look.fetched or tier == own else len(TIERS)] += number
    return counts


def elsewhere(looks: Iterable[Look], *, head: int | None = None) -> Array | None:
    """Return ``[4]``: the attention for each of ``ELSEWHERE``, as the mean of all query heads, or for ``head``.

    None if it is unknown.
    """
    parts = [look.elsewhere if head is None or look.elsewhere is None else look.elsewhere[head:][:1] for look in looks]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not sum(map(len, known)):
        return None
    mean: Array = np.concatenate(known).mean(0)
    return mean


class Use(NamedTuple):
    """A retrieved block, or a run of its tokens. Offset, score, tier and layer are those of its best score."""

    document: str
    block: int
    offset: int | None
    """A token of the block; None if whole blocks are retrieved."""
    weight: float
    """The mean over all looks and query heads; see ``Trace.used``."""
    score: float | None
    tier: str | None
    layer: int


def uses(looks: Iterable[Look], *, head: int | None = None, unit: int | None = None, size: int = 1) -> list[Use]:
    """Return what ``looks`` retrieved, most weight first: blocks, or runs of ``unit`` tokens in blocks of ``size``.

    Runs begin at the document's first token. ``head`` takes the list and the weights of that query head only.
    """
    names: dict[str, int] = {}
    found: list[list[Array]] = []
    heads = 0
    for look in looks:
        lists, weights = look.by_list(head)
        heads += len(look.weights) if head is None else len(weights)
        numbers = np.array([*(names.setdefault(name, len(names)) for name in look.documents), -1])
        offsets = np.full(look.blocks.shape, -1) if look.offsets is None else look.offsets
        arrays = (numbers[look.document], look.blocks, offsets, look.scores, look.tiers)
        found.append([each[lists].ravel() for each in arrays] + [weights.ravel(), np.full(weights.size, look.layer)])
    if not found:
        return []
    joined = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    documents, blocks, offsets, scores, tiers, weights, layers = (each[joined[0] >= 0] for each in joined)
    keys = blocks if unit is None else (blocks * size + offsets) // unit
    distinct, places = np.unique(documents << 44 | keys, return_inverse=True)  # blocks and runs are less than 2**44
    means = np.bincount(places, weights, len(distinct)) / max(1, heads)
    best, scores = np.full(len(distinct), -np.inf), np.where(np.isfinite(scores), scores, -np.inf)
    np.maximum.at(best, places, scores)
    # Few entries have the best score: sorting only these is much faster. Of equal ones, that with most weight is told.
    top, first = np.flatnonzero(scores == best[places])[::-1], np.empty(len(distinct), np.int64)
    top = top[np.argsort(weights[top], kind="stable")]
    first[places[top]] = top
    order = np.argsort(-means, kind="stable")
    of, tier_of, at = list(names), dict(enumerate(TIERS)).get, first[order]
    columns = (means[order], *(each[at] for each in (documents, blocks, offsets, scores, tiers, layers)))
    return [
        Use(
            of[name],
            block,
            offset if offset >= 0 else None,
            weight,
            score if score > -np.inf else None,
            tier_of(tier),
            layer,
        )
        for weight, name, block, offset, score, tier, layer in zip(*(each.tolist() for each in columns), strict=True)
    ]


def most_weight(
    steps: Iterable[Step], *, layer: int | None = None, head: int | None = None
) -> list[tuple[str, int, float]]:
    """Return the blocks that ``steps`` retrieved, as (document, block, weight), most weight first.

    See ``Trace.used``.
    """
    looks = (look for step in steps for look in step.looks if layer in (None, look.layer))
    return [(use.document, use.block, use.weight) for use in uses(looks, head=head)]


def best_scores(steps: Iterable[Step]) -> dict[tuple[str, int], float]:
    """Return the best score of each chosen (document, block), leaving out blocks that were retrieved without a choice.

    ``steps`` begin with a trace's first one: a list that stayed from one step to the next was not chosen again.
    """
    chosen = (look for step in steps for look in step.looks if look.fetched or not step.number)
    return {(use.document, use.block): use.score for use in uses(chosen) if use.score is not None}


class _PendingStep:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.token: int | None = None
        self.looks: list[Look] = []


class Recorder(AbstractContextManager["Recorder"]):
    """Records one trace: ``begin`` a step, add the ``look`` of each layer, and the ``token`` that it chose.

    Steps are written about once a second, and the rest at the end of the ``with`` block. A failed write is logged once
    and ends the recording, so a full disk does not stop a model's answer.
    """

    def __init__(self, file: TraceFile, info: dict[str, Any], max_bytes: int) -> None:
        """Made by ``Traces.record``."""
        self._file, self._max_bytes = file, max_bytes
        self.info = info
        """The facts about the trace so far."""
        self._begun = self._written_at = time.perf_counter()
        self._first = 0
        self._steps: list[_PendingStep] = []
        self.active = True
        """Whether steps are still written: the recorder is open, and no write has failed."""
        self._encoded_last: tuple[list[Look], bytes | None] = ([], None)
        self.before_writing: Callable[[], None] | None = None
        """Called before steps are written, so that a mechanism computes its delayed looks."""
        text = storable(info, INFO, "the facts about a trace")
        file.acquire()
        try:
            with file.writing() as connection:
                row = "INSERT INTO traces (info, ended, bytes) VALUES (?, 0, ?)"
                self.number: int = connection.execute(row, [text, len(text)]).lastrowid or 0
        except BaseException:
            file.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """Number of the latest step; -1 before the first ``begin``."""
        return self._first + len(self._steps) - 1

    def describe(self, **info: Any) -> None:
        """Add facts to the trace's ``info`` that were unknown at its start; JSON. Raises ``InvalidArgument``."""
        text = storable(self.info | info, INFO, "the facts about a trace")
        self.info |= info
        statement = "UPDATE traces SET info = ?, bytes = bytes - length(info) + ? WHERE number = ?"
        self._write(statement, [[text, len(text), self.number]])

    def begin(self) -> None:
        """Begin a new step for a forward pass."""
        if not self.active:
            return
        now = time.perf_counter()
        if now - self._written_at > INTERVAL:
            self._flush()
            self._written_at = now
        self._steps.append(_PendingStep(now - self._begun))

    def look(self, look: Look, *, step: int | None = None) -> None:
        """Add the retrieval of a layer, for the latest step, or for an earlier unwritten ``step``."""
        if self.active:
            step = self.step if step is None else step
            assert self._first <= step <= self.step, "the step is written already, or has not begun"
            self._steps[step - self._first].looks.append(look)

    def token(self, token_id: int) -> None:
        """Record the id of the token that the latest step chose, before the next one begins."""
        if self.active and self._steps:
            self._steps[-1].token = token_id

    def close(self, tokens: Sequence[int] | None = None) -> None:
        """Write the remaining steps, and end the trace; ``tokens``, if given, are the tokens of the steps, in order.

        Closing twice is allowed. Raises ``InvalidArgument``.
        """
        if not self.active:
            return
        ids = getattr(tokens, "tolist", lambda: list(tokens or ()))()
        for token in ids:
            check_whole("the id of a token", token, 0, 2**31 - 1)
        self._flush()
        named = [[token, self.number, step] for step, token in enumerate(ids)]
        self._write("UPDATE steps SET token = ? WHERE trace = ? AND number = ?", named)
        self._write("UPDATE traces SET ended = 1 WHERE number = ?", [[self.number]])
        self._stop()

    def _flush(self) -> None:
        if self.before_writing is not None:
            self.before_writing()
        if not self.active or not self._steps:
            return
        rows = [
            (self.number, self._first + place, step.token, step.seconds, self._encoded(step.looks))
            for place, step in enumerate(self._steps)
        ]
        self._first, self._steps = self._first + len(self._steps), []
        nbytes = sum(len(looks) for *_, looks in rows if looks is not None)
        with self._writing() as connection:
            connection.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", rows)
            connection.execute("UPDATE traces SET bytes = bytes + ? WHERE number = ?", [nbytes, self.number])
            make_room(connection, self.number, self._max_bytes)

    def _encoded(self, looks: list[Look]) -> bytes | None:
        """Return a step in the file's form; steps that use a list again have the same looks."""
        if looks != self._encoded_last[0]:
            self._encoded_last = (looks, encode(looks) if looks else None)
        return self._encoded_last[1]

    def _write(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        if self.active:  # otherwise an earlier write has failed
            with self._writing() as connection:
                connection.executemany(statement, rows)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Run a transaction; if it fails, the recording ends without an error."""
        try:
            with self._file.writing() as connection:
                yield connection
        except MemstoreError as error:
            # Traces.record raises, because nothing has begun yet. After that the answer matters more than its trace.
            _log.warning("recording of trace %d has stopped: %s", self.number, error)
            self._stop()

    def _stop(self) -> None:
        if self.active:
            self.active = False
            self._file.release()


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


def delete(connection: Any, number: int) -> None:
    """Delete a trace, if it exists."""
    connection.execute("DELETE FROM steps WHERE trace = ?", [number])
    connection.execute("DELETE FROM traces WHERE number = ?", [number])
