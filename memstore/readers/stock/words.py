"""The words of attached documents, which vote beside the router where somebody asks in words.

States find what is meant, words find names and numbers: on questions of people they fail at different ones. A block's
score for a query is that of its states plus ``Retrieval.words`` times BM25's of the words that both have, as far as
that is above a fifth of what all words of the query are worth. So a question in other words, which shares "which" and
"her" with some block and nothing else, is left to the states.

Token ids are stored with the blocks, so nothing else is: the words of a document are read off when the first query
comes, in about a second for a million tokens, and those of new blocks as they come. An edit starts anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memstore.index.words import WordIndex, words_of

if TYPE_CHECKING:
    from memstore.memory import Document
    from memstore.readers.stock.visible import Candidates

KEPT = 2
"""Indexes held at a time: that of searches, and that of prompts, which see the document's ends without a search."""
LEAST = 0.2
"""Share of what the words of a query are worth that a block must have more of."""
UNKNOWN = -1
"""A word that no block has."""
AT_ONCE = 1024
"""Blocks that are decoded at a time."""


class DocumentWords:
    """The words of the documents that a reader sees. One thread at a time, as the reader."""

    def __init__(self, tokenizer: Any) -> None:
        """Without a tokenizer every token is a word of its own."""
        self._tokenizer = tokenizer
        self._numbers: dict[str, int] = {}
        self._runs: dict[tuple[int, str], tuple[tuple[int | None, int, int], int, Tensor, Tensor]] = {}
        self._indexes: dict[tuple[object, ...], WordIndex] = {}

    def score(self, candidates: Candidates, query: Tensor) -> Tensor:
        """What the words of the tokens ``query [n]`` add to the scores of the candidates: ``[N]``, at least 0."""
        index = self._index(candidates)  # first, for it learns words
        return index.score(self._words(query), least=LEAST)

    def _words(self, query: Tensor) -> Tensor:
        if self._tokenizer is None:
            return query
        words = words_of(str(self._tokenizer.decode(query)))
        return torch.tensor([self._numbers.get(word, UNKNOWN) for word in words], dtype=torch.int64)

    def _index(self, candidates: Candidates) -> WordIndex:
        parts = tuple((source.memory, *_state(source.document), blocks) for source, blocks in candidates.parts)
        key = (*parts, *candidates.incomplete.items())
        if key not in self._indexes:
            while len(self._indexes) >= KEPT:
                del self._indexes[next(iter(self._indexes))]
            words, of, first = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], 0
            for source, blocks in candidates.parts:
                first += len(blocks)
                full = blocks[:-1] if first - 1 in candidates.incomplete else blocks
                runs = [self._run(source.memory, source.document, full)]
                if full != blocks:  # it will change
                    runs.append(self._read(source.document, blocks[-1:]))
                for run, places in runs:
                    words.append(run)
                    of.append(places - blocks.stop + first)
            self._indexes[key] = WordIndex(torch.cat(words), torch.cat(of), len(candidates))
        return self._indexes[key]

    def _run(self, memory: int, document: Document, blocks: range) -> tuple[Tensor, Tensor]:
        """The words of ``blocks``, in their order, and the block of each."""
        if not blocks:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        (whole,) = (run for run in document.present(document.complete_blocks) if blocks.start in run)
        key, state = (memory, document.name), (*_state(document), whole.start)
        held, stop, words, of = self._runs.get(key, (None, 0, torch.empty(0), torch.empty(0)))
        if held != state:
            stop, words, of = whole.start, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        if stop < whole.stop:
            new, places = self._read(document, range(stop, whole.stop))
            words, of = torch.cat((words, new)), torch.cat((of, places))
            self._runs[key] = (state, whole.stop, words, of)
        first, last = torch.searchsorted(of, torch.tensor([blocks.start, blocks.stop])).tolist()
        return words[first:last], of[first:last]

    def _read(self, document: Document, blocks: range) -> tuple[Tensor, Tensor]:
        size = document.memory.spec.block_size
        if self._tokenizer is None:
            tokens = document.tokens(blocks)
            return tokens, torch.arange(blocks.start, blocks.stop).repeat_interleave(size)[: len(tokens)]
        found: list[int] = []
        counts: list[int] = []
        for start in range(blocks.start, blocks.stop, AT_ONCE):
            some = range(start, min(start + AT_ONCE, blocks.stop))
            for text in self._tokenizer.batch_decode(document.tokens(some).split(size)):
                words = words_of(text)
                found += [self._numbers.setdefault(word, len(self._numbers)) for word in words]
                counts.append(len(words))
        of = torch.arange(blocks.start, blocks.stop).repeat_interleave(torch.tensor(counts))
        return torch.tensor(found, dtype=torch.int64), of


def _state(document: Document) -> tuple[int | None, int]:
    """While it stays the same, complete blocks never change."""
    return document.id, document.located()[0].edits
