"""A question over many short documents, beside the same text in one document.

    python benchmarks/documents.py --documents 1000

A tiny model with random weights, so that what is measured is the choice, not the model: ``ask`` with two tokens, and
``search``. The first of each reads what the memory knows of every document; the median of the others is told beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import memstore
from memstore.eval.resources import hardware
from tests.instruct import instruct_model, instruct_tokenizer


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = [f"Note {i}: the key of house {i} hangs behind beam {i}. " for i in range(options.documents)]
    with tempfile.TemporaryDirectory() as scratch:
        many, one = measure(Path(scratch) / "many", texts), measure(Path(scratch) / "one", ["".join(texts)])
    for name in many:
        (first, later), (first_one, later_one) = many[name], one[name]
        print(
            f"{name:<7}{options.documents:,} documents {first:.3f} s, then {later:.3f} s; one {first_one:.3f} s, then "
            f"{later_one:.3f} s: {later / later_one:.1f}"
        )
    print(hardware())


def measure(memory: Path, texts: list[str]) -> dict[str, tuple[float, float]]:
    """Seconds of the first question, and the median of five more."""
    model, tokenizer = instruct_model(), instruct_tokenizer()
    with memstore.attach(model, memory, tokenizer=tokenizer, block_size=16) as reader:
        for i, text in enumerate(texts):
            reader.read(text, f"n{i}")
    with memstore.attach(model, memory, tokenizer=tokenizer, mode="r") as reader:
        return {
            "ask": seconds(lambda: reader.ask("Where is the key of house 7?", max_tokens=2)),
            "search": seconds(lambda: reader.search("Where is the key?", 8)),
        }


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Of the first call, and the median of five more."""
    spent = []
    for _ in range(6):
        begun = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begun)
    return spent[0], median(spent[1:])


if __name__ == "__main__":
    main()
