"""Several processes on one memory: ``python -m benchmarks.parallel ranks`` and ``... workers``.

``ranks``: one to four processes (gloo) search and gather together. Processor time of each rank and operation, the least
of some rounds: a rank scores its share of the landmarks, and reads its share of the blocks; the collective is in both.

``workers``: processes of Ray read documents, and one long document, with the DRT that comes with the package. Beside
tokens per second there is the processor time that a million tokens take in all workers together, and in the process
that copies: on a machine that does other things only these mean anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

import memstore
from benchmarks.attach import long_text
from benchmarks.scale import SPEC, append
from memstore.readers.ranks import Ranks, Share, SharedDocument
from memstore.resources import hardware
from memstore.tools.models import load_model

RESULTS = Path(__file__).parent / "results"
SEARCHED = replace(SPEC, key_dim=64)
"""Many blocks of tiny states, to be searched."""
GATHERED = replace(SPEC, fields={"k": (3, 64, 64), "v": (3, 64, 64)}, block_size=64)
"""Blocks of a layer of SmolLM2-135M, 48 KiB, to be gathered."""
LIST = 32
"""Blocks that are gathered."""

Row = dict[str, Any]


def main() -> None:
    """Measure and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ranks", "workers"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--blocks", type=int, default=1 << 18, help="that are searched")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=1 << 19, help="that are read, in all documents")
    parser.add_argument("--model", default="passkey")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows = (of_ranks if options.what == "ranks" else of_workers)(options, Path(scratch))
    about = {"date": str(datetime.datetime.now(datetime.UTC).date()), "options": vars(options), **hardware()}
    about["load"] = os.getloadavg()[0]
    (RESULTS / f"{options.what}.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


def of_ranks(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """A row for each number of ranks."""
    with memstore.open(scratch / "searched", spec=SEARCHED) as memory:
        while (document := memory.document("text")).n_blocks < options.blocks:
            append(document, min(1 << 14, options.blocks - document.n_blocks))
    with memstore.open(scratch / "gathered", spec=GATHERED) as memory:
        for _ in range(16):
            append(memory.document("text"), 64)
    rows = []
    for size in options.ranks:
        context = get_context("spawn")
        told = context.SimpleQueue()
        ranks = [context.Process(target=rank, args=(n, size, str(scratch), options.rounds, told)) for n in range(size)]
        for each in ranks:
            each.start()
        found = [told.get() for _ in ranks]
        for each in ranks:
            each.join()
        # The slowest rank is waited for.
        rows.append({"ranks": size} | {name: max(each[name] for each in found) for name in found[0]})
    return rows


def rank(number: int, size: int, folder: str, rounds: int, told: Any) -> None:
    """Be a rank: search and gather with the others, and tell what it took here."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{size}", rank=number, world_size=size)
    share = Share(Ranks(dist.group.WORLD))
    made = torch.Generator().manual_seed(1)
    with (
        memstore.open(f"{folder}/searched", mode="r") as searched,
        memstore.open(f"{folder}/gathered", mode="r", host_bytes=0) as gathered,
    ):
        one, other = (SharedDocument(each.document("text"), share).layer(0) for each in (searched, gathered))
        query = torch.randn(1, 1, SEARCHED.key_dim, generator=made)
        lists = [torch.randperm(1024, generator=made)[:LIST] for _ in range(rounds)]
        row = {
            "search_processor_ms": least(lambda _: one.search(query, 8), rounds),
            "gather_processor_ms": least(lambda turn: other.gather(lists[turn]), rounds),
            "landmarks": share.landmarks,
            "gathered_bytes": 2 * LIST * 3 * 64 * 64 * 2,
        }
    told.put(row)
    dist.destroy_process_group()


def least(call: Callable[[int], object], rounds: int) -> float:
    """Milliseconds of processor time that ``call`` takes, the least of some rounds."""
    call(0)
    spent = []
    for turn in range(rounds):
        begun = time.process_time()
        call(turn)
        spent.append(1e3 * (time.process_time() - begun))
    return round(min(spent), 3)


class Loader:
    """Loads the model in each worker, and keeps writing down the processor time of that worker."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder, self._here = model, folder, os.getpid()

    def __call__(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        loaded = load_model(self._model)
        if os.getpid() != self._here:
            begun, file = time.process_time(), self._folder / str(os.getpid())

            def note() -> None:
                while True:
                    told = file.with_suffix(".new")
                    told.write_text(str(time.process_time() - begun))
                    told.replace(file)  # the process may be ended at any moment
                    time.sleep(0.1)

            threading.Thread(target=note, daemon=True).start()
        return loaded.model, loaded.tokenizer


def of_workers(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """A row for each number of workers, of eight documents and of one."""
    ids = long_text(load_model(options.model), options.tokens)
    rows = []
    for documents in (8, 1):
        texts = {str(number): part for number, part in enumerate(ids.chunk(documents))}
        for workers in options.workers:
            folder = scratch / f"{documents}-{workers}"
            folder.mkdir()
            begun, own = time.perf_counter(), time.process_time()
            read = memstore.read_many(
                Loader(options.model, folder), texts, folder / "m", workers=workers, stretch=options.tokens // 8
            )
            took, own = time.perf_counter() - begun, time.process_time() - own
            spent = [float(file.read_text()) for file in folder.iterdir() if file.name.isdigit()]
            million = options.tokens / 1e6
            rows.append(
                {
                    "documents": documents,
                    "workers": workers,
                    "tokens_per_s_with_start": round(options.tokens / took),
                    "worker_processor_s_per_million": round(sum(spent) / million, 2),
                    "most_of_one_worker": round(max(spent) / sum(spent), 3),
                    "own_processor_s_per_million": round(own / million, 2),
                    "seconds_reading": round(sum(each.seconds for each in read), 2),
                }
            )
    return rows


if __name__ == "__main__":
    main()
