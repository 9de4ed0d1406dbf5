"""Which words a model looks up in its memory of tokens: names that it read so far back that only the memory has them.

    python -m benchmarks.lookups --model DIR --text FILE

Wu et al. 2022 find in their qualitative study that the memory is used for rare words, such as the names of theorems and
functions, that were defined far earlier. Here every word of a text is sorted by where the document had it last. Each
kind is scored with and without the memory, on the same tokens. For the words that gain most, the retrieved tokens are
shown.

Words that were last read out of reach of all windows, or of a stock model's segment, are *far*: without a memory they
are as good as new.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.knn_tables import scorer_of, settings_of
from memstore.errors import InvalidArgument
from memstore.eval.perplexity import Advance, silent
from memstore.models.memorizing import MemorizingForCausalLM, knn_memory_of
from memstore.models.memorizing.cache import KNNChoice
from memstore.models.memorizing.evaluation import StockScorer
from memstore.progress import progress_bar
from memstore.readers.kinds import load_folder, quiet_transformers
from memstore.readers.observer import Choices
from memstore.report import Page, cell, tokens_of
from memstore.tools.files import read_text

MOST = 3
"""Retrieved tokens that are shown for one token."""
Weights = dict[int, list[tuple[int, float]]]
"""By place in a document, the tokens that its query found: (place, weight), most weight first."""
KINDS = ("far", "near", "new", "other")
"""Words last read out of reach, words last read within it, words that are new in the document, and the rest."""
WORD = re.compile(r"[^\W\d_]{2,}")
AROUND = 6
"""Tokens that are shown on each side of one."""


def lookup(
    model: MemorizingForCausalLM | PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    memory_size: int | None = None,
    examples: int = 5,
    advance: Advance = silent,
) -> dict[str, Any]:
    """Score ``text`` as one document by kinds of words, and show the lookups of the words that gained most.

    ``model`` is a Memorizing Transformer, or a stock model that ``load_knn_memory`` has loaded. ``memory_size``: tokens
    that can be found, by default as configured. ``advance`` is called with the tokens that were read. The text is read
    three times, or twice without ``examples``. Raises ``InvalidArgument`` for a model or a memory that finds nothing,
    and for a text of one token.

    Returns the data that ``--json`` prints: ``kinds`` of words with their perplexities, and
    ``examples`` of far words. Each example has the tokens ``retrieved`` for it. Their ``weight`` is their part of the
    layer's attention, a mean over heads. It may be negative in a stock model, as gates may. Texts show their token in
    brackets.
    """
    reading, (layer, size) = scorer_of(model), settings_of(model)
    size = size if memory_size is None else memory_size
    if layer is None or size < 1:
        raise InvalidArgument(
            f"a look-up needs a memory layer and a memory of at least one token; got memory_layer={layer} and "
            f"{size} tokens"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if len(tokens) < 2:
        raise InvalidArgument(f"the text has {len(tokens)} tokens, but at least 2 are needed. Use a longer text")
    words, back = last_read(text, encoded["offset_mapping"])
    kinds = kinds_of(words, back, reading.reach)
    losses = [reading.losses(tokens, each, advance) for each in (0, size)]
    gains = losses[0] - losses[1]
    best = heapq.nlargest(examples, (n for n in range(1, len(tokens)) if kinds[n] == "far"), key=lambda n: gains[n - 1])
    seen = watched(reading, model, tokens, size, {number - 1 for number in best}, advance) if best else {}

    def around(number: int, *, after: int = 0) -> str:
        """Return token ``number`` in brackets, with a few tokens before it and ``after`` tokens after it."""
        cuts = (max(0, number - AROUND), number), (number, number + 1), (number + 1, number + 1 + after)
        before, own, behind = (tokenizer.decode(encoded["input_ids"][start:end]) for start, end in cuts)
        return f"{before}[{own}]{behind}"

    return {
        "memory_size": size,
        "reach": reading.reach,
        "kinds": [kind for name in KINDS if (kind := _scored(name, kinds, losses))],
        "examples": [
            {
                "number": number,
                "word": words[number] or "",
                "last_read": back[number],
                "text": around(number),
                "loss_without": float(losses[0][number - 1]),
                "loss_with": float(losses[1][number - 1]),
                "retrieved": [
                    {"number": place, "weight": weight, "text": around(place, after=AROUND)}
                    for place, weight in seen.get(number - 1, [])
                ],
            }
            for number in best
        ],
    }


def last_read(text: str, offsets: Sequence[tuple[int, int]]) -> tuple[list[str | None], list[int]]:
    """Return for each token the word it belongs to, and how many tokens ago that word was last read; 0: never.

    ``offsets``: the characters of each token.
    """
    words: list[str | None] = [None] * len(offsets)
    back = [0] * len(offsets)
    ends: dict[str, int] = {}
    number = 0
    for found in WORD.finditer(text):
        while number < len(offsets) and offsets[number][1] <= found.start():
            number += 1
        first = number
        while number < len(offsets) and offsets[number][0] < found.end():
            words[number] = found[0]
            back[number] = number - ends[found[0]] if found[0] in ends else 0
            number += 1
        if number > first:
            ends[found[0]] = number - 1
    return words, back


def kinds_of(words: Sequence[str | None], back: Sequence[int], reach: int) -> list[str]:
    """Return one of ``KINDS`` for each token."""
    return [
        "other" if word is None else "new" if not ago else "near" if ago <= reach else "far"
        for word, ago in zip(words, back, strict=True)
    ]


def _scored(name: str, kinds: Sequence[str], losses: Sequence[Tensor]) -> dict[str, Any] | None:
    """Return the score of a kind, without the first token, which nothing predicts. None if the kind has no token."""
    which = torch.tensor([kind == name for kind in kinds[1:]])
    count = int(which.sum())
    if not count:
        return None
    without, with_memory = (math.exp(each.double()[which].mean()) for each in losses)
    return {"kind": name, "tokens": count, "without": without, "with_memory": with_memory}


@torch.no_grad()
def watched(reading: Any, model: Any, tokens: Tensor, size: int, wanted: set[int], advance: Advance) -> Weights:
    """Return the tokens that were found at the places ``wanted``, with a memory of ``size`` tokens."""
    found: Weights = {}
    told = Choices(KNNChoice, lambda choice: choice)
    with reading.reading(size) as given:
        if isinstance(reading, StockScorer):
            memory = knn_memory_of(model)
            memory.found = lambda **seen: told.choice(KNNChoice(settings_of(model)[0] or 0, attention=memory, **seen))
        else:
            given["past_key_values"].observers.append(told)
        for start in range(0, max(wanted) + 1, reading.segment):
            part = tokens[None, start : start + reading.segment]
            model(part.to(model.device), **given)
            for choice in told:  # one, as soon as the memory holds something
                for place in wanted.intersection(range(start, start + part.shape[1])):
                    found[place] = most(reading, choice, place - start)
            told.clear()
            advance(part.shape[1])
    return found


def most(reading: Any, choice: KNNChoice, at: int) -> list[tuple[int, float]]:
    """Return the tokens that token ``at`` of a segment found, by mean weight over heads."""
    _, weights = choice.weights(0, at)  # [H, K]
    total: defaultdict[int, float] = defaultdict(float)
    numbers = choice.places()[0, :, at].flatten().tolist()
    for number, weight in zip(numbers, weights.flatten().tolist(), strict=True):
        if number >= 0:
            total[place_of(reading, number)] += weight / len(weights)
    return heapq.nlargest(MOST, total.items(), key=lambda each: abs(each[1]))


def place_of(reading: Any, number: int) -> int:
    """Return the place in the document of the token that was stored under this number."""
    if not isinstance(reading, StockScorer):
        return number
    stored = max(1, reading.segment - 1)  # the first token of a segment is never stored
    return number // stored * reading.segment + number % stored + 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the words of a text by kind, and examples, or write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Memorizing Transformer or a stock model with one")
    parser.add_argument("--text", required=True, help="a text file, which is read as one document")
    parser.add_argument("--memory-size", help="tokens in the memory, such as 8K; the model's by default")
    parser.add_argument("--examples", type=int, default=5, help="words to show with the tokens retrieved for them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    size = tokens_of("--memory-size", options.memory_size, least=1)
    text = read_text(options.text)
    with quiet_transformers():
        model, tokenizer = load_folder(options.model, options.device)
    with progress_bar("lookup", 0, None, not options.json) as advance:
        found = lookup(model, tokenizer, text, memory_size=size, examples=options.examples, advance=advance)
    data = {"task": "lookup", "model": options.model.name, **found}
    if options.json:
        print(json.dumps(data, indent=1))
    else:
        _show(Page(), data)


def _show(page: Page, data: dict[str, Any]) -> None:
    page.line(
        f"Perplexity by the last place of a word in the text. Far means more than {data['reach']:,} tokens back, "
        f"which only the memory of {data['memory_size']:,} tokens covers"
    )
    rows = [[kind["kind"], kind["tokens"], kind["without"], kind["with_memory"]] for kind in data["kinds"]]
    page.table(["words", "tokens", "without memory", "with memory"], rows)
    if not any(kind["kind"] == "far" for kind in data["kinds"]):
        page.line("No word is far: use a longer text to see the effect of the memory")
    for example in data["examples"]:
        page.line()
        page.line(cell(f"…{example['text']}"))
        page.line(
            f"  {example['word']!r} was last read {example['last_read']:,} tokens back; loss "
            f"{example['loss_without']:.2f} without memory, {example['loss_with']:.2f} with it"
        )
        for found in example["retrieved"]:
            page.line(cell(f"  {found['weight']:.3f}  token {found['number']:,}: …{found['text']}…"))


if __name__ == "__main__":
    main()
