"""What a memory of tokens costs on a CPU: ``python benchmarks/knn.py``.

A step of training with a full memory against the same step without one, and the search alone against the matrix product
that scores every token, in bfloat16 and in float32. Weights and tokens are random: they change nothing about the cost.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.attention.knn_memory import RecentTokens
from memstore.models.memorizing import MemorizingCache, MemorizingConfig, MemorizingForCausalLM
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "knn.json"
SIZES = (0, 1536, 8192, 65_536)
MODELS: dict[str, dict[str, Any]] = {
    "4 layers of 64": {"window": 512},
    "12 layers of 512": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_hidden_layers": 12,
        "memory_layer": 8,
        "window": 512,
    },
}
SEARCHED = (65_536, 262_144)
HEADS, TOKENS, DIM, TOP_K = 8, 512, 64, 32


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for row in measure(options.rounds):
        print(json.dumps(row), flush=True)
        rows.append(row)
    options.out.write_text(
        json.dumps({"hardware": hardware(), "threads": options.threads, "rows": rows}, indent=1) + "\n"
    )


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """The rows."""
    for name, sizes in MODELS.items():
        yield from steps(name, sizes, rounds)
    for count in SEARCHED:
        yield search(count, rounds)


def steps(name: str, sizes: dict[str, Any], rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds of a step of one row of 512 tokens, by turns with memories of all sizes."""
    made = {size: _model(sizes, size) for size in SIZES}
    ids = torch.randint(512, (1, TOKENS))
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(rounds + 1):
        for size, (model, cache) in made.items():
            begun = time.perf_counter()
            loss = model(ids, labels=ids, past_key_values=cache, use_cache=True).loss
            assert loss is not None
            loss.backward()
            model.zero_grad()
            if number:
                seconds[size].append(time.perf_counter() - begun)
    bare = min(seconds[0])
    for size in SIZES:
        row = {"what": "train", "model": name, "memory": size, "seconds": round(min(seconds[size]), 3)}
        yield row | {"ratio": round(min(seconds[size]) / bare, 3)}


def _model(sizes: dict[str, Any], memory: int) -> tuple[MemorizingForCausalLM, MemorizingCache]:
    """A model whose memory is full."""
    model = MemorizingForCausalLM(MemorizingConfig(**sizes, memory_size=memory)).train()
    cache = MemorizingCache(model.config, 1)
    if memory:
        groups, dim = model.config.num_key_value_heads, model.config.head_dim
        cache.memory = RecentTokens(1, groups, memory, dim)
        states = torch.nn.functional.normalize(torch.randn(1, groups, memory, dim), dim=-1)
        cache.memory.append([torch.zeros(memory)], states, states)
    return model, cache


def search(count: int, rounds: int) -> dict[str, Any]:
    """Seconds of looking up 32 of ``count`` tokens for 512 tokens of 8 heads, and of the products alone."""
    memory = RecentTokens(1, HEADS, count, DIM)
    keys = torch.nn.functional.normalize(torch.randn(1, HEADS, count, DIM), dim=-1)
    memory.append([torch.zeros(count)], keys, keys)
    queries = torch.nn.functional.normalize(torch.randn(1, HEADS, TOKENS, DIM), dim=-1)
    half = memory.keys.bfloat16()

    def product(keys: Tensor) -> Callable[[], object]:
        asked = queries.to(keys.dtype)
        return lambda: [asked[0, head] @ keys[0, head].T for head in range(HEADS)]

    found = _seconds(lambda: memory.search(queries, TOP_K), rounds)
    bf16, fp32 = _seconds(product(half), rounds), _seconds(product(memory.keys), rounds)
    row = {"what": "search", "memory": count, "seconds": round(found, 3)}
    return row | {"bf16_product_seconds": round(bf16, 3), "fp32_product_seconds": round(fp32, 3)}


def _seconds(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    main()
