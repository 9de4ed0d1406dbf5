"""Behaviour of a store of key-value states when its disk, its power or its files fail.

It works for any store, in a few lines: a ``Subject`` appends blocks of states, cuts them off and reads them back. Its
history follows from a seed, so no two blocks are equal. A block that is read belongs to the last commit, to an earlier
one, or to none. Only the store's answers in a new process count.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.torture.processes import (
    Say,
    be_traced,
    end_children,
    fork,
    may_mount,
    may_trace,
    mount_small_disk,
    run,
    step_through,
)

States = npt.NDArray[np.float32]
SHAPE = (2, 2, 16, 32)
"""Shape of a block: keys and values, heads, tokens, head size; 8 KiB."""
STEPS = 24
"""Commits of a whole history."""
COPIES = 8
"""Last commits after which a copy is kept. Older pages are restored from these copies."""
SAME = 8
"""Rounds of damage to one history."""
PAGE = 4096
"""Bytes that a disk writes at once: the size of a swapped or restored page."""
DISK_BYTES = 8 << 20
"""Bytes of the disk that is filled."""


class UntriedStore(RuntimeError):
    """The store cannot be tested: it does not work, or has no files."""


class Subject(ABC):
    """A store under test: the blocks of one text, in order. Each change is committed when its call returns."""

    name = "store"
    """Name in the report, with the version."""

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """Open the store in ``folder``, or make it. Damage may be refused here, by any exception."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks."""

    @abstractmethod
    def append(self, states: States) -> None:
        """Append blocks ``[n, *SHAPE]`` of float32."""

    @abstractmethod
    def cut(self, blocks: int) -> None:
        """Keep only the first ``blocks``."""

    @abstractmethod
    def read(self, block: int) -> States:
        """Read block number ``block``, bit for bit. Damage is refused by any exception."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Close all files."""

    @staticmethod
    def files(folder: Path) -> list[Path]:
        """Return the files that hold stored data and get damaged: all of them, unless a subclass overrides this."""
        return [file for file in sorted(folder.rglob("*")) if file.is_file() and file.stat().st_size]


