"""What a call sees of the documents: sink, candidates for retrieval, and direct tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from memstore.readers.stock.short import SHORT, Short, ShortDocuments, incomplete_landmarks
from memstore.transfer import to_device

if TYPE_CHECKING:
    from memstore.memory import Document

States = tuple[Tensor, Tensor]
"""Position-free keys and values."""


class AttachedDocument(NamedTuple):
    """A document, and the number of the memory that it is in."""

    document: Document
    memory: int


@dataclass(frozen=True)
class Candidates:
    """The blocks that may be retrieved, numbered 0..N-1 over one or several documents."""

    parts: tuple[tuple[AttachedDocument, range], ...]

    def __len__(self) -> int:
        return sum(len(blocks) for _, blocks in self.parts)

    @cached_property
    def incomplete(self) -> dict[int, int]:
        """How many tokens the candidates have that are not full: the last blocks of documents."""
        found, number = {}, -1
        for (document, _), blocks in self.parts:
            number += len(blocks)
            full = document.complete_blocks.stop
            if blocks.stop > full:
                found[number] = len(document) - full * document.memory.spec.block_size
        return found

    def empty(self, numbers: Tensor, block_size: int) -> Tensor | None:
        """``[..., S]``: True where the candidates ``numbers [...]`` have no token; None where they are full."""
        if not self.incomplete:
            return None
        tokens = torch.full((len(self),), block_size)
        tokens[list(self.incomplete)] = torch.tensor(list(self.incomplete.values()))
        empty = torch.arange(block_size) >= tokens[numbers].unsqueeze(-1)
        return empty if bool(empty.any()) else None

    @property
    def memories(self) -> int:
        """How many memories the candidates are of, at least: one more than the highest number."""
        return 1 + max((source.memory for source, _ in self.parts), default=0)

    @cached_property
    def _stops(self) -> Tensor:
        """For each part the number of the first candidate behind it."""
        return torch.tensor([len(blocks) for _, blocks in self.parts], dtype=torch.int64).cumsum(0)

    @cached_property
    def _shifts(self) -> Tensor:
        """For each part what makes the number of a candidate of it the number of its block."""
        starts = torch.tensor([blocks.start for _, blocks in self.parts], dtype=torch.int64)
        lengths = torch.tensor([len(blocks) for _, blocks in self.parts], dtype=torch.int64)
        return starts - (self._stops - lengths)

    def _parts_of(self, numbers: Tensor) -> Tensor:
        """Which part each of the candidates ``numbers [...]`` is in."""
        return torch.searchsorted(self._stops, numbers, right=True)

    def locate(self, number: int) -> tuple[Document, int]:
        """Document and block of candidate ``number``."""
        ((document, (block,)),) = self.located(torch.tensor([number]))
        return document, block

    def named(self, numbers: Tensor) -> tuple[list[str], Tensor, Tensor]:
        """Names of the documents, and of the candidates ``numbers``: which of the names, and the block, of each."""
        places: dict[str, int] = {}
        of_part = torch.tensor([places.setdefault(each.document.name, len(places)) for each, _ in self.parts])
        part = self._parts_of(numbers)
        return list(places), of_part[part], numbers + self._shifts[part]

    def blocks(self) -> Tensor:
        """Block id of every candidate, ``[N]``."""
        numbers = torch.arange(len(self))
        return numbers + self._shifts[self._parts_of(numbers)]

    def consecutive(self, device: torch.device | None = None) -> Tensor:
        """``[N]``: True where a candidate directly follows the one before it in the same document."""
        follows = torch.ones(len(self), dtype=torch.bool, device=device)
        follows[:1] = False
        if len(self.parts) > 1:
            parts = self._parts_of(torch.arange(len(self)))
            follows[1:] = to_device([parts[1:] == parts[:-1]], follows.device)[0]
        return follows

    def score(self, layer: int, queries: Sequence[Tensor], short: ShortDocuments) -> Tensor:
        """Best inner product of each query with each candidate's landmarks, ``[H, T, N]``, where the index is.

        ``queries[m] [H, T, D]`` are those for the landmarks of memory ``m``: each memory has a router of its own.
        """
        index = self.parts[0][0].document.layer(layer).index
        queries = [each.to(None if index is None else index.device) for each in queries]
        scores = queries[0].new_empty((*queries[0].shape[:2], len(self)), dtype=torch.float32)
        together: dict[int, list[tuple[range, Short]]] = {}
        stop = 0
        for (document, memory), blocks in self.parts:
            if not blocks:
                continue
            stop += len(blocks)
            numbers, tokens = range(stop - len(blocks), stop), self.incomplete.get(stop - 1)
            if len(blocks) <= SHORT and len(self.parts) > 1 and document.memory.index_capabilities.dense:
                together.setdefault(memory, []).append((numbers, Short(document, blocks, tokens)))
                continue
            view, full = document.layer(layer), blocks if tokens is None else blocks[:-1]
            if full:
                scores[..., numbers.start : numbers.start + len(full)] = view.score(queries[memory], allowed=full)[0]
            if tokens is not None:
                last = incomplete_landmarks(view.landmarks(blocks[-1:])[0], tokens, document.memory.spec.block_size)
                scores[..., stop - 1] = _best(last, queries[memory])
        for memory, parts in together.items():
            at = torch.tensor([number for numbers, _ in parts for number in numbers], device=scores.device)
            scores[..., at] = short.score(memory, layer, [each for _, each in parts], queries[memory])
        return scores

    def located(self, numbers: Tensor) -> list[tuple[Document, list[int]]]:
        """The candidates ``numbers [n]`` (ascending) as blocks of documents."""
        parts, sizes = self._parts_of(numbers).unique_consecutive(return_counts=True)
        runs = numbers.split(sizes.tolist())
        return [
            (self.parts[part][0].document, (run + self._shifts[part]).tolist())
            for part, run in zip(parts.tolist(), runs, strict=True)
        ]


def _best(landmarks: Tensor, queries: Tensor) -> Tensor:
    """Best inner product ``[H, T]`` of ``queries [H, T, D]`` with ``landmarks [G, P, D]`` of one block."""
    heads = landmarks.to(queries.device).repeat_interleave(len(queries) // len(landmarks), 0)
    best: Tensor = (queries.float() @ heads.transpose(-1, -2)).amax(-1)
    return best


def gather(
    located: Sequence[tuple[Document, list[int]]], layers: Sequence[int], device: torch.device
) -> Iterator[States]:
    """Keys and values ``[n, G, S, D]`` of blocks of documents in each of ``layers``, on ``device``."""
    for states in zip(*(document.gather(layers, blocks, device=device) for document, blocks in located), strict=True):
        if len(states) == 1:
            yield states[0]["k"], states[0]["v"]
        else:
            yield torch.cat([s["k"] for s in states]), torch.cat([s["v"] for s in states])


@dataclass(frozen=True)
class Visible:
    """The parts of the memory that the tokens of one call see."""

    sink: range
    """Tokens at the beginning of the document, always attended to."""
    candidates: Candidates
    direct: range
    """The tokens right before the call, always attended to: the window, and what came after it was set."""

    def direct_for(self, sliding: int | None) -> range:
        """The direct tokens of a layer that sees ``sliding`` tokens back and needs no memory."""
        return self.direct if sliding is None else range(max(0, self.direct.stop - sliding), self.direct.stop)


NOTHING = Visible(range(0), Candidates(()), range(0))


def everything(sources: Sequence[AttachedDocument]) -> Candidates:
    """All blocks of ``sources``."""
    return Candidates(
        tuple((source, part) for source in sources for part in source.document.present(source.document.blocks))
    )


def visible(
    sources: Sequence[AttachedDocument], block_size: int, *, tokens: int, start: int, sink: int, window: int | None
) -> Visible:
    """What a call sees that continues the last of ``sources`` after ``tokens`` tokens.

    ``start`` is the token from which the window is counted back: ``tokens`` for a prompt, the beginning of the segment
    while reading, so that the same tokens are seen however a segment is cut into calls. ``window=None``: nothing is
    continued, so the last document is searched like the others.
    """
    own = sources[-1]
    first = own.document.blocks.start * block_size
    if window is None:  # its sink is attended to as well, but does not say where an answer is from
        return Visible(range(first, min(first + sink, tokens)), everything(sources), range(tokens, tokens))
    others = everything(sources[:-1])
    window_start = (start - window) // block_size * block_size
    if window_start <= first + sink:
        return Visible(range(first, first), others, range(first, tokens))
    between = range((first + sink) // block_size, window_start // block_size)
    parts = tuple((own, part) for part in own.document.present(between) or [between[:0]])
    return Visible(range(first, first + sink), Candidates((*others.parts, *parts)), range(window_start, tokens))


class DocumentStates:
    """Position-free states of runs of tokens of one document, read from its store to ``device``."""

    def __init__(self, document: Document, block_size: int, layers: int, device: torch.device) -> None:
        self.document, self.block_size, self.layers, self.device = document, block_size, layers, device
        self._there: dict[range, list[States]] = {}

    def read(self, layer: int, tokens: range) -> States:
        """Keys and values ``[G, n, D]`` of ``tokens``, which lie in stored blocks."""
        if self.device.type == "cpu":
            return self._read([layer], tokens)[0]
        if tokens not in self._there:  # of all layers at once, and once: copies to a device are better few
            self._there[tokens] = self._read(range(self.layers), tokens)
        return self._there[tokens][layer]

    def _read(self, layers: Sequence[int], tokens: range) -> list[States]:
        size = self.block_size
        blocks = range(tokens.start // size, -(-tokens.stop // size))
        skip = tokens.start - blocks.start * size
        kept = slice(skip, skip + len(tokens))
        gathered = self.document.gather(layers, blocks, device=self.device)
        return [(as_tokens(states["k"])[:, kept], as_tokens(states["v"])[:, kept]) for states in gathered]


def as_tokens(blocks: Tensor) -> Tensor:
    """Blocks ``[n, G, S, D]`` as one run of tokens ``[G, n * S, D]``."""
    return blocks.transpose(0, 1).flatten(1, 2)


def as_blocks(tokens: Tensor, block_size: int) -> Tensor:
    """A run of tokens ``[G, n, D]`` as blocks ``[ceil(n / S), G, S, D]``, the last one padded with zeros."""
    if missing := -tokens.shape[1] % block_size:
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, missing))
    blocks: Tensor = tokens.unflatten(1, (-1, block_size))
    return blocks.transpose(0, 1)
