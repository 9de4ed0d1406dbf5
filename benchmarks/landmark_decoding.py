"""Time per generated token of a landmark model with its states on disk, against a sliding window of 512.

``python benchmarks/landmark_decoding.py`` prints a table and writes ``benchmarks/results/landmark_decoding.json``. The
text is random, for time does not depend on it. All settings take turns, token by token, in one process; times are
medians of processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
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

import memstore
from memstore.memory import Retrieval
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM, Reader

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
}
BLOCK, SEGMENT, TOP_K, WINDOW = 64, 4, 4, 512
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
def measure(folder: Path, length: int, count: int) -> dict[str, Any]:
    """Milliseconds per token for every setting after ``length`` tokens, and blocks fetched per segment."""
    landmark = make(block_size=BLOCK, segment_blocks=SEGMENT, retrieval_top_k=TOP_K)
    window = make(attention="window", window=WINDOW)
    more = text(count + 1, seed=1)
    with Reader(landmark, folder, retrieval=SETTINGS["one list for a segment"]) as reader:
        result = reader.read(text(length))
        before = window(text(length)[None, -2 * WINDOW :], use_cache=True).past_key_values
        steps: dict[str, Callable[[Tensor], Any]] = {"window of 512": partial(window, past_key_values=before)}
        caches = {name: reader.cache(retrieval=retrieval) for name, retrieval in SETTINGS.items()}
        for name, cache in caches.items():
            steps[name] = partial(landmark, past_key_values=cache)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(count):
            for name, step in steps.items():
                begun = time.process_time()
                step(more[None, number : number + 1])
                times[name].append((time.process_time() - begun) * 1e3)
        disk = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
        layers = range(1, SIZES["num_hidden_layers"])
        return {
            "milliseconds": {name: statistics.median(each[1:]) for name, each in times.items()},
            "mean milliseconds": {name: statistics.mean(each[1:]) for name, each in times.items()},
            "unique blocks per segment": {
                name: statistics.mean(cache.asked.unique_blocks(layer) for layer in layers)
                for name, cache in caches.items()
            },
            "tokens read per second": result.tokens_per_second,
            "megabytes on disk": disk / 1e6,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 49_152])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/landmark_decoding.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for length in arguments.lengths:
        with tempfile.TemporaryDirectory() as folder:
            found = results[str(length)] = measure(Path(folder) / "memory", length, arguments.tokens)
        base, mean = found["milliseconds"]["window of 512"], found["mean milliseconds"]["window of 512"]
        print(
            f"\n{length:,} tokens, {found['megabytes on disk']:.0f} MB on disk, "
            f"read at {found['tokens read per second']:.0f} tokens/s"
        )
        for name, each in found["milliseconds"].items():
            unique = found["unique blocks per segment"].get(name)
            blocks = "" if unique is None else f"{unique:6.1f} blocks a pass"
            means = found["mean milliseconds"][name] / mean
            print(f"{name:28} {each:7.2f} ms {each / base:5.2f} x  mean {means:5.2f} x {blocks}")
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
    }
    versions = {"torch": torch.__version__, "memstore": memstore.__version__}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**about, **versions, "sizes": SIZES, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
