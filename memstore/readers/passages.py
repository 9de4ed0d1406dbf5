"""Passages of documents: the quotes before a question, and the sources after an answer.

A ``Passage`` is the best sentence of a block, with its line and page, and not the beginning of the block.
"""

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby, pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import torch

from memstore.errors import DamagedError, NotFound
from memstore.index.words import FUNCTION_WORDS, STEM, asked_words, words_of
from memstore.memory.search import Match
from memstore.memory.shared import CHAT

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.memory import Document, Memory, Trace

EXCERPT_CHARS = 160
"""Most characters of an excerpt."""
MAX_SOURCES = 8
"""Default number of sources of an answer."""
SEPARATOR = "\n\n"
"""The text after each quoted passage."""
CANDIDATES = 4
"""So many of the best blocks are considered for one quote. For several twice as many are, and so many quoted."""
REACH_BLOCKS = 2
"""A quoted paragraph may begin and end so many blocks before and after its block."""
BLANK = re.compile(r"\n\s*\n|\f")
"""The text between paragraphs."""
BORDER_TOKENS = 256
"""Sentences at the borders of a block may begin and end so many tokens before and after it."""
PAGE = 1 << 14
"""Most tokens of a first page. Its end is searched for within them."""
SENTENCES = re.compile(
    r"(?<=\w{3}\.)\s+|(?<=[!?])\s+|(?<=[!?][\"')\u201d\u2019])\s+|(?<=[\u3002\uff01\uff1f])"
    r"|\n[\n\f]+|\f[\n\f]*|\n(?![a-z])|(?<![^\n\f]{40})\n"
)
"""The end of a sentence, but not after "Dr." and the like, or where a long line goes on with a small letter."""
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""Letters of scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_ENGLISH = {"the", "who", "how", "why", "did", *(word for word in FUNCTION_WORDS if len(word) > 3)}
"""Words that tell an English question from others. "Is", "in" and "was" are words of other languages too."""
_LISTS = re.compile(
    r"\b((?<!at )(?<!after )all|each|every|list|which (?!is\b|was\b|has\b|does\b|\w+[su]s\b)\w+s"
    r"|(what|who) (are|were) (the|my|our|your|their))\b"
)
"""Words of an English question that asks for a list."""
_BETWEEN = re.compile(r"[,;]?(?<!\s)\s+(?:and|or|than)\s+|[,;]\s+", re.IGNORECASE)
"""The text between things that an English question asks for."""
_CONTRACTED = re.compile("\\b\\w+n['\u2019]t\\b|['\u2019](?:re|ve|ll|d|m|s)\\b")
"""Parts of English words that would count as words of their own."""
_PLURAL = re.compile(r"(?<=\w{2}[^\Wsiu])s\Z")
"""The end of "huts", not of "gas", "bus", "boss" or "analysis"."""
_REQUESTING = {"please", "tell", "explain", "describe", "many", "much"}
"""Words that ask, and say nothing of what is asked about."""
_ANSWERING = {"yes", "no", "cannot", "there", "also", "only", "so", "because", "will", "would", "may", "might", "must"}
_ANSWERING |= FUNCTION_WORDS
"""Words of answers, which need no source."""


Reader = Any
"""A ``memstore.readers.reader.Reader``, whose file imports this one."""
Place = tuple[str, int]
"""A document and a block."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A retrieved block, with its best sentence."""

    document: str
    block: int
    first_token: int
    """The block's first token in the document."""
    line: int | None
    """The line of the document where ``excerpt`` begins, from 1; None if blocks before it were dropped."""
    page: int | None
    """Its page, from 1; None for a document without pages."""
    score: float | None
    """Its score in a search, or for the question of an answer. None if the block needed no choice."""
    attention: float | None = None
    """The share of attention on its states: the mean over an answer's tokens, layers and heads. None without an answer,
    or if only its text was attended to. Attention on quoted text does not count."""
    quoted: bool = False
    """Whether a paragraph that overlaps it also stood as text before the question."""
    excerpt: str
    """The sentence or line with most of the words, rare ones first, of the block or, if it was quoted, its paragraph;
    and the text after it; on one line."""
    text: str
    """The whole text of the block."""


