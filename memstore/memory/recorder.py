"""What mechanisms write a trace to while a model is generating; ``trace_file.py`` has the file."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from memstore.errors import MemstoreError
from memstore.memory.trace_file import Look, TraceFile, encode, make_room

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
