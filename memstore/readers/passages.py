"""The passages of documents that an answer was written with: what is quoted before a question, what is told behind it.

A ``Passage`` is of a block the sentence that fits best, with its line and page, and not the block's begin.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby, pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memstore.errors import DamagedError, NotFound
from memstore.index.words import FUNCTION_WORDS, STEM, asked_words, words_of
from memstore.memory.search import Match

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.memory import Document, Memory, Trace
    from memstore.readers.kinds import Retrieval

EXCERPT_CHARS = 160
"""Characters of an excerpt at most."""
MAX_SOURCES = 8
"""Sources of an answer, unless said otherwise."""
SEPARATOR = "\n\n"
"""Behind each passage that is quoted."""
CANDIDATES = 4
"""So many of the best blocks are looked at for one to quote."""
REACH_BLOCKS = 2
"""Blocks before and behind a block in which a paragraph that is quoted may begin and end."""
BLANK = re.compile(r"\n\s*\n|\f")
"""Between paragraphs."""
BORDER_TOKENS = 256
"""Tokens before and behind a block in which the sentences at its borders may begin and end."""
PAGE = 1 << 14
"""Tokens of a first page at most: so far it is looked for its end."""
SENTENCES = re.compile(r"(?<=\w{3}\.)\s+|(?<=[!?])\s+|(?<=[!?][\"')\u201d\u2019])\s+|(?<=[\u3002\uff01\uff1f])|[\n\f]+")
"""Where a sentence ends: not behind "Dr." and the like."""


class PassageReader(Protocol):
    """What is needed of a reader to tell passages of what it has read; a ``Reader`` is one."""

    tokenizer: Any

    @property
    def retrieval(self) -> Retrieval:
        """How blocks are chosen."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """All memories."""

    @property
    def documents(self) -> list[Document]:
        """Those that are seen."""

    @property
    def quoted_blocks(self) -> int:
        """So many blocks are quoted before a question."""

    def search(self, text: Sequence[str], top_k: int) -> list[Match]:
        """The best blocks for a question, the last of what was said in turn."""


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
    """How well it was found: by a search, or by the question of an answer. None where nobody had to choose."""
    attention: float | None
    """The part of attention that its states had: mean over an answer's tokens, layers and heads; None without an
    answer, or where only its text was attended to. What a quoted text had is not in it."""
    quoted: bool
    """Whether a paragraph that it has a part of also stood as text before the question."""
    excerpt: str
    """The sentence or line of the block with most of the words, rare ones first, and what follows; on one line."""
    text: str
    """All of the block."""


def stored(memories: Sequence[Memory], name: str) -> Document | None:
    """The document ``name`` of the first of ``memories`` that has it; None where none has."""
    for memory in memories:
        with suppress(NotFound):
            document = memory.document(name)
            if document.id is not None:
                return document
    return None


def quotes(
    reader: PassageReader, said: Sequence[str], about: str, *, session: str | None = None
) -> tuple[list[tuple[str, int]], str]:
    """Of the best blocks for a question as many as ``reader`` quotes, and the text of the paragraphs that fit best.

    ``said``: what was said in turn, the question last. ``about``: its words, with those of what it refers to.

    Passages stand as ``Retrieval.order`` says, the best one nearest to the question or in order of time. The
    ``session``, a document that is seen beside, is not quoted, nor is what cannot be read, or is in several memories
    under one name.
    """
    most, own = reader.quoted_blocks, None if session is None else stored(reader.memories, session)
    candidates = max(most, CANDIDATES) if reader.retrieval.words else most
    try:
        found = reader.search(said, candidates + (0 if own is None else len(own.blocks)))
    except DamagedError:  # an answer may need none of it, and says so itself if it does
        return [], ""
    words, holders = {*asked_words(about)}, {}
    found = [match for match in found if match.document != session][:candidates]
    for name in {match.document for match in found}:
        having = [document for memory in reader.memories if (document := stored([memory], name))]
        if len(having) == 1:
            holders[name] = having[0]

    @cache
    def paragraphs(name: str, *blocks: int) -> list[tuple[list[int], str]]:
        return [*_quotes(reader.tokenizer, holders[name], sorted(blocks), words)]

    best = [(match.document, match.block) for match in found if match.document in holders]
    if reader.retrieval.words:
        texts = {place: " ".join(text for _, text in paragraphs(*place)) for place in best}
        best = _telling({place: words & {*words_of(text)} for place, text in texts.items()}, most)
    made = list[tuple[list[tuple[str, int]], str]]()
    for name in dict.fromkeys(name for name, _ in best):
        for blocks, text in paragraphs(name, *(block for at, block in best if at == name)):
            made.append(([(name, block) for block in blocks], text))
    if reader.retrieval.order == "score":
        made.sort(key=lambda each: min(map(best.index, each[0])), reverse=True)
    else:
        names = [document.name for document in reader.documents]
        made.sort(key=lambda each: (names.index(each[0][0][0]), each[0][0][1]))
    quoted = [place for place in best if any(place in several for several, _ in made)]
    return quoted, "".join(text + SEPARATOR for _, text in made)


def _telling(found: Mapping[tuple[str, int], set[str]], most: int) -> list[tuple[str, int]]:
    """``most`` of the blocks ``found``, best first, by the words of the question that their paragraphs have.

    One that has all those of a better one, and more, comes before it: in lists and tables many blocks are alike, and
    the name that tells them apart stands elsewhere in the paragraph. A better one without any was found by its meaning.
    """
    left, chosen = [*found], list[tuple[str, int]]()
    while left and len(chosen) < most:
        best = left[0]
        for place in left:
            if set() < found[best] < found[place]:
                best = place
        chosen.append(best)
        left.remove(best)
    return chosen


def _quotes(
    tokenizer: Any, document: Document, best: Sequence[int], words: set[str]
) -> Iterator[tuple[list[int], str]]:
    """Paragraphs of the ``best`` blocks in order, each with those blocks; blocks alone where others are damaged."""
    near = sorted({block + step for block in best for step in range(-REACH_BLOCKS, REACH_BLOCKS + 1)})
    there = [block for part in document.present(document.blocks) for block in near if block in part]
    for _, run in groupby(enumerate(there), lambda each: each[1] - each[0]):
        blocks = [block for _, block in run]
        wanted = [block for block in blocks if block in best]
        try:
            yield from _paragraphs(tokenizer, document, range(blocks[0], blocks[-1] + 1), wanted, words)
        except (DamagedError, NotFound):
            for block in wanted:
                with suppress(DamagedError, NotFound):
                    yield from _paragraphs(tokenizer, document, range(block, block + 1), [block], words)


def _paragraphs(
    tokenizer: Any, document: Document, around: range, best: Sequence[int], words: set[str]
) -> Iterator[tuple[list[int], str]]:
    """For each of the ``best`` blocks: of the paragraphs that it has a part of, those that have most of ``words``.

    Each paragraph comes once, with its blocks. The best one is enough if it is as long as the block: what stands beside
    the right paragraph misleads small models. One that goes on for more than ``REACH_BLOCKS`` before or behind the
    block is cut one block from it. All is within ``around``.
    """
    ids, size, live = document.tokens(around), document.memory.spec.block_size, document.blocks
    text, ends = _decoded(tokenizer, ids, [size * n for n in range(len(around) + 1)])

    def begin(block: int) -> int:
        return ends[min(max(block - around.start, 0), len(around))]

    chosen = dict[tuple[int, int], list[int]]()
    for block in best:
        first, last = begin(block), begin(block + 1)
        if own := text[first:last].strip():  # what is blank at its borders ends paragraphs too
            first = text.index(own, first)
            last = first + len(own)
        before = [each.end() for each in BLANK.finditer(text, begin(block - REACH_BLOCKS), first)]
        behind = BLANK.search(text, last, begin(block + 1 + REACH_BLOCKS))
        start = before[-1] if before else begin(block - (REACH_BLOCKS if block - REACH_BLOCKS <= live.start else 1))
        stop = (
            behind.start()
            if behind
            else begin(block + 1 + (REACH_BLOCKS if block + 1 + REACH_BLOCKS >= live.stop else 1))
        )
        for span in _fitting(text, _between(BLANK, text, start, stop), range(first, last), words):
            chosen.setdefault(span, []).append(block)
    met = list[tuple[int, int, list[int]]]()
    for (start, stop), blocks in sorted(chosen.items()):
        if met and start <= met[-1][1]:  # of a text without paragraphs
            start, _, others = met.pop()
            blocks = [*others, *blocks]
        met.append((start, stop, blocks))
    for start, stop, blocks in met:
        yield blocks, text[start:stop].strip()


def _decoded(tokenizer: Any, ids: Tensor, cuts: Sequence[int]) -> tuple[str, list[int]]:
    """The text of tokens, and where in it those before each of ``cuts`` end."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    parts = (str(tokenizer.decode(ids[:cut], skip_special_tokens=True)) for cut in cuts)
    # A part that ends inside a character is decoded otherwise at its end, by some tokenizers to more characters.
    return text, [*accumulate((len(commonprefix([part, text])) for part in parts), max)]  # noqa: RUF071 - of characters