def stored(memories: Sequence[Memory], name: str) -> Document | None:
    """Return the document ``name``; None if no memory or several have it. Of conversations the first counts."""
    found: list[Document] = []
    for memory in memories:
        with suppress(NotFound):
            document = memory.document(name)
            if document.id is not None:
                found.append(document)
    return found[0] if len(found) == 1 or (found and name.startswith(CHAT)) else None


def quotes(
    reader: Reader, said: Sequence[str], about: str, *, session: str | None = None, alone: bool = False
) -> tuple[list[Place], str]:
    """Return as many of the best blocks for a question as ``reader`` quotes, and the text of their best paragraphs.

    ``said``: the turns so far, the question last. ``about``: the words of the question, and of the text that it refers
    to. ``alone``: quote the best block alone.

    Passages are in the order of ``Retrieval.order``: the best one nearest to the question, or by time. The ``session``,
    a document that is seen beside them, is not quoted. Nor are blocks that cannot be read, or documents whose name is
    in several memories.
    """
    most, own = 1 if alone else reader.quoted_blocks, None if session is None else stored([reader.memory], session)
    auto = reader.retrieval.quote == "auto" and not alone
    parts = _parts(about) if auto and about.strip() in said[-1] else []
    lists = auto and _LISTS.search(about.lower()) is not None
    candidates = max(most, 2 * CANDIDATES if parts or lists else CANDIDATES) if reader.retrieval.words else most
    try:
        found = reader.search(said, candidates + (0 if own is None else len(own.blocks)))
    except DamagedError:  # the answer may not need it; if it does, the answer raises
        return [], ""
    words = {*asked_words(about)}
    found = [match for match in found if match.document != session][:candidates]
    holders = {name: each for name in {match.document for match in found} if (each := stored(reader.memories, name))}

    @cache
    def paragraphs(name: str, *blocks: int) -> list[tuple[list[int], str]]:
        return [*_quotes(reader.tokenizer, holders[name], sorted(blocks), words)]

    best = [(match.document, match.block) for match in found if match.document in holders]
    if reader.retrieval.words:
        texts = {place: " ".join(text for _, text in paragraphs(*place)) for place in best}
        told = {place: words & {*words_of(text)} for place, text in texts.items()}
        best = _asked_for(told, texts, parts, lists=lists) if parts or lists else _telling(told, most)
    made = list[tuple[list[Place], str]]()
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


def _telling(found: Mapping[Place, set[str]], most: int) -> list[Place]:
    """Return ``most`` of the blocks ``found``, best first, by the question's words in their paragraphs.

    A block with all words of a better one, and more, comes before it. In lists and tables many blocks are alike, and
    the name that distinguishes them stands elsewhere in the paragraph. A better block without any of the words was
    found by its meaning, and stays.
    """
    left, chosen = [*found], list[Place]()
    while left and len(chosen) < most:
        best = left[0]
        for place in left:
            if set() < found[best] < found[place]:
                best = place
        chosen.append(best)
        left.remove(best)
    return chosen


def _asked_for(
    told: Mapping[Place, set[str]], texts: Mapping[Place, str], parts: Sequence[str], *, lists: bool
) -> list[Place]:
    """Return the block that ``_telling`` puts first, and that with most words of each part of a question.

    If it asks for a list, then the next best whose text has as many of its words come too: of several things, each has
    as many. Any text has one of the words.
    """
    chosen = _telling(told, 1)
    least = max((len(told[place]) for place in chosen), default=0)
    for part in parts:
        having = {place: len(told[place] & {*words_of(part)}) for place in told}
        most = max(having.values(), default=0)
        chosen += [place for place in told if having[place] == most > 0][:1]
    chosen += [place for place in told if lists and len(told[place]) >= least > 1]
    first = dict[str, Place]()
    for place in chosen:
        first.setdefault(texts[place], place)
    return [*first.values()][: max(CANDIDATES, 1 + len(parts))]


