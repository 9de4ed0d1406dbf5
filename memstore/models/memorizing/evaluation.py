"""Measurements of a Memorizing Transformer: perplexity by length of the context, lookups, and audits.

An audit computes the attention that each head would pay to every token of its memory.

The layer takes the tokens with the highest scores and a softmax over those, without positions. So the truth is the
softmax over all stored tokens, for the same queries and keys with the learned scale. ``captured`` is the part of it
that the retrieved tokens hold. Where a gate mixes the memory in, the gate is the share of attention on the memory,
whatever is retrieved. A model with one softmax over the window and the memory (``joint``) has no such share before it
has chosen. For it, everything refers to the softmax over the tokens in memory, without the window.

Recall counts single tokens. Misses are reported by block: a block adds up the weights of its tokens.

Lookups: names that were last read so far back that only the memory can know them.

Wu et al. 2022 find in their qualitative study that the memory is used for rare words, such as the names of theorems and
functions, that were defined far earlier. Here every word of a text is sorted by where the document had it last. Each
kind is scored with and without the memory, on the same tokens. For the words that gain most, the retrieved tokens are
shown.

A token can learn of at most ``window`` tokens before it in a layer, so of ``reach`` tokens in all layers together.
Words that were last read further back are *far*: without a memory they are as good as new. A stock model with a memory
sees its segment and nothing before it; its ``reach`` is a segment.
"""

from __future__ import annotations

import copy
import heapq
import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from memstore.attention.knn import KNNAttention
from memstore.errors import InvalidArgument
from memstore.eval.evaluation import Evaluation, scorer_of
from memstore.eval.perplexity import by_context
from memstore.memory import Document
from memstore.models.memorizing import MemorizingCache, MemorizingForCausalLM, knn_memory_of
from memstore.models.memorizing.cache import KNNChoice
from memstore.models.memorizing.reader import DocumentTokens, MemorizingReader
from memstore.readers.audit import Auditor, index_recall, pieces
from memstore.readers.caches import CACHE
from memstore.readers.kinds import kind_of
from memstore.readers.observer import Choice, Choices
from memstore.report import Report

READ = 64
"""Blocks whose keys are read at once. Each of their tokens has one key."""
GATED = "tokens in memory have no positions; the truth is the softmax over all of them, times the gate of the head"
JOINT = (
    "tokens in memory have no positions; the truth is the softmax over all of them, without the local window "
    "that shares it"
)


