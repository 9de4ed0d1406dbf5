"""A question to a memory, put as the model was tuned to be asked; an answer that knows its sources; a conversation.

``Reader.ask`` makes an ``Answer``, ``Reader.chat`` a conversation of them. How a model wants to be spoken to is in its
chat template; a ``Template`` is it, cut where people's words go. What an answer was written with is in
``memstore.readers.passages``.

A conversation is kept in the memory: tomorrow's process goes on where today's has ended. The session is a document, the
model's chat template with what was said in it, continued by each turn, beside whatever other documents the memory
holds. Who said what and when are facts of the memory. A user's words are stored before the model is asked, the answer
when it is there, or as far as it came.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from memstore.errors import InvalidArgument
from memstore.memory import Traces
from memstore.memory.shared import CHAT, owner_of
from memstore.memory.traces import best_scores, most_weight
from memstore.memory.view import noting_left_out
from memstore.readers.kinds import encode
from memstore.readers.passages import (
    MAX_SOURCES,
    SENTENCES,
    Passage,
    PassageReader,
    quotes,
    stored,
    unsupported,
    written_with,
)

if TYPE_CHECKING:
    from memstore.memory import Document, Memory, Recorder, Trace
    from memstore.readers.kinds import Kind

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
FEW = 2
"""Words of a question that is none by itself: "Why?", "Since when?"."""
BEFORE = 0.2
"""How much a token of the exchange before a question counts that refers to it. Where the subject has changed after all,
more would cost what is best for the question itself (docs/notes/questions.md)."""
_LABELLED = re.compile(r"(?:.*\n)?\s*(?:question|q):\s*(.+?)\s*\n\s*(?:answer|a):\s*", re.IGNORECASE | re.DOTALL)
_ASKING = re.compile(r"\b(who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE)
_REFERRING = re.compile(
    r"\b(it|its|this|that|these|those|they|them|their|he|him|his|she|her|hers|else)\b"
    r"|^\W*(and|but|or|so|also|then|(what|how) about)\b",
    re.IGNORECASE,
)
_WORDS = ("memstore-words-1", "memstore-words-2", "memstore-words-3")
"""Stand for people's words while a template is cut: ordinary letters, which no template changes."""


@dataclass(frozen=True, eq=False)
class Query:
    """What chooses blocks in place of a prompt's own tokens."""

    tokens: torch.Tensor
    """``[n]`` int64."""
    before: torch.Tensor | None = None
    """``[m]`` int64: what was said before, where the query refers to it; each token counts ``BEFORE`` as much."""

    @property
    def parts(self) -> list[tuple[torch.Tensor, float]]:
        """Texts, each of which is understood by itself, and how much they count."""
        return [(self.tokens, 1.0), *([] if self.before is None else [(self.before, BEFORE)])]


class _Asker(PassageReader, Protocol):
    """What is needed of a reader to ask its model; a ``Reader`` is one."""

    model: Any
    kind: ClassVar[Kind]
    several: ClassVar[bool]
    names: list[str] | None

    @property
    def takes_questions(self) -> bool:
        """Whether a question chooses blocks by itself."""

    @property
    def memory(self) -> Memory:
        """The memory that is read into."""

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
    """Those of which a paragraph also stood as text before the question, best first."""
    missing: dict[tuple[str, int], str]
    """Blocks that it was written without because they could not be read, as (document, block), and why: empty unless
    ``Retrieval(on_error="miss")``."""
    reader: _Asker

    def __str__(self) -> str:
        return self.text

    def sources(self, most: int = MAX_SOURCES) -> list[Passage]:
        """The ``most`` blocks that it owes most to: those that were quoted, best first, then by attention.

        To be asked for while the memory is open.
        """
        words = f"{self.question}\n{self.text}"
        return written_with(self.reader, self.used, self.scores, words, quoted=self.quoted, most=most)

    def unsupported(self) -> list[str]:
        """Words of the answer that neither the question nor any block it was written with has: the model's own.

        An answer without any may still be wrong, and one with some be right in other words. To be asked for while the
        memory is open.
        """
        places = {*self.quoted, *((document, block) for document, block, _ in self.used)}
        return unsupported(self.reader, places, self.question, self.text)


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


