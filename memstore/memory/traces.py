"""Traces: records of what was retrieved while a model was generating, step by step, kept beside the memory.

A mechanism writes one through a ``Recorder``; ``memstore trace`` and the pictures read it. ``trace_file.py`` has
the file, and what a step is made of.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from memstore._version import __version__
from memstore.errors import DamagedError, NotFound
from memstore.memory.recorder import Recorder
from memstore.memory.trace_file import ELSEWHERE, TIERS, Array, Look, Step, TraceFile, decode, delete
from memstore.store.contract import BlockStore
from memstore.stored import anything, fit, members, parse

__all__ = ["ELSEWHERE", "KEPT", "MAX_BYTES", "TIERS", "Look", "Recorder", "Step", "Trace", "Traces"]

KEPT = "kept"
"""Beside ``TIERS``: what a step did not have to bring, for it was there from the step before."""
MAX_BYTES = 64 << 20
"""Bytes that the traces of a memory take: the oldest traces leave first, then the oldest looks of the one in hand."""

_in_memory: WeakKeyDictionary[BlockStore, Traces] = WeakKeyDictionary()
_guard = threading.Lock()


class Trace:
    """What was recorded of one generation. ``info`` is of the moment it was asked for, steps are read when asked for.

    ``info`` has ``mechanism`` ("attach", "landmark", "drt", "knn"), ``model``, ``documents``, ``question``, ``prompt``
    (token ids), ``layers``, ``heads``, ``top_k``, ``block_size``, ``started`` (ISO 8601), ``ended``, ``version``.
    """

    def __init__(self, file: TraceFile, number: int, info: Mapping[str, Any]) -> None:
        self._file = file
        self.number = number
        """Identifies the trace in its memory; never used again."""
        self.info = info

    def __repr__(self) -> str:
        return f"Trace({self.number}, {self.info.get('mechanism')!r}, started {self.info.get('started')})"

    def __len__(self) -> int:
        """Steps so far."""
        with self._file.reading() as connection:
            if connection is None:
                return 0
            count: int = connection.execute("SELECT count(*) FROM steps WHERE trace = ?", [self.number]).fetchone()[0]
            return count

    def steps(self, start: int = 0, stop: int | None = None) -> list[Step]:
        """The steps from number ``start`` on, up to ``stop``. Raises ``DamagedError``."""
        return list(self._steps(start, stop))

    def tokens(self) -> list[int | None]:
        """The token that each step chose."""
        with self._file.reading() as connection:
            if connection is None:
                return []
            rows = connection.execute("SELECT token FROM steps WHERE trace = ? ORDER BY number", [self.number])
            return [token for (token,) in rows]

    def used(self, *, layer: int | None = None, head: int | None = None) -> list[tuple[str, int, float]]:
        """The blocks that were retrieved, as (document, block, weight), most weight first.

        Weights are means over all steps, layers and query heads, or over those of ``layer`` and ``head`` alone; where
        a block was not retrieved it had none.
        """
        return most_weight(self._steps(0, None), layer=layer, head=head)

    def steps_using(self, document: str, block: int) -> list[tuple[int, float]]:
        """The steps that retrieved a block, as (number, weight): means over layers and query heads."""
        using = []
        for step in self._steps(0, None):
            found = {(name, number): weight for name, number, weight in most_weight([step])}
            if (document, block) in found:
                using.append((step.number, found[document, block]))
        return using

    def _steps(self, start: int, stop: int | None) -> Iterator[Step]:
        with self._file.reading() as connection:
            if connection is None:
                return
            rows = connection.execute(
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
        """``folder`` is that of the memory; None keeps the traces in host memory, as long as this object lives."""
        self._file = TraceFile(folder, url)
        self._url = url
        self.max_bytes = MAX_BYTES
        """Bytes of looks that are kept by recorders made from now on."""

    def list(self) -> builtins.list[Trace]:
        """All traces, oldest first. Raises ``DamagedError``."""
        with self._file.reading() as connection:
            if connection is None:
                return []
            rows = connection.execute("SELECT number, info, ended FROM traces ORDER BY number").fetchall()
        return [self._trace(*row) for row in rows]

    def get(self, number: int) -> Trace:
        """The trace ``number``. Raises ``NotFound``, ``DamagedError``."""
        for trace in self.list():
            if trace.number == number:
                return trace
        raise self._missing(number)

    def last(self) -> Trace | None:
        """The latest trace, None where there is none."""
        traces = self.list()
        return traces[-1] if traces else None

    def remove(self, number: int) -> None:
        """Delete a trace, down to its bytes in the file. Raises ``NotFound``, ``ReadOnlyMemory``."""
        self.get(number)
        self._file.acquire()
        try:
            with self._file.writing() as connection:
                if not delete(connection, number):
                    raise self._missing(number)
            self._file.shrink()
        finally:
            self._file.release()

    def record(self, **info: Any) -> Recorder:
        """Begin a trace with these facts, JSON; use the recorder as a context manager.

        Raises ``ReadOnlyMemory`` where the folder cannot be written, ``DamagedError``, ``StoreFull``.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return Recorder(self._file, {**info, "started": now, "version": __version__}, self.max_bytes)

    def _trace(self, number: int, info: str, ended: int) -> Trace:
        try:
            told = fit(parse(info.encode(), "a trace"), members(anything, 1000), "a trace")
            return Trace(self._file, number, {**told, "ended": bool(ended)})
        except (ValueError, TypeError, AttributeError, DamagedError) as error:
            raise self._file.explained(error) from error

    def _missing(self, number: int) -> NotFound:
        known = ", ".join(str(trace.number) for trace in self.list()) or "none"
        return NotFound(f"memory {self._url} has no trace {number}; it has {known}.")


