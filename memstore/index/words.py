"""A lexical index: scores blocks by the words of a query (BM25, Robertson & Zaragoza 2009).

Words are numbers here; the caller numbers them. The index is made in one go, in about 0.1 s for a million words, so it
needs no file and no additions.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

WORD = re.compile(r"\w+")
SATURATION = 1.5
"""``k1``: how much repeated words in a block count."""
LENGTH = 0.75
"""``b``: how much longer blocks are penalised for their length."""

STEM = 6
"""Leading letters that identify a word, if words of one stem are to be the same."""
FUNCTION_WORDS = frozenset(
    WORD.findall(
        "a an the and or but if as of in on at to for from by with about into than that this these those what which "
        "who whom whose when where why how is are was were be been being do does did have has had can could would "
        "should it its they them their he him his she her i you we me my your our not s t"
    )
)
"""English words that say how something is asked, not what about. They are rare in lists, tables and manuals, so BM25
would find the words of every question in the few blocks of prose.
"""


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters and digits."""
    return WORD.findall(text.lower())


def asked_words(question: str) -> list[str]:
    """Return those of ``words_of`` a question that say what it is about, or all if none does."""
    words = words_of(question)
    return [word for word in words if word not in FUNCTION_WORDS] or words


class WordIndex:
    """The count of each word in each of ``blocks`` blocks."""

    def __init__(self, words: Tensor, of: Tensor, blocks: int) -> None:
        """Count ``words [n]`` int64, at least 0, in the blocks ``of [n]``, numbered from 0 to ``blocks - 1``."""
        self.blocks = blocks
        pairs, counts = torch.unique(words * blocks + of, return_counts=True)
        self._words, self._of = pairs // max(1, blocks), pairs % max(1, blocks)
        lengths = torch.bincount(of, minlength=blocks).float()
        share = lengths / lengths.mean().clamp(min=1)
        damped = SATURATION * (1 - LENGTH + LENGTH * share)[self._of]
        self._weights = counts * (SATURATION + 1) / (counts + damped)

    def score(self, query: Tensor, *, least: float = 0.0) -> Tensor:
        """Return scores ``[blocks]`` float32 for the words ``query [t]``, repeated words included; 0 for no match.

        ``least`` is a share of the total worth of the query's distinct words, including words in no block. Only the
        part of a score above it counts.
        """
        scores, worth = torch.zeros(self.blocks), 0.0
        first, last = torch.searchsorted(self._words, query), torch.searchsorted(self._words, query, right=True)
        for start, stop in zip(first.tolist(), last.tolist(), strict=True):
            rare = math.log(1 + (self.blocks - (stop - start) + 0.5) / (stop - start + 0.5))
            scores[self._of[start:stop]] += rare * self._weights[start:stop]
            worth += rare
        return (scores - least * worth).clamp(min=0) if least else scores
