"""Auditing a landmark model: the attention that each head would pay every block in memory, token by token.

With landmarks the truth is cheap: by the grouped softmax (equations 1-4 of the paper) a block has the weight of its
landmark, however many blocks are attended to. Blocks stand where they stand while they are searched: the latest few in
slots of their own, all older ones in one slot. A context-miss token is left out: it scales all of the memory alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memstore.attention.landmark import Questions
from memstore.memory import Document
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.choice import LandmarkChoice
from memstore.models.landmark.reader import LandmarkReader
from memstore.readers.audit import Auditor, exact_scores, index_recall
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice


class LandmarkAuditor(Auditor):
    """What a landmark model retrieves."""

    mechanism = "landmark"
    positions = "all blocks stand where they are searched: the latest few in slots of their own, older ones in one slot"

    def __init__(self, reader: LandmarkReader, top_k: int | None) -> None:
        super().__init__(reader.model)
        retrieval = reader.retrieval if top_k is None else replace(reader.retrieval, top_k=top_k)
        self._document, self.documents = reader.document, [reader.document.name]
        self.top_k = retrieval.top_k
        self._cache = reader.cache(retrieval=retrieval)

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        """See ``Auditor``."""
        self._cache.observers.append(self)
        yield {CACHE: self._cache}

    def choice(self, choice: Choice) -> None:
        """See ``Observer``: what one layer saw at the last token of a call."""
        assert isinstance(choice, LandmarkChoice)
        if not choice.rows:
            return
        document, layer, at = self._document, choice.layer, choice.last.at[0]
        questions = choice.ask().tokens(slice(at, at + 1))
        stored = self._stored(layer, questions)
        scores = _scores(document, self._cache, layer, questions, stored)  # [H, N]
        local = choice.local[0, :, at].to(scores)
        weights = (scores - torch.logaddexp(scores.logsumexp(-1), local)[:, None]).exp()
        lists = choice.blocks[0, :, at if choice.blocks.shape[2] > 1 else 0]  # [X, K]
        lists = lists.repeat_interleave(len(scores) // len(lists), 0)
        chosen = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(lists >= 0, lists, scores.shape[1]), value=True)
        self.tally.add(layer, weights, chosen[:, :-1], scores)
        if layer in document.memory.spec.index_layers:
            recall = index_recall(document.layer(layer), questions.older[0], max(1, lists.shape[1]), [stored])
            self.tally.add_index_recall(layer, recall)

    def _stored(self, layer: int, questions: Questions) -> range:
        """Older blocks that are searched in the document; the latest ones are at hand in tensors."""
        own, first = self._cache.table.own[layer].first, int(questions.first[0])
        start = self._document.complete_blocks.start
        return range(start, max(start, min(own, first)))

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more of them would not help
        """See ``Auditor``."""
        size = self.model.config.segment_tokens
        return f"no block is in memory yet: they are from {size} tokens on; read a longer text"

    def locate(self, number: int) -> tuple[Document, int]:
        """See ``Auditor``."""
        return self._document, number


def _scores(document: Document, cache: LandmarkCache, layer: int, questions: Questions, stored: range) -> Tensor:
    """Scores ``[H, N]`` of the blocks 0..N-1 for one token; -inf for those that have left the document."""
    stop = questions.first.clamp(min=0)
    if layer in document.memory.spec.index_layers:
        own, blocks = cache.table.own[layer].score(questions.older, stop)
        older = torch.cat([exact_scores(document.layer(layer), questions.older[0], stored), own[0].float().cpu()], -1)
        numbers = torch.cat([torch.arange(stored.start, stored.stop), blocks.cpu()])
    else:
        found, blocks = cache.table.layers[layer].score(questions.older, stop)
        older, numbers = found[0].float().cpu(), blocks.cpu()
    there, recent = numbers < int(stop), questions.recent_blocks[0].cpu()
    values = torch.cat([older[:, 0, there], questions.recent[0, :, 0].float().cpu()[:, recent >= 0]], -1)
    numbers = torch.cat([numbers[there], recent[recent >= 0]])
    scores = values.new_full((len(values), int(numbers.max()) + 1), -torch.inf)
    scores[:, numbers] = values
    return scores
