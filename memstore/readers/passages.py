"""Where an answer stands: of a block the sentence that fits best, with its line and page, and not the block's begin."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch

from memstore.errors import DamagedError, NotFound
from memstore.index.words import words_of
from memstore.memory import Document

SHORT = 160
"""Characters of an excerpt at most."""
BESIDE = 256
"""Tokens before and behind a block in which the sentences at its borders may begin and end."""
PAGE = 1 << 14
"""Tokens of a first page at most: so far it is looked for its end."""
SENTENCES = re.compile(r"(?<=\w{3}\.)\s+|(?<=[!?])\s+|(?<=[!?][\"')\u201d\u2019])\s+|(?<=[\u3002\uff01\uff1f])|[\n\f]+")
"""Where a sentence ends: not behind "Dr." and the like."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A block that was found, and what in it fits best."""

    document: str
    block: int
    first_token: int
    """Where the block begins in the document."""
    line: int | None
    """The line of the document's text that ``excerpt`` begins in, from 1; None where blocks before it were dropped."""
    page: int | None
    """Its page, from 1; None for a document without pages."""
    score: float | None
    """How well it was found by whoever searched; None where an answer tells its sources."""
    attention: float | None
    """The part of attention that it had: mean over an answer's tokens, layers and heads; None without an answer."""
    excerpt: str
    """The sentence or line of the block with most of the words, rare ones first, and what follows; on one line."""
    text: str
    """All of the block."""


@dataclass(frozen=True)
class _Sentence:
    """A part of the text around a block."""

    start: int
    stop: int
    words: list[str]


@dataclass(frozen=True)
class _Surroundings:
    """A block with the text beside it."""

    text: str
    start: int
    """Where the block begins in it."""
    own: str
    """The text of the block alone."""
    sentences: list[_Sentence]
    """Those that the block has a part of."""

    @classmethod
    def of(cls, tokenizer: Any, document: Document, block: int) -> _Surroundings:
        size = document.memory.spec.block_size
        reach, live = -(-BESIDE // size), document.blocks
        near = range(max(live.start, block - reach), min(live.stop, block + reach + 1))
        part = next((each for each in document.present(near) if block in each), range(block, block + 1))
        try:
            ids = document.tokens(part)
        except DamagedError:  # beside it, or it is told now
            part = range(block, block + 1)
            ids = document.tokens(part)
        at = (block - part.start) * size
        before, own, text = (
            str(tokenizer.decode(each, skip_special_tokens=True)) for each in (ids[:at], ids[at : at + size], ids)
        )
        start, stop = len(before), len(before) + len(own)
        borders = [(0, 0), *(each.span() for each in SENTENCES.finditer(text)), (len(text), len(text))]
        spans = [(end, begin) for (_, end), (begin, _) in pairwise(borders) if end < stop and begin > start]
        there = [_Sentence(*each, words_of(text[slice(*each)])) for each in spans if text[slice(*each)].strip()]
        return cls(text, start, own, there)

    def counted(self, mark: str, at: int) -> int:
        """How often ``mark`` comes between the begin of the block and ``at``; below 0 where that lies before it."""
        return self.text.count(mark, self.start, at) - self.text.count(mark, at, self.start)


def passages_at(tokenizer: Any, found: Sequence[tuple[Document, int, float]], words: str) -> list[Passage]:
    """The blocks that were ``found``, with their scores; ``words`` of question and answer choose what of each is told.

    Of several that fit as well the first is told, and where no word is in it what the block begins with.
    """
    around = [_Surroundings.of(tokenizer, document, block) for document, block, _ in found]
    wanted = set(words_of(words))
    there = Counter(word for each in around for sentence in each.sentences for word in sentence.words)
    weights = {word: math.log(1 + there.total() / there[word]) for word in wanted & there.keys()}
    places = _places(tokenizer, [(document, block) for document, block, _ in found])
    made = []
    for (document, block, score), each in zip(found, around, strict=True):
        at, excerpt = _excerpt(each, weights)
        line, page = places[document.name, block]
        made.append(
            Passage(
                document=document.name,
                block=block,
                first_token=block * document.memory.spec.block_size,
                line=None if line is None else line + each.counted("\n", at),
                page=None if page is None else page + each.counted("\f", at),
                score=score,
                attention=None,
                excerpt=excerpt,
                text=each.own.replace("\f", "\n"),
            )
        )
    return made


def _excerpt(around: _Surroundings, weights: dict[str, float]) -> tuple[int, str]:
    """Where what is told of a block begins, and its words on one line."""
    if not around.sentences:
        return around.start, ""
    sums = [sum(weights.get(word, 0) for word in {*each.words}) for each in around.sentences]
    chosen = sums.index(max(sums))
    first, *others = around.sentences[chosen:]
    start, text = first.start, around.text
    if first.stop - start > SHORT:  # a part of it, with the rarest of the words or else what the block begins with
        rare = max({*first.words} & weights.keys(), key=lambda word: (weights[word], word), default="")
        word = re.compile(rf"\b{re.escape(rare)}\b", re.IGNORECASE)
        inside = max(start, around.start)
        found = (word.search(text, inside) or word.search(text, start)) if rare else None
        at = found.start() if found else inside
        if at + len(rare) - start > SHORT:
            start = _border(text, at - SHORT // 2 if rare else at)
    stop = first.stop
    for each in others:
        if len(_squeezed(text[start : each.stop])) > SHORT:
            break
        stop = each.stop
    told = _squeezed(text[start:stop])
    short = textwrap.shorten(told, SHORT, placeholder=" …").removeprefix("…") or told[: SHORT - 1] + "…"
    return start, "… " * (start > first.start) + short


def _border(text: str, at: int) -> int:
    """Where the first word from ``at`` on begins, or ``at`` where that is far."""
    found = re.compile(r"(?<!\S)\S").search(text, at, at + SHORT // 2)
    return found.start() if found else at


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _places(
    tokenizer: Any, places: Sequence[tuple[Document, int]]
) -> dict[tuple[str, int], tuple[int | None, int | None]]:
    """The line and page that each block begins in; None behind blocks that are gone, and for pages where none ends."""
    found: dict[tuple[str, int], tuple[int | None, int | None]] = {}
    for name, group in groupby(sorted(places, key=lambda each: (each[0].name, each[1])), lambda each: each[0].name):
        there = list(group)
        document, start, lines, pages = there[0][0], 0, 1, 1
        begins: dict[int, tuple[int, int]] = {}
        stop = min(document.blocks.stop, there[-1][1] + -(-PAGE // document.memory.spec.block_size))
        with suppress(NotFound, DamagedError):  # nobody knows what was in blocks that were dropped or cannot be read
            for block in (*(block for _, block in there), stop):
                if block == stop and pages > 1:
                    break  # else it is to be known whether this is a first page; no token is read twice
                newlines, feeds = _breaks(tokenizer, document.tokens(range(start, block)))
                start, lines, pages = block, lines + newlines, pages + feeds
                begins[block] = lines, pages
        for _, block in there:
            line, page = begins.get(block, (None, None))
            found[name, block] = line, page if pages > 1 else None
    return found


def _breaks(tokenizer: Any, tokens: torch.Tensor) -> tuple[int, int]:
    """How often a new line and a new page begin in a text.

    Each token tells, for no character but the whole newline or form feed has its byte.
    """
    ids, counts = tokens.unique(return_counts=True)
    texts = tokenizer.batch_decode(ids[:, None]) if len(ids) else []
    often = list(zip(texts, counts.tolist(), strict=True))
    newlines, feeds = (sum(text.count(mark) * count for text, count in often) for mark in "\n\f")
    return newlines, feeds