def traces_of(store: BlockStore, folder: Path | None, url: str) -> Traces:
    """The traces of the memory on ``store``: beside it in ``folder``, or in host memory for as long as the store."""
    if folder is not None:
        return Traces(folder, url)
    with _guard:
        return _in_memory.setdefault(store, Traces(None, url))


def counted(step: Step) -> list[int]:
    """How many entries of its lists a step had from each of ``TIERS``, and how many were kept from the step before."""
    counts, own = [0] * (len(TIERS) + 1), TIERS.index("own")
    for look in step.looks:
        tiers = look.tiers[(look.blocks >= 0) & (look.tiers >= 0) & (look.tiers < len(TIERS))]
        for tier, number in enumerate(np.bincount(tiers, minlength=len(TIERS)).tolist()):
            counts[tier if look.fetched or tier == own else len(TIERS)] += number
    return counts


def elsewhere(looks: Iterable[Look], *, head: int | None = None) -> Array | None:
    """``[4]``: the part of attention that went to each of ``ELSEWHERE``, the mean of all query heads, or of ``head``.

    None where it is not known.
    """
    parts = [look.elsewhere if head is None or look.elsewhere is None else look.elsewhere[head:][:1] for look in looks]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not sum(map(len, known)):
        return None
    mean: Array = np.concatenate(known).mean(0)
    return mean


def most_weight(
    steps: Iterable[Step], *, layer: int | None = None, head: int | None = None
) -> list[tuple[str, int, float]]:
    """The blocks that ``steps`` retrieved, as (document, block, weight), most weight first; see ``Trace.used``."""
    names: dict[str, int] = {}
    found: list[tuple[Array, Array, Array]] = []
    heads = 0
    for look in (look for step in steps for look in step.looks if layer in (None, look.layer)):
        lists, weights = look.by_list(head)
        heads += len(look.weights) if head is None else len(weights)
        numbers = np.array([*(names.setdefault(name, len(names)) for name in look.documents), -1])
        found.append((numbers[look.document[lists]].ravel(), look.blocks[lists].ravel(), weights.ravel()))
    if not found:
        return []
    documents, blocks, weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
    there = documents >= 0
    keys, places = np.unique(documents[there] << 40 | blocks[there], return_inverse=True)  # a block is less than 2**40
    means = np.bincount(places, weights[there], len(keys)) / max(1, heads)
    of = list(names)
    order = np.argsort(-means, kind="stable")
    return [
        (of[key >> 40], key & (1 << 40) - 1, mean)
        for key, mean in zip(keys[order].tolist(), means[order].tolist(), strict=True)
    ]
