"""Give pages of a memory back what they held some commits ago, lose writes, tear and exchange them.

What is served is what was committed last, or an error of ours that verify names too. One thing no file can tell of
itself: where the page that names the last commit is the older one, and nothing else was touched, that commit never was.
So a run of pages that has one of the first two in it may bring back an earlier commit as a whole; in Zarr without the
shards that were deleted since, which is told as damage.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb

from benchmarks.torture.processes import Say, run
from tests.faults.bit_flips import STEPS
from tests.faults.damage import read_damaged, report
from tests.faults.outcome import Outcome
from tests.faults.world import SIZES, STORES, State, World, files_of

PAGE, SECTOR = 4096, 512  # bytes
KEPT = 12  # commits that pages come back from
LONGEST = 8  # pages of a run
METAS = 2  # pages at the start of a data file that name its last two commits
_NAME_BYTES = 13  # of a key: what it is the key of

Change = tuple[int, bytes]
"""Where in the file, and what is written there."""


def roll_back(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Damage ``rounds`` runs of pages or values, one at a time."""
    rng, outcome = random.Random(seed), Outcome()
    for number, size in enumerate(SIZES):
        world = World(seed, SIZES[size])
        url = STORES[store](folder / size)
        states, older = _make(world, url, folder / f"{size}-older")
        for _ in range(rounds // len(SIZES) + (number < rounds % len(SIZES))):
            changes: list[Change] = []
            while not changes:  # what was chosen may be what is there
                file = _chosen(url, rng)
                before = [path for path in (copy / file.name for copy in older) if file.name == "data.mdb"]
                kind = rng.choice([*KINDS] if before else ["torn", "swapped"])
                whole = file.read_bytes()
                changes = [change for change in KINDS[kind](rng, whole, before) if _differs(whole, *change)]
            found = _changed(world, url, states, file, whole, changes)
            outcome.counts["damaged"] += 1
            outcome.counts[f"{kind}: {found}"] += 1
            places = ", ".join(f"{len(part)} bytes at {at}" for at, part in changes)
            report(outcome, found, f"{size}, {kind}, {places} of {file.name} (seed {seed})")
    return outcome


def _make(world: World, url: str, folder: Path) -> tuple[list[State], list[Path]]:
    """Make a memory with a history of many commits; its last states, and folders with its data file as it was then."""
    states = world.history(STEPS)
    copies = [folder / str(number) for number in range(STEPS)][-KEPT:]

    def write(_: Say) -> None:
        with world.open(url) as memory:
            for number in range(STEPS):
                world.do(memory, number, states[number])
                if (copy := folder / str(number)) in copies:
                    copy.mkdir(parents=True)
                    shutil.copy(next(file for file in files_of(url) if file.name == "data.mdb"), copy)

    made = run(write)
    assert made.code == 0, made.lines
    return states[-KEPT:], copies[:-1]


def _chosen(url: str, rng: random.Random) -> Path:
    files = [file for file in files_of(url) if file.stat().st_size > SECTOR]
    data = next(file for file in files if file.name == "data.mdb")
    return data if rng.random() < 0.8 else rng.choice(files)


def _rolled_back(rng: random.Random, whole: bytes, older: list[Path]) -> Iterator[Change]:
    """A run of pages as it was some commits ago, that changes at least one page of what is stored now."""
    before = rng.choice(older).read_bytes()
    pages = [at for at in range(0, min(len(before), len(whole)), PAGE) if _differs(whole, at, before[at : at + PAGE])]
    if pages:
        start = max(0, rng.choice(pages) - PAGE * rng.randrange(LONGEST))
        yield start, before[start : start + PAGE * rng.randint(1, LONGEST)]


def _lost(rng: random.Random, whole: bytes, older: list[Path]) -> Iterator[Change]:
    """Pages that one commit wrote side by side, as one write: they have what was there before."""
    before = older[-1].read_bytes().ljust(len(whole), b"\0")
    runs: list[range] = []
    for at in range(METAS * PAGE, len(whole), PAGE):
        if _differs(whole, at, before[at : at + PAGE]):
            joins = bool(runs) and runs[-1].stop == at
            runs[-1:] = [range(runs[-1].start, at + PAGE)] if joins else [*runs[-1:], range(at, at + PAGE)]
    if runs:
        lost = rng.choice(runs)
        yield lost.start, before[lost.start : lost.stop]


def _torn(rng: random.Random, whole: bytes, older: list[Path]) -> Iterator[Change]:
    """A run of pages of which some sectors are older, or zeros."""
    before = rng.choice(older).read_bytes() if older else b""
    start = rng.randrange(len(whole) // SECTOR) * SECTOR
    for at in range(start, min(start + PAGE * rng.randint(1, LONGEST), len(whole)), SECTOR):
        if rng.random() < 0.5:
            yield at, (before or bytes(len(whole)))[at : at + SECTOR]


def _swapped(rng: random.Random, whole: bytes, _: list[Path]) -> Iterator[Change]:
    """Two runs of pages, one in the place of the other."""
    length = PAGE * rng.randint(1, LONGEST)
    pages = range(0, max(PAGE, len(whole) - length), PAGE)
    one, other = rng.choice(pages), rng.choice(pages)
    yield one, whole[other : other + length]
    yield other, whole[one : one + length]


def _older_value(rng: random.Random, whole: bytes, older: list[Path]) -> Iterator[Change]:
    """A value as it was some commits ago, under the same key and of the same length."""
    now, before = _values(whole, rng.choice(older).parent), _values(b"", rng.choice(older))
    changed = [name for name in now if name in before and before[name] != now[name]]
    same = [name for name in changed if len(before[name]) == len(now[name])]
    if same:
        name, at = rng.choice(same), -1
        while (at := whole.find(now[name], at + 1)) >= 0:  # also where a page that is free by now has a copy
            yield at, before[name]


def _values(data: bytes, path: Path) -> dict[bytes, bytes]:
    """Name -> value, of a data file."""
    folder = path.parent
    if data:
        folder = path / "now"
        folder.mkdir(exist_ok=True)
        (folder / "data.mdb").write_bytes(data)
    with lmdb.open(str(folder), readonly=True, lock=False, map_size=1 << 40) as env, env.begin() as txn:
        return {bytes(key[:_NAME_BYTES]): bytes(value) for key, value in txn.cursor()}


KINDS: dict[str, Callable[[random.Random, bytes, list[Path]], Iterator[Change]]] = {
    "rolled back": _rolled_back,
    "lost": _lost,
    "torn": _torn,
    "swapped": _swapped,
    "older than the value": _older_value,
}


def _differs(whole: bytes, at: int, part: bytes) -> bool:
    return bool(part) and whole[at : at + len(part)] != part[: len(whole) - at]


def _changed(world: World, url: str, states: list[State], file: Path, whole: bytes, changes: list[Change]) -> str:
    """What came of it. The file is whole again then."""
    with file.open("r+b") as data:
        for at, part in changes:
            data.seek(at)
            data.write(part[: len(whole) - at])
        data.flush()
        found = read_damaged(world, url, states[-1])
        if found.startswith("wrong") and min(at for at, _ in changes) < METAS * PAGE and file.name == "data.mdb":
            earlier = {read_damaged(world, url, state).partition(",")[0] for state in reversed(states[:-1])}
            if "right" in earlier:
                found = "an earlier commit as a whole"
            elif "refused" in earlier and url.startswith("zarr:"):
                found = "an earlier commit, but for shards that were deleted since"
        data.seek(0)
        data.write(whole)
    return found
