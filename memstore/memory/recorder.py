"""What a trace is made of: what one layer retrieved at one step, and how a step's looks lie in a file.

A step is one compressed value: a count, the lists of documents, a head of fixed length for each look, then the arrays
field by field, so that the same lists of blocks in many layers lie near each other and take hardly any space. Weights
are kept in float16, which rounds a sum of weights by less than 0.0005.

What mechanisms write a trace to while a model is generating.
"""

from __future__ import annotations

import json
import logging
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memstore.errors import DamagedError, MemstoreError
from memstore.memory.trace_file import TraceFile
from memstore.stored import array, fit, parse, text

MOST_BYTES = 256 * 1024 * 1024
"""Of what is recorded of one step, unpacked."""

Array = npt.NDArray[Any]

TIERS = ("device", "host", "disk", "own")
"""Where states were when they were asked for; "own" are tensors of the call itself, which were never stored."""

_COUNTS = struct.Struct("<II")  # looks, bytes of JSON
_HEAD = struct.Struct("<IIHIHI?ff")  # layer, row, number of its documents, R, H, K, offsets?, search, gather
_FIELDS = {"document": "<i2", "blocks": "<i8", "offsets": "<i8", "scores": "<f4", "weights": "<f2", "tiers": "i1"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """What one layer retrieved at one step, for one row of the batch: ``R`` lists of ``K``, for ``H`` query heads."""

    layer: int
    row: int
    documents: Sequence[str]
    """Names that ``document`` points into."""
    document: Array
    """``[R, K]`` int16: index into ``documents``, -1 for none. Query head ``h`` uses list ``h * R // H``."""
    blocks: Array
    """``[R, K]`` int64: block ids, best score first; -1 where there are fewer."""
    offsets: Array | None = None
    """``[R, K]`` int64: the token within the block, where single tokens are retrieved."""
    scores: Array
    """``[R, K]`` float32: comparable within a list; NaN where nobody had to choose."""
    weights: Array
    """``[H, K]`` float32: the part of the layer's attention that each entry carried for the step's last token, after
    local attention was merged in; for grouped cross attention the weights of the blocks. NaN where unknown."""
    tiers: Array
    """``[R, K]`` int8: index into ``TIERS``, where the states were when they were asked for; -1 for none."""
    search_us: float = 0.0
    """Microseconds of searching; 0 where another layer or an earlier step had searched."""
    gather_us: float = 0.0
    """Microseconds of gathering; 0 where the states were there from an earlier step."""

    def by_list(self, head: int | None = None) -> tuple[Array, Array]:
        """Lists ``[n]``, and the weights ``[n, K]`` that all query heads of each give it, or ``head`` alone.

        What is unknown counts as nothing. There is no list for a head that the layer does not have.
        """
        weights, of_head = np.nan_to_num(self.weights), self.by_head()
        if head is not None:
            return of_head[head : head + 1], weights[head : head + 1]
        lists = np.arange(len(self.blocks))
        return lists, np.add.reduceat(weights, np.searchsorted(of_head, lists), axis=0)

    def by_head(self) -> Array:
        """``[H]``: the list that each query head uses."""
        heads = len(self.weights)
        lists: Array = np.arange(heads) * len(self.blocks) // max(1, heads)
        return lists


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass: what was retrieved for it, and the token that it chose."""

    number: int
    """0 is the pass over the prompt, which chose the first token."""
    token: int | None
    """Id of the token that this step chose for the first row; None if nothing went on from it."""
    seconds: float
    """Since the trace began."""
    looks: Sequence[Look]
    """Empty where nothing was retrieved, and where they had to leave for later ones."""


def encode(looks: Sequence[Look]) -> bytes:
    """The bytes that ``decode`` reads."""
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
    """The looks in ``data``. Raises ``ValueError`` for what ``encode`` has not written."""
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
    has_offsets = look.offsets is not None
    return _HEAD.pack(
        look.layer, look.row, documents, lists, heads, entries, has_offsets, look.search_us, look.gather_us
    )


def _decode(data: bytes) -> list[Look]:
    count, length = _COUNTS.unpack_from(data)
    at = _COUNTS.size + length
    lists = fit(parse(data[_COUNTS.size : at], "a step"), array(array(text(511), 2**20), 2**20), "a step")
    heads = [_HEAD.unpack_from(data, at + n * _HEAD.size) for n in range(count)]
    at += count * _HEAD.size
    arrays: list[dict[str, Array | None]] = [dict.fromkeys(_FIELDS) for _ in heads]
    for field, dtype in _FIELDS.items():
        for head, found in zip(heads, arrays, strict=True):
            _, _, _, rows, query_heads, entries, has_offsets, _, _ = head
            if field == "offsets" and not has_offsets:
                continue
            shape = (query_heads if field == "weights" else rows, entries)
            found[field] = np.frombuffer(data, dtype, shape[0] * shape[1], at).reshape(shape)
            at += shape[0] * shape[1] * np.dtype(dtype).itemsize
    return [_look(head, lists, found) for head, found in zip(heads, arrays, strict=True)]


def _look(head: tuple[Any, ...], lists: list[list[str]], arrays: dict[str, Any]) -> Look:
    layer, row, documents, _, _, _, _, search_us, gather_us = head
    arrays["weights"] = arrays["weights"].astype(np.float32)
    return Look(layer=layer, row=row, documents=lists[documents], search_us=search_us, gather_us=gather_us, **arrays)


assert set(_FIELDS) <= {field.name for field in fields(Look)}


INTERVAL = 1.0
"""Seconds after which steps that are over are written: what is put off until then is cheaper for many steps at once."""

_log = logging.getLogger("memstore")


class _Pending:
    """A step that is not written yet."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.token: int | None = None
        self.looks: list[Look] = []


class Recorder:
    """Records one trace: ``begin`` a step, tell the ``look`` of each layer, and the ``token`` that came of it.

    Steps are written about once a second, and the rest when the ``with`` block is left. What cannot be written is
    logged once and ends the recording: a model that answers is not stopped by a disk that is full.
    """

    def __init__(self, file: TraceFile, info: dict[str, Any], max_bytes: int) -> None:
        """Made by ``Traces.record``."""
        self._file, self._info, self._max_bytes = file, info, max_bytes
        self._begun = self._written_at = time.perf_counter()
        self._first = 0
        self._steps: list[_Pending] = []
        self._recording = True
        self._encoded_last: tuple[list[Look], bytes | None] = ([], None)
        self.before_writing: Callable[[], None] | None = None
        """Called before steps are written: a mechanism that puts off computing what it looked at does so now."""
        file.acquire()
        try:
            with file.writing() as connection:
                row, text = "INSERT INTO traces (info, ended, bytes) VALUES (?, 0, ?)", json.dumps(info)
                self.number: int = connection.execute(row, [text, len(text)]).lastrowid or 0
        except BaseException:
            file.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """Number of the step that ``begin`` began last; -1 before the first."""
        return self._first + len(self._steps) - 1

    @property
    def active(self) -> bool:
        """Whether anything is still written: it is not closed, and writing has not failed."""
        return self._recording

    @property
    def info(self) -> dict[str, Any]:
        """What the trace says of itself so far."""
        return self._info

    def describe(self, **info: Any) -> None:
        """Add to the trace's ``info`` what was not known when it began; JSON."""
        self._info |= info
        if self._recording:
            text = json.dumps(self._info)
            statement = "UPDATE traces SET info = ?, bytes = bytes - length(info) + ? WHERE number = ?"
            self._write(statement, [[text, len(text), self.number]])

    def begin(self) -> None:
        """A forward pass begins: a new step."""
        if not self._recording:
            return
        now = time.perf_counter()
        if now - self._written_at > INTERVAL:
            self._flush()
            self._written_at = now
        self._steps.append(_Pending(now - self._begun))

    def look(self, look: Look, *, step: int | None = None) -> None:
        """What a layer retrieved, at the step that began last, or at an earlier ``step`` that is not written yet."""
        if self._recording:
            step = self.step if step is None else step
            assert self._first <= step <= self.step, "the step is written already, or has not begun"
            self._steps[step - self._first].looks.append(look)

    def token(self, token_id: int) -> None:
        """The id of the token that the step before chose, told before the next one begins."""
        if self._recording and self._steps:
            self._steps[-1].token = token_id

    def close(self, tokens: Sequence[int] | None = None) -> None:
        """Write what is left, and end the trace; ``tokens``, where given, are those that the steps chose, in order.

        Closing twice is allowed.
        """
        if not self._recording:
            return
        self._flush()
        if tokens is not None:
            named = [[token, self.number, step] for step, token in enumerate(tokens)]
            self._write("UPDATE steps SET token = ? WHERE trace = ? AND number = ?", named)
        self._write("UPDATE traces SET ended = 1 WHERE number = ?", [[self.number]])
        self._stop()

    def _flush(self) -> None:
        if self.before_writing is not None:
            self.before_writing()
        if not self._recording or not self._steps:
            return
        rows = [
            (self.number, self._first + place, step.token, step.seconds, self._encoded(step.looks))
            for place, step in enumerate(self._steps)
        ]
        self._first, self._steps = self._first + len(self._steps), []
        nbytes = sum(len(looks) for *_, looks in rows if looks is not None)
        try:
            with self._file.writing() as connection:
                connection.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", rows)
                connection.execute("UPDATE traces SET bytes = bytes + ? WHERE number = ?", [nbytes, self.number])
                make_room(connection, self.number, self._max_bytes)
        except MemstoreError as error:
            self._give_up(error)

    def _encoded(self, looks: list[Look]) -> bytes | None:
        """What the file has of a step; steps that use a list again have the very same looks."""
        if looks != self._encoded_last[0]:
            self._encoded_last = (looks, encode(looks) if looks else None)
        return self._encoded_last[1]

    def _write(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        try:
            with self._file.writing() as connection:
                connection.executemany(statement, rows)
        except MemstoreError as error:
            self._give_up(error)

    def _give_up(self, error: MemstoreError) -> None:
        # Traces.record raises, for nothing has begun then; from there on the answer matters more than its trace.
        _log.warning("trace %d is not recorded any further: %s", self.number, error)
        self._stop()

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            self._file.release()


def make_room(connection: Any, current: int, max_bytes: int) -> None:
    """Let the oldest other traces leave until at most ``max_bytes`` are taken, then the oldest looks of this one."""
    taken = dict(connection.execute("SELECT number, bytes FROM traces ORDER BY number").fetchall())
    excess = sum(taken.values()) - max_bytes
    for number, nbytes in taken.items():
        if excess > 0 and number != current:
            delete(connection, number)
            excess -= nbytes
    if excess <= 0:
        return
    # Looks leave, tokens stay: so steps count on, and the answer is whole however little of it is explained.
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
    """Delete a trace; whether there was one."""
    connection.execute("DELETE FROM steps WHERE trace = ?", [number])
    return bool(connection.execute("DELETE FROM traces WHERE number = ?", [number]).rowcount)
