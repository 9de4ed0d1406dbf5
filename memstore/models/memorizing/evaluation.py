"""What is measured of a Memorizing Transformer: perplexity by size of its memory, lookups, and audits.

An audit tells the attention that each head would pay to every token of its memory.

The layer takes the tokens with the highest scores and a softmax over those, without positions. So the truth is the
softmax over all tokens that are stored, of the same queries and keys with the learned scale, and ``captured`` the part
of it that the retrieved tokens hold. Where a gate mixes the memory in, it is the share of attention that falls on the
memory, whatever is retrieved. A model with one softmax over the window and the memory (``joint``) has no such share
before it has chosen: there everything is of the softmax over the tokens in memory, without the window.

Recall is of single tokens; what was missed is told by blocks, which add up what their tokens would have had.

The tables of *Memorizing Transformers* for any checkpoint: perplexity by size of the memory, and by position.

As in the paper (Wu et al. 2022, section 4) documents are read in order, each with a memory that begins empty, and every
token but the first of each is scored. All rows score the same tokens, so they differ by the memory alone; columns tell
what a memory is worth at the beginning of a document and far into it.

What a memory of tokens is looked up for: names that were last read so far back that nothing else can know them.

Wu et al. 2022 find in their qualitative study that the memory is used for rare words, such as the names of theorems and
functions, that were defined far earlier. Here every word of a text is sorted by where the document had it last, and
each kind is scored with and without the memory: the same tokens in both. For the words that gain most, the tokens that
were retrieved are told.

A token can learn of at most ``window`` tokens before it in a layer, so in all layers together of ``reach`` tokens:
words that were last read further back are *far*, and without a memory as good as new. A stock model with a memory sees
its segment and nothing before it; there ``reach`` is a segment.
"""

from __future__ import annotations

import copy
import heapq
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from memstore.attention.knn import KNNAttention, Neighbours
from memstore.attention.knn_memory import RecentTokens
from memstore.errors import InvalidArgument
from memstore.eval.evaluation import Evaluation, scorer_of
from memstore.memory import Document
from memstore.models.memorizing import KNNMemory, MemorizingCache, MemorizingForCausalLM, knn_memory_of
from memstore.models.memorizing.cache import KNNChoice
from memstore.models.memorizing.reader import DocumentTokens, MemorizingReader
from memstore.progress import progress_bar
from memstore.readers.audit import Auditor, index_recall, pieces
from memstore.readers.caches import CACHE
from memstore.readers.kinds import encode, kind_of
from memstore.readers.observer import Choice
from memstore.report import Page, Report, token_counts

READ = 64
"""Blocks whose keys are read at once: each of their tokens has one."""
GATED = "tokens in memory have no positions; the truth is the softmax over all of them, times the gate of the head"
JOINT = (
    "tokens in memory have no positions; the truth is the softmax over all of them, without the local window, with "
    "which this model shares one softmax"
)


