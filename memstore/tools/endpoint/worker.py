"""The one thread that answers, in the order in which requests came.

A model computes one answer at a time, and one memory is attached to it at a time. So each answer has seen its own
memory and no other, however many are served by the same model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memstore.errors import MemstoreError
from memstore.readers.asking import Teller, Template, answered
from memstore.readers.kinds import encode
from memstore.tools.ask import chosen_documents
from memstore.tools.endpoint.request import Ask, Refused
from memstore.tools.failures import Mistake

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.readers.reader import Reader
    from memstore.tools.models import Loaded

SOURCES = 8


@dataclass(frozen=True)
class Served:
    """A memory that is asked by its name."""

    name: str
    model: str
    """What its model is called."""
    loaded: Loaded
    memory: Memory
    reader: Reader


@dataclass(frozen=True)
class Result:
    """An answer as the endpoint tells it."""

    text: str
    ended: bool
    prompt_tokens: int
    tokens: int
    sources: list[dict[str, Any]]


@dataclass(frozen=True)
class QueuedQuestion:
    """A request that waits, or is being answered."""

    served: Served
    ask: Ask
    tell: Callable[[str | Result | Exception], object]
    """Told pieces of the answer, and at last all of it or why there is none. Called in the worker's thread."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for the answer any more."""


class Worker:
    """A thread that answers questions (``QueuedQuestion``), of which ``most`` may wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[QueuedQuestion] = deque()
        self._current: QueuedQuestion | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._attached: Reader | None = None
        self._thread = threading.Thread(target=self._work, name="memstore-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, job: QueuedQuestion) -> bool:
        """Let a job wait for its turn; False where too many do."""
        with self._changed:
            # Those that nobody waits for any more keep nobody out.
            self._waiting = deque(each for each in self._waiting if not each.left.is_set())
            if self._closed or len(self._waiting) >= self._most:
                return False
            self._waiting.append(job)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Break off what is being answered, drop the rest, and leave the models as they were."""
        with self._changed:
            self._closed = True
            if self._current is not None:
                self._current.left.set()
            self._changed.notify()
        self._thread.join()  # whoever closes a memory that is being read would take it from under the thread

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                done: Result | Exception = self._answer(job)
            except (MemstoreError, Refused) as error:
                done = error
                self._attach(None)
            except Exception as error:  # noqa: BLE001 - told to whoever asked; the others are still to be answered
                done = Mistake(error)
                self._attach(None)
            job.tell(done)
        self._attach(None)

    def _next(self) -> QueuedQuestion | None:
        with self._changed:
            self._current = None
            while not self._closed:
                while self._waiting:
                    job = self._waiting.popleft()
                    if not job.left.is_set():
                        self._current = job
                        return job
                self._changed.wait()
        return None

    def _attach(self, reader: Reader | None) -> None:
        """Let ``reader`` be the one that is open; most requests go to the memory of the one before."""
        if self._attached is not reader:
            if self._attached is not None:
                self._attached.close()
            self._attached = None
            if reader is not None:
                self._attached = reader.open()

    def _answer(self, job: QueuedQuestion) -> Result:
        ask, reader = job.ask, job.served.reader
        self._attach(reader)
        # Another process may have read more, or forgotten something, since the last request.
        reader.names = chosen_documents(job.served.loaded, job.served.memory, None)
        frame = None if ask.raw else Template.of(reader.tokenizer, ask.system) or Template.plain(ask.system)
        prompt = reader.prompt(ask.question) if frame is None else _prompt(reader, frame, ask)
        length, limit = prompt.shape[1], getattr(reader.model.config, "max_position_embeddings", None)
        if limit is not None and length + ask.max_tokens > limit:
            raise Refused(
                f"the model takes {limit:,} tokens, got {length:,} and {ask.max_tokens:,} to be generated",
                code="context_length_exceeded",
            )
        if ask.seed is not None:
            torch.manual_seed(ask.seed)

        def has_left(ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
            return torch.full((len(ids),), job.left.is_set(), dtype=torch.bool, device=ids.device)

        options = {**ask.options, "stopping_criteria": [has_left]}
        teller = Teller(reader, frame, job.tell)
        with reader.seeing(tail=ask.raw):
            answer = answered(reader, ask.question, prompt, teller, max_tokens=ask.max_tokens, trace=False, **options)
        sources = [] if job.left.is_set() else [asdict(each) for each in answer.sources(SOURCES)]
        return Result(answer.text, answer.ended, length, len(answer.tokens), sources)


def _prompt(reader: Reader, frame: Template, ask: Ask) -> torch.Tensor:
    """The question after what was said before, tokens ``[1, T]``. Control tokens' names in people's words are text."""
    tokens, before = [], frame.opening
    for question, answer in ask.before:
        tokens += frame.controls(reader.tokenizer, before) + encode(reader.tokenizer, question)
        tokens += frame.controls(reader.tokenizer, frame.header) + encode(reader.tokenizer, answer)
        before = frame.following
    tokens += frame.controls(reader.tokenizer, before) + encode(reader.tokenizer, ask.question)
    tokens += frame.controls(reader.tokenizer, frame.header)
    return torch.tensor([tokens], dtype=torch.int64, device=reader.model.device)
