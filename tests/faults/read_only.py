"""Take away the right to write while a memory is written and read: readers go on, and nothing is lost.

A process keeps what it has open, so the writer may go on too; opening for writing is refused with the way out. With
the right given back, the next writer resumes. Root may write everywhere, so a root gives up its rights first.
"""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import memstore
from benchmarks.torture.processes import Say, run
from memstore.errors import ReadOnlyMemory
from tests.faults.outcome import Outcome
from tests.faults.world import STORES, State, World, check_all, sound

NOBODY = 65534  # the number of a user without rights
STEPS = 8  # before, while and after it is read-only


def forbid_writing(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Take the right away from the folder, its files, or both, ``rounds`` times."""
    outcome, rng = Outcome(), random.Random(seed)
    for number in range(rounds):
        home = folder / str(number)
        home.mkdir()
        if not os.getuid():
            folder.chmod(0o755)
            os.chown(home, NOBODY, NOBODY)
        what = ("folder", "files", "folder and files")[number % 3]
        world, url, steps = World(rng.randrange(1000)), STORES[store](home / "m"), rng.randint(1, STEPS)
        ending = run(partial(_round, world, url, home / "m", what, steps))
        outcome.counts[f"rights taken from the {what}"] += 1
        for line in ending.lines:
            if line.startswith(("lost", "error")):
                outcome.losses.append(f"{what} (seed {world.seed}): {line}")
            else:
                outcome.counts[line] += 1
        if ending.code:
            outcome.crashes.append(f"{what} (seed {world.seed}): {ending.code} {ending.last}")
    return outcome


def _round(world: World, url: str, folder: Path, what: str, steps: int, say: Say) -> None:
    if not os.getuid():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    state = State()
    with world.open(url) as memory:
        for number in range(steps):
            state = world.do(memory, number, state)
        _chmod(folder, what, 0o555, 0o444)
        try:
            state = world.do(memory, steps, state)
            steps += 1
            say("the open writer went on")
        except ReadOnlyMemory:
            say("the open writer was refused")
        check_all(world, memory, state)
    say("readers went on")
    say(run(lambda tell: _look(world, url, state, tell)).last)
    try:
        world.open(url).close()
        say("opened for writing all the same")
    except ReadOnlyMemory as error:
        say("opening for writing was refused" if "mode='r'" in str(error) else f"lost: no way out in {error}")
    _chmod(folder, what, 0o755, 0o644)
    with world.open(url) as memory:
        check_all(world, memory, state)
        for number in range(steps, steps + STEPS):
            state = world.do(memory, number, state)
    say("the next writer resumed")
    say(run(lambda tell: _look(world, url, state, tell)).last)


def _chmod(folder: Path, what: str, folder_mode: int, file_mode: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and "folder" in what:
            path.chmod(folder_mode)
        if path.is_file() and "files" in what:
            path.chmod(file_mode)


def _look(world: World, url: str, state: State, say: Say) -> None:
    with memstore.open(url, mode="r") as memory:
        check_all(world, memory, state)
    findings = sound(url)
    say(f"lost: {findings}" if findings else "checked by a new reader")
