"""The words of attached documents, which vote beside the router where somebody asks in words.

States find what is meant, words find names and numbers: on questions of people they fail at different ones. A block's
score for a query is that of its states plus ``Retrieval.words`` times BM25's of the words that both have, as far as
that is above a fifth of what all words of the query are worth. So a question in other words, which shares "which" and
"her" with some block and nothing else, is left to the states.

An answer often stands in the block beside the one that has the question's words, so most of the vote is that of a block
together with its neighbour. And a word is its first letters here, for "settlers" asks for "settled" too.

Token ids are stored with the blocks, so nothing else is: the words of a document are read off when the first query
comes, in about a second for a million tokens, and those of new blocks as they come. An edit starts anew. An index lives
as long as the candidates that it is of.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.index.words import WordIndex, words_of

if TYPE_CHECKING:
    from memstore.memory import Document
    from memstore.readers.stock.visible import AttachedDocument, Candidates

LEAST = 0.2
"""Share of what the words of a query are worth that a block must have more of."""
STEM = 6
"""Letters of a word that count."""
OWN = 0.25
"""Part of the vote that a block has by its own words; the rest is that of the better pair with a neighbour."""
UNKNOWN = -1
"""A word that no block has."""
AT_ONCE = 1024
"""Blocks that are decoded at a time."""
_NO_WORDS = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)


class DocumentWords:
    """The words of the documents that a reader sees. One thread at a time, as the reader."""

    def __init__(self, tokenizer: Any) -> None:
        """Without a tokenizer every token is a word of its own."""
        self._tokenizer = tokenizer
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)
        self._runs: dict[tuple[int, str], tuple[tuple[int | None, int, int], int, Tensor, Tensor]] = {}
        self._lasts: dict[tuple[int, str], tuple[tuple[int | None, int, int], Tensor, Tensor]] = {}
        self._indexes: WeakKeyDictionary[Candidates, tuple[WordIndex, WordIndex]] = WeakKeyDictionary()

    def score(self, candidates: Candidates, query: Tensor) -> Tensor:
        """What the words of the tokens ``query [n]`` add to the scores of the candidates: ``[N]``, at least 0."""
        own, pairs = self._index(candidates)  # first, for it learns words
        words = self._words(query)
        after = pairs.score(words, least=LEAST)
        before = F.pad(after[:-1], (1, 0)).where(candidates.consecutive(), 0)
        return OWN * own.score(words, least=LEAST) + (1 - OWN) * torch.maximum(after, before)

    def _words(self, query: Tensor) -> Tensor:
        if self._tokenizer is None:
            return query
        words = words_of(str(self._tokenizer.decode(query)))
        return torch.tensor([self._numbers.get(word[:STEM], UNKNOWN) for word in words], dtype=torch.int64)

    def _index(self, candidates: Candidates) -> tuple[WordIndex, WordIndex]:
        """Of the candidates, and of each of them together with the one that follows it in its document."""
        index = self._indexes.get(candidates)
        if index is None:
            words, of, first = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], 0
            for source, blocks in candidates.parts:
                first += len(blocks)
                full = blocks[:-1] if first - 1 in candidates.incomplete else blocks
                runs = [self._run(source, full)]
                if full != blocks:
                    runs.append(self._last(source, blocks[-1:]))
                for run, places in runs:
                    words.append(run)
                    of.append(places - blocks.stop + first)
            own, at = torch.cat(words), torch.cat(of)
            follow = candidates.consecutive()[at]
            pairs = torch.cat((own, own[follow])), torch.cat((at, at[follow] - 1))
            index = WordIndex(own, at, len(candidates)), WordIndex(*pairs, len(candidates))
            self._indexes[candidates] = index
        return index

    def _last(self, source: AttachedDocument, blocks: range) -> tuple[Tensor, Tensor]:
        """As ``_run``, of the last block, which is not full and grows."""
        document, state = source.document, source.state
        key, now = (source.memory, document.name), (document.id, state.edits, state.tokens)
        held, words, of = self._lasts.get(key, (None, *_NO_WORDS))
        if held != now:
            words, of = self._read(document, blocks)
            self._lasts[key] = now, words, of
        return words, of

    def _run(self, source: AttachedDocument, blocks: range) -> tuple[Tensor, Tensor]:
        """The words of ``blocks``, in their order, and the block of each."""
        if not blocks:
            return _NO_WORDS
        document = source.document
        complete = source.state.complete(document.memory.spec.block_size)
        (whole,) = (run for run in source.present(complete) if blocks.start in run)
        key, state = (source.memory, document.name), (document.id, source.state.edits, whole.start)
        held, stop, words, of = self._runs.get(key, (None, 0, *_NO_WORDS))
        if held != state:
            stop, words, of = whole.start, *_NO_WORDS
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
                found += [self._numbers[word[:STEM]] for word in words]
                counts.append(len(words))
        of = torch.arange(blocks.start, blocks.stop).repeat_interleave(torch.tensor(counts))
        return torch.tensor(found, dtype=torch.int64), of