# Its blocks are known by their numbers, which no two steps share: an older block never equals its successor.
@dataclass(frozen=True)
class History:
    """All changes of a subject. They follow from the seed."""

    seed: int

    def states(self, steps: int = STEPS) -> list[tuple[int, ...]]:
        """Return the numbers of the existing blocks after 0, 1, ... ``steps`` commits."""
        found: list[tuple[int, ...]] = [()]
        for step in range(steps):
            kept, added = self._step(step, len(found[-1]))
            found.append((*found[-1][:kept], *(step * 8 + each for each in range(added))))
        return found

    def do(self, subject: Subject, step: int, blocks: int) -> None:
        """Make commit number ``step``, on top of ``blocks`` blocks."""
        kept, added = self._step(step, blocks)
        if kept < blocks:
            subject.cut(kept)
        else:
            subject.append(np.stack([self.block(step * 8 + each) for each in range(added)]))

    def block(self, number: int) -> States:
        return np.random.default_rng([self.seed, number]).standard_normal(SHAPE, dtype=np.float32)

    @property
    def writes_over(self) -> bool:
        """Check whether blocks near the end are cut off and replaced by others: older pages are then wrong ones."""
        *before, last, end = [len(state) for state in self.states()][-5:]
        return end > last and any(size > after for size, after in pairwise([*before, last]))

    def digests(self) -> dict[bytes, int]:
        """Map the digest of each block to its number."""
        numbers = {number for state in self.states() for number in state}
        return {_digest(self.block(number)): number for number in numbers}

    def _step(self, step: int, blocks: int) -> tuple[int, int]:
        """Return how many blocks stay, and how many are added. Only one of the two changes."""
        rng = random.Random(f"{self.seed} {step}")
        if blocks > 8 and rng.random() < 0.25:
            return rng.randrange(blocks // 2, blocks), 0
        return blocks, rng.randint(1, 4)


@dataclass
class _Observation:
    """The result of a new process: for each block its number, -1 if no commit wrote it, or the error."""

    blocks: list[int | str] = field(default_factory=list)
    error: str = ""
    """Reason if nothing could be read."""
    ended: str = ""
    """How the process ended, if a signal ended it."""

    def verdict(self, states: Sequence[tuple[int, ...]], under_way: tuple[int, ...] | None = None) -> str:
        """Return the verdict, if the last of ``states`` was committed last, and perhaps ``under_way`` after it."""
        last = states[-1]
        if self.ended or self.error:
            return "crashed" if self.ended else "refused"
        served = [number for number in self.blocks if isinstance(number, int)]
        whole = len(served) == len(self.blocks)
        if whole and tuple(served) in (last, under_way):
            return "right"
        if not self.blocks:
            return "lost"  # an empty store was never committed
        if whole and tuple(served) in states:
            return "earlier"
        numbered = [(i, number) for i, number in enumerate(self.blocks) if isinstance(number, int)]
        if all(number in (at(last, i), at(under_way or last, i)) for i, number in numbered):
            if under_way and len(self.blocks) != len(last):
                return "torn"
            return "lost" if len(self.blocks) < len(last) else "refused"
        return "wrong"


def at(state: tuple[int, ...], place: int) -> int | None:
    """Return the number of the block at ``place``, or None."""
    return state[place] if place < len(state) else None


VERDICTS = {
    "right": "everything committed was read",
    "refused": "an error, and no wrong data was served",
    "earlier": "an earlier commit as a whole, without an error",
    "lost": "committed data is missing, without an error",
    "torn": "only a part of a commit is present",
    "wrong": "wrong states were served",
    "crashed": "a signal ended the process, or it never ended",
}
BAD = ("lost", "torn", "wrong", "crashed")
"""Verdicts that no store should get. ``earlier`` cannot be avoided if only the page with the last commit is older."""


@dataclass
class FaultTally:
    """The results of one fault on one subject."""

    fault: str
    rounds: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    blocks: int = 0
    """Committed blocks, over all rounds with damage and without wrong blocks."""
    read: int = 0
    """Blocks among them that could still be read."""
    examples: dict[str, str] = field(default_factory=dict)
    """One example of each verdict: place and error."""
    seconds: float = 0.0

    def add(self, verdict: str, seen: _Observation, expected: int, where: str) -> None:
        self.rounds += 1
        self.verdicts[verdict] += 1
        if verdict in ("right", "refused"):
            self.blocks += expected
            self.read += sum(isinstance(each, int) for each in seen.blocks)
        words = seen.ended or seen.error or next((each for each in seen.blocks if isinstance(each, str)), "")
        self.examples.setdefault(verdict, f"{where}: {words}" if words else where)

    @property
    def broken(self) -> bool:
        """Whether the store got a verdict that no store should."""
        return any(self.verdicts[verdict] for verdict in BAD)


Make = type[Subject]


def look(make: Make, history: History, folder: Path) -> _Observation:
    """Open the store in a new process, and read every block."""

    def reading(say: Say) -> None:
        digests = history.digests()
        try:
            subject = make(folder)
            blocks: list[int | str] = []
            for block in range(len(subject)):
                try:
                    blocks.append(digests.get(_digest(subject.read(block)), -1))
                except Exception as error:  # noqa: BLE001 - any error of a store
                    blocks.append(_told(error))
            say(json.dumps(blocks))
        except Exception as error:  # noqa: BLE001
            say(json.dumps(_told(error)))

    ending = run(reading)
    if not ending.lines or ending.code:
        return _Observation(ended=f"it ended with {ending.code} {ending.last}")
    found = json.loads(ending.last)
    return _Observation(error=found) if isinstance(found, str) else _Observation(blocks=found)


def write(make: Make, history: History, folder: Path, start: int, stop: int, say: Say, *, stay: bool = False) -> None:
    """Commit steps ``start`` to ``stop``, and report each once its call has returned.

    ``stay``: keep it open at the end.
    """
    states = history.states()
    subject = make(folder)
    for step in range(start, stop):
        history.do(subject, step, len(states[step]))
        say(str(step + 1))
    while stay:
        time.sleep(0.001)  # a tracing parent counts such calls too
    subject.close()


def restart(make: Make, folder: Path, rounds: int, rng: random.Random) -> FaultTally:
    """Close the store, and open it in a new process, without any fault."""
    outcome = FaultTally("restart")
    for _ in range(rounds):
        history, place = _history(rng), _new(folder)
        _whole(make, history, place, STEPS)
        states = history.states()
        seen = look(make, history, place)
        outcome.add(_unharmed(seen.verdict(states)), seen, len(states[-1]), f"seed {history.seed}")
    return outcome


def kill(make: Make, folder: Path, rounds: int, rng: random.Random) -> FaultTally:
    """End the writing process by SIGKILL, at a system call (if these can be traced) or at a moment; then continue.

    It is ended after a commit that it has reported, so that there is always something to lose, and near the next one.
    """
    outcome, history, place, done = FaultTally("kill"), _history(rng), _new(folder), 0
    calls, seconds, traced = 50.0, 0.02, may_trace()
    for number in range(rounds):
        if done >= STEPS - 4:
            history, place, done = _history(rng), _new(folder), 0
        after, by_calls = rng.randrange(max(done, 1), STEPS), traced and number % 2 == 0

        body = _writing(make, history, place, done, after, traced=by_calls)
        if by_calls:
            ending = step_through(body, rng.randrange(int(calls)) + 1, 0, at_once=False)
        else:
            child = fork(body)
            child.hear(str(after))
            time.sleep(rng.random() * seconds)  # the moment is the fault under test
            ending = child.kill()
        told = max([done, *(int(line) for line in ending.lines if line.isdigit())])
        if by_calls:
            calls *= 0.7 if told > after + 1 else 1.3
        else:
            seconds *= 0.7 if told > after + 1 else 1.3
        seen = look(make, history, place)
        found, verdict = _interrupted(history, seen, told)
        if ending.last.startswith("error: "):  # before the kill: the store could not continue with the existing files
            verdict = "lost"
        elif ending.hung:
            verdict = "crashed"
        outcome.add(verdict, seen, len(history.states()[found]), f"seed {history.seed}, killed after commit {told}")
        done = found if verdict == "right" else STEPS
    return outcome


def _writing(
    make: Make, history: History, folder: Path, done: int, after: int, *, traced: bool
) -> Callable[[Say], None]:
    """Continue after ``done`` commits until killed. If ``traced``, its calls count from commit ``after``."""

    def body(say: Say) -> None:
        def tell(line: str) -> None:
            say(line)
            if traced and line == str(after):
                be_traced()

        if done:
            tell(str(done))  # opening may be the interrupted step
        write(make, history, folder, done, STEPS, tell, stay=True)

    return body


def fill(make: Make, folder: Path, rounds: int, rng: random.Random) -> FaultTally:
    """Fill the disk during writes. The store must raise, keep its commits, and continue once there is room."""
    outcome = FaultTally("fill")
    if not may_mount():
        return outcome
    for number in range(rounds):
        history, place, room = _history(rng), _new(folder), int(2 ** rng.uniform(14, 21))

        def filled(say: Say, history: History = history, place: Path = place, room: int = room) -> None:
            mount_small_disk(place, DISK_BYTES)
            ballast = place / "ballast"
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, DISK_BYTES - room)
            writing = run(lambda tell: write(make, history, place / "m", 0, STEPS, tell))
            told = max([0, *(int(line) for line in writing.lines if line.isdigit())])
            ballast.unlink()
            seen, states = look(make, history, place / "m"), history.states()
            found, verdict = _interrupted(history, seen, told)
            if verdict == "right":
                going_on = run(lambda tell: write(make, history, place / "m", found, STEPS, tell))
                seen = look(make, history, place / "m") if going_on.code == 0 else _Observation(error=going_on.last)
                verdict = _unharmed(seen.verdict(states))
            say(json.dumps([verdict, vars(seen), len(states[-1])]))

        ending = run(filled)
        verdict, seen, expected = (
            json.loads(ending.last) if ending.code == 0 else ("crashed", {"ended": ending.last}, 0)
        )
        outcome.add(
            verdict, _Observation(**seen), expected, f"seed {history.seed}, {room:,} bytes of room, round {number}"
        )
    return outcome


