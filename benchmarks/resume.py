"""How long it takes to go on with a memory: ``python -m benchmarks.resume > benchmarks/results/resume.json``.

For each kind of reader: processor seconds from ``attach`` to the first generated token behind a document, and to the
commit of one more token, by its length. The least of some tries, one thread. The models are small, those of the package
or random ones, so that little of it is the model's own work. The stored states are random: how long it takes does not
depend on them. The process has made the memory before, so nothing is used for the first time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.attach import grown
from memstore.resources import hardware
from memstore.tools.models import load_model

LENGTHS = (62_500, 250_000, 500_000)
TRIES = 5


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for kind in options.kinds for row in measured(kind, sorted(options.lengths))]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(json.dumps({"date": today, "rows": rows, **hardware()}, indent=1))


def stock() -> Any:
    """A Llama with random weights, as deep as SmolLM2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=49_152, num_hidden_layers=30, num_key_value_heads=1, **sizes)).train(
        False
    )


def memorizing() -> Any:
    """A Memorizing Transformer with random weights."""
    from memstore.models.memorizing import MemorizingConfig, MemorizingForCausalLM

    return MemorizingForCausalLM(MemorizingConfig.preset("small", vocab_size=512)).train(False)


KINDS: dict[str, Callable[[], Any]] = {
    "stock": stock,
    "landmark": lambda: load_model("landmark-passkey").model,
    "drt": lambda: load_model("passkey").model,
    "hils": lambda: load_model("hils-passkey").model,
    "indexed": lambda: load_model("indexed-passkey").model,
    "indexed, blocks": lambda: load_model("indexed-blocks-passkey").model,
    "memorizing": memorizing,
}


def measured(kind: str, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """The rows of a kind."""
    model, token = KINDS[kind](), torch.tensor([[7]])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "m"
        for length in lengths:
            with memstore.attach(model, place, document="text") as reader:
                size = reader._segment_tokens  # an interrupted reading ends with a segment
                grown(reader, -(-length // size) * size)
                there = len(reader.document)

            def first() -> None:
                with memstore.attach(model, place, document="text", mode="r") as reader:
                    reader.generate(token, max_new_tokens=1, do_sample=False)

            def commit() -> None:
                with memstore.attach(model, place, document="text") as reader:
                    reader.append(token[0])

            row = {"kind": kind, "tokens": there}
            for name, way in (("first_token_s", first), ("append_s", commit)):
                row[name] = round(min(seconds(way) for _ in range(TRIES)), 4)
            with memstore.open(place) as memory:
                memory.document("text").truncate(there // memory.spec.block_size)
            yield row


def seconds(way: Callable[[], None]) -> float:
    """Processor seconds."""
    begun = time.process_time()
    way()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
