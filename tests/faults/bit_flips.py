"""Flip bits in the files of a memory: whoever reads then gets what was committed or an error of ours, nothing else.

Each flip is made, read over by a child, and taken back. Half of them lie anywhere in the files; where the kind of store
has pages that find the values, the other half lies in those.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from benchmarks.torture.processes import Say, run
from tests.faults import lmdb_pages
from tests.faults.damage import read_damaged, report
from tests.faults.outcome import Outcome
from tests.faults.world import SIZES, STORES, State, World, files_of

STEPS = 60


def flip_bits(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Flip ``rounds`` bits, one at a time."""
    rng, outcome = random.Random(seed), Outcome()
    for number, size in enumerate(SIZES):
        world = World(seed, SIZES[size])
        url = STORES[store](folder / size)
        state = make(world, url)
        for place in range(rounds // len(SIZES) + (number < rounds % len(SIZES))):
            kind, file, offset = _place(url, store, rng, anywhere=place % 2 == 0)
            bit = 1 << rng.randrange(8)
            found = _flipped(world, url, state, file, offset, bit)
            outcome.counts["flips"] += 1
            outcome.counts[f"{kind}: {found}"] += 1
            report(outcome, found, f"{size}, {kind}, bit {bit} of byte {offset} in {file.name} (seed {seed})")
    return outcome


def make(world: World, url: str) -> State:
    """Make a memory with a history of many commits, in a process of its own; what it holds."""
    states = world.history(STEPS)

    def write(_: Say) -> None:
        with world.open(url) as memory:
            for number in range(STEPS):
                world.do(memory, number, states[number])

    made = run(write)
    assert made.code == 0, made.lines
    return states[-1]


def _place(url: str, store: str, rng: random.Random, *, anywhere: bool) -> tuple[str, Path, int]:
    """What lies there, the file and the byte in it."""
    files = list(files_of(url))
    if store == "lmdb":
        kinds = lmdb_pages.by_kind(files[0])
        kind = rng.choice(sorted(kinds)) if not anywhere else None
        places = kinds[kind] if kind else [range(files[0].stat().st_size)]
        chosen = rng.choices(places, [len(place) for place in places])[0]
        offset = rng.choice(chosen)
        return lmdb_pages.kind_of(kinds, offset), files[0], offset
    file = rng.choices(files, [file.stat().st_size for file in files])[0]
    return file.suffix or file.name, file, rng.randrange(file.stat().st_size)


def _flipped(world: World, url: str, state: State, file: Path, offset: int, bit: int) -> str:
    with file.open("r+b") as data:
        whole = os.pread(data.fileno(), 1, offset)
        os.pwrite(data.fileno(), bytes([whole[0] ^ bit]), offset)
        found = read_damaged(world, url, state)
        os.pwrite(data.fileno(), whole, offset)
    return found
