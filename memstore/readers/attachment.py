"""A model and its memories, open for the length of a ``with`` block, and how a text is read into one.

What does not depend on the mechanism is here: memories are opened, made and checked, and the documents among them are
found by their names; a text on its way into a document is compared with what is there, and cut into segments. A
mechanism says what it stores (``spec``), how its model gets to see the memory (``_install``), and how it reads segments
(``_read_segments``). What asks a memory stands on it: ``Reader``.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memstore.device_copies import background_workers, own_types
from memstore.errors import (
    BrokenOff,
    ForeignMemory,
    InvalidArgument,
    NotFound,
    ReadOnlyMemory,
    UnsupportedModel,
    on_one_line,
    opening,
)
from memstore.memory import Document, Fingerprint, Memory, MemorySpec, open_memory
from memstore.memory.append import Tokens, as_tokens
from memstore.memory.memory import check_same
from memstore.memory.urls import Mode
from memstore.progress import progress_bar
from memstore.readers.fingerprint import dividing
from memstore.readers.kinds import KINDS, Kind, Retrieval, encode
from memstore.readers.observer import Observer
from memstore.readers.ranks import Ranks, Share, SharedDocument

UNNAMED = "document"
"""The first document of a memory, where nobody names it."""
Place = Memory | str | Path
"""A memory: one that is open, or where it is."""
FREED_BYTES = 16 << 20
"""Bytes of states after which memory that reading has freed goes back to the system."""
COMPARED = 1 << 16
"""Stored tokens that are held in memory at once while a text is compared with them."""
Chunks = Tokens | Iterable[Tokens]
"""Token ids, or pieces of them one after the other."""
S = TypeVar("S")
M = TypeVar("M")


@dataclass(frozen=True)
class ReadResult:
    """What a call of ``Reader.read`` or ``Reader.append`` did."""

    document: str
    tokens: int
    """Tokens of the document now."""
    new_tokens: int
    """Tokens read by this call."""
    reused_tokens: int
    """Tokens that were there already, in this document or in others that begin with the same text."""
    seconds: float
    nll: Tensor = field(default_factory=lambda: torch.empty(0))
    """Negative log-likelihood of each scored token, ``[n]``, in nats."""

    @property
    def tokens_per_second(self) -> float:
        """Speed of reading the new tokens."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def perplexity(self) -> float:
        """Perplexity of the scored tokens; NaN if none were scored."""
        return float(self.nll.mean().exp())


@dataclass
class Job:
    """A text on its way into a document."""

    document: Document
    options: dict[str, Any] | None
    """What the states depend on beside the model and the tokens, for the first append of a document; else None."""
    retrieve: bool = True
    score_from: int | None = None
    """The first token whose likelihood is wanted."""
    nll: list[Tensor] = field(default_factory=list)


