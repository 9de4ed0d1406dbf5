"""The one answering thread: memories and sessions take turns, and the requests of each are answered in order.

A model computes one answer at a time and is attached to one memory at a time. So each answer sees only its own memory,
even if several memories share a model. Memories are open for reading. One is opened for writing only during a write, so
that other processes can write in between.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memstore.errors import CancelledError, MemstoreError, NotFound
from memstore.memory.shared import CHAT, not_found
from memstore.readers.asking import (
    INSTRUCTION,
    Answer,
    AnswerStream,
    Prompt,
    Template,
    check_words,
    fill_template,
    fitting,
    generate_answer,
    too_long,
)
from memstore.readers.kinds import encode
from memstore.tools.ask import all_but_chats, chosen_documents, opened_when_free
from memstore.tools.endpoint.request import Ask, Refusal
from memstore.tools.verb import Mistake

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.memory.urls import OpenFolder
    from memstore.readers.reader import Reader

SOURCES = 8
SERVED = "served/"
"""Prefix of session names from requests, so that none of them is a chat of the terminal."""
T = TypeVar("T")


@dataclass(frozen=True)
class ServedMemory:
    """A memory that requests address by name."""

    name: str
    model: str
    """Name of its model."""
    memory: Memory
    reader: Reader
    writer: Reader
    """The same memory for writing; open only during a write."""
    place: OpenFolder


@dataclass(frozen=True)
class Result:
    """An answer, in the terms of the endpoint."""

    text: str
    ended: bool
    prompt_tokens: int
    tokens: int
    seconds: float
    receipt: dict[str, Any] = field(default_factory=dict)
    """Facts that clients get beside the answer, see ``receipt_of``."""


Work = Callable[["Reader", "QueuedJob"], object]
"""A job for the worker's thread, with an open reader."""
Served = Callable[[Callable[[], None]], ServedMemory]
"""Finds a memory. Its argument detaches all models; call it before attaching one to another memory."""


