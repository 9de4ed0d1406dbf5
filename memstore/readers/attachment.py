"""A model and its memories, open for the length of a ``with`` block, and how a text is read into one.

This file has all that does not depend on the mechanism. It opens, makes and checks memories, and finds documents by
their names. A text on its way into a document is compared with the stored tokens, and cut into segments. A mechanism
says what it stores (``spec``), how its model sees the memory (``_install``), and how it reads segments
(``_read_segments``). The subclass ``Reader`` asks the memory.
"""

from __future__ import annotations

import ctypes
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memstore.device_copies import background_workers, own_types, to_device
from memstore.errors import (
    CancelledError,
    DamagedError,
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
from memstore.memory.urls import Mode, folder
from memstore.progress import progress_bar
from memstore.readers.fingerprint import dividing
from memstore.readers.kinds import KINDS, Kind, Retrieval, encode
from memstore.readers.observer import Observer
from memstore.readers.ranks import Ranks, Share, SharedDocument

UNNAMED = "document"
"""The name of a memory's first document, if none is given."""
Place = Memory | str | Path
"""A memory: an open one, or its path."""
FREED_BYTES = 32 << 20
"""After so many bytes of states, freed memory goes back to the system."""
COMPARED = 1 << 16
"""Stored tokens that are held in memory at once while a text is compared with them."""
Chunks = Tokens | Iterable[Tokens]
"""Token ids, or consecutive pieces of them."""
NO_TOKENS = "the text has no tokens: pass a text that is not empty"
S = TypeVar("S")
M = TypeVar("M")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ReadResult:
    """The result of ``Reader.read`` or ``Reader.append``."""

    document: str
    tokens: int
    """Tokens of the document now."""
    new_tokens: int
    """Tokens read by this call."""
    reused_tokens: int
    """Tokens that were stored already, in this document or in others that begin with the same text."""
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
    """The options that the states depend on, for the first append to a document; else None."""
    retrieve: bool = True
    score_from: int | None = None
    """The first token to be scored."""
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
            raise InvalidArgument(
                "with process_group a memory can only be asked: use mode='r', and read texts with one process"
            )
        if process_group is not None and self.retrieval.on_error == "miss":
            raise InvalidArgument(
                "on_error='miss' works in one process only, because ranks would attend to different blocks: use "
                "on_error='raise'"
            )
        if not self.divisible and dividing(model) is not None:
            raise UnsupportedModel(
                f"the weights of this {self.kind.name} are divided among processes, which only stock models "
                "support: give each process the whole model"
            )
        self._process_group = process_group
        self.share: Share | None = None
        """This rank's share of the blocks, if there are other ranks."""
        named = [document] if isinstance(document, str) else document
        self.names = None if named is None else [*dict.fromkeys(named)]
        on = model.device if device is None and model.device.type == "cuda" else device
        self._places = _places(memory)
        self._opening: dict[str, Any] = {"mode": mode, "index": index, "device": on}
        self._memories: tuple[Memory, ...] | None = None
        self._stack = ExitStack()
        self.observers: list[Observer] = []
        """They see what calls of the model retrieve, but not what reading retrieves."""
        self.stopping: Callable[[], bool] = lambda: False
        """Checked while texts are read and searched for. If it returns True, the work stops with ``CancelledError``."""
        for what, given in (("memories", self._places), ("documents", self.names or [])):
            if len(given) > 1 and not self.several:
                raise InvalidArgument(
                    f"a {self.kind.name} continues one document at a time, got {len(given)} {what}: attach one "
                    "after the other"
                )

    @classmethod
    def default_retrieval(cls, model: Any, made: MemorySpec | None = None) -> Retrieval:  # noqa: ARG003 - for overrides
        """Return the default retrieval of ``model``; ``made``: the spec of an existing memory."""
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
        """Open the memories, as the ``with`` block does. Raises ``ForeignMemory`` for a memory of another model."""
        if self._memories is not None:
            raise InvalidArgument("this reader is open already: leave its with block first")
        with ExitStack() as stack:
            try:
                self._memories = tuple(self._opened(stack))
                self._join()
                self._begin()
                self._install(stack)
                for name in ("__deepcopy__", "__reduce_ex__"):  # a copy would run, and search, the original
                    replaced(stack, self.model, name, _refuse_copy)
            except BaseException:
                self._memories = None
                raise
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Close the memories, as leaving the ``with`` block does. Memories that were passed open stay open."""
        try:
            self._stack.close()
        finally:
            self._memories = None
            _return_freed_memory()

    def _join(self) -> None:
        """Join the other ranks if a process group was given."""
        if self._process_group is not None:
            if any(memory.mode != "r" for memory in self.memories):
                raise InvalidArgument("with process_group a memory can only be asked: open it with mode='r'")
            self.share = Share(Ranks(self._process_group))

    # The memory

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The memories, open. Texts are read into the first one."""
        if self._memories is None:
            raise InvalidArgument(
                "this reader is not open: use it inside a with block: with memstore.attach(model, memory) as "
                "reader: ..."
            )
        return self._memories

    @property
    def memory(self) -> Memory:
        """The memory that texts are read into."""
        return self.memories[0]

    @property
    def document(self) -> Document:
        """The document that the model continues. Raises ``InvalidArgument`` if it is not clear which one."""
        return self._document(None)

    @property
    def documents(self) -> list[Document]:
        """The documents that the model sees; it continues the last one."""
        return [self.document]

    def _document(self, name: str | None) -> Document:
        """Return the document called ``name``, or without a name the default document."""
        if name is None and self.names is not None and len(self.names) == 1:
            (name,) = self.names
        if name is None:
            names = [each.name for each in self.memory.documents()]
            if len(names) > 1 or (self.names is not None and len(self.names) > 1):
                shown = ", ".join(map(repr, self.names or names))
                raise InvalidArgument(f"the memory has several documents: pass document=NAME, one of {shown}")
            name = names[0] if names else UNNAMED
        document = self.memory.document(name)
        return document if self.share is None else SharedDocument(document, self.share)

    def _opened(self, stack: ExitStack) -> Iterator[Memory]:
        """Open each memory. Missing ones are made like the first one that exists."""
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
        """Write into a new memory which model it belongs to, so that other programs know."""
        names = {"name": self.model, "tokenizer": self.tokenizer}
        info = {key: name for key, of in names.items() if (name := _name_of(of))}
        if "name" in info:
            memory.put_info("model", {**info, "dtype": str(self.model.dtype).removeprefix("torch.")})

    @abstractmethod
    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        """Return what is stored of this model. If a memory was ``made`` already, its spec fixes the free choices.

        Raises ``InvalidArgument`` for a model that can store nothing.
        """

    def _check_memory(self, memory: Memory, first: Memory) -> None:  # noqa: ARG002 - for overrides
        """Raise ``ForeignMemory`` if another model made ``memory``."""
        spec = self.spec(memory.spec)
        self._check_named(memory, spec.fingerprint)
        check_same(spec, memory)

    def _check_named(self, memory: Memory, ours: Fingerprint) -> None:
        """Raise ``ForeignMemory`` if another model made ``memory``, and the names of both are known."""
        theirs, maker, name = memory.spec.fingerprint, memory.model_info().get("name"), _name_of(self.model)
        # If only the dtype differs, the weights differ too. The names may then be two names of one model.
        another = ours.architecture != theirs.architecture or (
            ours.weights != theirs.weights and ours.dtype == theirs.dtype
        )
        if another and isinstance(maker, str) and name and maker != name:
            maker, name = on_one_line([maker]), on_one_line([name])
            raise ForeignMemory(
                f"memory {memory.url} was read by {maker}, not by {name}: attach {maker} (leave --model out), or "
                "read the text into a new memory"
            )

    def _begin(self) -> None:  # noqa: B027 - nothing for most
        """Check or load what else is needed, once the memories are open."""

    @abstractmethod
    def _install(self, stack: ExitStack) -> None:
        """Let the model see the memory, until ``stack`` is closed: push onto it what undoes each change.

        When a call of the model begins, each of ``self.observers`` must get ``Observer.begin``.
        """

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
        """Read a text from its beginning: stored tokens are compared, the rest is read and stored.

        Each segment is committed while the next one is computed. An interrupted read keeps all committed segments, and
        the same call continues after them. It computes in the types of the model's weights, also under
        ``torch.autocast``.

        Args:
            text: token ids ``[n]``; consecutive pieces of them, for texts that do not fit into memory; or a string, if
                a tokenizer was given. A text that ends before the document does is compared, and the document stays as
                it is.
            document: its name; by default the one given to ``attach``.
            progress: show a line with tokens per second.
            reuse: a new document shares blocks with another one that begins with the same tokens and was read with the
                same options. Shared blocks are not read again. False reads all tokens.
            score: also compute how well the last ``score`` tokens were predicted (``ReadResult.nll``).
            retrieve: False reads without retrieving, for comparison.

        Raises:
            InvalidArgument: no tokens, tokens outside of the vocabulary, or another text under this name.
            StoreFull, ReadOnlyMemory: the current segment could not be stored. Earlier segments are stored.
        """
        check_options(self.kind, {"score": score or None, "retrieve": retrieve})
        tokens = self._given(text)
        if score is not None and (type(score) is not int or score < 0):
            raise InvalidArgument(f"score must be a number of tokens from 0 on, got {score!r}")
        if score and not isinstance(tokens, Tensor):
            raise InvalidArgument("score needs the whole text: pass all its tokens in one call")
        target, retrieving = self._target(document), retrieve is None or retrieve
        options = self._reading(retrieve=retrieving)
        if reuse and isinstance(tokens, Tensor) and self.memory.mode != "r":
            # The last unscored token predicts the first scored one.
            unscored = tokens[: max(0, len(tokens) - score - 1)] if score else tokens
            target.reuse(unscored, reading=options, step=self._step)
        if target.blocks.start:
            raise InvalidArgument(
                f"document {target.name!r} has lost its first blocks: continue it with append(), or read the text "
                "under another name"
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
        """Replace the text of a document. The blocks before the first difference stay.

        The blocks after it are removed at once. If the update is interrupted, the same call continues it. See ``read``.
        """
        tokens = self._given(text)
        if not isinstance(tokens, Tensor):
            raise InvalidArgument("update needs the whole text: pass all its tokens in one call")
        self._check_writable()
        target, size = self._target(document), self.memory.spec.block_size
        if target.id is not None and not target.blocks.start:
            common = common_tokens(target, tokens)
            if common < len(target):
                if kept := common // size // self._step * self._step:  # checked before anything is removed
                    self._check_reading(target, self._reading(retrieve=True))
                target.truncate(kept)
        return self.read(tokens, target.name, progress=progress)

    def append(self, text: str | Chunks, document: str | None = None, *, progress: bool = False) -> ReadResult:
        """Read more tokens at the end of the document, such as a question and the generated answer.

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
        """Return how many of ``tokens [n]`` a document has. A new one may share those of another document."""
        ids, there = as_tokens(tokens), self.memory.document(document)
        if there.id is not None:
            return 0 if there.blocks.start else common_tokens(there, ids)
        found = self.memory.known(ids, reading=self._reading(retrieve=True))
        return 0 if found is None else found[1] // self._step * self._step * self.memory.spec.block_size

    def _given(self, text: str | Chunks) -> Tensor | Iterable[Tokens]:
        """Return a text as token ids ``[n]`` int32, or its pieces as they are."""
        if isinstance(text, str):
            text = self._encoded(text)
        elif not isinstance(text, Iterable):
            raise InvalidArgument(f"a text is a string, tokens, or pieces of tokens, not {type(text).__name__}")
        elif not is_flat(text):
            return text  # type: ignore[return-value]  # pieces
        if isinstance(text, Tensor) and text.dim() == 2 and len(text) == 1:
            text = text[0]
        tokens = self._checked(as_tokens(text))  # type: ignore[arg-type]  # it raises for anything else
        if not len(tokens):
            raise InvalidArgument(NO_TOKENS)
        return tokens

    def _pieces(self, tokens: Tensor | Iterable[Tokens]) -> Iterator[Tensor]:
        found = 0
        for piece in [tokens] if isinstance(tokens, Tensor) else tokens:
            ids = self._checked(as_tokens(piece))
            found += len(ids)
            yield ids
        if not found:
            raise InvalidArgument(NO_TOKENS)

    def _encoded(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidArgument("to read a string, pass the tokenizer: attach(..., tokenizer=tokenizer)")
        return encode(self.tokenizer, text)

    def _target(self, name: str | None) -> Document:
        """Return the document to read into."""
        if self.memory.mode == "r" and name is not None and all(each.name != name for each in self.memory.documents()):
            self._check_writable()
        return self._document(name)

    def _check_writable(self) -> None:
        if self.memory.mode == "r":
            raise ReadOnlyMemory(
                f"memory {self.memory.url} is open with mode='r'; open it with mode='a' to read texts into it"
            )

    def _run(self, job: Job, pieces: Iterator[Tensor], stored: int, total: int | None, progress: bool) -> float:
        """Read ``pieces`` at the end of the document, and return the seconds that it took."""
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
                        raise CancelledError(
                            f"reading {job.document.name} was cancelled; the part that was read is stored"
                        )
        return time.perf_counter() - begun

    def _result(self, job: Job, stored: int, reused: int, seconds: float) -> ReadResult:
        tokens, nll = len(job.document), torch.cat(job.nll) if job.nll else torch.empty(0)
        return ReadResult(job.document.name, tokens, tokens - stored, reused, seconds, nll)

    @property
    @abstractmethod
    def _segment_tokens(self) -> int:
        """Tokens between the places where a text is cut, counted from its beginning; usually whole blocks."""

    @property
    def _step(self) -> int:
        """Blocks after which states no longer depend on later tokens: other documents may begin with them."""
        return 1

    @property
    def depth(self) -> int | None:
        """How many earlier blocks the states depend on, or None if they depend on all of them."""
        return None

    @property
    def index_bytes_per_token(self) -> float:
        """Bytes of memory per stored token while it is attached, if an index scans all tokens."""
        return 0.0

    @property
    def numbers_per_pair(self) -> float:
        """Multiplications for a token and one before it, if an index or attention looks at all tokens."""
        return 0.0

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def _reading(self, *, retrieve: bool) -> dict[str, Any] | None:  # noqa: ARG002 - for overrides
        """Return the options that the states of a document depend on, or None if there are none."""
        return None

    def _prepared(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """Return ``pieces``, after the work that needs the text's beginning."""
        return pieces

    @abstractmethod
    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        """Read ``segments`` at the end of ``job.document`` and commit them; yield the number of tokens of each.

        A segment is int32 ``[n]`` on the CPU. If the document ends within a block, the batch of ``Document.append``
        begins with this block, and its states are put again from its first token. If ``segments`` raises, or reading
        is stopped, the complete segments stay committed.
        """

    def _check_reading(self, document: Document, options: dict[str, Any] | None) -> None:
        """Raise if a document was begun with other options: its states would not belong together."""
        if options is None or self.memory.mode == "r" or not len(document):
            return
        # Older versions kept the options in the memory, under this name, and not in documents.
        before = document.reading or self.memory.get_info(f"reading/{document.name}")
        if before is None:
            return
        changed = [key for key in {**options, **before} if before.get(key) != options.get(key)]
        if changed:
            different = "; ".join(f"{key}={before.get(key)!r}, now {options.get(key)!r}" for key in changed)
            raise InvalidArgument(
                f"document {document.name!r} was begun with {different}: use the same options, or read the text "
                "under another name"
            )

    def _checked(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` unchanged. Raises ``InvalidArgument`` for tokens outside the vocabulary."""
        last = self._vocabulary - 1
        if tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > last:
                raise InvalidArgument(
                    f"token ids must be from 0 to {last}, got {low} to {high}: encode the text with this model's "
                    "tokenizer"
                )
        return tokens


def check_options(kind: Kind, given: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options of ``attach`` that this ``kind`` does not take."""
    for name, value in given.items():
        if value is not None and not kind.takes(name):
            wanted = " and ".join(each.plural or f"{each.name}s" for each in KINDS if each.takes(name))
            raise InvalidArgument(f"{name} is for {wanted}, not for a {kind.name}: leave it out")


def check_retrieval(kind: Kind, retrieval: Retrieval) -> None:
    """Raise ``InvalidArgument`` if a field that this ``kind`` does not take differs from its default."""
    given = {of: getattr(retrieval, of.name) for of in fields(retrieval)}
    check_options(kind, {f"Retrieval.{of.name}": value for of, value in given.items() if value != of.default})


def _places(memory: object) -> list[Place]:
    given = list(memory) if isinstance(memory, (list, tuple)) else [memory]
    places = [each for each in given if isinstance(each, (str, Path, Memory))]
    if not places or len(places) < len(given):
        raise InvalidArgument(f"attach needs a memory, its path, or several of them; got {memory!r}")
    urls = [each.url if isinstance(each, Memory) else str(each) for each in places]
    named = [os.path.realpath(folder(url) or url) for url in urls if url != "ram:" and "\0" not in url]
    opened = [id(each) for each in places if isinstance(each, Memory)]
    if len({*named}) < len(named) or len({*opened}) < len(opened):
        raise InvalidArgument(f"attach got the same memory twice: pass each of {', '.join(urls)} once")
    return places


def _name_of(thing: Any) -> str | None:
    """Return where a model or tokenizer was loaded from. A folder has its whole path, as others may run elsewhere."""
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
    """Return how many of ``tokens [n]`` a document begins with, if it has lost no blocks.

    Blocks that a repair has dropped have unknown tokens, -1: they count as different.
    """
    stored = document.tokens()
    length = min(len(stored), len(tokens))
    different = (stored[:length] != tokens[:length]).nonzero()
    return int(different[0]) if len(different) else length


def compare(document: Document, start: int, tokens: Tensor) -> None:
    """Raise ``InvalidArgument`` unless the document holds ``tokens`` from token ``start`` on."""
    if (text := another_text(document, start, tokens)) is not None:
        raise InvalidArgument(f"{text}: read this text under another name, or continue the document with append()")


def another_text(document: Document, start: int, tokens: Tensor) -> str | None:
    """Say that the document does not hold ``tokens`` from token ``start`` on, or return None if it does.

    Blocks that a repair has dropped have unknown tokens: they count as the same.
    """
    size = document.memory.spec.block_size
    for part in tokens.long().split(COMPARED) if len(tokens) else ():
        # A range of blocks is one read of the store. Block by block, each would be a transaction.
        for blocks in document.present(range(start // size, -(-(start + len(part)) // size))):
            stored, at = document.tokens(blocks), blocks.start * size - start
            low, high = max(at, 0), min(at + len(stored), len(part))
            different = stored[low - at : high - at] != part[low:high]
            if bool(different.any()):
                place = start + low + int(different.nonzero()[0])
                return f"document {document.name!r} holds a different text (they differ from token {place} on)"
        start += len(part)
    return None


def last_states(document: Document, tokens: int, device: torch.device) -> tuple[int, list[Tensor] | None]:
    """Return the last place up to ``tokens`` with undamaged recurrent states, and these states; 0 and None without any.

    Lost states can be computed again; verify names the damage.
    """
    for place in reversed(document.recurrent_places()):
        with suppress(DamagedError, NotFound):
            if place <= tokens:
                return place, to_device(document.recurrent(place), device)
    return 0, None


def segments(pieces: Iterator[Tensor], place: int, size: int) -> Iterator[Tensor]:
    """Cut ``pieces``, which begin at token ``place``, at multiples of ``size`` tokens."""
    waiting: list[Tensor] = []
    for piece in pieces:
        while len(piece):
            waiting.append(piece[: size - place % size])
            piece = piece[len(waiting[-1]) :]
            place += len(waiting[-1])
            if place % size == 0:
                yield torch.cat(waiting)
                waiting = []
    if waiting:
        yield torch.cat(waiting)


def pipelined(
    segments: Iterable[S],
    compute: Callable[[S], M],
    commit: Callable[[M], None],
    *,
    workers: int = 0,
    ahead: bool = True,
) -> Iterator[M]:
    """Compute ``segments`` and commit the results in order, each in a thread beside the next ones.

    ``workers`` segments are computed side by side in threads. With 0 they are computed one after the other, in this
    thread. ``ahead=False`` waits for the previous commit, for segments that need its result. Yields each result as it
    is handed over. If ``segments`` raises, earlier results are committed first.
    """
    computing: deque[Future[M]] = deque()
    pending: Future[None] | None = None
    failure: BaseException | None = None
    source = iter(segments)

    def computed() -> Iterator[M]:
        nonlocal failure
        while True:
            try:
                segment = next(source)
            except StopIteration:
                break
            except BaseException as error:  # noqa: BLE001 - raised again once earlier results are committed
                failure = error
                break
            if pool is not None:
                computing.append(pool.submit(compute, segment))
                if len(computing) > workers:
                    yield computing.popleft().result()
                continue
            if pending is not None and not ahead:
                pending.result()
            yield compute(segment)
        while computing:
            yield computing.popleft().result()

    with background_workers(1) as writer, background_workers(workers) if workers else nullcontext() as pool:
        try:
            for made in computed():
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
    """Keep the model without dropout and noise, in the types of its weights, inside the block."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with own_types():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def changed(thing: Any, **values: Any) -> Iterator[None]:
    """Give attributes of ``thing`` other ``values`` inside the block."""
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def replaced(stack: ExitStack, thing: Any, name: str, value: Any) -> None:
    """Set an attribute of an instance, in front of that of its class, until ``stack`` is closed."""
    before = vars(thing).get(name)
    setattr(thing, name, value)
    stack.callback(partial(setattr, thing, name, before) if before else partial(delattr, thing, name))


def _refuse_copy(_: object) -> NoReturn:
    raise InvalidArgument("a model with a memory attached cannot be copied or pickled: leave the with block first")


def before_calls(stack: ExitStack, module: nn.Module, hook: Callable[..., Any]) -> None:
    """Run ``hook``, uncompiled, before each forward pass of ``module``, until ``stack`` is closed."""
    stack.callback(module.register_forward_pre_hook(uncompiled(hook), with_kwargs=True).remove)


def uncompiled(function: F) -> F:
    """Exclude ``function`` from ``torch.compile``: a model that is compiled calls it as it is, by a graph break.

    Its work depends on the stored blocks, so it would be compiled again for each token: minutes for a dozen.
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def _return_freed_memory() -> None:
    """Give back to the system what glibc's allocator keeps: it only trims the ends of its arenas, one per thread."""
    with suppress(AttributeError, OSError, TypeError):  # not in this C library, or not found by None as on Windows
        ctypes.CDLL(None).malloc_trim(0)
