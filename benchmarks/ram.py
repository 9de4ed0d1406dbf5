"""What of a process's RAM is its own, and what is the map of its memory's file, which the kernel takes back at need.

    python -m benchmarks.ram --dtype float32 --tokens 8192 32768 --then 131072 > ROW.json

A stock model reads a text into a memory on disk and is asked. *anonymous_mib* is all that is the process's own, with
Python, its libraries and the model: the most while this part of the text was read, seen every few milliseconds. Of
weights, only copies count; most are mapped. *read* and *ask* are the most megabytes of each kind since this reading, or
question, began. *freed_mib* is what the process has of its own once the memory is detached. One thread, Linux only.

``--then``: another process lets the document grow to so many tokens by random states, since a model would
read for hours. Then the last 2,048 tokens are read.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.attach import grown, long_text
from memstore.resources import PeakMemory, hardware, memory_in_use
from memstore.tools.models import LoadedModel, load_model

KINDS = {"anonymous": "RssAnon", "mapped": "RssFile"}
LAST = 2_048


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--then", type=int, nargs="*", default=[])
    parser.add_argument("--grow", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(options.model, options.dtype)
    if options.grow is not None:
        with memstore.attach(loaded.model, options.grow, tokenizer=loaded.tokenizer, document="text") as reader:
            grown(reader, options.then[0])
        return
    before = mib()
    ids = long_text(loaded, max([*options.tokens, LAST]))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "m"
        rows = [row(loaded, place, tokens, ids) for tokens in options.tokens]
        for tokens in options.then:
            size = ["--model", options.model, "--dtype", options.dtype, "--then", str(tokens - LAST)]
            subprocess.run([sys.executable, "-m", "benchmarks.ram", *size, "--grow", str(place)], check=True)
            rows.append(row(loaded, place, tokens, ids) | {"random": tokens - LAST - max(options.tokens)})
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "loaded_mib": before}
    print(json.dumps({"model": options.model, "dtype": options.dtype, **about, "rows": rows, **hardware()}, indent=1))


def row(loaded: LoadedModel, place: Path, tokens: int, ids: torch.Tensor) -> dict[str, Any]:
    """Read on to so many tokens, ask, and detach."""
    model, tokenizer = loaded
    with memstore.attach(model, place, document="text", tokenizer=tokenizer) as reader:
        there = len(reader.document)
        with PeakMemory() as peak, most() as read:
            reader.append(ids[there:tokens] if tokens <= len(ids) else ids[: tokens - there])
    with memstore.attach(model, place, document="text", tokenizer=tokenizer) as reader, most() as ask:
        reader.ask("What does the assert statement do?", max_tokens=24)
    own = round(peak.anonymous_bytes / 2**20)
    return {"tokens": tokens, "anonymous_mib": own, "read": read, "ask": ask, "freed_mib": mib()}


def mib() -> int:
    """Mebibytes that are the process's own."""
    return round(memory_in_use()[0] / 2**20)


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
