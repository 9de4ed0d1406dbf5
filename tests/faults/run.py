"""Run the faults: ``python -m tests.faults.run`` in the short form, ``--brief`` in a shorter one, and
``--long`` in the long one (``make faults``).

Prints a table of counts; exit status 1 if a promise was broken. A seed repeats the choices (what a random time meets is
up to the machine). ``--save FILE`` keeps the counts with date, versions and hardware.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import torch

import memstore
from tests import disk
from tests.faults.bit_flips import flip_bits
from tests.faults.full_disk import fill_disks
from tests.faults.interrupts import interrupt
from tests.faults.kill_readings import kill_readings
from tests.faults.kill_writers import kill_writers
from tests.faults.objects import damage_objects
from tests.faults.outcome import Outcome
from tests.faults.read_only import forbid_writing
from tests.faults.readers import read_beside_a_writer
from tests.faults.rolled_back import roll_back
from tests.faults.truncations import truncate_files
from tests.faults.world import STORES, warm_up
from tests.store.seaweed import shared

DISKS = ["lmdb", "zarr"]
"""Stores on a disk alone.

Two harnesses that fill it or forbid it fork in mid-work, which a bucket's client forbids. Three damage files: a bucket
has those of its tail alone, which Zarr has too; what its objects hold is damaged by a harness of its own.
"""


class Fault(NamedTuple):
    """One harness, and its rounds in the brief, the short and the long form."""

    run: Callable[[Path, str, int, int], Outcome]
    brief: int
    short: int
    long: int
    stores: Sequence[str] = tuple(STORES)


FAULTS = {
    "kill-writers": Fault(kill_writers, 4, 16, 600),
    "kill-readings": Fault(kill_readings, 4, 10, 400),
    "interrupts": Fault(interrupt, 2, 6, 400),
    "full-disk": Fault(fill_disks, 2, 3, 60, DISKS),
    "read-only": Fault(forbid_writing, 2, 3, 60, DISKS),
    "bit-flips": Fault(flip_bits, 10, 50, 10_000, DISKS),
    "rolled-back": Fault(roll_back, 8, 40, 10_000, DISKS),
    "truncations": Fault(truncate_files, 5, 10, 1_000, DISKS),
    "readers": Fault(read_beside_a_writer, 10, 60, 3_000),
    "objects": Fault(damage_objects, 5, 16, 1_000, ["bucket"]),
}


def run(name: str, store: str, rounds: int, seed: int) -> Outcome:
    """Run one fault on one store, in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="memstore-faults-") as folder:
        return FAULTS[name].run(Path(folder), store, rounds, seed)


def _rounds(name: str, options: argparse.Namespace) -> int:
    fault = FAULTS[name]
    return options.rounds or (fault.long if options.long else fault.brief if options.brief else fault.short)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {**vars(outcome), "counts": dict(outcome.counts)}


def report(name: str, store: str, seconds: float, outcome: Outcome) -> None:
    """Print the counts, and what went wrong."""
    broken = f"{len(outcome.losses)} losses, {len(outcome.wrong)} wrong reads, {len(outcome.crashes)} crashes"
    _print(f"{name} on {store}: {broken} ({seconds:.0f} s)")
    for what, count in sorted(outcome.counts.items()):
        _print(f"  {count:>8,}  {what}")
    for failure in outcome.failures[:20]:
        _print(f"  BROKEN  {failure}")


def environment() -> dict[str, Any]:
    """What the counts were made with."""
    cpus = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "name" in line]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{os.cpu_count()} x {cpus[0] if cpus else platform.machine()}",
        "system": platform.platform(),
        "memstore": memstore.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lmdb": ".".join(map(str, lmdb.version())),
    }


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--brief", action="store_true", help="the shortest form, which meets every fault some times")
    form.add_argument("--long", action="store_true", help="the long form, about an hour and a quarter for both stores")
    parser.add_argument("--only", choices=FAULTS, action="append", help="this fault alone; may be given several times")
    parser.add_argument(
        "--store", choices=STORES, action="append", help="this store alone; a bucket only where it is named"
    )
    parser.add_argument("--rounds", type=int, help="so many, instead of those of the form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the counts there as JSON")
    options = parser.parse_args()
    logging.getLogger("memstore").setLevel(logging.ERROR)  # evicting is part of the history
    if not options.long:
        disk.is_not_waited_for()
    torch.set_num_threads(1)  # whoever forks must have one thread
    warm_up()
    _print(f"seed {options.seed}")
    results: list[dict[str, Any]] = []
    stores = options.store or DISKS
    if "bucket" in stores:
        os.environ |= shared().environment
    for store in stores:
        for name in [name for name in options.only or FAULTS if store in FAULTS[name].stores]:
            rounds, start = _rounds(name, options), time.monotonic()
            outcome = run(name, store, rounds, options.seed)
            seconds = time.monotonic() - start
            report(name, store, seconds, outcome)
            results.append(
                {"fault": name, "store": store, "rounds": rounds, "seconds": round(seconds), **_plain(outcome)}
            )
    if options.save:
        saved = {"environment": environment(), "seed": options.seed, "results": results}
        options.save.write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n")
    return int(any(result[broken] for result in results for broken in ("losses", "wrong", "crashes")))


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