Damage = Callable[[random.Random, Path, Sequence[Path], Sequence[Path]], str]
"""Changes one of some files of a folder, given folders with their earlier versions; returns the place."""


def _flip(rng: random.Random, folder: Path, files: Sequence[Path], _: Sequence[Path]) -> str:
    file, size = _chosen(rng, files)
    at, bit = rng.randrange(size), rng.randrange(8)
    with file.open("r+b") as data:
        byte = os.pread(data.fileno(), 1, at)[0]
        os.pwrite(data.fileno(), bytes([byte ^ 1 << bit]), at)
    return f"bit {bit} of byte {at:,} of {file.relative_to(folder)}"


def _truncate(rng: random.Random, folder: Path, files: Sequence[Path], _: Sequence[Path]) -> str:
    file, size = _chosen(rng, files)
    # As often near the end, where the loss is small, as anywhere.
    length = rng.randrange(size) if rng.random() < 0.5 else max(0, size - rng.randrange(1, 1 << 15))
    os.truncate(file, length)
    return f"{file.relative_to(folder)} cut from {size:,} to {length:,} bytes"


def _swap(rng: random.Random, folder: Path, files: Sequence[Path], _: Sequence[Path]) -> str:
    """Exchange two pages, as a disk does that writes to the wrong place."""
    pages = [(file, at) for file in files for at in range(0, file.stat().st_size, PAGE)]
    (one, here), (other, there) = rng.sample(pages, 2) if len(pages) > 1 else pages * 2
    first, second = _page(one, here), _page(other, there)
    _put(one, here, second[: len(first)])
    _put(other, there, first[: len(second)])
    return f"page {here // PAGE} of {one.relative_to(folder)} and {there // PAGE} of {other.relative_to(folder)}"


