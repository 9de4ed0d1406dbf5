"""What encryption at rest costs: ``python -m benchmarks.encryption``.

Two memories on disk, one of them encrypted, do the same in turn: an append of a segment, a gather of 32 blocks of one
layer that the page cache holds (nothing is kept in host memory), and opening a memory of many documents. Blocks are
those of SmolLM2-135M, as in ``store.py``. Times are of the processor, of this process, and the least of all rounds, so
other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.store import LAYERS, LIST, SHAPE, spec
from memstore.memory import Document
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "encryption.json"
SEGMENT = 8
"""Blocks of an append: 512 tokens."""
READ, DOCUMENTS = 512, 500
ROUNDS = {"append": 60, "gather": 300, "open": 40}


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="Where to make the memories; a temporary folder by default.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = [print_row(row) for row in measure(Path(folder), os.urandom(32))]
    facts = {name: version(name) for name in ("lmdb", "cryptography", "numpy")}
    date = datetime.datetime.now().astimezone().date().isoformat()
    result = {"date": date, "hardware": hardware() | facts, "threads": 1, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def print_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row, told."""
    print(json.dumps(row), flush=True)
    return row


def measure(folder: Path, key: bytes) -> Iterator[dict[str, Any]]:
    """The rows."""
    keys = {"plain": None, "encrypted": lambda: key}
    names = list(keys)
    large = {
        name: memstore.open(folder / name, spec=spec(LAYERS, SHAPE), key=keys[name], host_bytes=0) for name in names
    }
    yield row("append", lambda name: append(large[name].document("text"), SEGMENT), "30 layers of 8 blocks, 11.8 MB")
    for memory in large.values():
        while memory.document("text").n_blocks < READ:
            append(memory.document("text"), SEGMENT)
    lists = random.Random(0)
    chosen = [lists.sample(range(READ), LIST) for _ in range(ROUNDS["gather"])]
    turn = dict.fromkeys(names, 0)

    def gather(name: str) -> None:
        large[name].document("text").layer(3).gather(chosen[turn[name] % len(chosen)])
        turn[name] += 1

    yield row("gather", gather, "32 blocks of one layer, 49,152 bytes each, in the page cache")
    for memory in large.values():
        memory.close()
    for name in names:
        with memstore.open(folder / f"many-{name}", spec=spec(1, (1, 64, 1)), key=keys[name]) as memory:
            for number in range(DOCUMENTS):
                append(memory.document(f"document {number}"), 1)

    def opening(name: str) -> None:
        with memstore.open(folder / f"many-{name}", mode="r", key=keys[name]) as memory:
            assert len(memory.documents()) == DOCUMENTS

    yield row("open", opening, f"and list {DOCUMENTS} documents")


def append(document: Document, blocks: int) -> None:
    """Append blocks of random states, the same for every layer."""
    of = document.memory.spec
    states = random_states(blocks, *of.fields["k"])
    first = len(document)
    with document.append(range(first, first + blocks * of.block_size)) as batch:
        for layer in range(of.layers):
            batch.put(layer, k=states, v=states)


@cache
def random_states(*shape: int) -> torch.Tensor:
    """Made once, so that making them is in no time."""
    return torch.randn(shape).bfloat16()


def row(what: str, side: Callable[[str], object], of: str) -> dict[str, Any]:
    """Least processor time of both, taking turns, and their ratio."""
    least = dict.fromkeys(("plain", "encrypted"), float("inf"))
    for _ in range(ROUNDS[what]):
        for name in least:
            begun = time.process_time()
            side(name)
            least[name] = min(least[name], time.process_time() - begun)
    times = {f"{name}_us": round(1e6 * seconds, 1) for name, seconds in least.items()}
    return {"what": what, "of": of, **times, "ratio": round(least["encrypted"] / least["plain"], 2)}


if __name__ == "__main__":
    main()
