"""How a document is read with a memory of tokens: by a Memorizing Transformer, or a stock model with a kNN layer.

Which class reads with a model its kind says (``Kind.document_scorer``).
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from memstore.attention.knn import KNNAttention, Neighbours
from memstore.attention.knn_memory import RecentTokens
from memstore.models.memorizing import KNNMemory, MemorizingCache, MemorizingForCausalLM, knn_memory_of

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
