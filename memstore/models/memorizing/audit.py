"""Auditing a Memorizing Transformer: the attention that each head would pay to every token of its memory.

The layer takes the tokens with the highest scores and a softmax over those, without positions. So the truth is the
softmax over all tokens that are stored, of the same queries and keys with the learned scale, and ``captured`` the part
of it that the retrieved tokens hold. Where a gate mixes the memory in, it is the share of attention that falls on the
memory, whatever is retrieved. A model with one softmax over the window and the memory (``joint``) has no such share
before it has chosen: there everything is of the softmax over the tokens in memory, without the window.

Recall is of single tokens; what was missed is told by blocks, which add up what their tokens would have had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memstore.attention.knn import KNNAttention
from memstore.memory import Document
from memstore.models.memorizing.choice import KNNChoice
from memstore.models.memorizing.reader import DocumentTokens, MemorizingReader
from memstore.readers.audit import Auditor, index_recall, pieces
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice

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
