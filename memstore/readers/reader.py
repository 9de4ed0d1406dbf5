"""What readers of all models share: texts that are read from their beginning, compared, and continued."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from memstore.errors import InvalidArgument, NotFound
from memstore.memory import Document, Memory, MemorySpec, Recorder, Traces, open_memory
from memstore.memory.append import Tokens, as_tokens
from memstore.memory.memory import check_same
from memstore.memory.tensors import own_types
from memstore.memory.urls import Mode
from memstore.models.cache import ModelCache

COMPARED = 1 << 16
"""Stored tokens that are held in memory at once while a text is compared with them."""
Chunks = Tokens | Iterable[Tokens]
"""Token ids, or pieces of them one after the other."""


@dataclass(frozen=True)
class ReadResult:
    """What a call of ``Reader.read`` did."""

    document: str
    tokens: int
    """Tokens of the document now."""
    new: int
    """Tokens read by this call."""
    reused: int
    """Tokens that were there already, in this document or in others that begin with the same text."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of reading the new tokens."""
        return self.new / self.seconds if self.seconds else 0.0


class DocumentReader(ABC):
    """A document of a memory, which grows as text is read."""

    model: Any

    def __init__(
        self,
        memory: Memory | str | Path,
        document: str,
        spec: MemorySpec,
        mode: Mode,
        vocabulary: int,
        *,
        reading: Mapping[str, Any] | None = None,
        step: int = 1,
        index: str = "exact",
    ) -> None:
        """``memory``: one that is open and was made for ``spec``, or where it is; then ``index`` is how it is searched.

        ``reading``: what states depend on beside the model and the tokens. ``step``: blocks after which they do not
        depend on what follows, so that other documents may begin with them.
        """
        self._own = not isinstance(memory, Memory)
        self._vocabulary, self._reading, self._step = vocabulary, reading, step
        self.memory = memory if isinstance(memory, Memory) else open_memory(memory, spec=spec, mode=mode, index=index)
        try:
            check_same(spec, self.memory)
            self.document = self.memory.document(document)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.document)

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """Close the memory, unless it was given open."""
        if self._own:
            self.memory.close()

    def read(self, tokens: Chunks, *, progress: bool = False, reuse: bool = True) -> ReadResult:
        """Read a text from its beginning: what is stored already is compared, the rest is read and stored.

        ``tokens``: ids, or pieces of them one after the other, for texts that are not to be held in memory. Where they
        end before the document does, they are compared and it stays as it is. Raises ``InvalidArgument`` where
        the document holds another text. With ``reuse`` a new document shares the blocks of another one of this memory
        that begins with the same text (as far as it is not an iterator), which then need not be read.
        """
        if reuse and _is_flat(tokens) and self.memory.mode != "r":
            (flat,) = pieces_of(tokens)
            self.document.reuse(flat, reading=self._reading, step=self._step)
        stored = len(self.document)
        seen = 0

        def rest() -> Iterator[Tensor]:
            nonlocal seen
            for piece in pieces_of(tokens):
                known = min(max(0, stored - seen), len(piece))
                if known:
                    _check_stored(self.document, self.memory.spec.block_size, seen, piece[:known])
                seen += len(piece)
                if known < len(piece):
                    yield piece[known:]

        total = _count(tokens) if _is_flat(tokens) else None
        seconds = self._append(rest(), stored, total, progress=progress)
        new = len(self.document) - stored
        return ReadResult(self.document.name, len(self.document), new, min(stored, seen), seconds)

    def append(self, tokens: Chunks, *, progress: bool = False) -> ReadResult:
        """Read more tokens at the end of the document, such as a question and the answer that was generated."""
        stored = len(self.document)
        seconds = self._append(pieces_of(tokens), stored, None, progress=progress)
        new = len(self.document) - stored
        return ReadResult(self.document.name, stored + new, new, 0, seconds)

    @abstractmethod
    def cache(self, rows: int = 1, *, trace: Recorder | None = None) -> ModelCache:
        """A cache that goes on where the document ends, for ``rows`` continuations at once.

        ``trace``: what to write to, see ``record``.
        """

    def record(self, prompt: Tokens, *, question: str | None = None, traces: Traces | None = None) -> Recorder:
        """Begin a trace of what comes after the document, in ``traces`` or else in those of the memory.

        ``prompt [T]`` are the tokens that are given first, ``question`` is their text where there is one. Give the
        recorder to ``cache``, and leave its ``with`` block when everything was generated::

            with reader.record(prompt[0]) as recorder:
                model.generate(prompt, past_key_values=reader.cache(trace=recorder))

        Raises what ``Traces.record`` does.
        """
        return (self.memory.traces if traces is None else traces).record(
            model=self.memory.model_info().get("name"),
            documents=[self.document.name],
            question=question,
            prompt=as_tokens(prompt).tolist(),
            block_size=self.memory.spec.block_size,
            **self._described(),
        )

    def generate(self, input_ids: Tensor, *, trace: bool = False, **options: Any) -> Any:
        """``model.generate`` after the document; ``input_ids [rows, T]`` are what comes next.

        With ``trace`` what is retrieved is written to ``memory.traces``. Raises ``InvalidArgument`` where nothing comes
        next, and for a trace of beams.
        """
        if input_ids.dim() != 2 or not input_ids.numel():
            raise InvalidArgument(
                f"expected the tokens that come next, [rows, T], got {list(input_ids.shape)}; to go on right after the "
                "document, read all but its last token and give that one here"
            )
        # So often does generate repeat each row.
        given = options.get("generation_config") or self.model.generation_config
        beams, samples = (
            options.get(name) or getattr(given, name) or 1 for name in ("num_beams", "num_return_sequences")
        )
        rows = len(input_ids) * max(beams, samples)
        if not trace:
            return self.model.generate(input_ids, past_key_values=self.cache(rows), **options)
        if beams > 1:
            raise InvalidArgument("a trace follows each row from its beginning to its end: generate without beams")
        with self.record(input_ids[0]) as recorder:
            result = self.model.generate(input_ids, past_key_values=self.cache(rows, trace=recorder), **options)
            new = getattr(result, "sequences", result)[0, input_ids.shape[1] :]
            recorder.close(new.tolist())
        return result

    @abstractmethod
    def _described(self) -> dict[str, Any]:
        """What the info of a trace says of the model and of how it retrieves."""

    @abstractmethod
    def _append(self, pieces: Iterator[Tensor], done: int, total: int | None, *, progress: bool) -> float:
        """Read ``pieces`` at the end of the document; seconds that it took."""

    def _tokens(self, first: int, count: int) -> Tensor:
        """Tokens of the document from block ``first`` on, which has ``count`` tokens in all."""
        blocks = range(first, -(-count // self.memory.spec.block_size))
        return self.document.tokens(blocks) if blocks else torch.empty(0, dtype=torch.int64)

    def _segments(self, pieces: Iterator[Tensor], size: int) -> Iterator[Tensor]:
        """Segments that end at multiples of ``size`` tokens of the document, as far as the pieces go."""
        waiting: list[Tensor] = []
        held, place = 0, len(self.document)
        for piece in pieces:
            self._check(piece)
            start = 0
            while start < len(piece):
                room = size - place % size - held
                waiting.append(piece[start : start + room])
                held += len(waiting[-1])
                start += len(waiting[-1])
                if held == size - place % size:
                    yield torch.cat(waiting)
                    place += held
                    waiting, held = [], 0
        if held:
            yield torch.cat(waiting)

    def _asking(self, tokens: Tokens, top_k: int) -> Tensor:
        """The tokens ``[n]`` int64 of a search. Raises ``InvalidArgument`` for what none can be made with."""
        ids = as_tokens(tokens)
        if not len(ids) or top_k < 1:
            raise InvalidArgument("a search needs at least one token, and a top_k of at least 1")
        self._check(ids)
        return ids.long()

    def _check(self, tokens: Tensor) -> None:
        last = self._vocabulary - 1
        if not tokens.numel():
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > last:
            raise InvalidArgument(
                f"token ids must be from 0 to {last}, got {low}..{high}; "
                "was the text encoded with this model's tokenizer?"
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout or noise, in the types of its weights, for the time being."""
    training = model.training
    model.train(False)
    try:
        with own_types():
            yield
    finally:
        model.train(training)


def spec_of(memory: Memory | str | Path, mode: Mode) -> MemorySpec | None:
    """What a memory was made for; None where it is yet to be made."""
    if isinstance(memory, Memory):
        return memory.spec
    if mode == "x":
        return None
    try:
        with open_memory(memory, mode="r") as opened:
            return opened.spec
    except NotFound:
        return None


def codec_of(memory: Memory | str | Path, mode: Mode) -> str:
    """The codec of a memory; "none" where it is yet to be made."""
    spec = spec_of(memory, mode)
    return "none" if spec is None else spec.codec


def _is_flat(tokens: Chunks) -> bool:
    if isinstance(tokens, Tensor | np.ndarray):
        return True
    return isinstance(tokens, Sequence) and (not tokens or isinstance(tokens[0], int))


def _count(tokens: Chunks) -> int:
    """How many tokens a flat text has."""
    return tokens.numel() if isinstance(tokens, Tensor) else len(tokens)  # type: ignore[arg-type]  # flat


def pieces_of(tokens: Chunks) -> Iterator[Tensor]:
    """The pieces of a text; a flat one is one piece."""
    if _is_flat(tokens):
        flat = tokens[0] if isinstance(tokens, Tensor) and tokens.dim() == 2 and len(tokens) == 1 else tokens
        yield as_tokens(flat)  # type: ignore[arg-type]  # checked above
        return
    for piece in tokens:
        yield as_tokens(piece)  # type: ignore[arg-type]  # it says what is wrong with anything else


def _check_stored(document: Document, size: int, start: int, piece: Tensor) -> None:
    """Raise ``InvalidArgument`` unless the document, in blocks of ``size``, holds ``piece`` from token ``start`` on."""
    for part in piece.split(COMPARED):
        # A range of blocks is one read of the store; block by block it would be a transaction for each of them.
        first, stop = start // size, -(-(start + len(part)) // size)
        stored = document.tokens(range(first, stop))[start - first * size :][: len(part)]
        different = stored != part.long()
        if bool(different.any()):
            place = start + int(different.nonzero()[0])
            raise InvalidArgument(
                f"document {document.name!r} holds another text (they differ from token {place} on): read this one "
                "under another name, or append() to go on after it"
            )
        start += len(part)