class KNNAuditor(Auditor):
    """What a Memorizing Transformer retrieves: single tokens, which ``top_k`` counts."""

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
        """See ``Auditor``."""
        self._cache.observers.append(self)
        trained, self._layer.top_k = self._layer.top_k, self.top_k
        try:
            yield {CACHE: self._cache}
        finally:
            self._layer.top_k = trained

    def choice(self, choice: Choice) -> None:
        """See ``Observer``: what the layer found for the last token of a call."""
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
        # A token alone says nothing to a reader, and its neighbours are missed with it: so what is missed are blocks.
        blocks = places // self._memory.stored.spec.block_size
        self.tally.add(choice.layer, weights, chosen, scores, blocks=blocks)
        parts = self._document.present(self._document.complete_blocks)
        recall = index_recall(self._document.layer(0), query[:, None], self._layer.top_k, parts, piece=READ)
        self.tally.add_index_recall(choice.layer, recall)

    def _own(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Products ``[H, n]`` with tokens that have left the window since the document ended, and their places."""
        own = self._memory.own
        numbers = torch.arange(own.numbers(0).start, own.numbers(0).stop)
        keys = own.keys[0][:, (numbers % own.capacity).to(own.keys.device)].float().cpu()
        return _with_keys(query, keys), len(self._document) + numbers

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more of them would not help
        """See ``Auditor``."""
        return "nothing is in memory yet: read a text first, of at least one token"

    def locate(self, number: int) -> tuple[Document, int]:
        """See ``Auditor``."""
        return self._document, number


def _products(document: Document, query: Tensor) -> Tensor:
    """Products ``[H, N]`` of ``query [H, D]`` with the keys of all tokens of a document, a run of blocks at a time."""
    size, view, parts = document.memory.spec.block_size, document.layer(0), [query.new_empty(len(query), 0)]
    for run in document.present(document.blocks):
        for piece in pieces(run, READ):
            held = min(piece.stop * size, len(document)) - piece.start * size
            keys = view.landmarks(piece).transpose(0, 1).flatten(1, 2)[:, :held]  # a token's key is its landmark
            parts.append(_with_keys(query, keys))
    return torch.cat(parts, -1)


def _places(document: Document) -> Tensor:
    """Places ``[N]`` of the tokens of a document that are there, from its beginning on."""
    size, parts = document.memory.spec.block_size, [torch.empty(0, dtype=torch.int64)]
    runs = document.present(document.blocks)
    return torch.cat(parts + [torch.arange(run.start * size, min(run.stop * size, len(document))) for run in runs])


def _with_keys(query: Tensor, keys: Tensor) -> Tensor:
    """Products ``[H, n]`` of ``query [H, D]`` with ``keys [G, n, D]``."""
    grouped = query.unflatten(0, (len(keys), -1))  # [G, H / G, D]
    products: Tensor = grouped @ keys.transpose(1, 2)
    return products.flatten(0, 1)


WINDOW = 512
"""Tokens of a segment of a stock model that was not trained with segments."""
Weights = dict[int, list[tuple[int, float]]]
"""By place in a document, of what its query found: (place, weight), most weight first."""


@torch.no_grad()
def document_losses(
    model: MemorizingForCausalLM, tokens: Tensor, memory_size: int, advance: Callable[[int], None]
) -> Tensor:
    """The loss of each token of ``tokens [n]`` but the first, ``[n - 1]``, with a memory of so many tokens."""
    config = copy.deepcopy(model.config)
    config.memory_size = memory_size
    cache = MemorizingCache(config, 1)
    ids = tokens[None].to(model.device)
    losses = []
    for start in range(0, len(tokens) - 1, config.window):
        given = ids[:, start : min(start + config.window, len(tokens) - 1)]
        logits = model(given, past_key_values=cache, use_cache=True).logits[0].float()
        losses.append(F.cross_entropy(logits, ids[0, start + 1 : start + 1 + given.shape[1]], reduction="none"))
        advance(given.shape[1])
    return torch.cat(losses)


@torch.no_grad()
def stock_losses(model: PreTrainedModel, tokens: Tensor, memory_size: int, advance: Callable[[int], None]) -> Tensor:
    """As ``document_losses``, of a stock model: it sees the segment, and finds what was before by its memory alone."""
    window = model.config.knn_memory.get("window", WINDOW)
    ids, losses = tokens.to(model.device), []
    with emptied(knn_memory_of(model), memory_size):
        for start in range(0, len(tokens) - 1, window):
            given = ids[None, start : min(start + window, len(tokens) - 1)]
            logits = model(given, use_cache=False).logits[0].float()
            losses.append(F.cross_entropy(logits, ids[start + 1 : start + 1 + given.shape[1]], reduction="none"))
            advance(given.shape[1])
    return torch.cat(losses)


@contextmanager
def emptied(memory: KNNMemory, size: int) -> Iterator[None]:
    """``memory``, empty and of ``size`` tokens; in the end, after errors too, empty and of as many as before."""
    memory.clear()
    usual, memory.memory_size = memory.memory_size, size
    try:
        yield
    finally:
        memory.memory_size = usual
        memory.clear()


class LookupTokens(RecentTokens):
    """A memory that tells what was found for some queries of its only row."""

    def __init__(
        self, wanted: Iterable[int], *sizes: int, scale: Tensor, part: Tensor, segment: int | None = None, **kind: Any
    ) -> None:
        """``wanted``: places in the document of the tokens whose queries are of interest.

        ``scale [H]`` is the factor on scores, ``part [H]`` what of the output is that of the memory. ``segment``: the
        first of every so many tokens is never stored; None: all are. ``kind``: dtype and device.
        """
        super().__init__(1, *sizes, **kind)
        self._scale, self._part, self._segment = scale, part, segment
        self._wanted = set(wanted)
        self.found: Weights = {}

    def search(self, queries: Tensor, top_k: int) -> Neighbours:
        """See ``RecentTokens``."""
        found = super().search(queries, top_k)
        first = self._begin(self.added[0])  # what is in the memory is all that was read before these queries
        for place in self._wanted.intersection(range(first, first + queries.shape[2])):
            self.found[place] = self._weights(queries[0, :, place - first], found, place - first)
        return found

    def _begin(self, number: int) -> int:
        """Where the segment begins after so many tokens were stored."""
        return number if self._segment is None else number // max(1, self._segment - 1) * self._segment

    def _place(self, number: int) -> int:
        """Where the token lies in the document that was stored as the one of this number."""
        if self._segment is None:
            return number
        return self._begin(number) + number % (self._segment - 1) + 1

    def _weights(self, q: Tensor, found: Neighbours, column: int) -> list[tuple[int, float]]:
        ids = found.ids[0, :, column]  # [H, K]
        group = torch.arange(len(q), device=q.device) // (len(q) // found.keys.shape[1])
        scores = torch.einsum("hd,hkd->hk", q, found.keys[0, group[:, None], ids.clamp(min=0)])
        scores = scores * self._scale[:, None]
        weights = scores.masked_fill(ids < 0, -torch.inf).softmax(-1).nan_to_num() * self._part[:, None]
        total: dict[int, float] = {}
        numbers = self.numbers_of(found.ids)[0, :, column]
        for number, weight in zip(numbers.flatten().tolist(), weights.flatten().tolist(), strict=True):
            if number >= 0:
                place = self._place(number)
                total[place] = total.get(place, 0.0) + weight / len(q)
        return heapq.nlargest(3, total.items(), key=lambda each: abs(each[1]))


class MemorizingScorer:
    """How a Memorizing Transformer is read."""

    def __init__(self, model: MemorizingForCausalLM) -> None:
        self._model = model
        self.layer: int | None = model.config.memory_layer
        self.memory_size: int = model.config.memory_size
        self.reach = model.config.num_hidden_layers * model.config.window

    def losses(self, tokens: Tensor, size: int, advance: Callable[[int], None]) -> Tensor:
        """See ``document_losses``."""
        return document_losses(self._model, tokens, size, advance)

    @torch.no_grad()
    def watched(self, tokens: Tensor, size: int, wanted: set[int], advance: Callable[[int], None]) -> Weights:
        """What was found by the tokens at the places ``wanted``."""
        model, config = self._model, copy.deepcopy(self._model.config)
        config.memory_size = size
        attention: KNNAttention = model.model.layers[self.layer].attention
        memory = LookupTokens(
            wanted,
            attention.groups,
            size,
            config.head_dim,
            scale=attention.scale.exp(),
            part=torch.ones_like(attention.scale) if attention.gate is None else attention.gate.sigmoid(),
            dtype=model.dtype,
            device=model.device,
        )
        cache = MemorizingCache(config, 1, memory)
        for part in _segments(tokens, wanted, config.window, advance):
            model(part.to(model.device), past_key_values=cache, use_cache=True)
        return memory.found


class StockScorer:
    """How a stock model with a memory is read: segment by segment."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._memory = model, knn_memory_of(model)
        settings = model.config.knn_memory
        self.layer: int | None = settings["layer"]
        self.memory_size: int = settings["memory_size"]
        self.reach: int = settings.get("window", WINDOW)

    def losses(self, tokens: Tensor, size: int, advance: Callable[[int], None]) -> Tensor:
        """See ``stock_losses``."""
        return stock_losses(self._model, tokens, size, advance)

    @torch.no_grad()
    def watched(self, tokens: Tensor, size: int, wanted: set[int], advance: Callable[[int], None]) -> Weights:
        """As in ``MemorizingScorer``."""
        model, layer = self._model, self._memory
        watching = LookupTokens(
            wanted,
            layer.groups,
            size,
            layer.dim,
            scale=layer.scale.exp() * layer.dim**-0.5,
            part=layer.gate.tanh(),
            segment=self.reach,
            dtype=model.dtype,
            device=model.device,
        )
        with emptied(layer, size):
            layer.memory = watching
            for part in _segments(tokens, wanted, self.reach, advance):
                model(part.to(model.device), use_cache=False)
        return watching.found


def _segments(tokens: Tensor, wanted: Iterable[int], window: int, advance: Callable[[int], None]) -> Iterator[Tensor]:
    """Segments ``[1, window]`` of ``tokens``, as far as there is something ``wanted`` in them."""
    for start in range(0, max(wanted) + 1, window):
        yield (part := tokens[None, start : start + window])
        advance(part.shape[1])


SIZES = (0, 512, 1536, 8192, 65_536, 262_144)
"""The paper's memories, in tokens."""
STRETCH = 512
"""Tokens whose mean counts as one observation for a standard error: neighbours gain or lose together."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One size of the memory."""

    memory_size: int
    """Tokens that can be found."""
    perplexity: float
    """Of all scored tokens."""
    by_position: dict[str, float]
    """Perplexity of the tokens of each part of the document, by what it is called: ``512-1,536``."""
    change: float | None = None
    """Of the loss against the first size, token by token; None for that one itself."""
    standard_error: float | None = None
    """Of ``change``, over stretches of ``STRETCH`` tokens; None also where there are fewer than two."""

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        positions = {name: round(value, 4) for name, value in self.by_position.items()}
        rest = {"change": self.change, "standard_error": self.standard_error}
        return {
            "memory_size": self.memory_size,
            "perplexity": round(self.perplexity, 4),
            **{name: value if value is None else round(value, 6) for name, value in rest.items()},
            "by_position": positions,
        }


# All rows score the same tokens: the whole text as one document but its first token. Differences are paired by token,
# and stretches of 512 tokens count as one observation.
def by_memory_size(
    model: MemorizingForCausalLM | PreTrainedModel,
    documents: Sequence[Tensor],
    sizes: Sequence[int],
    *,
    positions: Sequence[int] = SIZES,
    advance: Callable[[int], None] = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[MemoryRow]:
    """Perplexity of ``documents``, each ``[n]``, with a memory of each of ``sizes``.

    ``model`` is a Memorizing Transformer, or a stock model that ``load_knn_memory`` has loaded. ``positions`` are where
    parts of the document begin; those after its end are left out. Raises ``InvalidArgument`` for a size or a text that
    does not fit, and for a model without a layer that looks tokens up.
    """
    scorer = scorer_of(kind_of(model), model)
    _check(scorer.layer, documents, sizes)
    longest = max(map(len, documents))
    starts = sorted({1, *(each for each in positions if 1 < each < longest)})
    parts = list(zip(starts, [*starts[1:], longest], strict=True))
    first: list[Tensor] | None = None
    for size in sizes:
        losses = [scorer.losses(tokens, size, advance).double() for tokens in documents]
        change, error = (None, None) if first is None else paired(first, losses)
        first = first or losses
        yield MemoryRow(
            memory_size=size,
            perplexity=float(torch.cat(losses).mean().exp()),
            by_position={
                f"{0 if start == 1 else start:,}-{end:,}": _perplexity(losses, start - 1, end - 1)
                for start, end in parts
            },
            change=change,
            standard_error=error,
        )


def paired(first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[float, float | None]:
    """How much larger the losses of ``second`` are, in the mean over all tokens, and the standard error of that."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    stretches = torch.stack([part.mean() for each in differences for part in each.split(STRETCH)])
    error = float(stretches.std() / len(stretches) ** 0.5) if len(stretches) > 1 else None
    return float(torch.cat(differences).mean()), error


def fitting(sizes: Sequence[int], tokens: int) -> list[int]:
    """Those of ``sizes`` that make a difference to a text of so many ``tokens``: up to the first that holds it all."""
    ordered = sorted(set(sizes))
    return [size for size, before in zip(ordered, [0, *ordered], strict=False) if before < tokens]


def _perplexity(losses: Sequence[Tensor], start: int, end: int) -> float:
    """Of what lies between two positions of each document."""
    return float(torch.cat([each[start:end] for each in losses]).mean().exp())


def _check(layer: int | None, documents: Sequence[Tensor], sizes: Sequence[int]) -> None:
    if not documents:
        raise InvalidArgument("there is no document to score: name a text")
    shortest = min(map(len, documents))
    if shortest < 2:
        raise InvalidArgument(f"a text has {shortest} tokens; at least 2 are needed. Name a longer text")
    if not sizes or min(sizes) < 0:
        raise InvalidArgument(f"sizes of a memory are numbers of tokens from 0 on, not {list(sizes)}")
    if layer is None and max(sizes):
        raise InvalidArgument("this model has no layer that looks tokens up (memory_layer is None): its only size is 0")


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
    reading = scorer_of(kind_of(model), model)
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


def sizes_table(
    model: Any, tokenizer: Any, texts: Sequence[str], folder: Path, *, memory_sizes: str | None = None, show: bool
) -> Report:
    """The table of the model for texts, each read as a document; see ``Evaluation.perplexity``."""
    chosen = None
    if memory_sizes is not None:
        chosen = token_counts("--memory-sizes", memory_sizes, least=0, such_as="0,512,8K", what="size")
    documents = [torch.tensor(encode(tokenizer, text), dtype=torch.int64) for text in texts]
    total = sum(map(len, documents))
    if chosen is None:
        chosen = [0] if getattr(model.config, "memory_layer", 0) is None else fitting(SIZES, max(map(len, documents)))
    with progress_bar("perplexity", 0, len(chosen) * total, show) as advance:
        rows = [row.to_dict() for row in by_memory_size(model, documents, chosen, advance=advance)]
    data = {"task": "perplexity", "model": folder.name, "documents": len(documents), "tokens": total, "rows": rows}
    return Report(data=data, text=lambda page: _show(page, rows))


def _show(page: Page, rows: list[dict[str, Any]]) -> None:
    page.line("Perplexity by size of the memory, of all tokens and of those from one position to another")
    columns = ["memory", "all", *rows[0]["by_position"]]
    page.table(columns, [[row["memory_size"], row["perplexity"], *row["by_position"].values()] for row in rows])
    for row in rows[1:]:
        error = "" if row["standard_error"] is None else f", standard error {row['standard_error']:.4f}"
        page.line(f"A memory of {row['memory_size']:,} changes the loss by {row['change']:+.4f}{error}")


MEMORIZING = Evaluation(perplexity=sizes_table, lookup=lookup, document_scorer=MemorizingScorer)
KNN = Evaluation(perplexity=sizes_table, lookup=lookup, document_scorer=StockScorer)