class AnswerStream:
    """A streamer of transformers: tells an answer as it comes, whole characters only."""

    def __init__(
        self, reader: _Asker, frame: Template | None, tell: TELL | None = None, stop: Sequence[str] = ()
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


CHARACTERS = 32
"""Of a token at most, on average: of a question with more for each token that its model takes, nothing is computed."""
MOST_ASKED = 8192
"""Tokens of a question to a model that does not say how many it takes."""


def fill_template(tokenizer: Any, frame: Template, words: str, before: str) -> Prompt:
    """A question in its frame. Names of control tokens in ``words`` are text."""
    return Prompt(frame.controls(tokenizer, before), encode(tokenizer, words), frame.controls(tokenizer, frame.header))


def question_in(tokenizer: Any, said: Sequence[str]) -> tuple[str, tuple[str, str]]:
    """What is looked up for a query: the question in it, without its frame, and question and answer that it refers to.

    ``said``: what user and model have said in turn, the question last; or all of it as one text. Of a conversation in
    the chat template the question is what the user says last, of ``Question: ... Answer:`` what stands between the
    labels (the last ones), and of a long message what is ``wanted_in`` it. A message that is a question and nothing
    else may refer to the exchange before it.
    """
    *before, last = _said_in(tokenizer, *said) if len(said) == 1 else said
    labelled = _LABELLED.fullmatch(last)
    asked = wanted_in(labelled[1] if labelled else last)
    question, answer = ["", "", *before][-2:]
    return asked, (wanted_in(question), answer) if asked == last and refers(asked) else ("", "")


def refers(question: str) -> bool:
    """Whether an English question seems to need what was said before it: it has a word like "it", or is "Why?".

    Where such a word refers to nothing before, little is lost; a name of two words would lose much
    (docs/notes/questions.md).
    """
    alone = len(question.split()) <= FEW and _ASKING.search(question)
    return bool(alone or _REFERRING.search(question))


def _said_in(tokenizer: Any, text: str) -> list[str]:
    """What user and model say in turn, where ``text`` begins with a control token, as if rendered; or all as one."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {*getattr(tokenizer, "all_special_tokens", []), *(str(each) for each in added if each.special)}
    frame = None
    if text.lstrip().startswith(tuple(names)):
        with suppress(InvalidArgument):  # a template that does not work has rendered nothing
            frame = Template.of(tokenizer)
    if frame is None:
        return [text]
    control = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    backwards = zip(reversed(frame.opening), reversed(frame.following), strict=False)
    before = "".join(one for one, other in takewhile(lambda pair: pair[0] == pair[1], backwards))[::-1]
    end = control.match(before)  # of the turn before, which the first turn has none of
    if end and control.search(before, end.end()):
        before = before[end.end() :].lstrip()
    begin = control.search(before)
    if begin is None or before[begin.start() :] not in text:
        return [text]
    turns, past = list[str](), frame.past.strip()
    for turn in text.split(before[begin.start() :])[1:]:
        words, _, answer = turn.partition(past) if past else (turn, "", "")
        turns += [control.split(words)[0].strip(), control.split(answer)[0].strip()]
    return turns[:-1] if turns[-2] else [text]


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


def _most_tokens(model: Any) -> int | None:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def too_long(model: Any, length: int, new: int) -> str | None:
    """Why a prompt of ``length`` tokens and ``new`` more are too long for a model; None where they fit."""
    most = _most_tokens(model)
    if most is None or length + new <= most:
        return None
    return f"the model takes {most:,} tokens, got {length:,} and {new:,} to be generated"


def fitting(model: Any, length: int, new: int) -> int:
    """As many of ``new`` tokens as a model takes behind a prompt of ``length`` tokens."""
    most = _most_tokens(model)
    return new if most is None else max(1, min(new, most - length))


def check_words(model: Any, text: str) -> None:
    """Raise ``InvalidArgument`` for a question that is too long by its characters, before it is made tokens."""
    most = CHARACTERS * (_most_tokens(model) or MOST_ASKED)
    if len(text) > most:
        raise InvalidArgument(
            f"the question has {len(text):,} characters, and this model takes at most {most:,}: ask for less, or read "
            "the text into the memory"
        )


def check_asked(model: Any, tokens: int) -> None:
    """Raise ``InvalidArgument`` for a query of more ``tokens`` than a model takes."""
    most = _most_tokens(model) or MOST_ASKED
    if tokens > most:
        raise InvalidArgument(f"a query has at most {most:,} tokens here, got {tokens:,}: look for less at once")


def generate_answer(
    reader: _Asker,
    question: str,
    prompt: Prompt,
    teller: AnswerStream,
    *,
    max_tokens: int,
    trace: bool,
    said: Sequence[str] = (),
    session: str | None = None,
    told: Mapping[str, Any] | None = None,
    **options: Any,
) -> Answer:
    """Generate after ``prompt``, and note what was retrieved, and ``told``; see ``Reader.ask``.

    ``said``: what user and model have said before the question, in turn. ``session``: the document of the conversation
    that it is about.
    """
    if reason := too_long(reader.model, len(prompt.tokens), max_tokens):
        raise InvalidArgument(f"{reason}: ask in fewer words, or read long texts into the memory")
    memory = reader.memory
    begun = time.perf_counter()
    options = {"do_sample": False, **options}
    quoted, asked = list[tuple[str, int]](), prompt
    if teller.frame is not None:
        if reader.takes_questions:
            options["query"] = [*said, question]  # not the template around it, which is the same for all questions
            opening = teller.frame.controls(reader.tokenizer, teller.frame.opening)
            if prompt.tokens[: len(opening)] == opening:  # not where a conversation goes on
                options["opening"] = len(opening)
            if reader.quoted_blocks:
                looked_up, exchange = question_in(reader.tokenizer, options["query"])
                best, text = quotes(reader, options["query"], " ".join((looked_up, *exchange)), session=session)
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


SYSTEM = "You are a helpful assistant. You remember what was said and read before."
SAID = "said/"
"""Before the facts of a session: who said what, and when."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one side has said."""

    role: str
    """user or assistant."""
    text: str
    time: str
    """ISO 8601, UTC."""
    start: int
    """Tokens that the session had before the exchange that it belongs to."""


class Conversation:
    """See ``Reader.chat``, which makes it."""

    def __init__(self, reader: _Asker, session: str, system: str | None) -> None:
        if not reader.several:
            raise InvalidArgument(f"a {reader.kind.name} sees one document at a time, a conversation needs several")
        if reader.tokenizer is None:
            raise InvalidArgument("to talk, give attach the tokenizer: attach(..., tokenizer=tokenizer)")
        if not session.strip():
            raise InvalidArgument("the name of the session is empty")
        self.reader, self.session = reader, session
        self.name = CHAT + session
        """Of its document."""
        self._frame = Template.of(reader.tokenizer, system) or Template.plain(system)
        self.turns = self._kept()
        """What was said so far, oldest first."""

    def say(
        self,
        words: str,
        *,
        tell: Callable[[str], object] | None = None,
        max_tokens: int = 512,
        trace: bool = False,
        stop: Sequence[str] = (),
        **options: Any,
    ) -> Answer:
        """Say something, and get the answer, which also ends before a text of ``stop``; both are kept.

        See ``Reader.ask``.

        Interrupted, it keeps the answer as far as it came.
        """
        if not words.strip():
            raise InvalidArgument("there is nothing said: give some words")
        self.turns = self._kept()  # somebody may have forgotten the session since
        self._complete()
        asked, start, said = self._framed(words), self._tokens, [turn.text for turn in self.turns[-2:]]
        self._note(Turn(role="user", text=words, time=_now(), start=start))
        teller = AnswerStream(self.reader, self._frame, tell, stop)
        try:
            with self._seen(goes_on=start > 0):
                told = {"conversation": {"document": self.name, "start": start}}
                options = {"max_tokens": max_tokens, "trace": trace, **options}
                answer = generate_answer(
                    self.reader, words, asked, teller, said=said, session=self.name, told=told, **options
                )
        except KeyboardInterrupt:
            self._keep(asked, teller.tokens, teller.text, start)
            raise
        self._keep(asked, teller.tokens, answer.text, start)
        return answer

    def forget_last(self) -> bool:
        """Take back the last exchange and its traces, as if it had not been; whether there was one."""
        self.turns = self._kept()
        if not self.turns:
            return False
        start = self.turns[-1].start
        while self.turns and self.turns[-1].start == start:
            self.turns.pop()
            self.reader.memory.put_info(self._fact(len(self.turns)), None)
        for trace in self.reader.memory.traces.of_conversation(self.name, start):
            self.reader.memory.traces.remove(trace.number)
        document = self._document()
        if document is not None and not start:
            self.reader.memory.forget(self.name)
        elif document is not None:
            self.reader.update(document.tokens()[:start], self.name)
        return True

    @property
    def trace(self) -> Trace | None:
        """What was recorded of the last answer, also in another process; None where nothing was."""
        start = self.turns[-1].start if self.turns else None
        traces = [] if start is None else self.reader.memory.traces.of_conversation(self.name, start)
        return traces[-1] if traces else None

    def _kept(self) -> list[Turn]:
        """What the memory has of the session, oldest first; no turn is left of a session that was forgotten."""
        facts = self.reader.memory.infos(f"{SAID}{self.session}/")
        mine = {int(key.rpartition("/")[2]): fact for key, fact in facts.items() if owner_of(key) == self.name}
        turns = [Turn(**fact) for _, fact in sorted(mine.items()) if isinstance(fact, dict)]
        # A memory of before, which has forgotten the document alone: only the first words come before it.
        if len(turns) > 1 and self._document() is None:
            for number in mine if self.reader.memory.mode != "r" else ():
                self.reader.memory.put_info(self._fact(number), None)
            return []
        return turns

    @property
    def _tokens(self) -> int:
        document = self._document()
        return 0 if document is None else len(document)

    def _document(self) -> Document | None:
        return stored([self.reader.memory], self.name)

    def _framed(self, words: str) -> Prompt:
        before = self._frame.following if self._tokens else self._frame.opening
        return fill_template(self.reader.tokenizer, self._frame, words, before)

    @contextmanager
    def _seen(self, *, goes_on: bool) -> Iterator[None]:
        """The session goes on as the last of the documents; before it begins, nothing does."""
        reader, before = self.reader, self.reader.names
        everything = (document.name for memory in reader.memories for document in memory.documents())
        others = (name for name in everything if not name.startswith(CHAT)) if before is None else before
        reader.names = [*(name for name in dict.fromkeys(others) if name != self.name), *([self.name] * goes_on)]
        try:
            with reader.seeing(tail=goes_on):
                yield
        finally:
            reader.names = before

    def _complete(self) -> None:
        """Keep what a process has heard that ended before it could answer."""
        if self.turns and self.turns[-1].role == "user":
            self._keep(self._framed(self.turns[-1].text), [], "", self.turns[-1].start)

    def _keep(self, asked: Prompt, tokens: list[int], text: str, start: int) -> None:
        # Words that were appended by a process that was killed before it noted so are not said twice.
        if self._tokens == start:
            past = self._frame.controls(self.reader.tokenizer, self._frame.past)
            self.reader.append([*asked.before, *asked.words, *past, *tokens], self.name)
        self._note(Turn(role="assistant", text=text, time=_now(), start=start))

    def _note(self, turn: Turn) -> None:
        self.reader.memory.put_info(self._fact(len(self.turns)), vars(turn))
        self.turns.append(turn)

    def _fact(self, number: int) -> str:
        return f"{SAID}{self.session}/{number}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
