"""A text on its way into a document: how it is compared with what is there, cut, computed, and what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memstore.errors import InvalidArgument
from memstore.memory import Document
from memstore.memory.append import Tokens
from memstore.transfer import background_workers, own_types

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
    """Raise ``InvalidArgument`` unless the document holds ``tokens`` from token ``start`` on.

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
                raise InvalidArgument(
                    f"document {document.name!r} holds another text (they differ from token "
                    f"{start + low + int(different.nonzero()[0])} on): read this one under another name, or append() "
                    "to go on after it"
                )
        start += len(part)


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
