"""Shows how a store of states behaves when its disk, its power or its files fail: ``python -m benchmarks.torture``."""

from __future__ import annotations

import logging
import re
import signal
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import torch
import typer

from benchmarks.torture.harness import BAD, FAULTS, VERDICTS, FaultTally, Subject, UntriedStore, inflict
from benchmarks.torture.subjects import SUBJECTS
from memstore.errors import InvalidArgument, MemstoreError
from memstore.report import Page, Report
from memstore.tools.verb import INTERRUPTED, Interruption, report_failure, verb

Subjects = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STORE...]",
        help="Stores to test: lmdb, zarr and bucket (memories); torch, torch-replaced, safetensors and numpy (files "
        "written by hand); or module:Class of another store. Default: lmdb and zarr.",
        show_default=False,
    ),
]
Fault = Annotated[
    list[str] | None,
    typer.Option(
        help="Cause this fault: restart, kill, fill (a disk), flip (a bit), truncate (a file), swap (two pages) or "
        "roll-back (a page). May be repeated. Default: all."
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Repeat each fault this many times.")]
Seed = Annotated[int, typer.Option(help="Seed of the stored values and of the damage.")]
Where = Annotated[
    Path | None, typer.Option(help="Use this folder, on the disk to test. Default: the temporary folder.")
]


def torture(
    stores: Subjects = None,
    *,
    fault: Fault = None,
    rounds: Rounds = 20,
    seed: Seed = 0,
    folder: Where = None,
) -> Report:
    """Kill, fill, flip, truncate: see what a store serves afterwards.

    One process writes a store, a fault happens, and another process reads the store. Each served block is compared with
    the history. It can come from the last commit (right), be wrong, or be lost without an error. A damaged store should
    raise an error. The last column is the share of blocks that could still be read then.

    The exit code is 1 if anything was lost, torn or wrong, a process was ended, or a store could not be tried. For a
    store of your own give module:Class. That is a subclass of benchmarks.torture.harness.Subject (__init__, __len__,
    append, cut, read), which is installed or lies in this folder.

    Example:

        python -m benchmarks.torture lmdb torch --rounds 5
    """
    chosen = {name: _subject(name) for name in stores or ("lmdb", "zarr")}
    if unknown := sorted(set(fault or ()) - set(FAULTS)):
        raise InvalidArgument(f"there is no fault {unknown[0]!r}; choose from {', '.join(FAULTS)}.")
    if folder is not None and not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder; name a folder on the disk to test.")
    torch.set_num_threads(1)  # a process that forks must have one thread
    logging.getLogger("memstore").setLevel(logging.ERROR)  # the disk is filled on purpose
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the folder of the runs is removed then too
    rows, untried = [], {}
    for name, subject in chosen.items():
        for each in fault or FAULTS:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\033[K{name}: {each}")
            try:
                rows.append(_row(name, subject, inflict(subject, each, rounds, seed, folder)))
            except UntriedStore as error:  # earlier results are still reported
                untried[name] = str(error)
                break
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    broken = bool(untried) or any(row[verdict] for row in rows for verdict in BAD)

    def text(page: Page) -> None:
        columns = ["store", "fault", "rounds", *VERDICTS, "still read"]
        page.table(columns, [[row[column] for column in columns] for row in rows])
        for row in rows:
            for verdict in BAD:
                if example := row["examples"].get(verdict):
                    page.line(f"{row['store']}, {verdict}: {example}")

        for name, words in untried.items():
            page.line(f"{name}: {words}")

    return Report(
        data={"seed": seed, "rows": rows, "untried": untried, "verdicts": VERDICTS}, text=text, exit_code=int(broken)
    )


def _subject(name: str) -> type[Subject]:
    if name in SUBJECTS:
        return SUBJECTS[name]
    if not re.fullmatch(r"[\w.]+:\w+", name):
        raise InvalidArgument(f"there is no store {name!r}; choose from {', '.join(SUBJECTS)}, or name module:Class.")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"{name} cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Subject)):
        raise InvalidArgument(f"{name} must be a subclass of benchmarks.torture.harness.Subject.")
    return found


def _row(name: str, subject: type[Subject], outcome: FaultTally) -> dict[str, Any]:
    return {
        "store": name,
        "version": subject.name,
        "fault": outcome.fault,
        "rounds": outcome.rounds,
        **{verdict: outcome.verdicts[verdict] for verdict in VERDICTS},
        "still read": round(outcome.read / outcome.blocks, 3) if outcome.blocks else None,
        "examples": outcome.examples,
        "seconds": round(outcome.seconds, 1),
    }


def main() -> int:
    """Run the command line and return the exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(verb(torture))
    json = "--json" in sys.argv
    try:
        code: int = typer.main.get_command(app).main(prog_name="python -m benchmarks.torture", standalone_mode=False)
    except (MemstoreError, typer.TyperException) as error:
        return report_failure(error, json=json)
    if code == INTERRUPTED:  # typer catches Ctrl-C, and says nothing
        return report_failure(Interruption("interrupted; run the same command again"), json=json)
    return code


if __name__ == "__main__":
    sys.exit(main())
