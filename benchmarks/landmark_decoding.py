"""Time per generated token of a landmark model with its states on disk, against a sliding window of 512.

``python benchmarks/landmark_decoding.py`` prints a table and writes ``benchmarks/results/landmark-decoding.json``. The
text is random, for time does not depend on it. All settings take turns, token by token, in one process of one thread;
times are of the processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore import Retrieval
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM, LandmarkReader
from memstore.readers.caches import CACHE
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "landmark-decoding.json"
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
}
BLOCK, SEGMENT, TOP_K, WINDOW = 64, 4, 4, 512
BASE = "window of 512"
SETTINGS = {
    "one list for a segment": Retrieval(top_k=TOP_K, share="layer"),
    "each head, for a segment": Retrieval(top_k=TOP_K, share="none"),
    "one list for each token": Retrieval(top_k=TOP_K, share="layer", every=1, share_tokens=False),
    "each head and token": Retrieval(top_k=TOP_K, share="none", every=1, share_tokens=False),
}


def make(**options: Any) -> LandmarkForCausalLM:
    """A random model."""
    torch.manual_seed(0)
    model = LandmarkForCausalLM(LandmarkConfig(**{**SIZES, **options}))
    model.train(False)
    return model


def text(count: int, seed: int = 0) -> Tensor:
    """Random tokens ``[count]``."""
    return torch.randint(SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def measure(folder: Path, length: int, count: int) -> list[dict[str, Any]]:
    """A row for each setting after ``length`` tokens: milliseconds per token, and blocks fetched per segment."""
    landmark = make(block_size=BLOCK, segment_blocks=SEGMENT, retrieval_top_k=TOP_K)
    window = make(attention="window", window=WINDOW)
    more = text(count + 1, seed=1)
    with LandmarkReader(landmark, folder, retrieval=SETTINGS["one list for a segment"]) as reader:
        result = reader.read(text(length))
        before = window(text(length)[None, -2 * WINDOW :], use_cache=True).past_key_values
        steps: dict[str, Callable[[Tensor], Any]] = {BASE: partial(window, **{CACHE: before})}
        caches = {name: reader.cache(retrieval=retrieval) for name, retrieval in SETTINGS.items()}
        for name, cache in caches.items():
            steps[name] = partial(landmark, **{CACHE: cache})
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(count):
            for name, step in steps.items():
                begun = time.process_time()
                step(more[None, number : number + 1])
                times[name].append((time.process_time() - begun) * 1e3)
        disk = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
        about = {
            "tokens": length,
            "megabytes_on_disk": round(disk / 1e6),
            "tokens_read_per_second": round(result.tokens_per_second),
        }
        return [about | _row(name, times, caches.get(name)) for name in times]


def _row(name: str, times: dict[str, list[float]], cache: Any) -> dict[str, Any]:
    """The figures of one setting, against those of the window. The first token, which warms up, does not count."""
    row: dict[str, Any] = {"setting": name}
    for kind, average in (("median", statistics.median), ("mean", statistics.mean)):
        own, base = average(times[name][1:]), average(times[BASE][1:])
        row |= {f"{kind}_ms": round(own, 3), f"{kind}_ratio": round(own / base, 3)}
    if cache is not None:
        asked = zip(cache.asked.fetched[1:], cache.asked.segments[1:], strict=True)
        fetched = [blocks / max(1, segments) for blocks, segments in asked]
        row["unique_blocks"] = round(statistics.mean(fetched), 2)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 49_152])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder) / "memory", length, arguments.tokens)
        for row in found:
            print(json.dumps(row), flush=True)
        rows += found
        about = {"date": datetime.now(UTC).date().isoformat(), **hardware(), "threads": 1, "sizes": SIZES}
        arguments.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
