"""What a memory costs as it grows to ten million blocks: ``python benchmarks/scale.py --folder DISK``.

Blocks are tiny, so that there can be many: states of eight tokens in one layer, 64 bytes, and a landmark of sixteen
numbers. What is measured is what a memory does for each block beside keeping its states. One memory grows from step to
step; each verb runs in a process of its own, which tells its seconds, its processor seconds, and the highest anonymous
memory that it had. Pages of mapped files are not counted, for the kernel takes them back.

Memories of several gigabytes are made: ``--blocks 10000 100000`` makes small ones. ``--draw`` draws the picture of the
results that there are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

import memstore
from memstore import Fingerprint, MemorySpec
from memstore.memory import Document, Memory
from memstore.resources import PeakMemory, hardware

RESULTS = Path(__file__).parent / "results" / "scale.json"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "scale.png"
STEPS = (10_000, 100_000, 1_000_000, 10_000_000)
SPEC = MemorySpec(
    layers=1,
    fields={"c": (8, 4)},
    index_layers=(0,),
    key_heads=1,
    key_dim=16,
    block_size=8,
    keys_per_block=1,
    dtype="bfloat16",
    key_dtype="bfloat16",
    fingerprint=Fingerprint(
        architecture="none",
        weights="none",
        tokenizer="none",
        positions="none",
        layout="tiny",
        dtype="bfloat16",
        block_size=8,
    ),
)
AT_ONCE = 1 << 14
"""Blocks of an append while a memory grows."""
SEGMENT = 64
"""Blocks of an append that is measured."""
ROUNDS = 25
TAKEN = 5
"""Rounds of a verb, each in a process of its own; one of ``verify``, which takes long."""
RUN = 2048
"""Blocks whose landmarks lie in one value, which an append writes anew: both memories begin one."""

Row = dict[str, Any]


def main() -> None:
    """Measure, keep the rows, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder of the disk to measure; default: that of temporary files")
    parser.add_argument("--blocks", type=int, nargs="+", default=STEPS, help="sizes, ascending")
    parser.add_argument("--verbs", nargs="+", help="only these; rows of others stay as they are in the results")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    parser.add_argument("--child", nargs=2, metavar=("VERB", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(VERBS[options.child[0]](Path(options.child[1]))))
        return
    if not options.draw:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            measured(Path(scratch), options.blocks, options.verbs or [*VERBS], options.json)
    draw(json.loads(options.json.read_text())["rows"])


def measured(folder: Path, sizes: list[int], verbs: list[str], results: Path) -> None:
    """Let one memory grow, and run ``verbs`` at each of ``sizes``; the rows are kept after each."""
    rows: list[Row] = json.loads(results.read_text())["rows"] if results.exists() else []
    rows = [row for row in rows if row["verb"] not in verbs or row["blocks"] not in sizes]
    libraries = {name: version(name) for name in ("lmdb", "xxhash", "numpy")}
    about = {"date": str(datetime.datetime.now(datetime.UTC).date()), "hardware": hardware() | libraries, "threads": 1}
    for blocks in sizes:
        grow(folder / "large", blocks)
        for verb in verbs:
            row = {"verb": verb, "blocks": blocks} | best(verb, folder)
            print(json.dumps(row), flush=True)
            rows.append(row)
        results.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def best(verb: str, folder: Path) -> Row:
    """The least of some rounds, of seconds and of processor seconds: what other processes do is in all the others."""
    rounds = [child(verb, folder) for _ in range(1 if verb == "verify" else TAKEN)]
    least = {name: min(each[name] for each in rounds) for name in rounds[0] if name != "anonymous_mb"}
    return least | {"anonymous_mb": max(each["anonymous_mb"] for each in rounds)}


def child(verb: str, folder: Path) -> Row:
    """What a process of its own tells of ``verb``."""
    command = [sys.executable, __file__, "--child", verb, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def grow(folder: Path, blocks: int) -> None:
    """Append to the one document of the memory in ``folder`` until it has so many blocks; its index is kept."""
    with memstore.open(folder, spec=SPEC) as memory:
        document = memory.document("text")
        while document.n_blocks < blocks:
            append(document, min(AT_ONCE, blocks - document.n_blocks))
        memory.build_indexes()


def append(document: Document, blocks: int) -> None:
    """Add ``blocks`` blocks of numbers that depend on their place alone."""
    made, spec = torch.Generator().manual_seed(document.n_blocks), document.memory.spec
    tokens = torch.randint(0, 50_000, (blocks * spec.block_size,), generator=made)
    with document.append(tokens) as batch:
        states = {name: torch.randn(blocks, *shape, generator=made) for name, shape in spec.fields.items()}
        batch.put(0, landmarks=torch.randn(blocks, 1, 1, spec.key_dim, generator=made), **states)


def spent(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processor seconds of this process, that ``call`` takes."""
    begun, worked = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun, time.process_time() - worked


def timed(folder: Path, call: Callable[[Memory], object], *, mode: str = "r") -> Row:
    """The row of ``call``, given the large memory, which was opened before."""
    with memstore.open(folder / "large", mode=mode) as memory, PeakMemory() as peak:  # type: ignore[arg-type]
        seconds, worked = spent(lambda: call(memory))
    return {"seconds": round(seconds, 5), "processor": round(worked, 5), "anonymous_mb": peak.anonymous_bytes >> 20}


def search(memory: Memory) -> None:
    """The first search of a process."""
    hits = memory.document("text").layer(0).search(torch.ones(1, 1, SPEC.key_dim), 8)
    assert int((hits.blocks >= 0).sum()) == 8


def measure_open(folder: Path) -> Row:
    """To open a memory for writing, as a process does that goes on reading."""
    with PeakMemory() as peak:
        opened: list[Memory] = []
        seconds, worked = spent(lambda: opened.append(memstore.open(folder / "large")))
    size = opened[0].stats()["disk_bytes"]
    opened[0].close()
    row = {"seconds": round(seconds, 5), "processor": round(worked, 5), "anonymous_mb": peak.anonymous_bytes >> 20}
    return row | {"disk_bytes": size}


def measure_search(folder: Path) -> Row:
    """With the index that is kept beside the store."""
    return timed(folder, search)


def measure_rebuilt(folder: Path) -> Row:
    """Where no index is kept: it is built from the landmarks in the store."""
    kept, aside = folder / "large" / "index", folder / "index"
    kept.rename(aside)
    try:
        return timed(folder, search)
    finally:
        aside.rename(kept)


def measure_append(folder: Path) -> Row:
    """A segment into the large memory, and into one that was empty a moment ago, taking turns."""
    large, small = [], []
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        PeakMemory() as peak,
        memstore.open(folder / "large") as memory,
        memstore.open(Path(scratch) / "m", spec=SPEC) as empty,
    ):
        if rest := -memory.document("text").n_blocks % RUN:
            append(memory.document("text"), rest)
        for each in (memory, empty):
            append(each.document("text"), SEGMENT)
        for _ in range(ROUNDS):
            large.append(spent(lambda: append(memory.document("text"), SEGMENT)))
            small.append(spent(lambda: append(empty.document("text"), SEGMENT)))
    row = {"seconds": median(wall for wall, _ in large), "processor": min(worked for _, worked in large)}
    row |= {"of_empty": row["seconds"] / median(wall for wall, _ in small)}
    row |= {"processor_of_empty": row["processor"] / min(worked for _, worked in small)}
    return {name: round(value, 5) for name, value in row.items()} | {"anonymous_mb": peak.anonymous_bytes >> 20}


def measure_verify(folder: Path) -> Row:
    """In the process that measures, and not in a child of it, so that its memory is seen."""
    from memstore.memory.urls import open_unchecked
    from memstore.memory.verify import check

    store = open_unchecked(folder / "large")
    with PeakMemory() as peak:
        findings: list[object] = []
        seconds, worked = spent(lambda: findings.extend(check(store)))
    store.close()
    assert not findings, findings[0]
    return {"seconds": round(seconds, 5), "processor": round(worked, 5), "anonymous_mb": peak.anonymous_bytes >> 20}


def measure_compact(folder: Path) -> Row:
    """After a short document was forgotten."""

    def compact(memory: Memory) -> None:
        append(memory.document("short"), SEGMENT)
        memory.forget("short")
        memory.compact()

    return timed(folder, compact, mode="a")


def measure_stats(folder: Path) -> Row:
    """Sizes."""
    return timed(folder, Memory.stats)


VERBS: dict[str, Callable[[Path], Row]] = {
    "open": measure_open,
    "first search": measure_search,
    "first search, no index kept": measure_rebuilt,
    "append of a segment": measure_append,
    "verify": measure_verify,
    "compact": measure_compact,
    "stats": measure_stats,
}


def draw(rows: list[Row]) -> None:
    """Processor seconds, and anonymous memory, by blocks."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for verb in VERBS:
        points = [(row["blocks"], row["processor"], row["anonymous_mb"]) for row in rows if row["verb"] == verb]
        if not points:
            continue
        blocks, seconds, megabytes = zip(*points, strict=True)
        left.plot(blocks, seconds, "o-", label=verb, markersize=3)
        right.plot(blocks, megabytes, "o-", markersize=3)
    sizes = [row["blocks"] for row in rows if row["verb"] == "open"]
    left.plot(sizes, [1e-6 * size for size in sizes], "k:", linewidth=1, label="linear")
    left.set(xscale="log", yscale="log", xlabel="blocks", ylabel="processor seconds")
    right.set(xscale="log", yscale="log", xlabel="blocks", ylabel="anonymous memory of the process, MB")
    left.legend(fontsize=7)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
