"""A conversation with a model, kept in its memory: tomorrow's process goes on where today's has ended.

The session is a document: the model's chat template with what was said in it, continued by each turn, beside whatever
other documents the memory holds. Who said what and when are facts of the memory. A user's words are stored before the
model is asked, the answer when it is there, or as far as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument
from memstore.memory.shared import CHAT, owner_of
from memstore.readers.asking import Answer, AnswerStream, Prompt, Template, fill_template, generate_answer
from memstore.readers.passages import stored

if TYPE_CHECKING:
    from memstore.memory import Document, Trace
    from memstore.readers.asking import Asker

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

    def __init__(self, reader: Asker, session: str, system: str | None) -> None:
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
