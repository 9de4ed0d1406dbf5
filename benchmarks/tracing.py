"""What recording a trace costs: tokens generated with a recording and without, taking turns in one process.

    python -m benchmarks.tracing --tokens 16384

A memory is read once (and kept with ``--folder``). Then each round generates the same answer twice, recorded and not,
in turns that change which comes first; a ratio is that of the two sides of one round. Processor time counts what other
threads do and leaves out what else the machine does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.attach import attached_to, long_text
from benchmarks.tracing_models import MODELS, shipped
from memstore.memory import Memory
from memstore.report import Page
from memstore.resources import hardware
from memstore.tools.models import load_model


class Case(NamedTuple):
    """A model with a memory."""

    name: str
    memory: Memory
    generate: Callable[[int], None]
    """Generates so many tokens."""
    record: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one case; times are of a generated token, prompt included."""

    model: str
    tokens: int
    off_ms: float
    """Processor time without a recording, median of the rounds."""
    on_ms: float
    ratio: float
    """Processor time with a recording, times that without: median of the rounds."""
    wall_ratio: float
    bytes_a_step: int
    """In the file."""


def main() -> None:
    """Run the benchmark and print a table, or JSON rows."""
    options = _options()
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for name in options.models:
            with CASES[name](folder, options) as case:
                rows.append(measure(case, options))
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "new": options.new, **hardware()}
    if options.json:
        print(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}))
        return
    page = Page()
    page.facts(about)
    page.line()
    page.table([*asdict(rows[0])], [[*asdict(row).values()] for row in rows])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens in memory")
    parser.add_argument("--new", type=int, default=64, help="tokens generated each time")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, help="where the memories are kept, also for the next run")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


@contextmanager
def smollm2(folder: Path, options: argparse.Namespace) -> Iterator[Case]:
    """A stock model with a memory attached."""
    loaded = load_model("smollm2", options.dtype)
    ids = long_text(loaded, options.tokens)
    prompt = torch.tensor([loaded.tokenizer("In this language, a generator expression is")["input_ids"]])

    def generate(new: int) -> None:
        loaded.model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)  # type: ignore[operator]

    with attached_to(loaded, folder / f"smollm2-{options.tokens}-{options.dtype}.mem", 8) as attached:
        attached.read(ids, progress=True)
        yield Case("smollm2", attached.memories[0], generate, attached.record)


@contextmanager
def shipped_case(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Case]:
    """A model that comes with the package."""
    with shipped(name, folder, options) as parts:
        yield Case(*parts)


def measure(case: Case, options: argparse.Namespace) -> Row:
    """Take turns, and compare the two sides of each round."""
    sides: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    case.generate(4)
    for turn in range(options.rounds):
        for recorded in (False, True) if turn % 2 else (True, False):
            sides[recorded].append(timed(case, options.new, recorded=recorded))
    trace = case.memory.traces.last()
    assert trace is not None
    off, on = ([cpu for cpu, _ in sides[recorded]] for recorded in (False, True))
    wall = [on / off for (_, on), (_, off) in zip(sides[True], sides[False], strict=True)]
    return Row(
        model=case.name,
        tokens=options.tokens,
        off_ms=round(1000 * median(off) / options.new, 2),
        on_ms=round(1000 * median(on) / options.new, 2),
        ratio=round(median(each / other for each, other in zip(on, off, strict=True)), 3),
        wall_ratio=round(median(wall), 3),
        bytes_a_step=bytes_of(case.memory) // len(trace),
    )


def timed(case: Case, new: int, *, recorded: bool) -> tuple[float, float]:
    """Processor and wall time, in seconds, until the answer is there and its trace is written."""
    cpu, begun = time.process_time(), time.perf_counter()
    with case.record() if recorded else nullcontext():
        case.generate(new)
    return time.process_time() - cpu, time.perf_counter() - begun


def bytes_of(memory: Memory) -> int:
    """Bytes of the last trace."""
    from memstore.memory.trace_file import encode

    trace = memory.traces.last()
    assert trace is not None
    return sum(len(encode(step.looks)) for step in trace.steps())


CASES: dict[str, Callable[[Path, argparse.Namespace], AbstractContextManager[Case]]] = {
    "smollm2": smollm2,
    **{name: partial(shipped_case, name) for name in MODELS},
}

if __name__ == "__main__":
    main()