class KNNAuditor(Auditor):
    """Audits what a Memorizing Transformer retrieves: single tokens, which ``top_k`` counts."""

    mechanism = "knn"

    def __init__(self, reader: MemorizingReader, top_k: int | None) -> None:
        super().__init__(reader.model)
        layer: KNNAttention = reader.model.model.layers[reader.model.config.memory_layer or 0].attention
        self._layer, self._document, self._cache = layer, reader.document, reader.cache()
        assert isinstance(self._cache.memory, DocumentTokens)
        self._memory = self._cache.memory
        self.documents = [reader.document.name]
        self.top_k: int = layer.top_k if top_k is None else top_k
        self.shares = layer.gate is not None
        self.positions = GATED if self.shares else JOINT

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        self._cache.observers.append(self)
        trained, self._layer.top_k = self._layer.top_k, self.top_k
        try:
            yield {CACHE: self._cache}
        finally:
            self._layer.top_k = trained

    def choice(self, choice: Choice) -> None:
        """Record what the layer found for the last token of a call. See ``Observer``."""
        assert isinstance(choice, KNNChoice)
        if not choice.rows:
            return
        query, found = choice.queries[0, :, -1].float().cpu(), choice.places()[0, :, -1].contiguous()
        products, places = _products(self._document, query), _places(self._document)
        own, after = self._own(query)
        products, places = torch.cat([products, own], -1), torch.cat([places, after])
        if not len(places):
            return
        scores = self._layer.scale.exp().float().cpu()[:, None] * products  # [H, N]
        weights = scores.softmax(-1)
        if self._layer.gate is not None:
            weights = weights * self._layer.gate.sigmoid().float().cpu()[:, None]
        columns = torch.where(found >= 0, torch.searchsorted(places, found), len(places))
        chosen = torch.zeros(len(scores), len(places) + 1, dtype=torch.bool).scatter_(1, columns, value=True)[:, :-1]
        # A single token means little to a reader, and its neighbours are missed with it. So misses are reported as
        # blocks.
        blocks = places // self._memory.stored.spec.block_size
        self.tally.add(choice.layer, weights, chosen, scores, blocks=blocks)
        parts = self._document.present(self._document.complete_blocks)
        recall = index_recall(self._document.layer(0), query[:, None], self._layer.top_k, parts, piece=READ)
        self.tally.add_index_recall(choice.layer, recall)

    def _own(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return products ``[H, n]`` with tokens that left the window since the document ended, and their places."""
        own = self._memory.own
        numbers = torch.arange(own.numbers(0).start, own.numbers(0).stop)
        keys = own.keys[0][:, (numbers % own.capacity).to(own.keys.device)].float().cpu()
        return _with_keys(query, keys), len(self._document) + numbers

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more of them would not help
        return "the memory is empty: first read a text of at least one token"


def _products(document: Document, query: Tensor) -> Tensor:
    """Return products ``[H, N]`` of ``query [H, D]`` with all keys of a document, a run of blocks at a time."""
    size, view, parts = document.memory.spec.block_size, document.layer(0), [query.new_empty(len(query), 0)]
    for run in document.present(document.blocks):
        for piece in pieces(run, READ):
            held = min(piece.stop * size, len(document)) - piece.start * size
            keys = view.landmarks(piece).transpose(0, 1).flatten(1, 2)[:, :held]  # a token's key is its landmark
            parts.append(_with_keys(query, keys))
    return torch.cat(parts, -1)


def _places(document: Document) -> Tensor:
    """Return the places ``[N]`` of the tokens that a document still has, in order."""
    size, parts = document.memory.spec.block_size, [torch.empty(0, dtype=torch.int64)]
    runs = document.present(document.blocks)
    return torch.cat(parts + [torch.arange(run.start * size, min(run.stop * size, len(document))) for run in runs])


def _with_keys(query: Tensor, keys: Tensor) -> Tensor:
    """Return products ``[H, n]`` of ``query [H, D]`` with ``keys [G, n, D]``."""
    grouped = query.unflatten(0, (len(keys), -1))  # [G, H / G, D]
    products: Tensor = grouped @ keys.transpose(1, 2)
    return products.flatten(0, 1)


WINDOW = 512
"""Tokens of a segment of a stock model that was not trained with segments."""
MOST = 3
"""Retrieved tokens that are shown for one token."""
Advance = Callable[[int], None]


def silent(tokens: int) -> None:
    """Ignore the number of ``tokens`` that were read."""


Weights = dict[int, list[tuple[int, float]]]
"""By place in a document, the tokens that its query found: (place, weight), most weight first."""


class _Scorer(ABC):
    """Reads documents with a memory of tokens of any size, one segment in each call."""

    layer: int | None
    """The layer that looks tokens up."""
    memory_size: int
    reach: int
    """Earlier tokens that could help to predict a token without a memory."""
    segment: int

    def __init__(self, model: Any) -> None:
        self._model = model

    @abstractmethod
    def reading(self, size: int, watch: Choices[KNNChoice] | None = None) -> AbstractContextManager[dict[str, Any]]:
        """Start with an empty memory of ``size`` tokens, and give the arguments for each call of the model."""

    def place(self, number: int) -> int:
        """Return the place in the document of the token that was stored under this number."""
        return number

    @torch.no_grad()
    def losses(self, tokens: Tensor, size: int, advance: Advance = silent) -> Tensor:
        """Return the losses ``[n - 1]`` of all ``tokens [n]`` except the first, with a memory of ``size`` tokens."""
        ids, losses = tokens[None].to(self._model.device), []
        with self.reading(size) as given:
            for start in range(0, len(tokens) - 1, self.segment):
                part = ids[:, start : min(start + self.segment, len(tokens) - 1)]
                logits = self._model(part, **given).logits[0].float()
                losses.append(F.cross_entropy(logits, ids[0, start + 1 : start + 1 + part.shape[1]], reduction="none"))
                advance(part.shape[1])
        return torch.cat(losses)

    @torch.no_grad()
    def watched(self, tokens: Tensor, size: int, wanted: set[int], advance: Advance) -> Weights:
        """Return the tokens that were found at the places ``wanted``."""
        found: Weights = {}
        told = Choices(KNNChoice, lambda choice: choice)
        with self.reading(size, told) as given:
            for start in range(0, max(wanted) + 1, self.segment):
                part = tokens[None, start : start + self.segment]
                self._model(part.to(self._model.device), **given)
                for choice in told:  # one, as soon as the memory holds something
                    for place in wanted.intersection(range(start, start + part.shape[1])):
                        found[place] = self._most(choice, place - start)
                told.clear()
                advance(part.shape[1])
        return found

    def _most(self, choice: KNNChoice, at: int) -> list[tuple[int, float]]:
        """Return the tokens that token ``at`` of a segment found, by mean weight over heads."""
        _, weights = choice.weights(0, at)  # [H, K]
        total: defaultdict[int, float] = defaultdict(float)
        numbers = choice.places()[0, :, at].flatten().tolist()
        for number, weight in zip(numbers, weights.flatten().tolist(), strict=True):
            if number >= 0:
                total[self.place(number)] += weight / len(weights)
        return heapq.nlargest(MOST, total.items(), key=lambda each: abs(each[1]))


class MemorizingScorer(_Scorer):
    """Reads documents with a Memorizing Transformer."""

    def __init__(self, model: MemorizingForCausalLM) -> None:
        super().__init__(model)
        config = model.config
        self.layer, self.memory_size, self.segment = config.memory_layer, config.memory_size, config.window
        self.reach = config.num_hidden_layers * config.window

    @contextmanager
    def reading(self, size: int, watch: Choices[KNNChoice] | None = None) -> Iterator[dict[str, Any]]:
        config = copy.deepcopy(self._model.config)
        config.memory_size = size
        cache = MemorizingCache(config, 1)
        cache.observers += [] if watch is None else [watch]
        yield {"past_key_values": cache, "use_cache": True}


class StockScorer(_Scorer):
    """Reads with a stock model and its memory. It sees one segment, and finds earlier tokens by its memory alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        settings = model.config.knn_memory
        self.layer, self.memory_size = settings["layer"], settings["memory_size"]
        self.reach = self.segment = settings.get("window", WINDOW)

    def place(self, number: int) -> int:
        """See ``_Scorer``: the first token of a segment is never stored."""
        stored = max(1, self.segment - 1)
        return number // stored * self.segment + number % stored + 1

    @contextmanager
    def reading(self, size: int, watch: Choices[KNNChoice] | None = None) -> Iterator[dict[str, Any]]:
        """See ``_Scorer``. At the end, even after errors, the memory is empty and as large as before."""
        memory = knn_memory_of(self._model)
        memory.clear()
        usual, memory.memory_size = memory.memory_size, size
        if watch is not None:
            memory.found = lambda **told: watch.choice(KNNChoice(self.layer or 0, attention=memory, **told))
        try:
            yield {"use_cache": False}
        finally:
            memory.memory_size, memory.found = usual, None
            memory.clear()


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

    Returns the data that ``memstore eval lookup --json`` prints: ``kinds`` of words with their perplexities, and
    ``examples`` of far words. Each example has the tokens ``retrieved`` for it. Their ``weight`` is their part of the
    layer's attention, a mean over heads. It may be negative in a stock model, as gates may. Texts show their token in
    brackets.
    """
    reading = scorer_of(kind_of(model), model)
    size = reading.memory_size if memory_size is None else memory_size
    if reading.layer is None or size < 1:
        raise InvalidArgument(
            f"a look-up needs a memory layer and a memory of at least one token; got memory_layer={reading.layer} and "
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
    seen = reading.watched(tokens, size, {number - 1 for number in best}, advance) if best else {}

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


def by_memory(scorer: Callable[[Any], _Scorer]) -> Callable[..., Report]:
    """Make the measurement of perplexity; see ``by_context``. Texts are read in segments, as in training."""

    def after_window(model: Any, text: Tensor, scored: int) -> Tensor:
        reading = scorer(model)
        first = max(0, len(text) - scored - 1 - reading.reach) // reading.segment * reading.segment
        return reading.losses(text[first:], 0)[-scored:]

    def after_memory(model: Any, text: Tensor, scored: int) -> Tensor:
        return scorer(model).losses(text, len(text))[-scored:]

    return by_context(after_window, after_memory)


MEMORIZING = Evaluation(perplexity=by_memory(MemorizingScorer), lookup=lookup, document_scorer=MemorizingScorer)
KNN = Evaluation(perplexity=by_memory(StockScorer), lookup=lookup, document_scorer=StockScorer)
