"""Many requests to one server: that each is answered from its own memory, how fast, and that memory stays bounded.

    python benchmarks/serve.py --requests 10000

A tiny model with random weights, ten memories, clients that ask at the same time. Memory is that of the server's
process, as its ``/metrics`` tell it; the model is so small that what grows would be the server's.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import memstore
from memstore.resources import hardware
from memstore.tools.models import remember
from tests.instruct import instruct_model, instruct_tokenizer

MEMORIES = 10


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--clients", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        memories = make_memories(Path(scratch))
        command = [
            sys.executable,
            "-m",
            "memstore",
            "serve",
            *map(str, memories),
            "--no-token",
            "--port",
            "0",
            "--threads",
            "1",
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            url = server.stderr.readline().split()[0]
            try:
                measure(url, options.requests, options.clients)
            finally:
                server.terminate()


def make_memories(folder: Path) -> list[Path]:
    """Ten memories, each with a document of its own name."""
    model, tokenizer = instruct_model(), instruct_tokenizer()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    remember(str(folder / "model"))
    paths = [folder / f"m{i}.mem" for i in range(MEMORIES)]
    for i, path in enumerate(paths):
        with memstore.attach(model, path, tokenizer=tokenizer, block_size=16) as reader:
            reader.read(f"This is memory number {i}. " * 40, f"m{i}")
            reader.memory.put_info("model", {"name": str(folder / "model"), "dtype": "float32"})
    return paths


def measure(url: str, requests: int, clients: int) -> None:
    """Ask, and print."""

    def ask(i: int) -> bool:
        name = f"m{i % MEMORIES}"
        question = {"model": name, "messages": [{"role": "user", "content": f"Question {i}?"}], "max_tokens": 2}
        call = urllib.request.Request(  # noqa: S310
            f"{url}/chat/completions", json.dumps(question).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=600) as answer:  # noqa: S310
            return {each["document"] for each in json.load(answer)["sources"]} == {name}

    begun, used, right = time.perf_counter(), [], 0
    with ThreadPoolExecutor(clients) as pool:
        for first in range(0, requests, max(1, requests // 10)):
            asked = range(first, min(requests, first + max(1, requests // 10)))
            right += sum(pool.map(ask, asked))
            used.append(anonymous_bytes(url))
            print(f"{asked.stop:>7,} requests, {used[-1] / 2**20:,.1f} MiB anonymous memory", flush=True)
    seconds = time.perf_counter() - begun
    print(f"{right:,} of {requests:,} from their own memory, {requests / seconds:.1f} requests/s, {clients} clients")
    print(f"grown by {(used[-1] - used[len(used) // 2]) / 2**20:+.2f} MiB in the second half ({hardware()})")


def anonymous_bytes(url: str) -> int:
    """Of the server's process."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=600) as answer:  # noqa: S310
        found = re.search(r"^memstore_anonymous_memory_bytes (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    main()
