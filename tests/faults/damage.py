"""Reading a memory whose files are damaged: what came of it, in a few words."""

from __future__ import annotations

import signal

import memstore
from benchmarks.torture.processes import Say, run
from memstore.errors import MemstoreError
from tests.faults.outcome import Outcome
from tests.faults.world import State, World, Wrong, check_all, sound


def report(outcome: Outcome, found: str, where: str) -> None:
    """File what ``read_damaged`` said under the promise that it breaks, if it breaks one."""
    if found.startswith(("wrong", "unnoticed")):
        outcome.wrong.append(f"{found}: {where}")
    if found.startswith(("crashed", "hung", "not one of ours")):
        outcome.crashes.append(f"{found}: {where}")


def read_damaged(world: World, url: str, state: State) -> str:
    """Read everything in a child, then verify, in another one if the first is gone."""
    reading = run(lambda say: _read(world, url, state, say))
    hung = reading.hung
    if reading.lines:  # it was read, or refused; that verify may be ended by a signal is why it has its own process
        outcome, findings = reading.lines[0], [*reading.lines, "verify was ended"][1]
    else:
        checking = run(lambda say: say(_checked(url)))
        outcome, findings = f"crashed by {signal.Signals(-reading.code).name}", checking.last or "verify was ended"
        hung |= checking.hung
    if hung:
        return "hung"
    noticed = findings != "clean"
    match outcome.split(": ")[0]:
        case "right":
            return "right, found by verify" if noticed else "right"
        case "refused":
            return "refused" if noticed else "unnoticed by verify"
        case "error":
            return f"not one of ours: {outcome}"
    return f"{outcome.split(': ')[0]}, {'' if noticed else 'not even '}found by verify"


def _read(world: World, url: str, state: State, say: Say) -> None:
    try:
        with memstore.open(url, mode="r") as memory:
            check_all(world, memory, state)
    except MemstoreError as error:
        say(f"refused: {_line(error)}")
    except Wrong as error:
        say(f"wrong: {_line(error)}")
    else:
        say("right")
    say(_checked(url))


def _checked(url: str) -> str:
    try:
        return _line("; ".join(sound(url)) or "clean")
    except MemstoreError as error:
        return _line(error)


def _line(words: object) -> str:
    return " ".join(str(words).split())