def _between(borders: re.Pattern[str], text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """What lies between the ``borders`` from ``start`` to ``stop``, where it is more than blank."""
    edges = [(start, start), *(each.span() for each in borders.finditer(text, start, stop)), (stop, stop)]
    return [(end, begin) for (_, end), (begin, _) in pairwise(edges) if text[end:begin].strip()]


def _fitting(text: str, spans: Sequence[tuple[int, int]], block: range, words: set[str]) -> list[tuple[int, int]]:
    """The ``spans`` of ``text`` with most of ``words``, then most of the ``block``, until they are as long as it."""
    there = {span: words_of(text[slice(*span)]) for span in spans}
    weights = _weights(words, there.values())

    def fit(span: tuple[int, int]) -> tuple[float, int]:
        own = min(span[1], block.stop) - max(span[0], block.start)
        return sum(weights.get(word, 0) for word in {*there[span]}), own

    chosen = list[tuple[int, int]]()
    for span in sorted(spans, key=fit, reverse=True):
        if not chosen or sum(stop - start for start, stop in chosen) < len(block):
            chosen.append(span)
    return chosen


def _weights(words: set[str], texts: Iterable[Sequence[str]]) -> dict[str, float]:
    """How rare those of ``words`` are that are in ``texts``."""
    counts = Counter(word for each in texts for word in each)
    return {word: math.log(1 + counts.total() / counts[word]) for word in words & counts.keys()}


def quoted_in(trace: Trace) -> list[tuple[str, int]]:
    """The blocks that were quoted before the answer of a trace."""
    told = trace.info.get("quoted")
    pairs = told if isinstance(told, list) else []
    return [(each[0], each[1]) for each in pairs if isinstance(each, list) and [*map(type, each)] == [str, int]]


def written_with(
    reader: PassageReader,
    used: Sequence[tuple[str, int, float]],
    scores: Mapping[tuple[str, int], float],
    words: str,
    *,
    quoted: Sequence[tuple[str, int]] = (),
    most: int = MAX_SOURCES,
) -> list[Passage]:
    """The passages of an answer: ``quoted`` blocks, then those ``used``, (document, block, part of attention)."""
    parts = {(document, block): part for document, block, part in used}
    places = [*quoted, *(place for place in parts if place not in quoted)][:most]
    found = passages(reader, [Match(*place, parts.get(place, 0.0)) for place in places], words)
    return [
        replace(each, score=scores.get(place), attention=parts.get(place), quoted=place in quoted)
        for each in found
        for place in [(each.document, each.block)]
    ]


def unsupported(reader: PassageReader, places: Iterable[tuple[str, int]], question: str, answer: str) -> list[str]:
    """Words of ``answer`` that neither ``question`` nor what stands at ``places`` (document, block) has, in order.

    Words are the same that begin with the same ``STEM`` letters; words that every text has do not count.
    """
    known = {word[:STEM] for word in words_of(question)}
    for name, block in places:
        with suppress(DamagedError):  # since it was attended to
            if document := stored(reader.memories, name):
                known.update(word[:STEM] for word in words_of(_Surroundings.of(reader.tokenizer, document, block).text))
    words = dict.fromkeys(words_of(answer))
    return [word for word in words if word not in FUNCTION_WORDS and word[:STEM] not in known]


def passages(reader: PassageReader, matches: Sequence[Match], words: str) -> list[Passage]:
    """What was found with ``words``, and where it stands; without what is not in the memories any more.

    The words of question and answer choose what of each block is told. Of several sentences that fit as well the first
    is told, and where no word is in it what the block begins with.
    """
    documents = {name: stored(reader.memories, name) for name in {match.document for match in matches}}
    found = [(there, match.block, match.score) for match in matches if (there := documents[match.document])]
    around = [_Surroundings.of(reader.tokenizer, document, block) for document, block, _ in found]
    weights = _weights({*words_of(words)}, (sentence.words for each in around for sentence in each.sentences))
    places = _places(reader.tokenizer, [(document, block) for document, block, _ in found])
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
                quoted=False,
                excerpt=excerpt,
                text=each.own.replace("\f", "\n"),
            )
        )
    return made


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
        reach, live = -(-BORDER_TOKENS // size), document.blocks
        near = range(max(live.start, block - reach), min(live.stop, block + reach + 1))
        part = next((each for each in document.present(near) if block in each), range(block, block + 1))
        try:
            ids = document.tokens(part)
        except DamagedError:  # beside it, or it is told now
            part = range(block, block + 1)
            ids = document.tokens(part)
        at = (block - part.start) * size
        own = whole_characters(str(tokenizer.decode(ids[at : at + size], skip_special_tokens=True)))
        text, (start, stop) = _decoded(tokenizer, ids, [at, at + size])
        spans = [each for each in _between(SENTENCES, text, 0, len(text)) if each[0] < stop and each[1] > start]
        there = [_Sentence(*each, words_of(text[slice(*each)])) for each in spans]
        return cls(text, start, own, there)

    def counted(self, mark: str, at: int) -> int:
        """How often ``mark`` comes between the begin of the block and ``at``; below 0 where that lies before it."""
        return self.text.count(mark, self.start, at) - self.text.count(mark, at, self.start)


def whole_characters(text: str) -> str:
    """The text of a block without the parts of characters that it begins or ends with: tokens may be bytes."""
    return text.strip("\N{REPLACEMENT CHARACTER}")


def _excerpt(around: _Surroundings, weights: dict[str, float]) -> tuple[int, str]:
    """Where what is told of a block begins, and its words on one line."""
    if not around.sentences:
        return around.start, ""
    sums = [sum(weights.get(word, 0) for word in {*each.words}) for each in around.sentences]
    chosen = sums.index(max(sums))
    first, *others = around.sentences[chosen:]
    start, text = first.start, around.text
    if (
        first.stop - start > EXCERPT_CHARS
    ):  # a part of it, with the rarest of the words or else what the block begins with
        rare = max({*first.words} & weights.keys(), key=lambda word: (weights[word], word), default="")
        word = re.compile(rf"\b{re.escape(rare)}\b", re.IGNORECASE)
        inside = max(start, around.start)
        found = (word.search(text, inside) or word.search(text, start)) if rare else None
        at = found.start() if found else inside
        if at + len(rare) - start > EXCERPT_CHARS:
            start = _border(text, at - EXCERPT_CHARS // 2 if rare else at)
    stop = first.stop
    for each in others:
        if len(_squeezed(text[start : each.stop])) > EXCERPT_CHARS:
            break
        stop = each.stop
    told = _squeezed(text[start:stop])
    short = textwrap.shorten(told, EXCERPT_CHARS, placeholder=" …").removeprefix("…") or told[: EXCERPT_CHARS - 1] + "…"
    return start, "… " * (start > first.start) + short


def _border(text: str, at: int) -> int:
    """Where the first word from ``at`` on begins, or ``at`` where that is far."""
    found = re.compile(r"(?<!\S)\S").search(text, at, at + EXCERPT_CHARS // 2)
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
