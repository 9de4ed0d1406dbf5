"""A disk that fills while a memory is written: StoreFull, the last commit stands, and with room it goes on.

Three ways to be full: a file system of some megabytes of which the memory takes all; the same file system, filled by
somebody else; and a limit on the size of files, which is what a quota does.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path

import memstore
from benchmarks.torture.processes import Say, may_mount, mount_small_disk, run
from memstore import Memory
from memstore.errors import StoreFull
from tests.faults.outcome import Outcome
from tests.faults.world import SIZES, STORES, State, World, check_all, sound

MOST_STEPS = 400


def fill_disks(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Fill ``rounds`` disks."""
    outcome, rng = Outcome(), random.Random(seed)
    ways = ["limit", "memory", "somebody"] if may_mount() else ["limit"]
    for number in range(rounds):
        way, disk = ways[number % len(ways)], folder / str(number)
        disk.mkdir()
        filling = Filling(
            World(seed + number, SIZES["large"]), STORES[store](disk / "m"), disk, way, random.Random(rng.random())
        )
        ending = run(filling.run)
        outcome.counts[f"filled by {way}" if way != "limit" else "filled up to a limit"] += 1
        for line in ending.lines:
            word, _, words = line.partition(": ")
            if word in ("lost", "wrong"):
                (outcome.losses if word == "lost" else outcome.wrong).append(f"{way}, seed {seed}, {number}: {words}")
            elif word != "error":
                outcome.counts[line] += 1
        if ending.code:
            outcome.crashes.append(f"{way}, seed {seed}, round {number}: {ending.code} {ending.last}")
    return outcome


class Filling:
    """One disk, and a memory on it."""

    def __init__(self, world: World, url: str, disk: Path, way: str, rng: random.Random) -> None:
        self._world, self._url, self._disk, self._way, self._rng = world, url, disk, way, rng

    def run(self, say: Say) -> None:
        """Fill it, make room, go on, and look at it from a new process."""
        nbytes = int(2 ** self._rng.uniform(13, 22))  # 8 KB, so that creation fails, to 4 MB
        make_room = self._shrink(nbytes)
        state = State()
        step, full_at_once = 0, False
        try:
            memory = self._world.open(self._url)
        except StoreFull:
            say("met by creation")
            full_at_once = True
            make_room()
            memory = self._world.open(self._url)
        with memory:
            if not full_at_once:
                state, step = self._write_until_full(memory, state, say, grow=self._way != "somebody")
                state = self._forget_one(memory, state, say)
                make_room()
            for later in range(step, step + 10):
                state = self._world.do(memory, later, state)
        say("went on in the same process")
        looking = run(lambda tell: self._look(state, tell))
        say(looking.last if looking.code == 0 else f"lost: {looking.last}")

    def _shrink(self, nbytes: int) -> Callable[[], None]:
        """Leave only that much room; returns how to make more."""
        if self._way == "limit":
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        mount_small_disk(self._disk, 64 << 20)
        ballast = self._disk / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (64 << 20) - nbytes)
        return lambda: ballast.unlink(missing_ok=True)

    def _write_until_full(self, memory: Memory, state: State, say: Say, *, grow: bool) -> tuple[State, int]:
        for step in range(MOST_STEPS):
            if step == 20 and self._way == "somebody":
                self._take_the_rest()
            try:
                state = self._world.do(memory, step, state, grow=grow)
            except StoreFull as error:
                if "earlier commits are intact" not in str(error):
                    say(f"wrong: {error}")
                say("met by a commit")
                check_all(self._world, memory, state)
                return state, step
        return state, MOST_STEPS

    def _take_the_rest(self) -> None:
        room = os.statvfs(self._disk)
        with (self._disk / "more").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail) * room.f_bsize)
        (self._disk / "more").rename(self._disk / "ballast")

    def _forget_one(self, memory: Memory, state: State, say: Say) -> State:
        """Forgetting is what makes room, so it should need none; where it fails it must change nothing."""
        if not state.documents:
            return state
        name = self._rng.choice(list(state.documents))
        try:
            memory.forget(name)
        except StoreFull:
            say("no room to forget")
            check_all(self._world, memory, state)
            return state
        say("forgot without room")
        state = state.without(name)
        check_all(self._world, memory, state)
        return state

    def _look(self, state: State, say: Say) -> None:
        with memstore.open(self._url, mode="r") as memory:
            check_all(self._world, memory, state)
        findings = sound(self._url)
        say(f"lost: {findings}" if findings else "checked in a new process")