class Attachment(ABC):
    """A model with memories. Nothing is opened, locked or changed before ``open``."""

    kind: ClassVar[Kind]
    several: ClassVar[bool] = False
    """Whether several documents, and several memories, can be seen at once."""
    divisible: ClassVar[bool] = False
    """Whether the model's weights may be divided among processes."""
    model: Any
    retrieval: Retrieval

    def __init__(
        self,
        model: Any,
        memory: Place | Sequence[Place],
        document: str | Sequence[str] | None = None,
        *,
        retrieval: Retrieval | None = None,
        tokenizer: Any = None,
        index: str = "exact",
        mode: Mode = "a",
        device: str | torch.device | None = None,
        process_group: Any = None,
    ) -> None:
        """See ``memstore.attach``."""
        self.model, self.tokenizer = model, tokenizer
        self.retrieval = self.default_retrieval(model) if retrieval is None else retrieval
        check_retrieval(self.kind, self.retrieval)
        if process_group is not None and mode != "r":
            raise InvalidArgument("with process_group a memory is only asked: use mode='r', and read with one process")
        if process_group is not None and self.retrieval.on_error == "miss":
            raise InvalidArgument("on_error='miss' is for one process: ranks would attend to different lists")
        if not self.divisible and dividing(model) is not None:
            raise UnsupportedModel(
                f"the weights of this {self.kind.name} are divided among processes, which is for stock models: give "
                "each the whole model"
            )
        self._process_group = process_group
        self.share: Share | None = None
        """This rank's share of the blocks, where there are others."""
        self.names = [document] if isinstance(document, str) else None if document is None else list(document)
        on = model.device if device is None and model.device.type == "cuda" else device
        self._places = _places(memory)
        self._opening: dict[str, Any] = {"mode": mode, "index": index, "device": on}
        self._memories: tuple[Memory, ...] | None = None
        self._stack = ExitStack()
        self.observers: list[Observer] = []
        """Told what the calls of the model retrieve; not what reading does."""
        self.stopping: Callable[[], bool] = lambda: False
        """Asked while texts are read and searched for: True breaks it off with ``BrokenOff``."""
        for what, given in (("memories", self._places), ("documents", self.names or [])):
            if len(given) > 1 and not self.several:
                raise InvalidArgument(
                    f"a {self.kind.name} goes on after one document at a time, got {len(given)} {what}: attach one "
                    "after the other"
                )

    @classmethod
    def default_retrieval(cls, model: Any, made: MemorySpec | None = None) -> Retrieval:  # noqa: ARG003 - for those that care
        """How ``model`` retrieves unless it is told otherwise; ``made``: from a memory that is there already."""
        return Retrieval()

    def __enter__(self) -> Self:
        return self.open() if self._memories is None else self  # like a file that is open already

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.document)

    def __bool__(self) -> bool:
        return True

    def open(self) -> Self:
        """What entering the ``with`` block does. Raises ``ForeignMemory`` for a memory of another model."""
        if self._memories is not None:
            raise InvalidArgument("this reader is open already: leave its with block first")
        with ExitStack() as stack:
            try:
                self._memories = tuple(self._opened(stack))
                self._join()
                self._begin()
                self._install(stack)
            except BaseException:
                self._memories = None
                raise
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """What leaving the ``with`` block does. Memories that were given open stay open."""
        try:
            self._stack.close()
        finally:
            self._memories = None
            _return_freed_memory()

    def _join(self) -> None:
        """Join the other ranks, where there is a process group."""
        if self._process_group is not None:
            if any(memory.mode != "r" for memory in self.memories):
                raise InvalidArgument("with process_group a memory is only asked: open it with mode='r'")
            self.share = Share(Ranks(self._process_group))

    # The memory

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The memories, open; the first one is the one that is read into."""
        if self._memories is None:
            raise InvalidArgument(
                "a memory is read and asked inside a with block: with memstore.attach(model, memory) as reader: ..."
            )
        return self._memories

    @property
    def memory(self) -> Memory:
        """The memory that is read into."""
        return self.memories[0]

    @property
    def document(self) -> Document:
        """The document that the model goes on after. Raises ``InvalidArgument`` where it is not clear which one."""
        return self._document(None)

    @property
    def documents(self) -> list[Document]:
        """The documents that the model sees; the last one is the one that it goes on after."""
        return [self.document]

    def _document(self, name: str | None) -> Document:
        """The document called ``name``, or the one that is meant where nobody says."""
        if name is None and self.names is not None and len(self.names) == 1:
            (name,) = self.names
        if name is None:
            names = [each.name for each in self.memory.documents()]
            if len(names) > 1 or (self.names is not None and len(self.names) > 1):
                shown = ", ".join(map(repr, self.names or names))
                raise InvalidArgument(f"which document? Pass document=NAME, there are {shown}")
            name = names[0] if names else UNNAMED
        document = self.memory.document(name)
        return document if self.share is None else SharedDocument(document, self.share)

    def _opened(self, stack: ExitStack) -> Iterator[Memory]:
        """Each memory; those that are not there are made like the first one that is."""
        found = [each if isinstance(each, Memory) else self._existing(each, stack) for each in self._places]
        like = next((memory.spec for memory in found if memory is not None), None)
        for place, there in zip(self._places, found, strict=True):
            memory = there
            if memory is None:
                spec = self.spec(like)
                memory = open_memory(str(place), spec=spec, **self._opening)
                stack.enter_context(memory)
                self._sign(memory)
            with opening(memory.url):
                self._check_memory(memory, self.memories[0] if self._memories else found[0] or memory)
            yield memory

    def _existing(self, place: str | Path, stack: ExitStack) -> Memory | None:
        if self._opening["mode"] == "x":
            return None
        try:
            return stack.enter_context(open_memory(place, **self._opening))
        except NotFound:
            if self._opening["mode"] == "r":
                raise
            return None

    def _sign(self, memory: Memory) -> None:
        """Write into a new memory which model it is for, so that other programs need not be told."""
        names = {"name": self.model, "tokenizer": self.tokenizer}
        info = {key: name for key, of in names.items() if (name := _name_of(of))}
        if "name" in info:
            memory.put_info("model", {**info, "dtype": str(self.model.dtype).removeprefix("torch.")})

    @abstractmethod
    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        """What is stored of this model. ``made``: of the memory that is there already, to be like it in what is free.

        Raises ``InvalidArgument`` for a model that can store nothing.
        """

    def _check_memory(self, memory: Memory, first: Memory) -> None:  # noqa: ARG002 - for those that see several
        """Raise ``ForeignMemory`` where ``memory`` was made by another model."""
        spec = self.spec(memory.spec)
        self._check_named(memory, spec.fingerprint)
        check_same(spec, memory)

    def _check_named(self, memory: Memory, ours: Fingerprint) -> None:
        """Raise ``ForeignMemory`` where another model made ``memory``, and the names of both are known."""
        theirs, maker, name = memory.spec.fingerprint, memory.model_info().get("name"), _name_of(self.model)
        # Where only the dtype differs the weights do too, and the names may be two of one model.
        another = ours.architecture != theirs.architecture or (
            ours.weights != theirs.weights and ours.dtype == theirs.dtype
        )
        if another and isinstance(maker, str) and name and maker != name:
            maker, name = on_one_line([maker]), on_one_line([name])
            raise ForeignMemory(
                f"memory {memory.url} was read by {maker}, not by {name}: attach {maker} (leave --model out), or read "
                "the text into a new memory"
            )

    def _begin(self) -> None:  # noqa: B027 - nothing for most
        """The memories are open: whatever else has to be checked or loaded."""

    @abstractmethod
    def _install(self, stack: ExitStack) -> None:
        """Let the model see the memory, until ``stack`` is closed."""

    # Reading

    def read(
        self,
        text: str | Chunks,
        document: str | None = None,
        *,
        progress: bool = False,
        reuse: bool = True,
        score: int | None = None,
        retrieve: bool | None = None,
    ) -> ReadResult:
        """Read a text from its beginning: what is stored already is compared, the rest is read and stored.

        Segments are committed one after the other, each while the next one is computed: an interrupted read leaves all
        committed segments in place, and the same call goes on after them. It computes in the types of the model's
        weights, also under ``torch.autocast``.

        Args:
            text: token ids ``[n]``; pieces of them one after the other, for texts that are not to be held in memory; or
                a string, where a tokenizer was given. A text that ends before the document does is compared, and the
                document stays as it is.
            document: its name; by default the one given to ``attach``.
            progress: show a line with tokens per second.
            reuse: a new document shares the blocks of another one of this memory that begins with the same tokens and
                was read with the same options, which then need not be read. False reads all of them.
            score: also compute how well the last ``score`` tokens were predicted (``ReadResult.nll``).
            retrieve: False reads without retrieving, for comparison.

        Raises:
            InvalidArgument: no tokens, tokens outside of the vocabulary, or another text under this name.
            StoreFull, ReadOnlyMemory: the segment in hand could not be stored; those before it are.
        """
        check_options(self.kind, {"score": score or None, "retrieve": retrieve})
        tokens = self._given(text)
        if score is not None and score < 0:
            raise InvalidArgument(f"score is a number of tokens, got {score}")
        if score and not isinstance(tokens, Tensor):
            raise InvalidArgument("score needs the whole text: pass all its tokens in one call")
        target, retrieving = self._target(document), retrieve is None or retrieve
        options = self._reading(retrieve=retrieving)
        if reuse and isinstance(tokens, Tensor) and self.memory.mode != "r":
            # The last token that is not scored predicts the first one that is.
            unscored = tokens[: max(0, len(tokens) - score - 1)] if score else tokens
            target.reuse(unscored, reading=options, step=self._step)
        if target.blocks.start:
            raise InvalidArgument(
                f"document {target.name!r} has lost its first blocks: go on with append(), or read the text under "
                "another name"
            )
        stored = len(target)
        self._check_reading(target, options)
        job = Job(target, options if not stored else None, retrieving)
        job.score_from = len(tokens) - score if score and isinstance(tokens, Tensor) else None
        seen = 0

        def rest() -> Iterator[Tensor]:
            nonlocal seen
            for piece in self._pieces(tokens):
                known = min(max(0, stored - seen), len(piece))
                compare(target, seen, piece[:known])
                seen += len(piece)
                if known < len(piece):
                    self._check_writable()
                    yield piece[known:]

        seconds = self._run(job, rest(), stored, len(tokens) if isinstance(tokens, Tensor) else None, progress)
        return self._result(job, stored, min(stored, seen), seconds)

    def update(self, text: str | Tokens, document: str | None = None, *, progress: bool = False) -> ReadResult:
        """Read a text in place of the one that the document holds: the blocks before the first difference stay.

        Those behind it leave at once, so an interrupted update is gone on with by the same call. See ``read``.
        """
        tokens = self._given(text)
        if not isinstance(tokens, Tensor):
            raise InvalidArgument("an update needs the whole text at once, not in pieces")
        self._check_writable()
        target, size = self._target(document), self.memory.spec.block_size
        if target.id is not None and not target.blocks.start:
            common = common_tokens(target, tokens)
            if common < len(target):
                target.truncate(common // size // self._step * self._step)
        return self.read(tokens, target.name, progress=progress)

    def append(self, text: str | Chunks, document: str | None = None, *, progress: bool = False) -> ReadResult:
        """Read more tokens at the end of the document, such as a question and the answer that was generated.

        See ``read``.
        """
        tokens = self._given(text)
        self._check_writable()
        target, options = self._target(document), self._reading(retrieve=True)
        stored = len(target)
        self._check_reading(target, options)
        job = Job(target, options if not stored else None)
        seconds = self._run(job, self._pieces(tokens), stored, None, progress)
        return self._result(job, stored, 0, seconds)

    def stored_tokens(self, tokens: Tokens, document: str) -> int:
        """How many of ``tokens [n]`` need not be read into a document: it has them, or is new and another begins so."""
        ids, there = as_tokens(tokens), self.memory.document(document)
        if there.id is not None:
            return 0 if there.blocks.start else common_tokens(there, ids)
        found = self.memory.known(ids, reading=self._reading(retrieve=True))
        return 0 if found is None else found[1] // self._step * self._step * self.memory.spec.block_size

    def _given(self, text: str | Chunks) -> Tensor | Iterable[Tokens]:
        """A text as token ids ``[n]`` int32, or its pieces as they are."""
        if isinstance(text, str):
            return self._checked(torch.tensor(self._encoded(text), dtype=torch.int64))
        if not is_flat(text):
            return text  # type: ignore[return-value]  # pieces
        if isinstance(text, Tensor):
            if text.dtype == torch.bool:
                raise InvalidArgument("expected token ids, got a mask of True and False")
            if text.dim() == 2 and len(text) == 1:
                text = text[0]
        tokens = self._checked(as_tokens(text))  # type: ignore[arg-type]  # it says what is wrong with anything else
        if not len(tokens):
            raise InvalidArgument("there is nothing to read: the text has no tokens")
        return tokens

    def _pieces(self, tokens: Tensor | Iterable[Tokens]) -> Iterator[Tensor]:
        if isinstance(tokens, Tensor):
            yield tokens
            return
        for piece in tokens:
            yield self._checked(as_tokens(piece))

    def _encoded(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidArgument("to read a string, give attach the tokenizer: attach(..., tokenizer=tokenizer)")
        return encode(self.tokenizer, text)

    def _target(self, name: str | None) -> Document:
        """The document to read into."""
        if self.memory.mode == "r" and name is not None and all(each.name != name for each in self.memory.documents()):
            self._check_writable()
        return self._document(name)

    def _check_writable(self) -> None:
        if self.memory.mode == "r":
            raise ReadOnlyMemory(
                f"the memory {self.memory.url} was opened with mode='r'; open it with mode='a' to read a text into it"
            )

    def _run(self, job: Job, pieces: Iterator[Tensor], stored: int, total: int | None, progress: bool) -> float:
        """Read ``pieces`` at the end of the document; seconds that it took."""
        begun = time.perf_counter()
        told = progress_bar(job.document.name, stored, total, show=True) if progress else nullcontext(lambda _: None)
        with torch.no_grad(), evaluating(self.model), told as advance:
            cut = segments(self._prepared(pieces), stored, self._segment_tokens)
            with closing(self._read_segments(job, cut)) as done:
                written, token_bytes = 0, job.document.memory.spec.token_bytes
                for tokens in done:
                    advance(tokens)
                    written += tokens * token_bytes
                    if written > FREED_BYTES:  # a call takes milliseconds
                        _return_freed_memory()
                        written = 0
                    if self.stopping():
                        raise BrokenOff(f"reading {job.document.name} was broken off; what was read is stored")
        return time.perf_counter() - begun

    def _result(self, job: Job, stored: int, reused: int, seconds: float) -> ReadResult:
        tokens, nll = len(job.document), torch.cat(job.nll) if job.nll else torch.empty(0)
        return ReadResult(job.document.name, tokens, tokens - stored, reused, seconds, nll)

    @property
    @abstractmethod
    def _segment_tokens(self) -> int:
        """Tokens between the places where a text is cut."""

    @property
    def _step(self) -> int:
        """Blocks after which states no longer depend on the tokens behind: other documents may begin with them."""
        return 1

    @property
    def depth(self) -> int | None:
        """How many blocks before a place the states behind it depend on; None where they depend on all of them."""
        return None

    @property
    def index_bytes_per_token(self) -> float:
        """Bytes of memory that a stored token takes while it is attached, where an index scans all of them."""
        return 0.0

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def _reading(self, *, retrieve: bool) -> dict[str, Any] | None:  # noqa: ARG002 - for those that can do without
        """What the states of a document depend on beside the model and the tokens; None where that is nothing."""
        return None

    def _prepared(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """``pieces``, once whatever depends on the text's beginning is done."""
        return pieces

    @abstractmethod
    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        """Read ``segments`` at the end of the document and commit them; tells the tokens of each.

        Where ``segments`` raises, or reading is broken off, what was whole before stays committed.
        """

    def _check_reading(self, document: Document, options: dict[str, Any] | None) -> None:
        """A document is read with the same options from beginning to end, or its states would not belong together."""
        if options is None or self.memory.mode == "r" or not len(document):
            return
        # Before documents kept their options themselves, the memory did, under this name.
        before = document.reading or self.memory.get_info(f"reading/{document.name}")
        if before is None:
            return
        changed = [key for key in {**options, **before} if before.get(key) != options.get(key)]
        if changed:
            different = "; ".join(f"{key}={before.get(key)!r}, now {options.get(key)!r}" for key in changed)
            raise InvalidArgument(
                f"document {document.name!r} was begun with {different}: go on with the same options, or read the text "
                "under another name"
            )

    def _checked(self, tokens: Tensor) -> Tensor:
        """``tokens`` as they are. Raises ``InvalidArgument`` for those that are not of the vocabulary."""
        last = self._vocabulary - 1
        if tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > last:
                raise InvalidArgument(
                    f"token ids must be from 0 to {last}, got {low}..{high}; "
                    "was the text encoded with this model's tokenizer?"
                )
        return tokens