def _parts(question: str) -> list[str]:
    """Return the parts of an English question that asks for two things or more, else none. A long text has too many."""
    parts = [part for part in _BETWEEN.split(question) if {*words_of(part)} - FUNCTION_WORDS]
    return parts if 1 < len(parts) <= 2 * CANDIDATES else []


def _quotes(
    tokenizer: Any, document: Document, best: Sequence[int], words: set[str]
) -> Iterator[tuple[list[int], str]]:
    """Yield paragraphs of the ``best`` blocks in order, each with those blocks. Near damage, blocks are read alone."""
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
    """Yield for each of the ``best`` blocks the paragraphs with most of ``words``, of those that overlap it.

    Each paragraph comes once, with its blocks. The best one is enough if it is as long as the block, because text
    beside the right paragraph misleads small models. A paragraph that goes on for more than ``REACH_BLOCKS`` before or
    after the block is cut one block from it. Everything is within ``around``.
    """
    ids, size, live = document.tokens(around), document.memory.spec.block_size, document.blocks
    text, ends = _decoded(tokenizer, ids, [size * n for n in range(len(around) + 1)])

    def begin(block: int) -> int:
        return ends[min(max(block - around.start, 0), len(around))]

    chosen = dict[tuple[int, int], list[int]]()
    for block in best:
        first, last = begin(block), begin(block + 1)
        if own := text[first:last].strip():  # blank text at the block's borders also ends paragraphs
            first = text.index(own, first)
            last = first + len(own)
        before = [each.end() for each in BLANK.finditer(text, begin(block - REACH_BLOCKS), first)]
        behind = BLANK.search(text, last, begin(block + 1 + REACH_BLOCKS))
        reach_before = REACH_BLOCKS if block - REACH_BLOCKS <= live.start else 1
        reach_behind = REACH_BLOCKS if block + 1 + REACH_BLOCKS >= live.stop else 1
        start = before[-1] if before else begin(block - reach_before)
        stop = behind.start() if behind else begin(block + 1 + reach_behind)
        for span in _fitting(text, _between(BLANK, text, start, stop), range(first, last), words):
            chosen.setdefault(span, []).append(block)
    met = list[tuple[int, int, list[int]]]()
    for (start, stop), blocks in sorted(chosen.items()):
        if met and start <= met[-1][1]:  # happens in a text without paragraphs
            start, _, others = met.pop()
            blocks = [*others, *blocks]
        met.append((start, stop, blocks))
    for start, stop, blocks in met:
        yield blocks, text[start:stop].strip()


