"""How fast a DRT reads, generates and trains on a CPU: ``python benchmarks/drt.py``.

The model is the preset ``tiny`` with random weights, for what it has learned does not change what it costs. Reading is
measured with blocks committed to disk; generating as the CPU time of a token behind a memory, on one thread (operations
this small gain nothing from more), by turns with the same model with retrieval off: the median, and the mean, which has
the search at the end of each block in it; training as the time of a step of a fixed number of tokens in rows of growing
length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.models.drt import DRTCache, DRTConfig, DRTForCausalLM, DRTReader
from memstore.resources import PeakMemory, disk_bytes, hardware

RESULTS = Path(__file__).parent / "results" / "drt.json"
ROUNDS = 24
"""Blocks of generated tokens, by turns with retrieval and without."""
TOKENS = 16_384
"""Tokens of a training step."""
CONTEXTS = (1_024, 2_048, 4_096, 8_192, 16_384)


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", default="65536,1048576", help="Tokens read, separated by commas.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for row in measure([int(length) for length in options.lengths.split(",")]):
        print(json.dumps(row), flush=True)
        rows.append(row)
    options.out.write_text(
        json.dumps({"hardware": hardware(), "threads": options.threads, "rows": rows}, indent=1) + "\n"
    )


def measure(lengths: list[int]) -> Iterator[dict[str, Any]]:
    """The rows."""
    model = DRTForCausalLM(DRTConfig.preset("tiny")).train(False)
    off = DRTForCausalLM(DRTConfig.preset("tiny", retrieval="none")).train(False)
    off.load_state_dict({name: model.state_dict()[name] for name in off.state_dict()})
    for length in lengths:
        yield from read_and_generate(model, off, length)
    for context in CONTEXTS:
        yield train(context)


def read_and_generate(model: DRTForCausalLM, off: DRTForCausalLM, length: int) -> Iterator[dict[str, Any]]:
    """Reading ``length`` random tokens into a memory on disk, then generating behind it."""
    tokens = torch.randint(model.config.vocab_size, (length,))
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as peak, DRTReader(model, Path(folder) / "m") as reader:
        result = reader.read(tokens, reuse=False)
        yield {
            "what": "read",
            "tokens": length,
            "tokens_per_second": round(result.tokens_per_second),
            "peak_anonymous_bytes": peak.anonymous_bytes,
            "disk_bytes": disk_bytes(Path(folder)),
        }
        yield {"what": "generate", "tokens": length, **generate(model, reader.cache(), off, DRTCache(off.config, 1))}


def generate(model: DRTForCausalLM, cache: DRTCache, off: DRTForCausalLM, empty: DRTCache) -> dict[str, float]:
    """Milliseconds of a token with retrieval and without, and how many times as long it takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    token = torch.zeros(1, 1, dtype=torch.int64)
    retrieving: list[float] = []
    bare: list[float] = []
    for number in range(ROUNDS + 2):
        with_retrieval, token = block(model, token, cache)
        without, token = block(off, token, empty)
        if number >= 2:  # the first search builds the index, the first windows are not full
            retrieving += with_retrieval
            bare += without
    torch.set_num_threads(threads)
    median, bare_median = statistics.median(retrieving), statistics.median(bare)
    mean, bare_mean = statistics.mean(retrieving), statistics.mean(bare)
    return {
        "ms_per_token": round(median, 3),
        "ms_per_token_retrieval_off": round(bare_median, 3),
        "ratio": round(median / bare_median, 3),
        "mean_ms_per_token": round(mean, 3),
        "mean_ms_per_token_retrieval_off": round(bare_mean, 3),
        "ratio_of_means": round(mean / bare_mean, 3),
    }


@torch.no_grad()
def block(model: DRTForCausalLM, token: Tensor, cache: DRTCache) -> tuple[list[float], Tensor]:
    """Milliseconds of each token of a block, and the token after them."""
    times = []
    for _ in range(model.config.tokens_per_block):
        begun = time.process_time()
        token = model(token, past_key_values=cache).logits.argmax(-1)
        times.append(1000 * (time.process_time() - begun))
    return times, token


def train(context: int) -> dict[str, Any]:
    """Forward and backward over ``TOKENS`` tokens in rows of ``context``."""
    model = DRTForCausalLM(DRTConfig.preset("tiny")).train()
    ids = torch.randint(model.config.vocab_size, (TOKENS // context, context))
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        loss = model(ids, labels=ids, use_cache=False).loss
        assert loss is not None
        loss.backward()
        seconds.append(time.perf_counter() - begun)
    return {"what": "train", "context": context, "tokens_per_second": round(TOKENS / min(seconds))}


if __name__ == "__main__":
    main()
