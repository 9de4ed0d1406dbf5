"""A question to a memory: put as the model was tuned to be asked, and an answer that knows its sources.

``Reader.ask`` makes an ``Answer``, ``Reader.chat`` a conversation of them. How a model wants to be spoken to is in its
chat template; a ``Template`` is it, cut where people's words go. A source is a ``Passage``: of a block the sentence
that fits best, with its line and page, and not the block's begin.
"""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.index.words import words_of
from memstore.memory import Traces
from memstore.memory.search import Match
from memstore.memory.traces import best_scores, most_weight
from memstore.memory.view import noting_left_out
from memstore.readers.kinds import encode

if TYPE_CHECKING:
    from memstore.memory import Document, Memory, Recorder, Trace
    from memstore.readers.kinds import Kind, Retrieval

# Asked for a short phrase and "never a sentence", small models answer more briefly and are wrong more often: in a
# sentence they say first what they were asked for (docs/notes/questions.md).
INSTRUCTION = "Answer from what you have read, in a few words. If it does not say, answer that you do not know."
"""The system prompt of a question, unless said otherwise."""
TELL = Callable[[str], object]
THINK, THOUGHT = "<think>", "</think>"
"""Around what a model thinks aloud."""
SHORTEST, LONGEST, TIMES = 4, 32, 6
"""An answer goes round in circles where so many tokens, from the first number to the second, come so many times."""
LONG = 50
"""Words of somebody from which on a question in them chooses. People's questions are shorter."""
SHORT = 160
"""Characters of an excerpt at most."""
SHOWN = 8
"""Sources of an answer, unless said otherwise."""
SEPARATOR = "\n\n"
"""Behind each passage that is quoted."""
BESIDE = 256
"""Tokens before and behind a block in which the sentences at its borders may begin and end."""
PAGE = 1 << 14
"""Tokens of a first page at most: so far it is looked for its end."""
SENTENCES = re.compile(r"(?<=\w{3}\.)\s+|(?<=[!?])\s+|(?<=[!?][\"')\u201d\u2019])\s+|(?<=[\u3002\uff01\uff1f])|[\n\f]+")
"""Where a sentence ends: not behind "Dr." and the like."""
_LABELLED = re.compile(r"(?:.*\n)?\s*(?:question|q):\s*(.+?)\s*\n\s*(?:answer|a):\s*", re.IGNORECASE | re.DOTALL)
_ASKING = re.compile(r"\b(who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE)
_WORDS = ("memstore-words-1", "memstore-words-2", "memstore-words-3")
"""Stand for people's words while a template is cut: ordinary letters, which no template changes."""


class Asker(Protocol):
    """What is needed of a reader to ask its model; a ``Reader`` is one."""

    model: Any
    tokenizer: Any
    kind: ClassVar[Kind]
    several: ClassVar[bool]
    names: list[str] | None

    @property
    def retrieval(self) -> Retrieval:
        """How blocks are chosen."""

    @property
    def takes_questions(self) -> bool:
        """Whether a question chooses blocks by itself."""

    @property
    def quoted_blocks(self) -> int:
        """So many blocks are quoted before a question."""

    @property
    def documents(self) -> list[Document]:
        """Those that are seen."""

    def search(self, text: str, top_k: int) -> list[Match]:
        """The best blocks for a question."""

    @property
    def memory(self) -> Memory:
        """The memory that is read into."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """All memories."""

    def generate(self, text: torch.Tensor, **options: Any) -> Any:
        """Go on after ``text``."""

    def record(self, *, question: str, traces: Traces, **info: Any) -> AbstractContextManager[Recorder]:
        """Record what is retrieved."""

    def append(self, text: list[int], document: str) -> Any:
        """Read more at the end of a document."""

    def update(self, text: torch.Tensor, document: str) -> Any:
        """Read a text in place of another."""

    def seeing(self, *, tail: bool) -> AbstractContextManager[None]:
        """Whether calls see the document's end without a search."""


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
    """Whether it also stood as text before the question."""
    excerpt: str
    """The sentence or line of the block with most of the words, rare ones first, and what follows; on one line."""
    text: str
    """All of the block."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model has answered; ``str(answer)`` is its text."""

    question: str
    text: str
    tokens: list[int]
    """Without what ends it."""
    thought: list[int]
    """Tokens of what the model has thought aloud before, between ``<think>`` and ``</think>``."""
    ended: bool
    """Whether the model has ended it; not the limit of tokens, nor that it went round in circles."""
    seconds: float
    trace: int | None
    """Its number among the traces of the memory, where it was recorded."""
    used: list[tuple[str, int, float]]
    """All blocks that were retrieved for it as (document, block, part of attention), most attention first."""
    scores: dict[tuple[str, int], float]
    """The scores by which blocks were chosen for it, of (document, block); without those that nobody had to choose."""
    quoted: list[tuple[str, int]]
    """Those that also stood as text before the question, with their neighbours, best first; see
    ``Retrieval.quote``."""
    missing: dict[tuple[str, int], str]
    """Blocks that it was written without because they could not be read, as (document, block), and why: empty unless
    ``Retrieval(on_error="miss")``."""
    reader: Asker

    def __str__(self) -> str:
        return self.text

    def sources(self, most: int = SHOWN) -> list[Passage]:
        """The ``most`` blocks that it owes most to: those that were quoted, best first, then by attention.

        To be asked for while the memory is open.
        """
        words = f"{self.question}\n{self.text}"
        return written_with(self.reader, self.used, self.scores, words, quoted=self.quoted, most=most)


def stored(memories: Sequence[Memory], name: str) -> Document | None:
    """The document ``name`` of the first of ``memories`` that has it; None where none has."""
    for memory in memories:
        with suppress(NotFound):
            document = memory.document(name)
            if document.id is not None:
                return document
    return None


def quotes(reader: Asker, question: str, *, session: str | None = None) -> tuple[list[tuple[str, int]], str]:
    """The best blocks for a question, as many as ``reader`` quotes, and the text that they are with their neighbours.

    Passages stand as ``Retrieval.order`` says, the best one nearest to the question or in order of time. The
    ``session``, a document that is seen beside, is not quoted, nor is what cannot be read, or is in several memories
    under one name.
    """
    most, said = reader.quoted_blocks, None if session is None else stored(reader.memories, session)
    try:
        found = reader.search(question, most + (0 if said is None else len(said.blocks)))
    except DamagedError:  # an answer may need none of it, and says so itself if it does
        return [], ""
    best = [(match.document, match.block) for match in found if match.document != session][:most]
    texts = dict[tuple[str, range], str]()
    for name in dict.fromkeys(name for name, _ in best):
        holders = [document for memory in reader.memories if (document := stored([memory], name))]
        if len(holders) == 1:
            for blocks, text in _runs(reader.tokenizer, holders[0], [block for at, block in best if at == name]):
                texts[name, blocks] = text

    def rank(run: tuple[str, range]) -> int:
        return min((at for at, (name, block) in enumerate(best) if name == run[0] and block in run[1]), default=most)

    if reader.retrieval.order == "score":
        runs = sorted(texts, key=rank, reverse=True)
    else:
        places = [document.name for document in reader.documents]
        runs = sorted(texts, key=lambda run: (places.index(run[0]), run[1].start))
    quoted = [(name, block) for name, block in best if any(name == run[0] and block in run[1] for run in runs)]
    return quoted, "".join(texts[run] + SEPARATOR for run in runs)


def _runs(tokenizer: Any, document: Document, best: Sequence[int]) -> Iterator[tuple[range, str]]:
    """``best`` blocks of a document with their neighbours, as they follow each other; alone where those are damaged."""
    near = sorted({block + step for block in best for step in (-1, 0, 1)})
    there = [block for part in document.present(document.blocks) for block in near if block in part]
    for _, run in groupby(enumerate(there), lambda each: each[1] - each[0]):
        blocks = [block for _, block in run]
        for some in (range(blocks[0], blocks[-1] + 1), *(range(block, block + 1) for block in blocks if block in best)):
            try:
                tokens = document.tokens(some)
            except (DamagedError, NotFound):
                continue
            yield some, str(tokenizer.decode(tokens, skip_special_tokens=True))
            if len(some) == len(blocks):
                break


def quoted_in(trace: Trace) -> list[tuple[str, int]]:
    """The blocks that were quoted before the answer of a trace."""
    told = trace.info.get("quoted")
    pairs = told if isinstance(told, list) else []
    return [(each[0], each[1]) for each in pairs if isinstance(each, list) and [*map(type, each)] == [str, int]]


def written_with(
    reader: Asker,
    used: Sequence[tuple[str, int, float]],
    scores: Mapping[tuple[str, int], float],
    words: str,
    *,
    quoted: Sequence[tuple[str, int]] = (),
    most: int = SHOWN,
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


def passages(reader: Asker, matches: Sequence[Match], words: str) -> list[Passage]:
    """What was found with ``words``, and where it stands; without what is not in the memories any more.

    The words of question and answer choose what of each block is told. Of several sentences that fit as well the first
    is told, and where no word is in it what the block begins with.
    """
    documents = {name: stored(reader.memories, name) for name in {match.document for match in matches}}
    found = [(there, match.block, match.score) for match in matches if (there := documents[match.document])]
    around = [_Surroundings.of(reader.tokenizer, document, block) for document, block, _ in found]
    wanted = set(words_of(words))
    counts = Counter(word for each in around for sentence in each.sentences for word in sentence.words)
    weights = {word: math.log(1 + counts.total() / counts[word]) for word in wanted & counts.keys()}
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


@dataclass(frozen=True)
class Template:
    """What stands around people's words: a chat template, cut where the words go."""

    opening: str
    """Before the first words of a user, with the system prompt."""
    header: str
    """Between a user's words and the answer."""
    past: str
    """The same where the answer was given before: without what lets a model think first."""
    following: str
    """Between an answer and the user's next words; it begins with what ends the answer."""
    stop: str | None = None
    """A text that ends the answer, for models that have no token for it."""

    @classmethod
    def of(cls, tokenizer: Any, system: str | None = None) -> Template | None:
        """The template of a tokenizer with the system prompt ``system``; None where it has no template."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        user, said, again = _WORDS
        turns = [("user", user), ("assistant", said), ("user", again)]
        try:
            text = _rendered(tokenizer, [*([("system", system)] if system else []), *turns])
        # Some templates know no system; Jinja's errors are not to be imported here.
        except Exception as error:
            if not system:
                raise InvalidArgument(f"the model's chat template does not work: {error}. Ask with raw=True") from error
            text = _rendered(tokenizer, [("user", f"{system}\n\n{user}"), *turns[1:]])
        parts = []
        for word in _WORDS:
            part, found, text = text.partition(word)
            if not found:
                raise InvalidArgument("the model's chat template leaves words out. Ask with raw=True")
            parts.append(part)
        return cls(parts[0], text, parts[1], parts[2])

    @classmethod
    def plain(cls, system: str | None = None) -> Template:
        """For models without a template: names before what is said, as in a play."""
        return cls(f"{system}\n\nUser: " if system else "User: ", "\nAssistant:", "\nAssistant:", "\nUser: ", "\nUser:")

    def ends(self, tokenizer: Any) -> list[int]:
        """The tokens that end an answer: those of the tokenizer, and the first control token after one."""
        ids = self.controls(tokenizer, self.following)
        special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
        own = [tokenizer.eos_token_id, next((each for each in ids if each in special), None)]
        return list(dict.fromkeys(each for each in own if each is not None))

    @staticmethod
    def controls(tokenizer: Any, text: str) -> list[int]:
        """Tokens of the frame itself, in which control tokens are what they say; those of people's words are not."""
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return ids


def _rendered(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": words} for role, words in turns]
    # A model that thinks aloud first is asked not to; templates that do not know the word pass it over.
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    )


class Teller:
    """A streamer of transformers: tells an answer as it comes, whole characters only."""

    def __init__(
        self, reader: Asker, frame: Template | None, tell: TELL | None = None, stop: Sequence[str] = ()
    ) -> None:
        """``stop``: texts that end the answer, beside those of ``frame``."""
        self._made: list[int] = []
        """Without what ends it."""
        self._begin = 0
        """Where the answer begins in it, behind what was thought."""
        self._thinks, self._decided = frame is not None and frame.header.rstrip().endswith(THINK), False
        self.ended = False
        self.frame, self._tell, self._tokenizer = frame, tell, reader.tokenizer
        usual = reader.model.generation_config.eos_token_id
        self.ends: list[int] = [] if usual is None else [usual] if isinstance(usual, int) else list(usual)
        """The tokens that end it."""
        if frame is not None:
            self.ends = frame.ends(reader.tokenizer) or self.ends
        self._stops = [*stop, *([frame.stop] if frame is not None and frame.stop else [])]
        self.loops = False
        """Whether it goes round in circles; not looked for without a frame, where a model is let go on."""
        self._told, self._prompt = "", True

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then each token."""
        if self._prompt:
            self._prompt = False
            return
        for token in value.flatten().tolist():
            if token in self.ends:
                self.ended = True
            elif not self.ended:
                self._made.append(token)
        self._look_for_thoughts()
        self.loops = self.frame is not None and loops(self._made)
        if self._stops and not self.ended:
            text = self._decoded()
            self.ended = any(stop in text for stop in self._stops)
        self._tell_more(held=True)

    def end(self) -> None:
        """No more comes."""
        self._tell_more(held=False)

    def over(self, ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
        """For ``stopping_criteria`` of ``model.generate``, which has told of each token before it asks."""
        return torch.full((len(ids),), self.ended or self.loops, dtype=torch.bool, device=ids.device)

    @property
    def tokens(self) -> list[int]:
        """Of the answer so far, without what ends it."""
        return [] if self._thinks else self._made[self._begin :]

    @property
    def thought(self) -> list[int]:
        """What the model has thought aloud before it answered."""
        return self._made[:] if self._thinks else self._made[: self._begin]

    @property
    def text(self) -> str:
        """The answer so far. What a model has thought aloud before is not part of it."""
        text = self._decoded()
        for stop in self._stops:
            text = text.partition(stop)[0]
        return text if self.frame is None else text.strip()

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))

    # The marks may be control tokens, ordinary ones, or several of these; and where the template opens the thought
    # itself, only its end comes.
    def _look_for_thoughts(self) -> None:
        if self._decided:
            return
        text = str(self._tokenizer.decode(self._made, skip_special_tokens=False)).lstrip()
        if self._thinks or text.startswith(THINK):
            self._thinks = THOUGHT not in text
            self._begin = 0 if self._thinks else len(self._made)
            self._decided = not self._thinks
        else:
            self._decided = not THINK.startswith(text)

    def _tell_more(self, *, held: bool) -> None:
        text = self.text
        # A character may take several tokens, and what could be the beginning of the end is not told before it is not.
        begins = any(_begins(text, stop) for stop in self._stops)
        if held and (begins or text.endswith("\ufffd") or not (self._decided or self._thinks)):
            return
        if self._tell is not None and text.startswith(self._told) and len(text) > len(self._told):
            self._tell(text[len(self._told) :])
        self._told = text


def _begins(text: str, stop: str) -> bool:
    return any(text.endswith(stop[:n]) for n in range(1, len(stop)))


def loops(tokens: Sequence[int]) -> bool:
    """Whether the same few tokens have come again and again at the end of ``tokens``."""
    return any(
        len(tokens) >= TIMES * n and tokens[-TIMES * n : -n] == tokens[-(TIMES - 1) * n :]
        for n in range(SHORTEST, LONGEST + 1)
    )


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt: what stands before the user's words, the words, and what stands after them."""

    before: list[int]
    words: list[int]
    after: list[int]

    @property
    def tokens(self) -> list[int]:
        """All of them."""
        return [*self.before, *self.words, *self.after]


def framed(tokenizer: Any, frame: Template, words: str, before: str) -> Prompt:
    """A question in its frame. Names of control tokens in ``words`` are text."""
    return Prompt(frame.controls(tokenizer, before), encode(tokenizer, words), frame.controls(tokenizer, frame.header))


def asked_in(tokenizer: Any, text: str) -> str:
    """What is looked up for a query: the question in it, without the frame that it may be given in.

    Of a conversation in the chat template that is what the user says last, of ``Question: ... Answer:`` what stands
    between the labels (the last ones), and of a long message what is ``wanted_in`` it.
    """
    said = _said_last(tokenizer, text)
    labelled = _LABELLED.fullmatch(said)
    return wanted_in(labelled[1] if labelled else said)


def _said_last(tokenizer: Any, text: str) -> str:
    """What a user says last, where ``text`` begins as a rendered conversation does, with a control token; or all."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {*getattr(tokenizer, "all_special_tokens", []), *(str(each) for each in added if each.special)}
    frame = None
    if text.lstrip().startswith(tuple(names)):
        with suppress(InvalidArgument):  # a template that does not work has rendered nothing
            frame = Template.of(tokenizer)
    if frame is None:
        return text
    control = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    backwards = zip(reversed(frame.opening), reversed(frame.following), strict=False)
    before = "".join(one for one, other in takewhile(lambda pair: pair[0] == pair[1], backwards))[::-1]
    end = control.match(before)  # of the turn before, which the first turn has none of
    if end and control.search(before, end.end()):
        before = before[end.end() :].lstrip()
    _, found, said = text.rpartition(before)
    return (control.split(said)[0].strip() if found and control.search(before) else "") or text


def wanted_in(words: str) -> str:
    """What somebody wants to know who says ``words``: all of it, or the longest question in it, where it is long.

    A question behind or before a long letter chooses as it does alone, also where the letter asks how one is; all
    questions together would not (docs/notes/questions.md). A long text that asks nothing chooses as it is.
    """
    if len(words.split()) <= LONG:
        return words
    *said, last = SENTENCES.split(words.strip())
    asked = [each for each in (*said, last) if each.rstrip(" \"')\u201d\u2019").endswith(("?", "\uff1f"))]
    if last[-1:].isalnum() and _ASKING.search(last):  # the mark is often left out where a message ends
        asked.append(last)
    return max(reversed(asked), key=len, default=words)


def too_long(model: Any, length: int, new: int) -> str | None:
    """Why a prompt of ``length`` tokens and ``new`` more are too long for a model; None where they fit."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is None or length + new <= most:
        return None
    return f"the model takes {most:,} tokens, got {length:,} and {new:,} to be generated"


def answered(
    reader: Asker,
    question: str,
    prompt: Prompt,
    teller: Teller,
    *,
    max_tokens: int,
    trace: bool,
    session: str | None = None,
    told: Mapping[str, Any] | None = None,
    **options: Any,
) -> Answer:
    """Generate after ``prompt``, and note what was retrieved, and ``told``; see ``Reader.ask``.

    ``session``: the document of the conversation that it is about.
    """
    if reason := too_long(reader.model, len(prompt.tokens), max_tokens):
        raise InvalidArgument(f"{reason}: ask in fewer words, or read long texts into the memory")
    memory = reader.memory
    begun = time.perf_counter()
    options = {"do_sample": False, **options}
    quoted, asked = list[tuple[str, int]](), prompt
    if teller.frame is not None:
        if reader.takes_questions:
            options["query"] = question  # not the template around it, which is the same for all questions
            opening = teller.frame.controls(reader.tokenizer, teller.frame.opening)
            if prompt.tokens[: len(opening)] == opening:  # not where a conversation goes on
                options["opening"] = len(opening)
            if reader.quoted_blocks:
                best, text = quotes(reader, question, session=session)
                longer = replace(prompt, words=[*encode(reader.tokenizer, text), *prompt.words])
                if best and not too_long(reader.model, len(longer.tokens), max_tokens):
                    quoted, prompt = best, longer
        options["eos_token_id"] = teller.ends or None
    options["stopping_criteria"] = [*(options.get("stopping_criteria") or []), teller.over]
    traces = memory.traces if trace else Traces(None, memory.url)
    # A trace knows which blocks were quoted, and not their text, which it would keep when they are forgotten.
    info = {**(told or {}), **({"quoted": quoted} if quoted else {})}
    ids = torch.tensor([prompt.tokens], dtype=torch.int64, device=reader.model.device)
    with (
        torch.inference_mode(),
        noting_left_out() as missing,
        reader.record(question=question, traces=traces, **info) as recorder,
    ):
        recorder.describe(prompt=asked.tokens)
        made = reader.generate(ids, max_new_tokens=max_tokens, streamer=teller, **options)[0, ids.shape[1] :]
        recorder.close(made.tolist())
    steps = traces.get(recorder.number).steps()
    return Answer(
        question=question,
        text=teller.text,
        tokens=teller.tokens,
        thought=teller.thought,
        ended=not teller.loops and (teller.ended or len(made) < max_tokens),
        seconds=time.perf_counter() - begun,
        trace=recorder.number if trace else None,
        used=most_weight(steps),
        scores=best_scores(steps),
        quoted=quoted,
        missing=missing,
        reader=reader,
    )
