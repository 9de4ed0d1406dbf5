"""What codes of index keys in 8 bits save: ``python -m benchmarks.int8_keys``.

``index_dtype="int8"`` keeps them in RAM beside the keys. The choice must be the same, bit for bit; otherwise the run
fails. Each row: milliseconds of the choice from the keys alone, and of that from codes first.

Keys, queries and weights are Gaussian. Implementations take turns, and medians are reported, of the time of the
processor: others may use the machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.chosen import medians
from memstore.kernels.index_scores import IndexCodes, choose, encode
from memstore.kernels.native import processor
from memstore.resources import hardware

RESULTS = Path(__file__).parent.parent / "results" / "int8_keys.json"
VECTORS = "AVX-512 VNNI" if "avx512_vnni" in processor() else "AVX2"
AT_ONCE = 8192
"""Keys that are encoded together."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one choice."""

    queries: int = 1
    heads: int = 16
    dim: int = 64
    keys: int = 131_072
    k: int = 256
    block: int = 1
    dtype: str = "float32"


K, M = 1 << 10, 1 << 20
LARGE = Case(heads=64, dim=128, k=2048, dtype="bfloat16")
BLOCKS = Case(queries=4, heads=1, dim=128, k=16, block=128, dtype="bfloat16")
CASES = {
    "32K keys": Case(keys=32 * K),
    "128K keys": Case(),
    "128K keys, 2,048 best": Case(k=2048),
    "256K keys": Case(keys=256 * K),
    "1M keys": Case(keys=M),
    "DeepSeek-V3.2, 32K keys": replace(LARGE, keys=32 * K),
    "DeepSeek-V3.2, 128K keys": LARGE,
    "DeepSeek-V3.2, 256K keys": replace(LARGE, keys=256 * K),
    "DeepSeek-V3.2, 1M keys": replace(LARGE, keys=M),
    "MiniMax-M3, 256K keys": replace(BLOCKS, keys=256 * K),
    "64 queries, 64K keys": Case(queries=64, keys=64 * K),
    "256 queries, 64K keys": Case(queries=256, keys=64 * K),
    "64 queries, 256K keys": Case(queries=64, keys=256 * K),
    "64 queries, 1M keys": Case(queries=64, keys=M),
    "DeepSeek-V3.2, 64 queries, 64K keys": replace(LARGE, queries=64, keys=64 * K),
    "DeepSeek-V3.2, 64 queries, 256K keys": replace(LARGE, queries=64, keys=256 * K),
    "DeepSeek-V3.2, 64 queries, 1M keys": replace(LARGE, queries=64, keys=M),
}


def main() -> None:
    """Measure, print rows, and put them in place of the same ones in the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*CASES], choices=CASES, help="of the cases")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **hardware()}
    sizes = {name: asdict(case) for name, case in CASES.items()}
    rows = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    for name in options.only:
        new = {"name": name, "vectors": VECTORS, **measured(CASES[name], options.repeats)}
        print(json.dumps(new), flush=True)
        rows = [row for row in rows if (row["name"], row["vectors"]) != (name, VECTORS)] + [new]
        options.output.write_text(json.dumps({"about": about, "sizes": sizes, "rows": rows}, indent=1) + "\n")


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Return the milliseconds of both ways, which must choose the same."""
    torch.manual_seed(0)
    queries = torch.randn(case.queries, case.heads, case.dim)
    weights = None if case.heads == 1 else torch.randn(case.queries, case.heads)
    keys = torch.randn(case.keys, case.dim).to(getattr(torch, case.dtype))
    codes = IndexCodes(*map(torch.cat, zip(*map(encode, keys.split(AT_ONCE)), strict=True)))
    given: dict[str, Any] = {
        "scale": case.dim**-0.5, "limit": torch.full((case.queries,), case.keys), "k": case.k, "block": case.block,
        "relu": case.block == 1,
    }  # fmt: skip
    truth, ours = choose(queries, weights, keys, **given), choose(queries, weights, keys, codes=codes, **given)
    if not all(map(torch.equal, ours, truth)):
        raise AssertionError(f"the choice from codes differs from the exact one: {case}")
    exact, coded = medians(
        (
            lambda: choose(queries, weights, keys, **given),
            lambda: choose(queries, weights, keys, codes=codes, **given),
        ),
        repeats,
    )
    return {"exact_ms": round(exact, 3), "coded_ms": round(coded, 3), "times_as_fast": round(exact / coded, 2)}
