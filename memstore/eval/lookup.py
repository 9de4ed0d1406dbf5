"""What a memory of tokens is looked up for: names that were last read so far back that nothing else can know them.

Wu et al. 2022 find in their qualitative study that the memory is used for rare words, such as the names of theorems and
functions, that were defined far earlier. Here every word of a text is sorted by where the document had it last, and
each kind is scored with and without the memory: the same tokens in both. For the words that gain most, the tokens that
were retrieved are told.

A token can learn of at most ``window`` tokens before it in a layer, so in all layers together of ``reach`` tokens:
words that were last read further back are *far*, and without a memory as good as new. A stock model with a memory sees
its segment and nothing before it; there ``reach`` is a segment.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore.errors import InvalidArgument
from memstore.models.memorizing import MemorizingForCausalLM
from memstore.readers.kinds import kind_of

KINDS = ("far", "near", "new", "other")
"""Words last read out of reach, words last read within it, words that the document did not have yet, and the rest."""
WORD = re.compile(r"[^\W\d_]{2,}")
AROUND = 6
"""Tokens that are told on each side of one."""


@dataclass(frozen=True, kw_only=True)
class WordKind:
    """The tokens of one kind of words."""

    kind: str
    tokens: int
    without: float
    """Perplexity with a memory of 0 tokens."""
    with_memory: float
    """Perplexity with the memory."""


@dataclass(frozen=True, kw_only=True)
class TokenHit:
    """A token that was looked up."""

    number: int
    """Its place in the document."""
    weight: float
    """Its part of the layer's attention, a mean over heads; of what was found alone where the model is ``joint``.

    Of a stock model it may be negative, as gates may.
    """
    text: str
    """It and the tokens around it, itself in brackets."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A token of a far word, and what was looked up to predict it."""

    number: int
    word: str
    last_read: int
    """Tokens back."""
    text: str
    """It and the tokens before it, itself in brackets."""
    loss_without: float
    loss_with: float
    retrieved: list[TokenHit]


# A stock model sees nothing before its segment but by its memory, so a word is far when it was last read more than a
# segment back. Weights may be negative, as its gates may.
@dataclass(frozen=True, kw_only=True)
class Lookup:
    """The outcome."""

    memory_size: int
    reach: int
    """Tokens before a token that could tell of it without a memory."""
    kinds: list[WordKind]
    examples: list[Example]

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return asdict(self)


def lookup(
    model: MemorizingForCausalLM | PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    memory_size: int | None = None,
    examples: int = 5,
    advance: Callable[[int], None] = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Lookup:
    """Score ``text`` as one document by kinds of words, and tell what was looked up for the words that gained most.

    ``model`` is a Memorizing Transformer, or a stock model that ``load_knn_memory`` has loaded. ``memory_size``: tokens
    that can be found; as the model's configuration says if None. ``advance`` hears of every token that was read; the
    text is read three times, twice without ``examples``. Raises ``InvalidArgument`` for a model or a memory that finds
    nothing, and for a text of one token.
    """
    reading = kind_of(model).scorer(model)
    size = reading.memory_size if memory_size is None else memory_size
    if reading.layer is None or size < 1:
        raise InvalidArgument(f"nothing is looked up with memory_layer={reading.layer} and {size} tokens")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if len(tokens) < 2:
        raise InvalidArgument(f"the text has {len(tokens)} tokens; at least 2 are needed. Name a longer text")
    words, back = last_read(text, encoded["offset_mapping"])
    kinds = kinds_of(words, back, reading.reach)
    losses = [reading.losses(tokens, each, advance) for each in (0, size)]
    gains = losses[0] - losses[1]
    best = heapq.nlargest(examples, (n for n in range(1, len(tokens)) if kinds[n] == "far"), key=lambda n: gains[n - 1])
    seen = reading.watched(tokens, size, {number - 1 for number in best}, advance) if best else {}
    pieces = TextPieces(tokenizer, tokens)
    return Lookup(
        memory_size=size,
        reach=reading.reach,
        kinds=[kind for name in KINDS if (kind := _scored(name, kinds, losses))],
        examples=[
            Example(
                number=number,
                word=words[number] or "",
                last_read=back[number],
                text=pieces.around(number, after=0),
                loss_without=float(losses[0][number - 1]),
                loss_with=float(losses[1][number - 1]),
                retrieved=[
                    TokenHit(number=place, weight=weight, text=pieces.around(place, after=AROUND))
                    for place, weight in seen.get(number - 1, [])
                ],
            )
            for number in best
        ],
    )


def last_read(text: str, offsets: Sequence[tuple[int, int]]) -> tuple[list[str | None], list[int]]:
    """For each token the word that it is part of, and how many tokens back that word was read last; 0: never.

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
    """One of ``KINDS`` for each token."""
    return [
        "other" if word is None else "new" if not ago else "near" if ago <= reach else "far"
        for word, ago in zip(words, back, strict=True)
    ]


def _scored(name: str, kinds: Sequence[str], losses: Sequence[Tensor]) -> WordKind | None:
    """The score of a kind; the first token, which nothing predicts, is left out. None where there is no such token."""
    which = torch.tensor([kind == name for kind in kinds[1:]])
    count = int(which.sum())
    if not count:
        return None
    without, with_memory = (math.exp(each.double()[which].mean()) for each in losses)
    return WordKind(kind=name, tokens=count, without=without, with_memory=with_memory)


class TextPieces:
    """The text of single tokens."""

    def __init__(self, tokenizer: Any, tokens: Tensor) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens.tolist()

    def around(self, number: int, *, after: int) -> str:
        """Token ``number`` in brackets, with a few before it and so many ``after`` it."""
        before = self._tokens[max(0, number - AROUND) : number]
        behind = self._tokens[number + 1 : number + 1 + after]
        parts = [self._tokenizer.decode(part) for part in (before, self._tokens[number : number + 1], behind)]
        return f"{parts[0]}[{parts[1]}]{parts[2]}"