@dataclass(frozen=True)
class QueuedJob:
    """A request that waits or is being answered."""

    served: Served
    """Finds the memory, in the worker's thread, which may have to open it."""
    work: Work
    tell: Callable[[Any], object]
    """Receives the pieces that ``work`` reports, then its result or its error."""
    writes: bool = False
    """Whether ``work`` gets the reader that can write."""
    line: str = ""
    """Name of its queue. Queues take turns."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for it any more."""

    @property
    def stopping(self) -> list[Callable[..., torch.Tensor]]:
        """Return ``stopping_criteria`` for ``model.generate``, which cancel the job when nobody waits any more."""

        def has_left(ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
            return torch.full((len(ids),), self.left.is_set(), dtype=torch.bool, device=ids.device)

        return [has_left]


class Worker:
    """A thread that runs jobs. At most ``most`` jobs wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: dict[str, deque[QueuedJob]] = {}
        """The waiting jobs, the queue whose turn is next first."""
        self._current: QueuedJob | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._attached: Reader | None = None
        self._thread = threading.Thread(target=self._work, name="memstore-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, list(self._lines.values())))

    @property
    def answering(self) -> bool:
        """Whether an answer is being computed."""
        return self._current is not None

    def submit(self, job: QueuedJob) -> None:
        """Queue a job. Raises ``Refusal`` if too many jobs wait.

        If this job's queue is shorter than the longest one, the last job of the longest queue is refused instead.
        """
        full = Refusal("too many requests are waiting: try again later", status=429, code="queue_full")
        with self._changed:
            # Cancelled jobs take no place.
            lines = {name: deque(each for each in line if not each.left.is_set()) for name, line in self._lines.items()}
            self._lines = {name: line for name, line in lines.items() if line}
            mine = self._lines.get(job.line, deque())
            if self._closed:
                raise _ending()
            if self.waiting >= self._most:
                longest = max(self._lines.values(), key=len, default=mine)
                if len(mine) + 1 >= len(longest):
                    raise full
                longest.pop().tell(full)
            mine.append(job)
            self._lines[job.line] = mine
            self._changed.notify()

    async def done(
        self,
        served: Served,
        work: Callable[[Reader, QueuedJob], T],
        *,
        writes: bool = False,
        left: threading.Event | None = None,
    ) -> T:
        """Return the result of ``work`` once its turn has come. It is cancelled if ``left`` is set or nobody awaits it.

        Raises ``Refusal``, and the errors of ``work``.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(what: object) -> None:
            if not future.done():
                future.set_result(what)

        def told(what: object) -> None:
            with suppress(RuntimeError):  # the loop has ended with the server
                loop.call_soon_threadsafe(tell, what)

        job = QueuedJob(served, work, told, writes, left=left or threading.Event())
        self.submit(job)
        try:
            result = await future
        finally:
            job.left.set()
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[no-any-return]  # the result of work

    def stop(self) -> None:
        """Cancel the current answer, and tell everybody who waits that the server ends."""
        with self._changed:
            self._closed = True
            waiting = [job for line in self._lines.values() for job in line]
            self._lines.clear()
            for job in (*waiting, *filter(None, [self._current])):
                job.left.set()
                job.tell(_ending())
            self._changed.notify()

    def close(self) -> None:
        """Call ``stop``, wait for the current computation to end, and restore the models."""
        self.stop()
        self._thread.join()  # closing a memory during a read would pull it away from the thread

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                done = self._do(job)
            except (MemstoreError, Refusal) as error:
                done = error
                self._attach(None)
            except Exception as error:  # noqa: BLE001 - the client gets the error; the other requests are still answered
                done = Mistake(error)
                self._attach(None)
            with self._changed:  # first, so that a client with its answer finds that nothing is answered any more
                self._current = None
            job.tell(done)
        self._attach(None)

    def _next(self) -> QueuedJob | None:
        with self._changed:
            while not self._closed:
                while self._lines:
                    name, line = next(iter(self._lines.items()))
                    job = line.popleft()
                    del self._lines[name]
                    if line:
                        self._lines[name] = line  # behind the others
                    if not job.left.is_set():
                        self._current = job
                        return job
                self._changed.wait()
        return None

    def _attach(self, reader: Reader | None) -> None:
        """Open ``reader`` instead of the current one; most requests go to the same memory as before."""
        if self._attached is not reader:
            if self._attached is not None:
                self._attached.close()
            self._attached = None
            if reader is not None:
                self._attached = opened_when_free(reader)

    def _do(self, job: QueuedJob) -> object:
        served = job.served(lambda: self._attach(None))
        try:
            served.place.check()
        except NotFound as error:
            told = f"the memory {served.name} was removed or replaced while the server ran: restart the server"
            raise error.reworded(told) from None
        self._attach(served.writer if job.writes else served.reader)
        assert self._attached is not None
        try:
            self._attached.stopping = job.left.is_set
            return job.work(self._attached, job)
        finally:
            if job.writes:
                self._attach(None)


def _ending() -> Refusal:
    return Refusal("the server is shutting down: ask again when it is back", status=503, code="server_ending")


def answer(ask: Ask, reader: Reader, job: QueuedJob, *, trace: bool = False, chats: bool = False) -> Result:
    """Answer ``ask`` and send each piece to the job. With ``trace``, record the retrieved blocks.

    ``chats``: conversations may be searched too, because the owner of the memory asks.
    """
    _choose(ask, reader, chats=chats)
    for each in (ask.question, ask.system or "", *chain.from_iterable(ask.before)):
        check_words(reader.model, each)
    system = INSTRUCTION if ask.system is None else ask.system
    frame = None if ask.raw else Template.of(reader.tokenizer, system) or Template.plain(system)
    prompt = (
        Prompt([], reader.prompt(ask.question)[0].tolist(), []) if frame is None else _prompt(reader, frame, ask, job)
    )
    length = len(prompt.tokens)
    options = _options(ask, reader, job, length)
    teller = AnswerStream(reader, frame, job.tell, ask.stop)
    with reader.seeing(tail=ask.raw):
        said = [*ask.before[-1]] if ask.before else []
        made = generate_answer(reader, ask.question, prompt, teller, trace=trace, said=said, **options)
    return _result(made, job, length)


def converse(
    ask: Ask, most: int, reader: Reader, job: QueuedJob, *, trace: bool = False, chats: bool = False
) -> Result:
    """Answer the last words of ``ask`` in its session and store both. A memory keeps at most ``most`` sessions.

    Other sessions are not seen. ``chats``: the session may be a chat of the terminal, see ``answer``.
    """
    assert ask.session is not None
    _choose(ask, reader, chats=chats)
    session, prefix = (ask.session, CHAT) if chats else (SERVED + ask.session, CHAT + SERVED)
    sessions = {each.name for each in reader.memory.documents() if each.name.startswith(prefix)}
    if CHAT + session not in sessions and len(sessions) >= most:
        raise Refusal(
            f"this server stores at most {most:,} conversations in a memory, and that many exist already: "
            "continue one of them, or forget one",
            status=403,
            param="metadata",
            code="session_limit",
        )
    conversation = reader.chat(session, **({} if ask.system is None else {"system": ask.system}))
    options = _options(ask, reader, job, len(conversation.prompt(ask.question).tokens))
    made = conversation.say(ask.question, tell=job.tell, trace=trace, stop=ask.stop, **options)
    said = len(reader.memory.document(conversation.name)) - conversation.turns[-1].start
    return _result(made, job, said - len(made.tokens))


def _choose(ask: Ask, reader: Reader, *, chats: bool) -> None:
    """Select the requested documents in ``reader``. Raises ``NotFound`` if one does not exist."""
    # Another process may have read or forgotten documents since the last request.
    memory = reader.memory
    there = [each.name for each in memory.documents()] if chats else all_but_chats(memory)
    for name in ask.documents or []:
        if name not in there:
            raise not_found(name, memory.url, there)
    reader.names = chosen_documents(reader.model, memory, ask.documents, "metadata.document") or []


def _options(ask: Ask, reader: Reader, job: QueuedJob, length: int) -> dict[str, Any]:
    """Return options for a prompt of ``length`` tokens. Raises ``Refusal`` if the model cannot take that many."""
    if reason := too_long(reader.model, length, 1):
        raise Refusal(reason, param="messages", code="context_length_exceeded")
    # Without a seed, the answer must not depend on that of an earlier request.
    torch.manual_seed(secrets.randbits(63) if ask.seed is None else ask.seed)
    return {
        **ask.options,
        "max_tokens": fitting(reader.model, length, ask.max_tokens),
        "stopping_criteria": job.stopping,
    }


def _result(made: Answer, job: QueuedJob, length: int) -> Result:
    receipt = {} if job.left.is_set() else receipt_of(made)
    return Result(made.text, made.ended, length, len(made.thought) + len(made.tokens), made.seconds, receipt)


def receipt_of(made: Answer) -> dict[str, Any]:
    """Return the sources of an answer, what it lacks, missing blocks, and its trace; see ``Answer``. Unknown: none."""
    known: dict[str, Any] = {name: getattr(made, name) for name in ("coverage", "absent", "found", "trace")}
    missing = [{"document": name, "block": block, "error": why} for (name, block), why in made.missing.items()]
    return {
        "sources": [asdict(each) for each in made.sources(SOURCES)],
        "unsupported": made.unsupported(),
        **{name: fact for name, fact in known.items() if fact is not None},
        **({"missing": missing} if missing else {}),
    }


def _prompt(reader: Reader, frame: Template, ask: Ask, job: QueuedJob) -> Prompt:
    """Build the prompt: the question after earlier messages. Names of control tokens in messages stay plain text.

    Raises ``Refusal`` as soon as it is too long, and ``CancelledError`` if nobody waits any more.
    """
    tokens, before = list[int](), frame.opening
    for question, answer in ask.before:
        if job.left.is_set():
            raise CancelledError("the client has left")
        if reason := too_long(reader.model, len(tokens), 1):
            raise Refusal(f"{reason}, later messages not counted", param="messages", code="context_length_exceeded")
        tokens += frame.controls(reader.tokenizer, before) + encode(reader.tokenizer, question)
        tokens += frame.controls(reader.tokenizer, frame.past) + encode(reader.tokenizer, answer)
        before = frame.following
    asked = fill_template(reader.tokenizer, frame, ask.question, before)
    return replace(asked, before=[*tokens, *asked.before])
