"""How fast blocks are read and written, beside plain memory and plain files: ``python benchmarks/store.py``.

Blocks are those of SmolLM2-135M: keys and values of 64 tokens in one layer, 49,152 bytes in bfloat16. Every row is a
ratio within one run, both sides taking turns; a ratio of 1 is as fast as the plain way. Cold reads are made by a fresh
process, after the pages of all files were dropped from the page cache; absolute times depend on the machine and on what
else it does. ``--folder`` says which disk is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import count, repeat
from pathlib import Path
from statistics import median
from typing import Any

import lmdb
import numpy as np
import torch
from xxhash import xxh3_64_intdigest

import memstore
from memstore import Fingerprint, MemorySpec
from memstore.memory import Document, LayerView, Memory
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "store.json"
LIST = 32
"""Blocks of a gather."""
SHAPE = (3, 64, 64)
BLOCK_BYTES = 2 * 2 * 3 * 64 * 64
QUEUE_DEPTH = 16
WARM_ROUNDS = 600
COLD_ROUNDS = 60
APPENDS = 24
RAM_DISK = "/dev/shm"  # noqa: S108 - the one folder that Linux keeps in memory
LAYERS = 30
FORKS, DOCUMENTS, TINY = 10_000, 100_000, (1, 1, 1)
"""What ``--growth`` makes: documents of one block, whose states are two numbers."""
LARGE = 262_144
"""Blocks of a memory of 16 million tokens."""
COMPUTE_MS = 2.0
"""What a layer computes between two gathers, where reading ahead is measured."""

Row = dict[str, Any]
Side = Callable[[list[int]], object]
"""One of the ways that are compared: does something with a list of blocks."""


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="Where to make the memories; a temporary folder by default.")
    parser.add_argument("--blocks", type=int, default=16_384, help="Blocks in the store that is read.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--growth", action="store_true", help="What many forks and documents cost; writes nothing down."
    )
    parser.add_argument(
        "--limits", action="store_true", help="Only what is compared with the least that LMDB and checksums take."
    )
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)  # what the fresh process does
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.cold:
        for row in cold(options.folder, options.blocks):
            print(json.dumps(row), flush=True)
        return
    if options.growth:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for row in growth(Path(folder)):
                print(json.dumps(row), flush=True)
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for row in limits(Path(folder)) if options.limits else measure(Path(folder), options.blocks):
            print(json.dumps(row), flush=True)
            rows.append(row)
    facts = {name: version(name) for name in ("lmdb", "xxhash", "numpy")}
    date = datetime.datetime.now().astimezone().date().isoformat()
    result = {"date": date, "hardware": hardware() | facts, "threads": options.threads, "blocks": options.blocks}
    options.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


def measure(folder: Path, blocks: int) -> Iterator[Row]:
    """The rows."""
    make_blocks(folder, blocks)
    yield from warm(folder, min(blocks, 2048))
    yield first_reading(folder, blocks)
    yield from cold_in_fresh_process(folder, blocks)
    yield append(folder)
    yield append_in_memory(1, 1)
    yield opening(folder)
    yield from fork(folder)


def limits(folder: Path) -> Iterator[Row]:
    """The rows of ``--limits``."""
    make_blocks(folder, 2048)
    yield from warm(folder, 2048)
    yield append_in_memory(1, 1)
    yield append_in_memory(LAYERS, 8)
    yield opening(folder)


def spec(layers: int, shape: tuple[int, ...], index_layers: tuple[int, ...] = ()) -> MemorySpec:
    """Blocks of 64 tokens in bfloat16, with landmarks of 128 dimensions where there are any."""
    names = dict.fromkeys(("architecture", "weights", "tokenizer", "positions", "layout"), "benchmark")
    return MemorySpec(
        layers=layers,
        fields={"k": shape, "v": shape},
        index_layers=index_layers,
        key_heads=1,
        key_dim=128,
        keys_per_block=1,
        block_size=64,
        dtype="bfloat16",
        fingerprint=Fingerprint(**names, dtype="bfloat16", block_size=64),
    )


def make_blocks(folder: Path, blocks: int) -> None:
    """A memory of one layer, and a plain file with as many blocks."""
    with memstore.open(folder / "blocks", spec=spec(1, SHAPE)) as memory, (folder / "plain").open("wb") as plain:
        for start in range(0, blocks, 256):
            k, v = (torch.randn(min(256, blocks - start), *SHAPE).bfloat16() for _ in range(2))
            with memory.document("text").append(torch.zeros(64 * len(k), dtype=torch.int32)) as batch:
                batch.put(0, k=k, v=v)
            for states in zip(k, v, strict=True):
                plain.write(b"".join(each.view(torch.uint8).numpy().tobytes() for each in states))


def by_turns(
    lists: Iterator[list[int]],
    rounds: int,
    skip: int,
    clock: Callable[[], float],
    **sides: Side,
) -> dict[str, float]:
    """Median microseconds of each side, each given blocks of its own; the first ``skip`` rounds do not count.

    ``clock`` is one that other processes do not disturb where nothing waits for the disk.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            mine = next(lists)
            begun = clock()
            side(mine)
            if number >= skip:
                times[name].append(1e6 * (clock() - begun))
    return {name: round(median(each), 1) for name, each in times.items()}


