"""The time to the first token with a memory of a million tokens, beside that of the same prompt without one.

    python benchmarks/first_token.py --tokens 1000000 --documents 10

What is stored is random, in the shape of the model's states: how long a search, a gather and a pass take does not
depend on it, and nobody waits for hours until a model has read it. The documents are forks of one, so that the disk
holds it once; each is searched by itself, as a document of its own is. Both ways are asked in turn with the question in
the model's chat template, and the least processor time of each counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import memstore
from memstore.eval.resources import hardware
from memstore.memory import Document
from memstore.readers.asking import INSTRUCTION
from memstore.tools.models import load_model

QUESTION = "Who was in charge of the lighthouse when the great storm came, and what was the keeper's dog called?"


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--index", default="exact")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    (model, tokenizer), (plain, _) = (load_model(options.model, options.dtype) for _ in range(2))
    with tempfile.TemporaryDirectory() as scratch:
        memory = Path(scratch) / "m"
        with memstore.attach(model, memory, tokenizer=tokenizer, codec=options.codec) as reader:
            fill(reader, options.tokens // options.documents, options.documents)
        with memstore.attach(model, memory, tokenizer=tokenizer, mode="r", index=options.index) as reader:
            held = sum(map(len, reader.documents))
            seconds = in_turn(plain, tokenizer, reader, options.rounds)
    bare, asked, raw = seconds
    print(f"{held:,} tokens in {options.documents} documents, index {options.index}, {options.model} in {plain.dtype}")
    print(f"first token: {1000 * bare:.0f} ms without a memory, {1000 * asked:.0f} ms asked of it: {asked / bare:.2f}")
    print(f"by the prompt's own last tokens, without the words of the question: {1000 * raw:.0f} ms: {raw / bare:.2f}")
    print(hardware())


def fill(reader: Any, tokens: int, documents: int) -> None:
    """Put random states of so many tokens into a document, and make forks of it."""
    spec, made = reader.memory.spec, torch.Generator().manual_seed(0)
    reader.calibrate(torch.randint(1000, 40_000, (2048,), generator=made))
    document: Document = reader.memory.document("0")
    options = reader._reading(retrieve=True)
    for start in range(0, tokens, 64 * spec.block_size):
        count = min(64 * spec.block_size, tokens - start) // spec.block_size * spec.block_size
        ids = torch.randint(1000, 40_000, (count,), generator=made)
        with document.append(ids, reading=None if start else options) as batch:
            blocks = len(batch.blocks)
            codes = torch.randn(blocks, spec.key_heads, spec.keys_per_block, spec.key_dim, generator=made)
            for layer in range(spec.layers):
                states = {name: torch.randn(blocks, *shape, generator=made) for name, shape in spec.fields.items()}
                batch.put(layer, landmarks=codes if layer in spec.index_layers else None, **states)
    for number in range(1, documents):
        document.fork(str(number))


def in_turn(plain: Any, tokenizer: Any, reader: Any, rounds: int) -> tuple[float, float, float]:
    """Least seconds of processor time to the first token: bare, asked with the question, and by the prompt alone."""
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    ways: list[Callable[[], object]] = [
        lambda: plain.generate(prompt, max_new_tokens=1, do_sample=False),
        lambda: reader.generate(prompt, query=QUESTION, max_new_tokens=1, do_sample=False),
        lambda: reader.generate(prompt, max_new_tokens=1, do_sample=False),
    ]
    spent: list[list[float]] = [[], [], []]
    with reader.seeing(tail=False):
        for _ in range(rounds):
            for way, seconds in zip(ways, spent, strict=True):
                begun = time.process_time()
                way()
                seconds.append(time.process_time() - begun)
    bare, asked, raw = map(min, spent)
    return bare, asked, raw


if __name__ == "__main__":
    main()
