"""How much of what a window costs does a memory give back? Perplexity at the end of long texts that do not repeat.

    python benchmarks/long_texts.py --tokens 8192 --texts 4

The last tokens of Wikipedia's articles in SQuAD (CC BY-SA 4.0; its longest ones), scored by the same stock model three
times: with full attention to all of the text, with sink and window alone, and with all that is before in a memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memstore
from memstore.eval.questions.squad import SOURCE
from memstore.eval.questions.wheel import load_json
from memstore.readers.kinds import encode
from memstore.resources import hardware
from memstore.tools.models import load_model


def main() -> None:
    """Measure, print a row for each text, and all of them together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--scored", type=int, default=2048, help="at the end of each text")
    parser.add_argument("--texts", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    losses: dict[str, list[Tensor]] = {}
    for title, tokens in articles(tokenizer, options.tokens, options.texts):
        few = {
            "full attention": fully(model, tokens, options.scored),
            "window": attached(model, tokens, options.scored, retrieve=False),
            "memory": attached(model, tokens, options.scored, retrieve=True),
        }
        for name, each in few.items():
            losses.setdefault(name, []).append(each)
        print(json.dumps({"text": title, **{name: round(float(each.mean().exp()), 3) for name, each in few.items()}}))
    every = {name: torch.cat(each).double() for name, each in losses.items()}
    # Bring the gap between window and full attention to 1.
    gap = float(every["window"].mean() - every["full attention"].mean())
    gained = every["window"] - every["memory"]
    facts = {
        "source": SOURCE,
        "model": options.model,
        "tokens": options.tokens,
        "scored": len(gained),
        "perplexity": {name: round(float(each.mean().exp()), 3) for name, each in every.items()},
        "memory_gains": round(float(gained.mean()), 4),
        "standard_error": round(float(gained.std()) / len(gained) ** 0.5, 4),
        "of_the_gap": round(float(gained.mean()) / gap, 3),
    }
    print(json.dumps({**facts, **hardware()}))


def articles(tokenizer: Any, tokens: int, most: int) -> Iterator[tuple[str, Tensor]]:
    """The first ``tokens`` tokens of articles that have as many."""
    found = 0
    for article in load_json("squad.json")["data"]:
        ids = encode(tokenizer, "\n\n".join(paragraph["context"] for paragraph in article["paragraphs"]))
        if len(ids) >= tokens and found < most:
            found += 1
            yield article["title"], torch.tensor(ids[:tokens])


@torch.inference_mode()
def fully(model: Any, tokens: Tensor, scored: int) -> Tensor:
    """Losses ``[scored]`` of the last tokens, with attention to all before them."""
    logits = model(tokens[None], logits_to_keep=scored + 1, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), tokens[-scored:], reduction="none")


def attached(model: Any, tokens: Tensor, scored: int, *, retrieve: bool) -> Tensor:
    """The same with sink and window, and what is retrieved of all before them."""
    with memstore.attach(model, "ram:") as reader:
        return reader.read(tokens, document="text", score=scored, retrieve=retrieve).nll


if __name__ == "__main__":
    main()
