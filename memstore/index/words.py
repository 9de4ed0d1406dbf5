"""A lexical index: which blocks hold the words of a query (BM25, Robertson & Zaragoza 2009).

Words are numbers here: whoever makes the index says which. It is made in one go, in about 0.1 s a million words, so
nobody needs to keep it on disk or to add to it.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

WORD = re.compile(r"\w+")
SATURATION = 1.5
"""``k1``: how much a second appearance of a word in a block still counts."""
LENGTH = 0.75
"""``b``: how much longer blocks have to pay for their length."""

STEM = 6
"""Letters of a word that count, where words of one stem are to be the same."""
FUNCTION_WORDS = frozenset(
    WORD.findall(
        "a an the and or but if as of in on at to for from by with about into than that this these those what which "
        "who whom whose when where why how is are was were be been being do does did have has had can could would "
        "should it its they them their he him his she her i you we me my your our not s t"
    )
)
"""English words that say how something is asked, not what about. In lists, tables and manuals they are rare, so by BM25
the few blocks of prose would have the words of every question."""


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case: runs of letters and digits."""
    return WORD.findall(text.lower())


def asked_words(question: str) -> list[str]:
    """Those of ``words_of`` a question that say what it is about, or all where none does."""
    words = words_of(question)
    return [word for word in words if word not in FUNCTION_WORDS] or words


class WordIndex:
    """How often each word is in each of ``blocks`` blocks."""

    def __init__(self, words: Tensor, of: Tensor, blocks: int) -> None:
        """``words [n]`` int64, at least 0, in the blocks ``of [n]``, which are numbered from 0 to ``blocks - 1``."""
        self.blocks = blocks
        pairs, counts = torch.unique(words * blocks + of, return_counts=True)
        self._words, self._of = pairs // max(1, blocks), pairs % max(1, blocks)
        lengths = torch.bincount(of, minlength=blocks).float()
        share = lengths / lengths.mean().clamp(min=1)
        damped = SATURATION * (1 - LENGTH + LENGTH * share)[self._of]
        self._weights = counts * (SATURATION + 1) / (counts + damped)

    def score(self, query: Tensor, *, least: float = 0.0) -> Tensor:
        """Scores ``[blocks]`` float32 for the words ``query [t]``, each as often as it is there; 0 for no word.

        ``least``: a score counts as far as it is above this share of what all words of the query are worth, each once,
        those that are in no block included.
        """
        scores, worth = torch.zeros(self.blocks), 0.0
        first, last = torch.searchsorted(self._words, query), torch.searchsorted(self._words, query, right=True)
        for start, stop in zip(first.tolist(), last.tolist(), strict=True):
            rare = math.log(1 + (self.blocks - (stop - start) + 0.5) / (stop - start + 0.5))
            scores[self._of[start:stop]] += rare * self._weights[start:stop]
            worth += rare
        return (scores - least * worth).clamp(min=0) if least else scores
