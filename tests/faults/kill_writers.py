"""SIGKILL a process that writes in every way there is: every commit it told of is there, whole, and nothing else is.

A round goes on with the memory that the round before was killed over. After some rounds the memory is finished and
compared with one that nobody disturbed, byte by byte.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import memstore
from benchmarks.torture.processes import Say, run
from memstore import Memory
from memstore.errors import NotFound
from tests.faults.killer import Killer, told
from tests.faults.outcome import Outcome
from tests.faults.world import STORES, State, World, Wrong, check_all, digest, moved, sound

STEPS = 4  # of a round that nobody kills
ROUNDS = 25  # on one memory; the next round makes a new one, so that creation is killed too


def kill_writers(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Kill ``rounds`` times."""
    outcome, killer = Outcome(), Killer(seed)
    for start in range(0, rounds, ROUNDS):
        killed = _Killed(World(seed + start), STORES[store](folder / f"killed-{start}"), outcome)
        for _ in range(min(ROUNDS, rounds - start)):
            killed.round(killer)
        killed.compare(STORES[store](folder / f"undisturbed-{start}"))
    return outcome


class _Killed:
    """One memory, and the steps of its history that were found in it."""

    def __init__(self, world: World, url: str, outcome: Outcome) -> None:
        self._world, self._url, self._outcome = world, url, outcome
        self._states = world.history(ROUNDS * STEPS)
        self._done = 0
        self._exists = False
        self._published = -1
        """Steps that another computer must see, if not more; -1: it need not even find the memory."""

    def round(self, killer: Killer) -> None:
        """Kill once, and look at what is left."""
        way, ending = killer.kill(self._write, self._outcome.counts)
        if ending.code > 0:
            self._outcome.crashes.append(f"{self._where(way)} could not go on: {ending.last}")
        acknowledged = max([self._done, *(int(line) for line in ending.lines if line.isdigit())])
        if ending.code == 0:  # to close it publishes
            self._published = acknowledged
        elif self._exists and "open" in ending.lines:  # so does to open it after a kill
            self._published = self._done
        self._exists |= bool(ending.lines)
        looking = run(lambda say: say(self._look(acknowledged)))
        if looking.last.isdigit():
            self._outcome.counts["commits checked"] += int(looking.last) - self._done
            self._done = int(looking.last)
            return
        broken = self._outcome.losses if looking.last.startswith("lost") else self._outcome.wrong
        (broken if looking.code == 0 else self._outcome.crashes).append(f"{self._where(way)}: {looking.last}")
        self._done = acknowledged

    def _where(self, way: str) -> str:
        return f"{self._url} (seed {self._world.seed}), killed by {way} after {self._done} steps"

    def _write(self, say: Say, last: int | None) -> None:
        with self._world.open(self._url) as memory, told(memory, say, last):
            say("open")
            for number in range(self._done, min(self._done + STEPS, len(self._states) - 1)):
                self._world.do(memory, number, self._states[number])
                say(str(number + 1))

    def _look(self, acknowledged: int) -> str:
        """In a process of its own: how many steps are there, or what is wrong with what is there."""
        try:
            with memstore.open(self._url, mode="r") as memory:
                try:
                    check_all(self._world, memory, self._states[acknowledged])
                    found = acknowledged
                except Wrong:  # the commit under way may be there as well, whole
                    found = acknowledged + 1
                    check_all(self._world, memory, self._states[found])
        except NotFound as error:  # killed while it was made
            return f"lost: {error}" if self._exists else "0"
        except (Wrong, IndexError) as error:
            return f"lost: {error}"
        try:
            if "?tail=" in self._url:
                self._check_published(found)
        except Wrong as error:
            return f"lost: {error}"
        findings = sound(self._url)
        return f"verify found: {findings}" if findings else str(found)

    def _check_published(self, found: int) -> None:
        """Whether another computer reads a state that was committed, whole, and no older one than it must."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                memory = memstore.open(moved(self._url, Path(folder)), mode="r")
            except NotFound as error:
                if self._published < 0:
                    return
                raise Wrong(f"it was published, and is not found: {error}") from error
            with memory:
                if not any(self._is(memory, state) for state in self._states[max(self._published, 0) : found + 1]):
                    raise Wrong("what is published is no state that was committed, or an older one than it must be")

    def _is(self, memory: Memory, state: State) -> bool:
        with suppress(Wrong):
            check_all(self._world, memory, state)
            return True
        return False

    def compare(self, other: str) -> None:
        """The next run resumes, and ends with the bytes of an undisturbed memory."""

        def finish(say: Say) -> None:
            for url, start in ((self._url, self._done), (other, 0)):
                with self._world.open(url) as memory:
                    for number in range(start, len(self._states) - 1):
                        self._world.do(memory, number, self._states[number])
                    memory.limit(None)  # one that is still set depends on how much was sealed when it was set
                say(digest(url))

        ending = run(finish)
        self._outcome.counts["memories compared"] += 1
        if ending.code or ending.lines[0] != ending.lines[1]:
            self._outcome.losses.append(f"{self._where('several')} does not end like an undisturbed one: {ending.last}")
