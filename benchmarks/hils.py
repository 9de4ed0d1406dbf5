"""HiLS attention beside full attention, and what a token costs behind a long document on disk.

    python benchmarks/hils.py

On one thread, with one layer like those of the released 7B but smaller: 8 heads of 64, windows of 512, 32 blocks of 64.
Three figures:

- prefill of 16,384 tokens: the layer's attention, against PyTorch's causal attention (SDPA) of the same shape;
- a training step at 4,096 tokens: the same, forward and backward;
- decoding behind 131,072 stored tokens, in LMDB, against 8,192: a model of one such layer, token by token.

The two of a pair take turns, and the median counts; processor time, so that other programs matter less.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memstore
from memstore.kernels.hils_attention import hils_attention
from memstore.models.hils import HilsConfig, HilsForCausalLM
from memstore.report import Page
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "hils.json"
HEADS, DIM = 8, 64
LAYER: dict[str, Any] = {"block_size": 64, "window": 512, "top_k": 32}


def main() -> None:
    """Measure, print a table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=16_384, help="tokens")
    parser.add_argument("--train", type=int, default=4096, help="tokens")
    parser.add_argument("--stored", type=int, nargs=2, default=[8192, 131_072], help="tokens of two documents")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        _prefill(options.prefill, options.repeats),
        _training(options.train, options.repeats),
        _decoding(options.stored[0], options.stored[1], options.repeats),
    ]
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **hardware()}
    options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    page = Page()
    page.facts(about)
    page.line()
    page.table([*rows[0]], [[*row.values()] for row in rows])


def _prefill(tokens: int, repeats: int) -> dict[str, Any]:
    q, k, v, u = (torch.randn(1, HEADS, tokens, DIM) for _ in range(4))
    with torch.no_grad():
        hils, full = _turns(repeats, lambda: hils_attention(q, k, v, u, **LAYER), lambda: _full(q, k, v))
    return _row(f"prefill, {tokens:,} tokens", "SDPA / HiLS", hils, full, full / hils)


def _training(tokens: int, repeats: int) -> dict[str, Any]:
    q, k, v, u = (torch.randn(1, HEADS, tokens, DIM, requires_grad=True) for _ in range(4))
    gradient = torch.randn(1, HEADS, tokens, DIM)
    hils, full = _turns(
        repeats,
        lambda: hils_attention(q, k, v, u, **LAYER).backward(gradient),
        lambda: _full(q, k, v).backward(gradient),
    )
    return _row(f"training step, {tokens:,} tokens", "HiLS / SDPA", hils, full, hils / full)


def _full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@torch.no_grad()
def _decoding(few: int, many: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = HilsConfig(
        vocab_size=1024, hidden_size=HEADS * DIM, intermediate_size=1024, num_attention_heads=HEADS,
        num_hidden_layers=1, enable_external_lmk_embed=True, enable_softmax1=False,
    )  # fmt: skip
    model = HilsForCausalLM(config).train(False)
    text = torch.randint(0, 1024, (many,))
    with tempfile.TemporaryDirectory() as folder:
        steps = []
        for tokens in (many, few):
            reader = memstore.attach(model, f"{folder}/{tokens}.mem", document="text")
            with reader:
                reader.read(text[:tokens])
            reader.open()
            cache = reader.cache()
            steps.append(lambda cache=cache: _tokens(model, cache))
        longer, shorter = _turns(repeats, *steps)
    return _row(f"64 tokens, {many:,} against {few:,} stored", "longer / shorter", longer, shorter, longer / shorter)


def _tokens(model: HilsForCausalLM, cache: Any) -> None:
    """A block and a token."""
    for _ in range(64):
        model(torch.randint(0, 1024, (1, 1)), past_key_values=cache)


def _turns(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """The median of the processor seconds of each function, which take turns; the first turn does not count."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, spent in zip(functions, seconds, strict=True):
            begun = time.process_time()
            function()
            spent.append(time.process_time() - begun)
    return [median(each[1:]) for each in seconds]


def _row(what: str, ratio: str, first: float, second: float, value: float) -> dict[str, Any]:
    return {
        "what": what,
        "seconds": round(first, 4),
        "against": round(second, 4),
        "ratio": ratio,
        "value": round(value, 2),
    }


if __name__ == "__main__":
    main()
