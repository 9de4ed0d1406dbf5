"""One text, four mechanisms: what each stores of it, and what it finds.

python examples/four_mechanisms.py        # with models that come with memstore, and a stock model made on the spot
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memstore
from memstore.models.memorizing import add_knn_memory
from memstore.tools.models import load_model

KEY = "|The passkey is:73914|"
QUESTION = "|What is the passkey? The passkey is:"
TEXT = "\n".join(topics.values())


def stock(tokens: int) -> LlamaForCausalLM:
    """A Llama that has learned nothing: it stores and finds like a trained one, and answers nonsense."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokens, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def report(name: str, model: Any, tokenizer: Any, folder: Path, length: int) -> None:
    """Read the text with the passkey in its middle, and ask for it."""
    text = tokenizer(TEXT, add_special_tokens=False).input_ids[:length]
    key, question = (tokenizer(each, add_special_tokens=False).input_ids for each in (KEY, QUESTION))
    tokens = [*text[: length // 2], *key, *text[length // 2 :]]
    with memstore.attach(model, folder / name, document="text", tokenizer=tokenizer) as reader:
        reader.read(tokens)
        answer = model.generate(torch.tensor([question]), max_new_tokens=6, do_sample=False)[0, len(question) :]
        stored = reader.memory.stats()["used_bytes"] / len(tokens)
        print(f"{name:<10} {stored:>8,.0f} bytes a token, says {tokenizer.decode(answer)!r}")


def main(length: int = 8_000) -> None:
    """All four."""
    drt, small = load_model("drt")
    landmark, other = load_model("landmark-passkey")
    plain, lookup = stock(len(small)), stock(len(small))
    add_knn_memory(lookup, layer=2)
    with tempfile.TemporaryDirectory() as folder:
        report("stock", plain, small, Path(folder), length)
        report("DRT", drt, small, Path(folder), length)
        report("landmark", landmark, other, Path(folder), length)
        report("kNN", lookup, small, Path(folder), length)


if __name__ == "__main__":
    main()