def _decoded(tokenizer: Any, ids: Tensor, cuts: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of tokens, and the end of the text before each of ``cuts``."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    parts = (str(tokenizer.decode(ids[:cut], skip_special_tokens=True)) for cut in cuts)
    # A part that ends inside a character decodes differently at its end, with some tokenizers to more characters.
    return text, [*accumulate((len(commonprefix([part, text])) for part in parts), max)]  # noqa: RUF071 - of characters


def _between(borders: re.Pattern[str], text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the spans between the ``borders`` from ``start`` to ``stop`` that are not blank."""
    edges = [(start, start), *(each.span() for each in borders.finditer(text, start, stop)), (stop, stop)]
    return [(end, begin) for (_, end), (begin, _) in pairwise(edges) if text[end:begin].strip()]


def _fitting(text: str, spans: Sequence[tuple[int, int]], block: range, words: set[str]) -> list[tuple[int, int]]:
    """Return the ``spans`` with most of ``words``, then most of the ``block``, until they are as long as the block."""
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
    """Return how rare each of ``words`` is in ``texts``, for the words that occur there."""
    counts = Counter(word for each in texts for word in each)
    return {word: math.log(1 + counts.total() / counts[word]) for word in words & counts.keys()}


def quoted_in(trace: Trace) -> list[Place]:
    """Return the blocks that were quoted before the answer of a trace."""
    told = trace.info.get("quoted")
    pairs = told if isinstance(told, list) else []
    return [(each[0], each[1]) for each in pairs if isinstance(each, list) and [*map(type, each)] == [str, int]]


def written_with(
    reader: Reader,
    used: Sequence[tuple[str, int, float]],
    scores: Mapping[Place, float],
    words: str,
    *,
    quoted: Sequence[Place] = (),
    most: int = MAX_SOURCES,
) -> list[Passage]:
    """Return the passages of an answer: ``quoted`` blocks, then those ``used``, as (document, block, attention).

    If the question chose them, the best scores come first. Attention says less: the first tokens of any document get
    much of it. Otherwise ``used`` has the order.
    """
    parts = {(document, block): part for document, block, part in used}
    others = [place for place in parts if place not in quoted]
    if reader.takes_questions:
        others.sort(key=lambda place: scores.get(place, -math.inf), reverse=True)
    places = [*quoted, *others][:most]
    found = passages(reader, [Match(*place, parts.get(place, 0.0)) for place in places], words, quoted)
    return [
        replace(each, score=scores.get(place), attention=parts.get(place), quoted=place in quoted)
        for each in found
        for place in [(each.document, each.block)]
    ]


def unsupported(reader: Reader, places: Iterable[Place], question: str, answer: str) -> list[str]:
    """Return words of ``answer`` that are neither in ``question`` nor at ``places`` (document, block), in order.

    Two words are the same if they begin with the same ``STEM`` letters, or differ in a plural's s. Words that every
    text has do not count. The name of a document is a part of it.
    """
    places = [*places]
    known = _stems(" ".join((question, *(name for name, _ in places))))
    for name, block in places:
        for memory in reader.memories:
            with suppress(DamagedError, NotFound):  # damaged since, or a block of another document of this name
                if document := stored([memory], name):
                    known |= _stems(_Surroundings.of(reader.tokenizer, document, block).text)
    words = dict.fromkeys(words_of(_CONTRACTED.sub("", unicodedata.normalize("NFC", answer).lower())))
    return [word for word in words if word not in _ANSWERING and _stem(word) not in known]


def absent(question: str, text: str) -> tuple[list[str], float] | None:
    """Return the words of ``question`` that ``text`` lacks, in order, and the share that it has.

    None for a question of one word, or one that has no English word that only asks: which words of other languages do,
    is not known. Words are the same as in ``unsupported``.
    """
    asked = words_of(_CONTRACTED.sub("", unicodedata.normalize("NFC", question).lower()))
    words = dict.fromkeys(word for word in asked if word not in FUNCTION_WORDS and word not in _REQUESTING)
    if len(words) < 2 or not _ENGLISH & {*asked} or UNSPACED.search(question):
        return None
    there = _stems(text)
    lacking = [word for word in words if _stem(word) not in there]
    return lacking, 1 - len(lacking) / len(words)


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in words_of(unicodedata.normalize("NFC", text))}


def _stem(word: str) -> str:
    """Return what identifies a word: its first letters, without a plural's s, and accents, which many do not type."""
    letters = unicodedata.normalize("NFD", word)
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return _PLURAL.sub("", plain)[:STEM]


def passages(reader: Reader, matches: Sequence[Match], words: str, quoted: Sequence[Place] = ()) -> list[Passage]:
    """Return the passages of blocks found with ``words``, without blocks that have left the memories.

    Blocks of a document are left out if several memories have one of its name: nothing tells which one was found.
    The words of question and answer choose the excerpt of each block. If several sentences fit equally well, the first
    is taken. If none has any of the words, the excerpt is the beginning of the block.
    """
    documents = {name: stored(reader.memories, name) for name in {match.document for match in matches}}
    found = [(there, match.block, match.score) for match in matches if (there := documents[match.document])]
    around = [
        _Surroundings.of(reader.tokenizer, document, block, whole=(document.name, block) in quoted)
        for document, block, _ in found
    ]
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
    """The block's first character in it."""
    own: str
    """The text of the block alone."""
    sentences: list[_Sentence]
    """The sentences that overlap the block, or its paragraphs."""

    @classmethod
    def of(cls, tokenizer: Any, document: Document, block: int, *, whole: bool = False) -> _Surroundings:
        """``whole``: with all sentences of its paragraphs."""
        size = document.memory.spec.block_size
        reach, live = -(-BORDER_TOKENS // size), document.blocks
        near = range(max(live.start, block - reach), min(live.stop, block + reach + 1))
        part = next((each for each in document.present(near) if block in each), range(block, block + 1))
        try:
            ids = document.tokens(part)
        except DamagedError:  # the damage is in the blocks beside it, or the next read raises
            part = range(block, block + 1)
            ids = document.tokens(part)
        at = (block - part.start) * size
        own = whole_characters(str(tokenizer.decode(ids[at : at + size], skip_special_tokens=True)))
        text, (start, stop) = _decoded(tokenizer, ids, [at, at + size])
        first, last = start, stop
        if whole:
            first = max((each.end() for each in BLANK.finditer(text, 0, start)), default=0)
            last = end.start() if (end := BLANK.search(text, stop)) else len(text)
        spans = [each for each in _between(SENTENCES, text, 0, len(text)) if each[0] < last and each[1] > first]
        there = [_Sentence(*each, words_of(text[slice(*each)])) for each in spans]
        return cls(text, start, own, there)

    def counted(self, mark: str, at: int) -> int:
        """Count ``mark`` between the beginning of the block and ``at``; negative if ``at`` lies before it."""
        return self.text.count(mark, self.start, at) - self.text.count(mark, at, self.start)


def whole_characters(text: str) -> str:
    """Strip incomplete characters at both ends of a block's text: tokens may be bytes."""
    return text.strip("\N{REPLACEMENT CHARACTER}")


def _excerpt(around: _Surroundings, weights: dict[str, float]) -> tuple[int, str]:
    """Return where the excerpt of a block begins, and its words on one line."""
    if not around.sentences:
        return around.start, ""
    sums = [sum(weights.get(word, 0) for word in {*each.words}) for each in around.sentences]
    chosen = sums.index(max(sums))
    first, *others = around.sentences[chosen:]
    start, text = first.start, around.text
    # Of a long sentence a part is shown: with the rarest of the words, or else with the beginning of the block.
    if first.stop - start > EXCERPT_CHARS:
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
    """Return where the first word from ``at`` on begins, or ``at`` if that is far."""
    found = re.compile(r"(?<!\S)\S").search(text, at, at + EXCERPT_CHARS // 2)
    return found.start() if found else at


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _places(tokenizer: Any, places: Sequence[tuple[Document, int]]) -> dict[Place, tuple[int | None, int | None]]:
    """Return the line and page where each block begins. Both are None after dropped blocks; pages if none ends."""
    found: dict[Place, tuple[int | None, int | None]] = {}
    for name, group in groupby(sorted(places, key=lambda each: (each[0].name, each[1])), lambda each: each[0].name):
        there = list(group)
        document, start, lines, pages = there[0][0], 0, 1, 1
        begins: dict[int, tuple[int, int]] = {}
        stop = min(document.blocks.stop, there[-1][1] + -(-PAGE // document.memory.spec.block_size))
        with suppress(NotFound, DamagedError):  # the text of dropped or unreadable blocks is unknown
            for block in (*(block for _, block in there), stop):
                if block == stop and pages > 1:
                    break  # else find out whether this is a first page; no token is read twice
                newlines, feeds = _breaks(tokenizer, document.tokens(range(start, block)))
                start, lines, pages = block, lines + newlines, pages + feeds
                begins[block] = lines, pages
        for _, block in there:
            line, page = begins.get(block, (None, None))
            found[name, block] = line, page if pages > 1 else None
    return found


def _breaks(tokenizer: Any, tokens: torch.Tensor) -> tuple[int, int]:
    """Count the new lines and new pages of a text.

    Single tokens are enough: only newline and form feed have these bytes.
    """
    ids, counts = tokens.unique(return_counts=True)
    texts = tokenizer.batch_decode(ids[:, None]) if len(ids) else []
    often = list(zip(texts, counts.tolist(), strict=True))
    newlines, feeds = (sum(text.count(mark) * count for text, count in often) for mark in "\n\f")
    return newlines, feeds