def random_lists(blocks: int) -> Iterator[list[int]]:
    """Sorted lists of random blocks, without end; no block comes twice before all had their turn."""
    todo: list[int] = []
    while True:
        if len(todo) < LIST:
            todo = random.sample(range(blocks), blocks)
        yield sorted(todo.pop() for _ in range(LIST))


def warm(folder: Path, blocks: int) -> Iterator[Row]:
    """Gathering blocks that are in the page cache, and blocks that are in the host tier."""
    plain = np.fromfile(folder / "plain", np.uint8, blocks * BLOCK_BYTES).reshape(blocks, BLOCK_BYTES)
    out = np.empty((LIST, BLOCK_BYTES), np.uint8)

    def memcpy(wanted: list[int]) -> None:
        for row, block in enumerate(wanted):
            out[row] = plain[block]

    def checksums(wanted: list[int]) -> None:
        for block in wanted:
            xxh3_64_intdigest(plain[block].data)

    def bare(wanted: list[int]) -> None:
        with least.begin(buffers=True) as reading, reading.cursor() as cursor:
            for row, block in zip(out, wanted, strict=True):
                row.data[:] = cursor.get(block.to_bytes(8, "big"))
                xxh3_64_intdigest(row.data)

    with (
        bare_lmdb(folder / "bare") as least,
        memstore.open(folder / "blocks", mode="r", host_bytes=0) as from_disk,
        memstore.open(folder / "blocks", mode="r", host_bytes=blocks * (BLOCK_BYTES + 1024)) as cached,
    ):
        put_bare(least, 0, plain)
        disk, host = view(from_disk), view(cached)
        host.gather(range(blocks))
        sides: dict[str, Side] = {
            "memcpy": memcpy,
            "lmdb": disk.gather,
            "host": host.gather,
            "checksums": checksums,
            "bare": bare,
        }
        us = by_turns(random_lists(blocks), WARM_ROUNDS, WARM_ROUNDS // 4, time.process_time, **sides)
    yield {"what": "warm gather, LMDB", **us, "ratio": round(us["memcpy"] / us["lmdb"], 3), "wanted": 0.5}
    yield {"what": "warm gather, host tier", **us, "ratio": round(us["memcpy"] / us["host"], 3), "wanted": 0.8}


def first_reading(folder: Path, blocks: int) -> Row:
    """Gathering blocks that this process has not verified yet, of pages that are in the page cache."""
    plain = np.memmap(folder / "plain", np.uint8, "r").reshape(blocks, BLOCK_BYTES)
    out = np.empty((LIST, BLOCK_BYTES), np.uint8)

    def memcpy(wanted: list[int]) -> None:
        for row, block in enumerate(wanted):
            out[row] = plain[block]

    with memstore.open(folder / "blocks", mode="r", host_bytes=0) as memory:
        rounds = blocks // LIST // 2  # two sides; no block comes twice
        us = by_turns(random_lists(blocks), rounds, 1, time.process_time, memcpy=memcpy, lmdb=view(memory).gather)
    return {"what": "first gather, LMDB", **us, "ratio": round(us["memcpy"] / us["lmdb"], 3)}


def view(memory: Memory) -> LayerView:
    """Layer 0 of the text."""
    return memory.document("text").layer(0)


def cold_in_fresh_process(folder: Path, blocks: int) -> Iterator[Row]:
    """Drop all pages from the page cache and read in another process: mapped pages are not dropped."""
    for file in (folder / "plain", folder / "blocks" / "data.mdb"):
        handle = os.open(file, os.O_RDWR)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    command = [sys.executable, __file__, "--cold", "--folder", str(folder), "--blocks", str(blocks)]
    done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, check=True)
    yield from map(json.loads, done.stdout.splitlines())


