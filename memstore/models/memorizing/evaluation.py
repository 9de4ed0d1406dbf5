"""Measurements of a Memorizing Transformer: perplexity by length of the context, and audits.

An audit computes the attention that each head would pay to every token of its memory.

The layer takes the tokens with the highest scores and a softmax over those, without positions. So the truth is the
softmax over all stored tokens, for the same queries and keys with the learned scale. ``captured`` is the part of it
that the retrieved tokens hold. Where a gate mixes the memory in, the gate is the share of attention on the memory,
whatever is retrieved. A model with one softmax over the window and the memory (``joint``) has no such share before it
has chosen. For it, everything refers to the softmax over the tokens in memory, without the window.

Recall counts single tokens. Misses are reported by block: a block adds up the weights of its tokens.

Documents are read in segments, as in training. A token can learn of at most ``window`` tokens before it in a layer, so
of ``reach`` tokens in all layers together. A stock model with a memory sees its segment and nothing before it; its
``reach`` is a segment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore.attention.knn import KNNAttention
from memstore.eval.evaluation import Evaluation
from memstore.eval.perplexity import Advance, by_context, losses_in_pieces, silent
from memstore.memory import Document
from memstore.models.memorizing import MemorizingCache, knn_memory_of
from memstore.models.memorizing.cache import KNNChoice
from memstore.models.memorizing.reader import DocumentTokens, MemorizingReader
from memstore.models.memorizing.stock import SEGMENT
from memstore.models.reading import in_lists
from memstore.readers.attachment import changed
from memstore.readers.audit import Auditor, index_recall, pieces
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice
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
        with changed(self._layer, top_k=self.top_k):
            yield {CACHE: self._cache}

    def choice(self, choice: Choice) -> None:
        """Record what the layer found for the last token of a call. See ``Observer``."""
        assert isinstance(choice, KNNChoice)
        if not choice.rows:
            return
        query, found = choice.queries[0, :, -1].float().cpu(), choice.places()[0, :, -1].contiguous()
        products, places = _stored(self._document, query)
        own, after = self._own(query)
        products, places = torch.cat([products, own], -1), torch.cat([places, after])
        if not len(places):
            return
        scores = self._layer.scale.exp().float().cpu()[:, None] * products  # [H, N]
        weights = scores.softmax(-1)
        if self._layer.gate is not None:
            weights = weights * self._layer.gate.sigmoid().float().cpu()[:, None]
        chosen = in_lists(torch.where(found >= 0, torch.searchsorted(places, found), -1), len(places))
        size, end = self._memory.stored.spec.block_size, len(self._document)
        self.tally.add(choice.layer, weights, chosen, scores, places=places, size=size, end=end)
        parts = self._document.present(self._document.complete_blocks)
        recall = index_recall(self._document.layer(0), query[:, None], self._layer.top_k, parts, piece=READ)
        self.tally.add_index_recall(choice.layer, recall)

    def _own(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return products ``[H, n]`` with tokens that left the window since the document ended, and their places."""
        own = self._memory.own
        numbers = torch.arange(own.numbers(0).start, own.numbers(0).stop)
        keys = own.keys[0][:, (numbers % own.capacity).to(own.keys.device)].float().cpu()
        return _with_keys(query, keys), len(self._document) + numbers


def _stored(document: Document, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return products ``[H, N]`` of ``query [H, D]`` with all keys that a document still has, and their places."""
    size, view, parts = document.memory.spec.block_size, document.layer(0), [query.new_empty(len(query), 0)]
    places = [torch.empty(0, dtype=torch.int64)]
    for run in document.present(document.blocks):
        for piece in pieces(run, READ):
            places.append(torch.arange(piece.start * size, min(piece.stop * size, len(document))))
            keys = view.landmarks(piece).transpose(0, 1).flatten(1, 2)  # a token's key is its landmark
            parts.append(_with_keys(query, keys[:, : len(places[-1])]))
    return torch.cat(parts, -1), torch.cat(places)


def _with_keys(query: Tensor, keys: Tensor) -> Tensor:
    """Return products ``[H, n]`` of ``query [H, D]`` with ``keys [G, n, D]``."""
    grouped = query.unflatten(0, (len(keys), -1))  # [G, H / G, D]
    products: Tensor = grouped @ keys.transpose(1, 2)
    return products.flatten(0, 1)


class MemorizingScorer:
    """Reads documents with a memory of tokens of any size, one segment in each call."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.segment: int = model.config.window
        self.reach: int = model.config.num_hidden_layers * self.segment
        """Earlier tokens that could help to predict a token without a memory."""

    @contextmanager
    def reading(self, size: int) -> Iterator[dict[str, Any]]:
        """Start with an empty memory of ``size`` tokens, and give the arguments for each call of the model."""
        config = copy.deepcopy(self._model.config)
        config.memory_size = size
        cache = MemorizingCache(config, 1)
        yield {"past_key_values": cache, "use_cache": True}

    def losses(self, tokens: Tensor, size: int, advance: Advance = silent) -> Tensor:
        """Return the losses ``[n - 1]`` of all ``tokens [n]`` except the first, with a memory of ``size`` tokens."""
        with self.reading(size) as given:
            return losses_in_pieces(self._model, tokens, self.segment, advance, **given)


class StockScorer(MemorizingScorer):
    """Reads with a stock model and its memory. It sees one segment, and finds earlier tokens by its memory alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.reach = self.segment = model.config.knn_memory.get("window", SEGMENT)

    @contextmanager
    def reading(self, size: int) -> Iterator[dict[str, Any]]:
        """See ``MemorizingScorer``. At the end, even after errors, the memory is empty and as large as before."""
        memory = knn_memory_of(self._model)
        memory.clear()
        usual, memory.memory_size = memory.memory_size, size
        try:
            yield {"use_cache": False}
        finally:
            memory.memory_size, memory.found = usual, None
            memory.clear()


def by_memory(scorer: Callable[[Any], MemorizingScorer]) -> Callable[..., Report]:
    """Make the measurement of perplexity; see ``by_context``. Texts are read in segments, as in training."""

    def after_window(model: Any, text: Tensor, scored: int) -> Tensor:
        reading = scorer(model)
        first = max(0, len(text) - scored - 1 - reading.reach) // reading.segment * reading.segment
        return reading.losses(text[first:], 0)[-scored:]

    def after_memory(model: Any, text: Tensor, scored: int) -> Tensor:
        return scorer(model).losses(text, len(text))[-scored:]

    return by_context(after_window, after_memory)


MEMORIZING = Evaluation(perplexity=by_memory(MemorizingScorer))
KNN = Evaluation(perplexity=by_memory(StockScorer))