def check_options(kind: Kind, given: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options of ``attach`` that are given to a ``kind`` which does not take them."""
    for name, value in given.items():
        if value is not None and not kind.takes(name):
            wanted = " and ".join(f"{each.name}s" for each in KINDS if each.takes(name))
            raise InvalidArgument(f"{name} is for {wanted}; a {kind.name} does not take it: leave it out")


def check_retrieval(kind: Kind, retrieval: Retrieval) -> None:
    """Raise ``InvalidArgument`` for what a ``kind`` cannot do: a field it does not take, and that is not as usual."""
    given = {of: getattr(retrieval, of.name) for of in fields(retrieval)}
    check_options(kind, {f"Retrieval.{of.name}": value for of, value in given.items() if value != of.default})


def _places(memory: object) -> list[Place]:
    given = list(memory) if isinstance(memory, (list, tuple)) else [memory]
    places = [each for each in given if isinstance(each, (str, Path, Memory))]
    if not places or len(places) < len(given):
        raise InvalidArgument(f"attach needs a memory, the path of one, or several of them, got {memory!r}")
    return places


def _name_of(thing: Any) -> str | None:
    """Where a model or tokenizer was loaded from; a folder by its whole path, for others may run elsewhere."""
    name = getattr(thing, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def is_flat(tokens: Chunks) -> bool:
    """Whether these are token ids, and not pieces of them."""
    if isinstance(tokens, Tensor | np.ndarray):
        return True
    return isinstance(tokens, Sequence) and not (tokens and isinstance(tokens[0], Tensor | np.ndarray | Sequence))


def common_tokens(document: Document, tokens: Tensor) -> int:
    """How many of ``tokens [n]`` a document that has lost no blocks begins with.

    Nobody knows the tokens of blocks that a repair has dropped, -1: they differ.
    """
    stored = document.tokens()
    length = min(len(stored), len(tokens))
    different = (stored[:length] != tokens[:length]).nonzero()
    return int(different[0]) if len(different) else length


def compare(document: Document, start: int, tokens: Tensor) -> None:
    """Raise ``InvalidArgument`` unless the document holds ``tokens`` from token ``start`` on."""
    if (text := another_text(document, start, tokens)) is not None:
        raise InvalidArgument(f"{text}: read this one under another name, or append() to go on after it")


def another_text(document: Document, start: int, tokens: Tensor) -> str | None:
    """That the document does not hold ``tokens`` from token ``start`` on, in words; None where it does.

    Nobody knows the tokens of blocks that a repair has dropped: they are taken for the same.
    """
    size = document.memory.spec.block_size
    for part in tokens.long().split(COMPARED) if len(tokens) else ():
        # A range of blocks is one read of the store; block by block it would be a transaction for each of them.
        for blocks in document.present(range(start // size, -(-(start + len(part)) // size))):
            stored, at = document.tokens(blocks), blocks.start * size - start
            low, high = max(at, 0), min(at + len(stored), len(part))
            different = stored[low - at : high - at] != part[low:high]
            if bool(different.any()):
                place = start + low + int(different.nonzero()[0])
                return f"document {document.name!r} holds another text (they differ from token {place} on)"
        start += len(part)
    return None


def segments(pieces: Iterator[Tensor], place: int, size: int) -> Iterator[Tensor]:
    """Pieces of ``pieces``, which begin at token ``place``, that end at multiples of ``size`` tokens or at the end."""
    waiting: list[Tensor] = []
    held = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            waiting.append(piece[start : start + size - place % size - held])
            held += len(waiting[-1])
            start += len(waiting[-1])
            if held == size - place % size:
                yield torch.cat(waiting)
                place, waiting, held = place + held, [], 0
    if held:
        yield torch.cat(waiting)


def pipelined(
    segments: Iterable[S],
    compute: Callable[[S], M],
    commit: Callable[[M], None],
    *,
    workers: int = 0,
    ahead: bool = True,
) -> Iterator[M]:
    """Compute ``segments`` and commit what they made in order, each in a thread beside the next ones.

    ``workers`` segments are computed side by side in threads; 0: one after the other, in this one. ``ahead=False``
    waits until what was made before is committed, for segments that need to find it. Tells what was made, as it is
    handed over. Where ``segments`` raises, what came before is committed first.
    """
    computing: deque[Future[M]] = deque()
    pending: Future[None] | None = None
    failure: BaseException | None = None
    source = iter(segments)
    with background_workers(1) as writer, background_workers(workers) if workers else nullcontext() as pool:
        try:
            while True:
                try:
                    segment = next(source)
                except StopIteration:
                    break
                except BaseException as error:  # noqa: BLE001 - raised again once what came before it is kept
                    failure = error
                    break
                if pool is None:
                    if pending is not None and not ahead:
                        pending.result()
                    made = compute(segment)
                else:
                    computing.append(pool.submit(compute, segment))
                    if len(computing) <= workers:
                        continue
                    made = computing.popleft().result()
                if pending is not None:
                    pending.result()
                pending = writer.submit(commit, made)
                yield made
            while computing:
                made = computing.popleft().result()
                if pending is not None:
                    pending.result()
                pending = writer.submit(commit, made)
                yield made
            if pending is not None:
                pending.result()
        finally:
            for each in computing:
                each.cancel()
    if failure is not None:
        raise failure


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout or noise, in the types of its weights, for the time being."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with own_types():
            yield
    finally:
        for module in training:
            module.training = True


def _return_freed_memory() -> None:
    """Give back to the system what glibc's allocator keeps of freed memory; other allocators do so themselves.

    Its arenas grow with the tensors of every thread that reads, and are trimmed at their ends only.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
