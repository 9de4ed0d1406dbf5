"""What of a process's RAM is its own, and what is the map of its memory's file, which the kernel takes back at need.

    python benchmarks/ram.py > benchmarks/results/ram.json

A stock model reads a text into a memory on disk and is asked; the most of each kind on top of the loaded model, seen
every few milliseconds. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import memstore
from memstore.eval import needles
from memstore.readers.kinds import encode
from memstore.resources import hardware
from memstore.tools.models import load_model

KINDS = {"anonymous": "RssAnon", "mapped": "RssFile"}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768])
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model, options.dtype)
    ids = encode(tokenizer, needles.prose_text())
    rows = []
    for tokens in options.tokens:
        row: dict[str, int | dict[str, int]] = {"tokens": tokens}
        with tempfile.TemporaryDirectory() as folder:
            with memstore.attach(model, Path(folder) / "m", tokenizer=tokenizer) as reader, most() as row["read"]:
                reader.read(ids[:tokens], document="text")
            with memstore.attach(model, Path(folder) / "m", tokenizer=tokenizer) as reader, most() as row["ask"]:
                reader.ask("What does the assert statement do?", max_tokens=24)
        rows.append(row)
    print(json.dumps({"model": options.model, "dtype": options.dtype, "rows": rows, **hardware()}, indent=1))


@contextmanager
def most() -> Iterator[dict[str, int]]:
    """The most megabytes of each kind in the block, above what there was before."""
    before, found, ended = resident(), dict.fromkeys(KINDS, 0), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for kind, now in resident().items():
                found[kind] = max(found[kind], now - before[kind])
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def resident() -> dict[str, int]:
    """Megabytes of this process, of each kind."""
    status = Path("/proc/self/status").read_text("utf-8")
    sizes = {kind: re.search(rf"{name}:\s+(\d+) kB", status) for kind, name in KINDS.items()}
    return {kind: int(found[1]) * 1024 // 10**6 for kind, found in sizes.items() if found}


if __name__ == "__main__":
    main()