def _roll_back(rng: random.Random, folder: Path, files: Sequence[Path], older: Sequence[Path]) -> str:
    """Restore a page from some commits ago, as after a lost write."""
    for copy in rng.sample(older, len(older)):
        pages = [
            (file, at)
            for file in files
            if (before := copy / file.relative_to(folder)).is_file()
            for at in range(0, min(file.stat().st_size, before.stat().st_size), PAGE)
            if _page(file, at) != _page(before, at)
        ]
        if pages:
            file, at = rng.choice(pages)
            _put(file, at, _page(copy / file.relative_to(folder), at))
            return f"page {at // PAGE} of {file.relative_to(folder)} as after commit {copy.name}"
    return "no page had changed"


DAMAGES: dict[str, Damage] = {"flip": _flip, "truncate": _truncate, "swap": _swap, "roll-back": _roll_back}


def damage(name: str, make: Make, folder: Path, rounds: int, rng: random.Random) -> FaultTally:
    """Damage copies of a whole store, one after the other, and read the rest."""
    outcome = FaultTally(name)
    for number in range(rounds):
        if number % SAME == 0:
            history, kept = _history(rng, writes_over=True), _new(folder)
            states, whole = history.states(), kept / "whole"
            older = [kept / str(step) for step in range(STEPS - COPIES, STEPS)]
            _whole(make, history, whole, STEPS - COPIES)
            for copy in older:  # each commit in a process of its own, so that nothing is open during the copy
                if not (whole.is_dir() and make.files(whole)):
                    raise UntriedStore("the store wrote nothing into its folder, so there is nothing to damage.")
                shutil.copytree(whole, copy)
                _whole(make, history, whole, int(copy.name) + 1, start=int(copy.name))
        place = kept / "damaged"
        shutil.copytree(whole, place)
        where = DAMAGES[name](rng, place, make.files(place), older)
        seen = look(make, history, place)
        outcome.add(seen.verdict(states), seen, len(states[-1]), f"round {number}, {where}")
        shutil.rmtree(place)
    return outcome


FAULTS: dict[str, Callable[[Make, Path, int, random.Random], FaultTally]] = {
    "restart": restart,
    "kill": kill,
    "fill": fill,
    **{
        name: lambda make, folder, rounds, rng, name=name: damage(name, make, folder, rounds, rng)  # type: ignore[misc]
        for name in DAMAGES
    },
}


def inflict(make: Make, fault: str, rounds: int, seed: int = 0, folder: Path | None = None) -> FaultTally:
    """Run ``rounds`` of one fault on a subject, in a folder below ``folder`` that is removed afterwards.

    ``fault`` is one of ``FAULTS``. It forks processes, so call it with only one thread and no open memory.
    """
    start = time.monotonic()
    # The folder's name is known before the folder exists, so it is removed at any interruption.
    place = Path(folder or tempfile.gettempdir()) / f"memstore-torture-{secrets.token_hex(8)}"
    try:
        place.mkdir(mode=0o700)
        rng = random.Random(f"{seed} {fault}")
        outcome = FAULTS[fault](make, place, rounds, rng)
    finally:
        end_children()  # after an interruption one may still be writing into the folder
        with suppress(FileNotFoundError):  # it could not be made; a folder that cannot be removed raises
            shutil.rmtree(place)
    outcome.seconds = time.monotonic() - start
    return outcome


def _whole(make: Make, history: History, folder: Path, steps: int, start: int = 0) -> None:
    ending = run(lambda say: write(make, history, folder, start, steps, say))
    if ending.code:
        raise UntriedStore(f"the store fails even without a fault: {ending.last or ending.code}")


def _history(rng: random.Random, *, writes_over: bool = False) -> History:
    """Make a new history; with ``writes_over``, one that replaces blocks."""
    while True:
        history = History(rng.randrange(1 << 30))
        if history.writes_over or not writes_over:
            return history


def _interrupted(history: History, seen: _Observation, told: int) -> tuple[int, str]:
    """Return the commit in a store whose writer was ended after it reported ``told`` commits, and the verdict."""
    states = history.states()
    under_way = states[told + 1] if told < STEPS else None
    verdict = seen.verdict(states[: told + 1], under_way)
    found = told + 1 if under_way is not None and tuple(seen.blocks) == under_way else told
    return found, _unharmed(verdict) if told else verdict  # an empty store can lose nothing


def _unharmed(verdict: str) -> str:
    """Return the verdict for untouched files: a refusal or an earlier state counts as lost."""
    return "lost" if verdict in ("refused", "earlier") else verdict


def _digest(states: States) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(states, np.float32).tobytes(), digest_size=16).digest()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def _chosen(rng: random.Random, files: Sequence[Path]) -> tuple[Path, int]:
    """Return a file and its size; large files are chosen more often."""
    file = rng.choices(files, [file.stat().st_size for file in files])[0]
    return file, file.stat().st_size


def _page(file: Path, at: int) -> bytes:
    with file.open("rb") as data:
        return os.pread(data.fileno(), PAGE, at)


def _put(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as data:
        os.pwrite(data.fileno(), content, at)
