"""Cut the end off a file of a memory: it is refused, or what is gone is an error, or nothing was lost.

A file that is cut under a reader that has it mapped ends that reader by SIGBUS, which no mapped file survives; that is
counted, and the promise is that no answer before it was wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import memstore
from benchmarks.torture.processes import Say, run
from memstore.errors import MemstoreError
from tests.faults.bit_flips import make
from tests.faults.damage import read_damaged, report
from tests.faults.outcome import Outcome
from tests.faults.world import SIZES, STORES, State, World, check_all, files_of, folder_of, moved


def truncate_files(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Cut ``rounds`` files, every fifth one under a reader."""
    rng, outcome, world = random.Random(seed), Outcome(), World(seed, SIZES["large"])
    whole = STORES[store](folder / "whole")
    url = moved(whole, folder / "cut")
    state = make(world, whole)
    for number in range(rounds):
        shutil.copytree(folder_of(whole), folder_of(url))
        file = rng.choice(list(files_of(url)))
        size = file.stat().st_size
        # As often near the end, where the loss is small, as anywhere.
        length = rng.randrange(size) if number % 2 else max(0, size - rng.randrange(1 << 16))
        if number % 5 == 4:
            found = _cut_under_a_reader(world, url, state, file, length)
        else:
            os.truncate(file, length)
            found = read_damaged(world, url, state)
        outcome.counts["cuts"] += 1
        outcome.counts[found] += 1
        report(outcome, found, f"{file.name} cut to {length} of {size} bytes (seed {seed})")
        shutil.rmtree(folder_of(url))
    return outcome


def _cut_under_a_reader(world: World, url: str, state: State, file: Path, length: int) -> str:
    def read(say: Say) -> None:
        with memstore.open(url, mode="r") as memory:
            check_all(world, memory, state)
            os.truncate(file, length)
            try:
                check_all(world, memory, state)
                say("right")
            except MemstoreError:
                say("refused")

    ending = run(read)
    if ending.code == -signal.SIGBUS:
        return "under a reader: ended by SIGBUS"
    return f"under a reader: {ending.last}" if ending.code == 0 else f"not one of ours: {ending.code} {ending.last}"
