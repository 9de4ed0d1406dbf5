"""Ends a process by SIGKILL, each time in another way and at another place.

At a random *time*; at a random *bytecode* instruction; at the start or end of a random system *call*; at a random
machine *instruction* after a random system call. The last two need ptrace, which some sandboxes forbid.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from benchmarks.torture.processes import Ending, Say, fork, may_trace, run, step_through
from memstore import Memory

_MOST_INSTRUCTIONS = 2_000

Body = Callable[[Say, int | None], None]
"""What is killed: it tells of its commits, and at the bytecode instruction of that number, if any, it kills itself."""


class Bytecodes:
    """Counts the bytecode instructions of the calling thread; at ``last`` the process kills itself."""

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last = last

    def __enter__(self) -> Bytecodes:
        sys.settrace(self._frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _frame(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._frame


class Killer:
    """Chooses how and where to kill, and learns from processes that ended before how long they take."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        ways = ["time", "bytecode", "call", "instruction"]
        self._ways = itertools.cycle(ways if may_trace() else ways[:2])
        self._longest = {"time": 0.1, "bytecode": 100_000.0, "call": 500.0, "instruction": 500.0}  # seconds, or steps

    def kill(self, body: Body, counts: Counter[str]) -> tuple[str, Ending]:
        """Start ``body`` and end it; how, and the ending."""
        way = next(self._ways)
        place = self._rng.random() * self._longest[way]
        match way:
            case "time":
                child = fork(lambda say: body(say, None))
                time.sleep(place)  # the moment is what is tried
                ending = child.kill()
            case "bytecode":
                ending = run(lambda say: body(say, int(place) + 1))
            case _:
                instructions = self._rng.randrange(_MOST_INSTRUCTIONS) if way == "instruction" else 0
                ending = step_through(lambda say: body(say, None), int(place) + 1, instructions)
        self._longest[way] *= 0.7 if ending.code == 0 else 1.1
        _count(way, ending, counts)
        return way, ending


def _count(way: str, ending: Ending, counts: Counter[str]) -> None:
    counts["rounds"] += 1
    if ending.code == -signal.SIGKILL:
        inside = [line for line in ending.lines if line in ("(", ")")][-1:] == ["("]
        counts[f"killed by {way}"] += 1
        counts["killed inside a commit"] += inside
    else:
        counts["ended before"] += 1


@contextmanager
def told(memory: Memory, say: Say, last: int | None, *, only_commits: bool = False) -> Iterator[None]:
    """Let a memory tell when a commit starts, ``(``, and ends, ``)``, and count bytecodes: all, or those of commits."""
    store, bytecodes = memory._shared.store, Bytecodes(last)

    def telling(write: Callable[..., Any]) -> Callable[..., Any]:
        def told(*arguments: Any) -> Any:
            say("(")
            with bytecodes if only_commits else nullcontext():
                result = write(*arguments)
            say(")")
            return result

        return told

    for name in ("write", "write_within", "compact"):
        setattr(store, name, telling(getattr(store, name)))
    with nullcontext() if only_commits else bytecodes:
        yield