def cold(folder: Path, blocks: int) -> Iterator[Row]:
    """Random gathers of blocks that are on disk alone, and reading ahead while something else computes."""
    lists = random_lists(blocks)
    handle = os.open(folder / "plain", os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead of what nobody wants

    def read(block: int) -> None:
        assert len(os.pread(handle, BLOCK_BYTES, block * BLOCK_BYTES)) == BLOCK_BYTES

    with (
        ThreadPoolExecutor(QUEUE_DEPTH) as pool,
        memstore.open(folder / "blocks", mode="r", host_bytes=0) as memory,
    ):
        sides: dict[str, Side] = {
            "pread": lambda wanted: list(pool.map(read, wanted)).clear(),
            "lmdb": view(memory).gather,
        }
        us = by_turns(lists, COLD_ROUNDS, COLD_ROUNDS // 6, time.perf_counter, **sides)
    yield {"what": "cold gather, LMDB", **us, "ratio": round(us["pread"] / us["lmdb"], 3), "wanted": 0.8}
    yield reading_ahead(folder, lists)


def reading_ahead(folder: Path, lists: Iterator[list[int]]) -> Row:
    """Thirty steps that compute and then gather, with and without a thread that brings what is gathered next."""
    matrix = torch.randn(256, 256)
    with memstore.open(folder / "blocks", mode="r", host_bytes=1 << 30) as memory:

        def step(wanted: list[int]) -> None:
            until = time.perf_counter() + COMPUTE_MS / 1000
            while time.perf_counter() < until:
                matrix @ matrix
            view(memory).gather(wanted)

        def run(ahead: bool) -> float:
            mine = [next(lists)[:8] for _ in range(LAYERS)]
            begun = time.perf_counter()
            for wanted in mine if ahead else ():
                view(memory).prefetch(wanted)
            for wanted in mine:
                step(wanted)
            return 1000 * (time.perf_counter() - begun)

        times = [(run(ahead=False), run(ahead=True)) for _ in range(5)]
    without, ahead = (round(median(each), 1) for each in zip(*times, strict=True))
    computing = LAYERS * COMPUTE_MS
    return {
        "what": "cold gathers between computing, reading ahead",
        "computing_ms": computing,
        "without_ms": without,
        "ahead_ms": ahead,
        "ratio": round(without / ahead, 3),
    }


def append(folder: Path) -> Row:
    """Committing four blocks of thirty layers, and writing the same bytes to a file with fsync."""
    k, v = (torch.randn(4, *SHAPE).bfloat16() for _ in range(2))
    tokens = torch.zeros(256, dtype=torch.int32)
    payload = b"".join(each.view(torch.uint8).numpy().tobytes() for each in (k, v)) * LAYERS
    times: dict[str, list[float]] = {"file": [], "lmdb": []}
    with (
        memstore.open(folder / "appended", spec=spec(LAYERS, SHAPE)) as memory,
        (folder / "written").open("wb") as file,
    ):

        def write() -> None:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())

        def commit() -> None:
            with memory.document("text").append(tokens) as batch:
                for layer in range(LAYERS):
                    batch.put(layer, k=k, v=v)

        for _ in range(APPENDS):
            for name, work in (("file", write), ("lmdb", commit)):
                begun = time.perf_counter()
                work()
                times[name].append(1000 * (time.perf_counter() - begun))
    ms = {name: round(median(each[4:]), 2) for name, each in times.items()}
    return {"what": "append with commit, ms", **ms, "ratio": round(ms["file"] / ms["lmdb"], 3), "wanted": 0.7}


def append_in_memory(layers: int, blocks: int) -> Row:
    """Committing blocks where the disk costs nothing, beside a bare LMDB transaction and a file of the same bytes."""
    k, v = (torch.randn(blocks, *SHAPE).bfloat16() for _ in range(2))
    states = np.frombuffer(b"".join(each.view(torch.uint8).numpy().tobytes() for each in (k, v)) * layers, np.uint8)
    values, places = states.reshape(-1, BLOCK_BYTES), count(0, layers * blocks)
    with (
        tempfile.TemporaryDirectory(dir=RAM_DISK) as folder,
        memstore.open(Path(folder) / "appended", spec=spec(layers, SHAPE)) as memory,
        (Path(folder) / "written").open("wb", buffering=0) as file,
        bare_lmdb(Path(folder) / "bare") as least,
    ):
        document, tokens = memory.document("text"), torch.zeros(64 * blocks, dtype=torch.int32)

        def commit(_: list[int]) -> None:
            with document.append(tokens) as batch:
                for layer in range(layers):
                    batch.put(layer, k=k, v=v)

        sides: dict[str, Side] = {
            "file": lambda _: file.write(states.data),
            "bare": lambda _: put_bare(least, next(places), values),
            "checksums": lambda _: [xxh3_64_intdigest(value.data) for value in values],
            "lmdb": commit,
        }
        rounds = max(40, WARM_ROUNDS // (layers * blocks))
        us = by_turns(repeat([]), rounds, rounds // 4, time.process_time, **sides)
    what = "append of one layer on a RAM disk" if layers == 1 else "append of a segment on a RAM disk"
    times = {f"{name}_times": round(us[name] / us["file"], 1) for name in ("bare", "lmdb")}
    return {"what": what, **us, "ratio": round(us["file"] / us["lmdb"], 3), **times}


@contextmanager
def bare_lmdb(folder: Path) -> Iterator[Any]:
    """An LMDB environment without memstore."""
    with lmdb.open(str(folder), map_size=1 << 36) as environment:
        yield environment


def put_bare(environment: Any, first: int, values: np.ndarray) -> None:
    """Put ``values [n, bytes]`` under the numbers from ``first`` on, in one transaction."""
    with environment.begin(write=True) as writing:
        for place, value in enumerate(values, first):
            writing.put(place.to_bytes(8, "big"), value.data)


def opening(folder: Path) -> Row:
    """Opening a memory of 16 million tokens with one layer of landmarks, up to and with the first search."""
    large = folder / "large"
    with memstore.open(large, spec=spec(1, (1,), index_layers=(0,))) as memory:
        for _ in range(0, LARGE, 8192):
            with memory.document("text").append(torch.zeros(64 * 8192, dtype=torch.int32)) as batch:
                batch.put(0, landmarks=torch.randn(8192, 1, 1, 128), k=torch.ones(8192, 1), v=torch.ones(8192, 1))
    begun, computed = time.perf_counter(), time.process_time()
    with memstore.open(large, mode="r") as memory:
        layer = view(memory)
        opened = time.perf_counter() - begun
        layer.search(torch.randn(1, 1, 128), 8)
        searched, computed = time.perf_counter() - begun, time.process_time() - computed
    return {
        "what": "opening 16M tokens, seconds",
        "open": round(opened, 3),
        "first_search": round(searched, 3),
        "first_search_cpu": round(computed, 3),
        "wanted": 2.0,
    }


def fork(folder: Path) -> Iterator[Row]:
    """Forking a document of 16 million tokens, where documents can be forked."""
    with memstore.open(folder / "large") as memory:
        make: Callable[[str], object] | None = getattr(memory.document("text"), "fork", None)
        if make is None:
            return
        times = []
        for number in range(20):
            begun = time.perf_counter()
            partial(make, f"fork {number}")()
            times.append(1000 * (time.perf_counter() - begun))
    yield {"what": "fork, ms", "median": round(median(times), 2), "wanted": 10.0}


def growth(folder: Path) -> Iterator[Row]:
    """Seconds and bytes of a chain of forks, each with one block more, and of many documents."""
    with memstore.open(folder / "chain", spec=spec(1, TINY)) as memory:
        began, document = time.perf_counter(), memory.document("0")
        _append_tiny(document)
        for number in range(1, FORKS):
            document = document.fork(str(number))
            _append_tiny(document)
        yield {"row": "chain of forks", "forks": FORKS, "s": time.perf_counter() - began} | _size(memory)
    with memstore.open(folder / "chain") as memory:
        yield {"row": "last fork, another process", "s": _seconds(lambda: memory.document(str(FORKS - 1)).tokens(0))}
        yield {"row": "forget the first", "s": _seconds(lambda: memory.forget("0"))}
        yield {"row": "forget one in the middle", "s": _seconds(lambda: memory.forget(str(FORKS // 2)))}
    with memstore.open(folder / "documents", spec=spec(1, TINY)) as memory:
        appends: list[float] = []
        for number in range(DOCUMENTS):
            appends.append(_seconds(lambda number=number: _append_tiny(memory.document(str(number)))))  # type: ignore[misc]
            if number + 1 in (2000, DOCUMENTS):
                row = {"documents": number + 1, "append_ms": 1000 * median(appends[-500:])}
                yield row | {"row": "documents()", "s": _seconds(memory.documents)} | _size(memory)
        yield {
            "row": "append to the last over append to the first",
            "ratio": median(appends[-500:]) / median(appends[:500]),
        }
        yield {"row": "forget the first", "s": _seconds(lambda: memory.forget("0"))}
    with memstore.open(folder / "documents") as memory:
        yield {"row": "first look for a name, another process", "s": _seconds(lambda: memory.document("1"))}
    with memstore.open(folder / "documents") as memory:
        yield {"row": "documents(), another process", "s": _seconds(memory.documents)}


def _append_tiny(document: Document) -> None:
    with document.append(torch.zeros(64, dtype=torch.int32)) as batch:
        batch.put(0, k=torch.zeros(1, *TINY), v=torch.zeros(1, *TINY))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _size(memory: Memory) -> Row:
    return {"disk_mb": memory.stats()["disk_bytes"] / 1e6}


if __name__ == "__main__":
    main()
