"""Auditing a DRT: whether the index found the blocks that the retriever wanted, and by how much they stood out.

Grouped cross attention has no full attention to compare with: the upper layers attend to each retrieved block by
itself, and add the results up by the softmax over the retrieved scores. So ``captured`` is of these weights: the share
that the retrieved blocks have of the softmax over the scores of *all* blocks, which is what the weights would be if all
were retrieved. ``recall`` is of the true best blocks by exact search, so for a DRT it is that of its index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memstore.errors import InvalidArgument
from memstore.memory import Document
from memstore.models.drt.choice import DRTChoice
from memstore.models.drt.reader import DRTReader
from memstore.readers.audit import Auditor, exact_scores, index_recall
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice


class DRTAuditor(Auditor):
    """What a DRT retrieves.

    It chooses at the end of each block, for the tokens of the next one: so a step is a block that ends within the
    question or the tokens generated after it, by default a block. What was chosen before the question is none.
    """

    mechanism = "drt"
    positions = "scores know no positions; GCA has no full attention, so captured is of the softmax over all scores"
    shares = False

    def __init__(self, reader: DRTReader, top_k: int | None) -> None:
        super().__init__(reader.model)
        config = reader.model.config
        if config.retrieval == "random":
            raise InvalidArgument("this model retrieves random blocks: there is nothing that it should have found")
        self._reader, self._document, self.documents = reader, reader.document, [reader.document.name]
        self.top_k = config.retrieval_top_k if top_k is None else top_k
        self.tokens = config.tokens_per_block

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        """See ``Auditor``."""
        config = self.model.config
        trained, config.retrieval_top_k = config.retrieval_top_k, self.top_k
        try:
            self._cache = self._reader.cache()
            self._cache.observers.append(self)
            yield {CACHE: self._cache}
        finally:
            config.retrieval_top_k = trained

    def choice(self, choice: Choice) -> None:
        """See ``Observer``: what one group chose at the end of one block."""
        assert isinstance(choice, DRTChoice)
        lookup = choice.lookup
        if lookup is None or not int(lookup.limits[0, -1]):
            return
        complete, view = self._document.complete_blocks, self._document.layer(0)
        limit, chosen = int(lookup.limits[0, -1]), lookup.chosen.blocks[0, -1].cpu()
        stored = range(complete.start, max(complete.start, min(complete.stop, limit)))
        query = lookup.queries[:1, -1:].float().cpu()
        scores = torch.full((limit,), -math.inf)
        # Blocks that came after the document are in no index: the cache scores them itself.
        every, numbers = self._cache.table.search(lookup.queries[:, -1:], lookup.limits[:, -1:], limit)
        values, blocks = every[0, 0].float().cpu(), numbers[0, 0].cpu()
        fresh = blocks >= complete.stop
        scores[blocks[fresh]] = values[fresh]
        scores[stored.start : stored.stop] = exact_scores(view, query, stored)[0, 0]
        was_chosen = torch.zeros(limit, dtype=torch.bool)
        was_chosen[chosen[chosen >= 0]] = True
        self.tally.add(choice.group, scores.softmax(-1)[None], was_chosen[None], scores[None])
        recall = index_recall(view, query, max(1, len(chosen)), [stored])
        self.tally.add_index_recall(choice.group, recall)

    def nothing(self, tokens: int) -> str:
        """See ``Auditor``."""
        size = self.model.config.tokens_per_block
        return (
            f"a DRT chooses where a block of {size} tokens ends, and none ends in this question and {tokens} tokens "
            f"after it; ask more, or let it generate {size} tokens"
        )

    def locate(self, number: int) -> tuple[Document, int]:
        """See ``Auditor``."""
        return self._document, number
