"""Exact search beside a plain product and FAISS Flat: ``python -m benchmarks.exact``.

For 16,384 to 1,048,576 random keys of 64 and 128 numbers, and 1 to 256 queries at a time: milliseconds of one thread's
processor time for all of them, and how many times as fast exact search is. The product is ``queries @ keys.T`` with
``topk``. All sides take turns, so each begins with caches that the others filled; with ``--alone`` each is measured by
itself. It runs once with all that the processor has, and once as on a processor with AVX2 and
nothing wider, by the switches of PyTorch (which our C obeys too), MKL, oneDNN, FAISS and OpenBLAS. Needs ``faiss-cpu``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.index import K, Side, by_turns
from memstore.index import VectorIndex, open_index
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "exact.json"
SIZES = (16_384, 131_072, 1_048_576)
DIMS = (64, 128)
BATCHES = (1, 8, 64, 256)
STEP = 1 << 16
PRODUCTS = 1 << 32
"""Products of one side, over all rounds, if there are not too few or too many."""
NARROW = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "FAISS_SIMD_LEVEL": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}
SWITCHES: dict[str, dict[str, str]] = {"all": {}, "avx2": NARROW}


def main() -> None:
    """Measure in a process for each kind of processor, print ratios, and write the rows down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES])
    parser.add_argument("--dims", type=int, nargs="+", default=[*DIMS])
    parser.add_argument("--batches", type=int, nargs="+", default=[*BATCHES])
    parser.add_argument("--vectors", nargs="+", default=[*SWITCHES], choices=[*SWITCHES])
    parser.add_argument("--out", type=Path, help="A file for the rows; a whole run goes to results/exact.json.")
    parser.add_argument("--alone", action="store_true", help="Measure one side after the other, not by turns.")
    parser.add_argument("--here", action="store_true", help="Measure in this process, and print rows as JSON.")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options)))
        return
    sizes = [("--" + name, *map(str, getattr(options, name))) for name in ("sizes", "dims", "batches")]
    rows = []
    for vectors in options.vectors:
        alone = ["--alone"] * options.alone
        command = [
            sys.executable,
            "-m",
            "benchmarks.exact",
            "--here",
            *alone,
            *(word for each in sizes for word in each),
        ]
        environment = {**os.environ, **SWITCHES[vectors], "OMP_NUM_THREADS": "1"}
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        rows += [{"vectors": vectors, **row} for row in json.loads(printed)]
    print(table({"rows": rows}))
    whole = not options.alone and (options.sizes, options.dims, options.batches) == ([*SIZES], [*DIMS], [*BATCHES])
    if out := options.out or (RESULTS if whole and len(options.vectors) == len(SWITCHES) else None):
        date = datetime.datetime.now().astimezone().date().isoformat()
        about = {"date": date, "hardware": hardware() | {"faiss-cpu": version("faiss-cpu")}, "threads": 1}
        out.write_text(json.dumps(about | {"alone": options.alone, "rows": rows}, indent=1) + "\n", "utf-8")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of this process."""
    import faiss

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    rows = []
    for dim in options.dims:
        for n in options.sizes:
            generator = torch.Generator().manual_seed(0)
            keys, asked = (torch.randn(count, dim, generator=generator) for count in (n, max(64, *options.batches)))
            index, flat = open_index("exact", key_heads=1, key_dim=dim, keys_per_block=1), faiss.IndexFlatIP(dim)
            flat.add(keys.numpy())
            for start in range(0, n, STEP):
                index.add(torch.arange(start, min(start + STEP, n)), keys[start : start + STEP, None, None])
            index.search(asked[None], K)  # after so many queries its keys have codes
            for batch in options.batches:
                rounds = min(31, max(4, PRODUCTS // (n * dim * batch)))
                compared = sides(index, keys, flat, asked[:batch])
                groups = [{name: side} for name, side in compared.items()] if options.alone else [compared]
                ms = {name: time for group in groups for name, time in by_turns(group, rounds).items()}
                times = {f"times_{side}": round(ms[side] / ms["exact"], 2) for side in ("product", "faiss_flat")}
                rows.append({"keys": n, "dim": dim, "queries": batch, "ms": ms, **times})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def sides(index: VectorIndex, keys: Tensor, flat: Any, queries: Tensor) -> dict[str, Side]:
    """What is compared."""
    return {
        "exact": lambda: index.search(queries[None], K),
        "product": lambda: (queries @ keys.T).topk(K, dim=1),
        "faiss_flat": lambda: flat.search(queries.numpy(), K),
    }


def table(results: dict[str, Any]) -> str:
    """A row for each set of keys: how many times as fast exact search is as the product and FAISS Flat."""
    rows = results["rows"]
    batches = list(dict.fromkeys(row["queries"] for row in rows))
    lines = [f"| vectors | keys | numbers | {' | '.join(f'{batch} at a time' for batch in batches)} |"]
    lines.append("|---" * (3 + len(batches)) + "|")
    for kind in dict.fromkeys((row["vectors"], row["keys"], row["dim"]) for row in rows):
        here = [row for row in rows if (row["vectors"], row["keys"], row["dim"]) == kind]
        cells = [f"{row['ms']['exact']:.2f} ms: {row['times_product']}, {row['times_faiss_flat']}" for row in here]
        lines.append(f"| {kind[0]} | {kind[1]:,} | {kind[2]} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
