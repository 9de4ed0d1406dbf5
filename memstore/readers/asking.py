"""Questions to a memory, in the form that the model was tuned for; answers with their sources; conversations.

``Reader.ask`` returns an ``Answer``, and ``Reader.chat`` a conversation. A model's chat template says how questions are
put to it. A ``Template`` is this text, cut at the places of people's words. The sources of an answer are in
``memstore.readers.passages``.

A conversation is kept in the memory, so a later process continues it. The session is a document: the model's chat
template, filled with the words of both sides. Each turn extends it; other documents lie beside it. The memory also
holds who said what and when. A user's words are stored before the model is asked. The answer is stored when it ends,
complete or not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from memstore.errors import InvalidArgument, MemstoreError, first_line
from memstore.json_checks import MAX_JSON_BYTES, check_whole, fit, table, text, whole
from memstore.memory import Traces
from memstore.memory.shared import CHAT, owner_of
from memstore.memory.traces import best_scores, most_weight
from memstore.memory.view import noting_left_out
from memstore.readers.attachment import changed
from memstore.readers.kinds import Kind, encode
from memstore.readers.passages import (
    MAX_SOURCES,
    SENTENCES,
    Passage,
    Reader,
    absent,
    quotes,
    stored,
    unsupported,
    written_with,
)

if TYPE_CHECKING:
    from memstore.memory import Document, Trace

# If they are asked for a short phrase and "never a sentence", small models answer more briefly and are wrong more
# often. In a sentence they first repeat what they were asked for (docs/notes/questions.md).
INSTRUCTION = "Answer from what you have read, in a few words. If it does not say, answer that you do not know."
"""The default system prompt of a question."""
TELL = Callable[[str], object]
THINK, THOUGHT = "<think>", "</think>"
"""The marks around what a model thinks aloud."""
SHORTEST, LONGEST, TIMES = 4, 32, 6
"""An answer goes round in circles if the same tokens come ``TIMES`` times; they are ``SHORTEST`` to ``LONGEST``
tokens."""
LONG = 50
"""If a message has more words than this, a question in it chooses. People's questions are shorter."""
FEW = 2
"""Most words of a question that means nothing by itself: "Why?", "Since when?"."""
BEFORE = 0.2
"""The weight of a token of the previous exchange, if a question refers to it. Where the subject has changed after all,
a higher weight would cost the best blocks for the question itself (docs/notes/questions.md)."""
LEAST_COVERAGE = 0.4
"""Below this share of a question's words in the quoted paragraphs, the memory probably has nothing on it. At this value
no right answer to the chosen questions of SQuAD is doubted, and 0.8 of the questions about other texts are."""
_QUESTION = re.compile(r"^[^\S\n]*(?:question|q):", re.IGNORECASE | re.MULTILINE)
_ASKING = re.compile(r"\b(who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE)
_REFERRING = re.compile(
    r"\b(it|its|this|that|these|those|they|them|their|he|him|his|she|her|hers|else)\b"
    r"|^\W*(and|but|or|so|also|then|(what|how) about)\b",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(
    r"^(\W|sorry|but|i.m)*\b(i|we) (do not|don.t) know\b|\bno (information|mention) (about|of|on|is|was)\b"
    r"|\b(is|are|was|were) (not|nowhere) (explicitly )?(mentioned|stated|specified|(given|provided) in)\b"
    r"|\b(text|notes?|information|context|passages?|it) (do|does)( not|n.t) (say|mention|state|specify|provide)\b",
    re.IGNORECASE,
)
"""An answer that says it does not know."""
_WORDS = ("memstore-words-1", "memstore-words-2", "memstore-words-3")
"""Placeholders for people's words while a template is cut: ordinary letters, which no template changes."""


@dataclass(frozen=True, eq=False)
class Query:
    """The text that chooses blocks in place of a prompt's own tokens."""

    tokens: torch.Tensor
    """``[n]`` int64."""
    before: torch.Tensor | None = None
    """``[m]`` int64: the previous exchange, if the query refers to it. Each token has the weight ``BEFORE``."""

    @property
    def parts(self) -> list[tuple[torch.Tensor, float]]:
        """The texts with their weights; each is encoded by itself."""
        return [(self.tokens, 1.0), *([] if self.before is None else [(self.before, BEFORE)])]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a model; ``str(answer)`` is its text."""

    question: str
    text: str
    tokens: list[int]
    """The answer, without the tokens that end it."""
    thought: list[int]
    """Tokens that the model thought aloud before the answer, between ``<think>`` and ``</think>``."""
    ended: bool
    """Whether the model ended it, and not the limit of tokens or a loop."""
    seconds: float
    trace: int | None
    """Its number among the traces of the memory, if it was recorded."""
    used: list[tuple[str, int, float]]
    """All blocks that were retrieved for it, as (document, block, share of attention), most attention first."""
    scores: dict[tuple[str, int], float]
    """The scores of the chosen blocks, by (document, block). Blocks that needed no choice have none."""
    quoted: list[tuple[str, int]]
    """The blocks whose paragraph also stood as text before the question, best first."""
    absent: list[str] | None
    """Words of the question that the quoted paragraphs and the names of their documents lack. None if nothing was
    quoted, if the question refers to what was said before it, or if its words cannot be told apart (one word, a
    language other than English, or a long text without a question in it)."""
    coverage: float | None
    """The share of the question's words that are not ``absent``, from 0 to 1; None where that is None."""
    missing: dict[tuple[str, int], str]
    """Blocks that could not be read and are missing in the answer, as (document, block), with the reason. Empty unless
    ``Retrieval(on_error="miss")``."""
    reader: Reader

    def __str__(self) -> str:
        return self.text

    @property
    def found(self) -> bool | None:
        """Whether the memory has something on the question: its paragraphs have ``LEAST_COVERAGE`` of its words.

        False if the answer says in English that it does not know; else None where ``coverage`` is None. Words tell
        questions about other subjects, not details that the text leaves out (docs/measured.md).
        """
        if _UNKNOWN.search(self.text):
            return False
        return None if self.coverage is None else self.coverage >= LEAST_COVERAGE

    def sources(self, most: int = MAX_SOURCES) -> list[Passage]:
        """Return the ``most`` blocks that matter most for the answer: quoted ones, best first, then by score.

        If the model's tokens choose blocks for themselves, these come by attention. Call it while the memory is open.
        Documents whose name is in several of the attached memories are left out.
        """
        check_whole("most", most, 0, 2**63)
        words = f"{self.question}\n{self.text}"
        return written_with(self.reader, self.used, self.scores, words, quoted=self.quoted, most=most)

    def unsupported(self) -> list[str]:
        """Return words of the answer that are neither in the question nor in its blocks: the model's own.

        An answer without such words may still be wrong, and one with some may be right in other words. Call it while
        the memory is open.
        """
        places = {*self.quoted, *((document, block) for document, block, _ in self.used)}
        return unsupported(self.reader, places, self.question, self.text)


@dataclass(frozen=True)
class Template:
    """The text around people's words: a chat template, cut at the places of the words."""

    opening: str
    """The text before the first words of a user, with the system prompt."""
    header: str
    """The text between a user's words and the answer."""
    past: str
    """The same before an earlier answer, without the part that lets a model think first."""
    following: str
    """The text between an answer and the user's next words. It begins with the end of the answer."""
    stop: str | None = None
    """A text that ends the answer, for models without such a token."""

    @classmethod
    def of(cls, tokenizer: Any, system: str | None = None) -> Template | None:
        """Return the template of a tokenizer with the system prompt ``system``, or None if it has no template."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        user, said, again = _WORDS
        turns = [("user", user), ("assistant", said), ("user", again)]
        try:
            text = _rendered(tokenizer, [*([("system", system)] if system else []), *turns])
        except InvalidArgument:  # some templates refuse a system prompt
            if not system:
                raise
            text = _rendered(tokenizer, [("user", f"{system}\n\n{user}"), *turns[1:]])
        parts = []
        for word in _WORDS:
            part, found, text = text.partition(word)
            if not found:
                raise InvalidArgument("the model's chat template drops some of the messages. Ask with raw=True")
            parts.append(part)
        return cls(parts[0], text, parts[1], parts[2])

    @classmethod
    def plain(cls, system: str | None = None) -> Template:
        """Return the frame for models without a template: names before the words, as in a play."""
        return cls(f"{system}\n\nUser: " if system else "User: ", "\nAssistant:", "\nAssistant:", "\nUser: ", "\nUser:")

    def ends(self, tokenizer: Any) -> list[int]:
        """Return the tokens that end an answer: those of the tokenizer, and the first control token after an answer."""
        ids = self.controls(tokenizer, self.following)
        special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
        own = [tokenizer.eos_token_id, next((each for each in ids if each in special), None)]
        return list(dict.fromkeys(each for each in own if each is not None))

    @staticmethod
    def controls(tokenizer: Any, text: str) -> list[int]:
        """Return the tokens of the frame itself. Control tokens count in it, but not in people's words."""
        return encode(tokenizer, text, controls=True) if text else []


def _rendered(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": words} for role, words in turns]
    # A model that thinks aloud first is asked not to. Templates that do not know the option ignore it.
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    try:
        return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # Jinja's errors are not imported here
        raise InvalidArgument(f"the chat template fails: {first_line(error)}. Ask with raw=True") from error


class AnswerStream:
    """A streamer for transformers. It passes an answer on as it comes, whole characters only."""

    def __init__(
        self, reader: Reader, frame: Template | None, tell: TELL | None = None, stop: Sequence[str] = ()
    ) -> None:
        """``stop``: texts that end the answer, besides those of ``frame``."""
        self._made: list[int] = []
        """The generated tokens, without those that end the answer."""
        self._begin = 0
        """Where the answer begins in them, after the thinking."""
        self._thinks, self._decided = frame is not None and frame.header.rstrip().endswith(THINK), False
        self.ended = False
        self.frame, self._tell, self._tokenizer = frame, tell, reader.tokenizer
        usual = reader.model.generation_config.eos_token_id
        self.ends: list[int] = [] if usual is None else [usual] if isinstance(usual, int) else list(usual)
        """The tokens that end the answer."""
        if frame is not None:
            self.ends = frame.ends(reader.tokenizer) or self.ends
        self._stops = [*stop, *([frame.stop] if frame is not None and frame.stop else [])]
        self.loops = False
        """Whether the answer goes round in circles. Without a frame, this is not checked and the model continues."""
        self._told, self._prompt = "", True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then each token."""
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
        """Take the end of the stream."""
        self._tell_more(held=False)

    def over(self, ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
        """Stop ``model.generate``, as one of its ``stopping_criteria``. It passes each token to ``put`` first."""
        return torch.full((len(ids),), self.ended or self.loops, dtype=torch.bool, device=ids.device)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer so far, without those that end it."""
        return [] if self._thinks else self._made[self._begin :]

    @property
    def thought(self) -> list[int]:
        """The tokens that the model thought aloud before the answer."""
        return self._made[:] if self._thinks else self._made[: self._begin]

    @property
    def text(self) -> str:
        """The answer so far, without what the model thought aloud."""
        text = self._decoded()
        for stop in self._stops:
            text = text.partition(stop)[0]
        return text if self.frame is None else text.strip()

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))

    # The marks may be control tokens, ordinary tokens, or several of these. If the template itself opens the thought,
    # only its end comes.
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
        # A character may take several tokens. Text that could begin the end mark is held back until that is clear.
        begins = any(text.endswith(stop[:n]) for stop in self._stops for n in range(1, len(stop)))
        if held and (begins or text.endswith("\ufffd") or not (self._decided or self._thinks)):
            return
        if self._tell is not None and text.startswith(self._told) and len(text) > len(self._told):
            self._tell(text[len(self._told) :])
        self._told = text


def loops(tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` end in the same few tokens again and again."""
    return any(
        len(tokens) >= TIMES * n and tokens[-TIMES * n : -n] == tokens[-(TIMES - 1) * n :]
        for n in range(SHORTEST, LONGEST + 1)
    )


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt: the text before the user's words, the words, and the text after them."""

    before: list[int]
    words: list[int]
    after: list[int]

    @property
    def tokens(self) -> list[int]:
        """All tokens in order."""
        return [*self.before, *self.words, *self.after]


CHARACTERS = 32
"""Most characters of a token on average. Longer questions are refused before they are tokenized."""
MOST_ASKED = 8192
"""Most tokens of a question, for a model that states no limit."""
NOT_TAKEN = (
    *("generation_config", "max_length", "streamer", "inputs", "input_ids", "return_dict_in_generate"),
    *("query", "opening"),
)
"""Options of ``reader.generate`` that an answer does not take, besides those for several rows."""


def fill_template(tokenizer: Any, frame: Template, words: str, before: str) -> Prompt:
    """Put a question into its frame. Names of control tokens in ``words`` are plain text."""
    return Prompt(frame.controls(tokenizer, before), encode(tokenizer, words), frame.controls(tokenizer, frame.header))


def question_in(tokenizer: Any, said: Sequence[str]) -> tuple[str, tuple[str, str]]:
    """Find the text to search with: the question without its frame, and the exchange that it refers to.

    ``said``: the turns of user and model, the question last; or all of it as one text. In a conversation in the chat
    template, the question is the user's last turn. In ``Question: ... Answer:`` it stands between the last labels. In a
    long message it is found by ``wanted_in``. A message that is only a question may refer to the exchange before it.
    """
    *before, last = _said_in(tokenizer, *said) if len(said) == 1 else said
    asked = wanted_in(_labelled(last) or last)
    question, answer = ["", "", *before][-2:]
    return asked, (wanted_in(question), answer) if asked == last and refers(asked) else ("", "")


def _labelled(text: str) -> str | None:
    """Return the question between the last ``Question:`` and ``Answer:`` at the end, or None. Takes linear time."""
    words, _, end = text.rstrip().rpartition("\n")
    if end.strip().lower() not in ("answer:", "a:"):
        return None
    asked = (words[label.end() :].strip() for label in reversed([*_QUESTION.finditer(words)]))
    return next(filter(None, asked), None)


def refers(question: str) -> bool:
    """Whether an English question seems to need its context: it has a word like "it", or is "Why?".

    If such a word refers to nothing, little is lost. For a name of two words much would be lost, so it does not count
    (docs/notes/questions.md).
    """
    alone = len(question.split()) <= FEW and _ASKING.search(question)
    return bool(alone or _REFERRING.search(question))


def _said_in(tokenizer: Any, text: str) -> list[str]:
    """Return the turns of user and model if ``text`` begins with a control token, as if rendered; else all as one."""
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
    end = control.match(before)  # of the previous turn; the first turn has no previous one
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
    """Return the request in ``words``: all of them, or if they are long, the longest question in them.

    A question after or before a long letter chooses as it does alone, even if the letter itself asks "How are you?".
    All questions together would choose worse (docs/notes/questions.md). A long text without a question chooses as a
    whole.
    """
    if len(words.split()) <= LONG:
        return words
    *said, last = SENTENCES.split(words.strip())
    asked = [each for each in (*said, last) if each.rstrip(" \"')\u201d\u2019").endswith(("?", "\uff1f"))]
    if last[-1:].isalnum() and _ASKING.search(last):  # people often leave out the mark at the end of a message
        asked.append(last)
    return max(reversed(asked), key=len, default=words)


def _most_tokens(model: Any) -> int | None:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def too_long(model: Any, length: int, new: int) -> str | None:
    """Say why a prompt of ``length`` tokens and ``new`` more are too long for a model, or return None."""
    most = _most_tokens(model)
    if most is None or length + new <= most:
        return None
    return f"the model takes at most {most:,} tokens, but the prompt has {length:,}, and {new:,} more were requested"


def fitting(model: Any, length: int, new: int) -> int:
    """Return how many of ``new`` tokens a model takes after a prompt of ``length`` tokens."""
    most = _most_tokens(model)
    return new if most is None else max(1, min(new, most - length))


def check_text(what: str, text: Any) -> None:
    """Raise ``InvalidArgument`` unless ``text`` is a string with words; ``what`` names it."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{what} must be a string, not {type(text).__name__}")
    if not text.strip():
        raise InvalidArgument(f"{what} is empty: pass some words")


def check_words(model: Any, text: str) -> None:
    """Raise ``InvalidArgument`` for a question with too many characters, before it is tokenized."""
    most = CHARACTERS * (_most_tokens(model) or MOST_ASKED)
    if len(text) > most:
        raise InvalidArgument(
            f"the question has {len(text):,} characters, but this model takes at most {most:,}: ask a shorter "
            "question, or read the text into the memory"
        )


def check_asked(model: Any, tokens: int) -> None:
    """Raise ``InvalidArgument`` if a query has more ``tokens`` than a model takes."""
    most = _most_tokens(model) or MOST_ASKED
    if tokens > most:
        raise InvalidArgument(f"a query has at most {most:,} tokens here, got {tokens:,}: search with a shorter text")


def check_answered(options: Mapping[str, Any], max_tokens: int) -> int:
    """Return the most tokens of an answer. Raises ``InvalidArgument`` for options that an answer does not take."""
    wrong = [name for name in NOT_TAKEN if not (options.get(name) is None or options[name] is False)]
    wrong += [name for name in ("num_beams", "num_return_sequences") if options.get(name) not in (None, 1)]
    if wrong:
        raise InvalidArgument(f"an answer is one row without beams, and sets {wrong[0]} itself: use reader.generate")
    check_whole("max_tokens", max_tokens, 1, 2**31)
    new: int = options.get("max_new_tokens", max_tokens)
    check_whole("max_new_tokens", new, 1, 2**31)
    return new


def check_fits(model: Any, prompt: Prompt, new: int) -> None:
    """Raise ``InvalidArgument`` if ``prompt`` and ``new`` tokens are too long for a model."""
    if reason := too_long(model, len(prompt.tokens), new):
        raise InvalidArgument(f"{reason}: ask a shorter question, or read long texts into the memory")


def generate_answer(
    reader: Reader,
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
    """Generate after ``prompt``, and record the retrieved blocks with ``told``; see ``Reader.ask``.

    ``said``: the turns of user and model before the question. ``session``: the document of the conversation.
    """
    max_tokens = check_answered(options, max_tokens)
    check_fits(reader.model, prompt, max_tokens)
    taken = {name: value for name, value in options.items() if name not in NOT_TAKEN}
    options = {"do_sample": False, "tokenizer": reader.tokenizer, **taken, "max_new_tokens": max_tokens}
    begun = time.perf_counter()
    own = options.get("eos_token_id")
    teller.ends += torch.as_tensor([] if own is None else own).flatten().tolist()
    quoted, asked, lacking = list[tuple[str, int]](), prompt, None
    if teller.frame is not None and reader.takes_questions:
        options["query"] = [*said, question]  # not the template around it, which is the same for all questions
        opening = teller.frame.controls(reader.tokenizer, teller.frame.opening)
        if prompt.tokens[: len(opening)] == opening:  # false when a conversation continues
            options["opening"] = len(opening)
        if reader.quoted_blocks:
            looked_up, exchange = question_in(reader.tokenizer, options["query"])
            about = " ".join((looked_up, *exchange))
            for alone in (False, True):  # the best one alone, if several are too long
                best, text = quotes(reader, options["query"], about, session=session, alone=alone)
                longer = replace(prompt, words=[*encode(reader.tokenizer, text), *prompt.words])
                if (fits := not too_long(reader.model, len(longer.tokens), max_tokens)) or len(best) < 2:
                    break
            if best and fits:
                quoted, prompt = best, longer
                if not any(exchange) and len(looked_up.split()) <= LONG:  # else a text without a question
                    lacking = absent(looked_up, " ".join((text, *(name for name, _ in quoted))))
    options["eos_token_id"] = teller.ends or None
    options["stopping_criteria"] = [*(options.get("stopping_criteria") or []), teller.over]
    traces = reader.memory.traces if trace else Traces(None, reader.memory.url)
    # A trace holds the numbers of quoted blocks, not their text: it would survive when the blocks are forgotten.
    info = {**(told or {}), **({"quoted": quoted} if quoted else {})}
    ids = torch.tensor([prompt.tokens], dtype=torch.int64, device=reader.model.device)
    with (
        torch.inference_mode(),
        noting_left_out() as missing,
        reader.record(question=question, traces=traces, **info) as recorder,
    ):
        recorder.describe(prompt=asked.tokens)
        made = reader.generate(ids, streamer=teller, **options)[0, ids.shape[1] :]
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
        absent=None if lacking is None else lacking[0],
        coverage=None if lacking is None else lacking[1],
        missing=missing,
        reader=reader,
    )


SYSTEM = "You are a helpful assistant. You remember what was said and read before."
SAID = "said/"
"""Prefix of the facts of a session: who said what, and when."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The words of one side."""

    role: str
    """"user" or "assistant"."""
    text: str
    time: str
    """ISO 8601, UTC."""
    start: int
    """Tokens of the session before the exchange that this turn belongs to."""


def check_several(kind: Kind) -> None:
    """Raise ``InvalidArgument`` if models of this kind cannot hold a conversation."""
    if not kind.reader_class().several:
        raise InvalidArgument(
            f"a {kind.name} sees one document at a time, but a conversation needs several: use a stock model"
        )


class Conversation:
    """A conversation, made by ``Reader.chat``."""

    def __init__(self, reader: Reader, session: str, system: str | None) -> None:
        check_several(reader.kind)
        if reader.tokenizer is None:
            raise InvalidArgument("chat needs the tokenizer: attach(..., tokenizer=tokenizer)")
        check_text("the name of the session", session)
        self.reader, self.session = reader, session
        self.name = CHAT + session
        """The name of its document."""
        self._frame = Template.of(reader.tokenizer, system) or Template.plain(system)
        self.turns = self._kept()
        """The turns so far, oldest first."""

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
        """Say something and return the answer. Both are kept. A text of ``stop`` also ends the answer.

        See ``Reader.ask``.

        If it is interrupted, the tokens of the answer so far are kept. Nothing of a refused message is.
        """
        check_text("the message", words)
        new = check_answered(options, max_tokens)
        asked = self.prompt(words)
        check_fits(self.reader.model, asked, new)
        start, said = self._tokens, [turn.text for turn in self.turns[-2:]]
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

    def prompt(self, words: str) -> Prompt:
        """Return the prompt that ``say`` generates after. Words that no process has answered are kept before it."""
        check_words(self.reader.model, words)
        self.turns = self._kept()  # another process may have forgotten the session
        if self.turns and self.turns[-1].role == "user":
            self._keep(self._framed(self.turns[-1].text), [], "", self.turns[-1].start)
        return self._framed(words)

    def forget_last(self) -> bool:
        """Take back the last exchange and its traces, and return whether there was one.

        Raises ``MemoryInUse`` if the traces cannot be removed now: then only they are left.
        """
        memory, turns, document = self.reader.memory, self._kept(), self._document()
        if not turns:
            return False
        start = turns[-1].start
        # The document first: if the process ends after that, ``_kept`` takes back the turns.
        if document is not None and not start:
            memory.forget(self.name)
        elif document is not None:
            self.reader.update(document.tokens()[:start], self.name)
        self.turns = [turn for turn in turns if turn.start != start]
        self._drop(range(len(self.turns), len(turns)))
        try:
            memory.traces.remove(*(trace.number for trace in memory.traces.of_conversation(self.name, start)))
        except MemstoreError as error:
            raise error.reworded(f"the last exchange is taken back, but not its traces: {error}") from error
        return True

    @property
    def trace(self) -> Trace | None:
        """Return the trace of the last answer, also in another process, or None if it was not recorded."""
        start = self.turns[-1].start if self.turns else None
        traces = [] if start is None else self.reader.memory.traces.of_conversation(self.name, start)
        return traces[-1] if traces else None

    def _kept(self) -> list[Turn]:
        """Read the turns of the session, oldest first. A forgotten session has none. Raises ``DamagedError``."""
        facts = self.reader.memory.infos(f"{SAID}{self.session}/")
        mine = {int(key.rpartition("/")[2]): fact for key, fact in facts.items() if owner_of(key) == self.name}
        turns = {number: _turn(fact, self.name) for number, fact in sorted(mine.items())}
        # Words without an answer come before their tokens, at the end of the document. Other turns that are not in the
        # document were being taken back, or an older version forgot the document alone.
        tokens = self._tokens
        answered = any((turn.role, turn.start) == ("assistant", tokens) for turn in turns.values())
        gone = [number for number, turn in turns.items() if turn.start >= tokens + (not answered)]
        if self.reader.memory.mode != "r":
            self._drop(gone)
        return [turn for number, turn in turns.items() if number not in gone]

    def _drop(self, numbers: Sequence[int]) -> None:
        """Delete turns, in order: if the process ends before the answer goes, ``_kept`` still knows what is gone."""
        for number in numbers:
            self.reader.memory.put_info(self._fact(number), None)

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
        """Let the session continue as the last of the documents. Before it begins, no document is continued."""
        reader, others = self.reader, self.reader.names
        if others is None:
            everything = (document.name for memory in reader.memories for document in memory.documents())
            others = [name for name in everything if not name.startswith(CHAT)]
        names = [*(name for name in dict.fromkeys(others) if name != self.name), *([self.name] * goes_on)]
        with changed(reader, names=names), reader.seeing(tail=goes_on):
            yield

    def _keep(self, asked: Prompt, tokens: list[int], text: str, start: int) -> None:
        # A process may have been killed after it appended words and before it noted so. They are not said twice.
        if self._tokens == start:
            past = self._frame.controls(self.reader.tokenizer, self._frame.past)
            self.reader.append([*asked.before, *asked.words, *past, *tokens], self.name)
        self._note(Turn(role="assistant", text=text, time=_now(), start=start))

    def _note(self, turn: Turn) -> None:
        self.reader.memory.put_info(self._fact(len(self.turns)), vars(turn))
        self.turns.append(turn)

    def _fact(self, number: int) -> str:
        return f"{SAID}{self.session}/{number}"


_TURN = {"role": text(100), "text": text(MAX_JSON_BYTES), "time": text(100), "start": whole()}


def _turn(fact: Any, name: str) -> Turn:
    fit(fact, table(**_TURN), f"a turn of the conversation {name!r}")
    return Turn(**{member: fact[member] for member in _TURN})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
