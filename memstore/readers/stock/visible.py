"""The parts of documents that a call sees: sink, candidates for retrieval, and direct tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from memstore.device_copies import to_device
from memstore.errors import NotFound
from memstore.kernels.best_signs import PackedSigns, best_signs, pack, problem
from memstore.memory.entry import lacking, merged
from memstore.memory.spec import index_dtype

if TYPE_CHECKING:
    from memstore.memory import Document
    from memstore.memory.entry import DocumentState, Places
    from memstore.readers.stock.architecture import LayerPlan

States = tuple[Tensor, Tensor]
"""Position-free keys and values."""
SHORT = 64
"""A document with at most so many blocks is scored together with others."""


@dataclass(frozen=True, eq=False)
class AttachedDocument:
    """A document, and the number of its memory."""

    document: Document
    memory: int

    @cached_property
    def _located(self) -> tuple[DocumentState, Places | None]:
        return self.document.located()

    @property
    def state(self) -> DocumentState:
        """The document's entry at the first access. A reader of thousands of documents reads each entry once."""
        return self._located[0]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The blocks that may be retrieved, numbered 0..N-1 over one or several documents.

    Their properties are computed once. A reader keeps the candidates from one question to the next, until the next
    commit.
    """

    parts: tuple[tuple[AttachedDocument, range], ...]

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        return sum(len(blocks) for _, blocks in self.parts)

    @cached_property
    def incomplete(self) -> dict[int, int]:
        """Tokens of each candidate that is not full, by its number: the last blocks of documents."""
        found, number = {}, -1
        for source, blocks in self.parts:
            number += len(blocks)
            size = source.document.memory.spec.block_size
            full = source.state.complete(size).stop
            if blocks.stop > full:
                found[number] = source.state.tokens - full * size
        return found

    def empty(self, numbers: Tensor, block_size: int) -> Tensor | None:
        """``[..., S]``: True where the candidates ``numbers [...]`` have no token; None if they are full."""
        tokens = [self.incomplete.get(number, block_size) for number in numbers.ravel().tolist()]
        if all(count == block_size for count in tokens):
            return None
        return torch.arange(block_size) >= torch.tensor(tokens).view(*numbers.shape, 1)

    @cached_property
    def memories(self) -> int:
        """One more than the highest memory number of the candidates."""
        return 1 + max((source.memory for source, _ in self.parts), default=0)

    @cached_property
    def _stops(self) -> Tensor:
        """For each part, the number of the first candidate after it."""
        return torch.tensor([len(blocks) for _, blocks in self.parts], dtype=torch.int64).cumsum(0)

    @cached_property
    def _shifts(self) -> Tensor:
        """For each part, the difference between the number of a block and that of its candidate."""
        starts = torch.tensor([blocks.start for _, blocks in self.parts], dtype=torch.int64)
        lengths = torch.tensor([len(blocks) for _, blocks in self.parts], dtype=torch.int64)
        return starts - (self._stops - lengths)

    def _parts_of(self, numbers: Tensor) -> Tensor:
        """Return the part of each of the candidates ``numbers [...]``."""
        return torch.searchsorted(self._stops, numbers, right=True)

    def locate(self, number: int) -> tuple[Document, int]:
        """Return document and block of candidate ``number``."""
        ((document, (block,)),) = self.located(torch.tensor([number]))
        return document, block

    def named(self, numbers: Tensor) -> tuple[list[str], Tensor, Tensor]:
        """Return the documents' names, and for each of ``numbers`` the place of its document's name, and its block."""
        part = self._parts_of(numbers)
        parts, of = part.unique(return_inverse=True)  # often few of thousands
        places: dict[str, int] = {}
        of_part = [places.setdefault(self.parts[each][0].document.name, len(places)) for each in parts.tolist()]
        return list(places), torch.tensor(of_part, dtype=torch.int64)[of], numbers + self._shifts[part]

    @cached_property
    def blocks(self) -> Tensor:
        """The block id of every candidate, ``[N]``."""
        numbers = torch.arange(len(self))
        return numbers + self._shifts[self._parts_of(numbers)]

    def consecutive(self, device: torch.device | None = None) -> Tensor:
        """``[N]``: True where a candidate directly follows the previous one in the same document."""
        if len(self.parts) > 1:
            return self._follows if device is None else to_device([self._follows], device)[0]
        follows = torch.ones(len(self), dtype=torch.bool, device=device)
        follows[:1] = False
        return follows

    @cached_property
    def _follows(self) -> Tensor:
        parts = self._parts_of(torch.arange(len(self)))
        return torch.cat([torch.zeros(min(1, len(self)), dtype=torch.bool), parts[1:] == parts[:-1]])

    def score(self, layer: int, queries: Sequence[Tensor], short: ShortDocuments) -> Tensor:
        """Best inner product of each query with each candidate's landmarks, ``[H, T, N]``, on the device of the index.

        ``queries[m] [H, T, D]`` are the queries for memory ``m``, because each memory has its own router.
        """
        index = self.parts[0][0].document.layer(layer).index
        queries = [each.to(None if index is None else index.device) for each in queries]
        scores = queries[0].new_empty((*queries[0].shape[:2], len(self)), dtype=torch.float32)
        alone, together = self._scored_as
        for source, blocks, numbers in alone:
            tokens, view = self.incomplete.get(numbers.stop - 1), source.document.layer(layer)
            full = blocks if tokens is None else blocks[:-1]
            if full:
                found, there = view.score(queries[source.memory], allowed=full)
                if len(there) != len(full):
                    what = f"document {source.document.name!r} had {len(full)} blocks to score, and has {len(there)}"
                    raise NotFound(f"{what} of them now: another process has cut it. Call the model again")
                scores[..., numbers.start : numbers.start + len(full)] = found
            if tokens is not None:
                last = incomplete_landmarks(
                    view.landmarks(blocks[-1:])[0], tokens, source.document.memory.spec.block_size
                )
                scores[..., numbers.stop - 1] = best_of(last, queries[source.memory])
        for memory, (at, parts) in together.items():
            found = short.score(memory, layer, parts, queries[memory])
            if len(at) == len(self):
                return found
            scores[..., at.to(scores.device)] = found
        return scores

    @cached_property
    def _scored_as(self) -> tuple[list[tuple[AttachedDocument, range, range]], dict[int, tuple[Tensor, ShortParts]]]:
        """Parts that are scored alone, with their blocks and numbers; and by memory, parts that are scored together."""
        alone: list[tuple[AttachedDocument, range, range]] = []
        together: dict[int, tuple[list[int], list[ShortDocument]]] = {}
        dense = [source.document.memory.index_capabilities.dense for source, _ in self.parts[:1]]
        stop = 0
        for source, blocks in self.parts:
            if not blocks:
                continue
            stop += len(blocks)
            numbers = range(stop - len(blocks), stop)
            if len(blocks) <= SHORT and len(self.parts) > 1 and all(dense):
                at, parts = together.setdefault(source.memory, ([], []))
                at += numbers
                parts.append(ShortDocument(source.document, source.state.edits, blocks, self.incomplete.get(stop - 1)))
            else:
                alone.append((source, blocks, numbers))
        return alone, {memory: (torch.tensor(at), tuple(parts)) for memory, (at, parts) in together.items()}

    def located(self, numbers: Tensor) -> list[tuple[Document, list[int]]]:
        """Return the candidates ``numbers [n]`` (ascending) as blocks of documents."""
        parts, sizes = self._parts_of(numbers).unique_consecutive(return_counts=True)
        runs = numbers.split(sizes.tolist())
        return [
            (self.parts[part][0].document, (run + self._shifts[part]).tolist())
            for part, run in zip(parts.tolist(), runs, strict=True)
        ]


def best_of(landmarks: Tensor, queries: Tensor) -> Tensor:
    """Best inner product ``[H, T]`` of ``queries [H, T, D]`` with ``landmarks [G, P, D]`` of one block."""
    heads = landmarks.to(queries.device).repeat_interleave(len(queries) // len(landmarks), 0)
    best: Tensor = (queries.float() @ heads.transpose(-1, -2)).amax(-1)
    return best


def gather(
    located: Sequence[tuple[Document, list[int]]], layers: Sequence[int], device: torch.device
) -> Iterator[States]:
    """Return keys and values ``[n, G, S, D]`` of blocks of documents in each of ``layers``, on ``device``."""
    for states in zip(*(document.gather(layers, blocks, device=device) for document, blocks in located), strict=True):
        if len(states) == 1:
            yield states[0]["k"], states[0]["v"]
        else:
            yield torch.cat([s["k"] for s in states]), torch.cat([s["v"] for s in states])


@dataclass(frozen=True)
class VisibleParts:
    """The parts of the memory that the tokens of one call see."""

    sink: range
    """Tokens at the beginning of the document, always attended to."""
    candidates: Candidates
    direct: range
    """The tokens right before the call, always attended to: the window, and the tokens after the window was set."""

    def direct_for(self, sliding: int | None) -> range:
        """Return the direct tokens of a layer that sees ``sliding`` tokens back and needs no memory."""
        first, stop = self.sink.start, self.direct.stop  # earlier ones may have left the document
        return self.direct if sliding is None else range(max(first, stop - sliding), stop)


NOTHING = VisibleParts(range(0), Candidates(()), range(0))


class _Distinct:
    """Distinct blocks of documents. A block that a fork shares with another document would get twice the attention."""

    def __init__(self) -> None:
        self._there: dict[tuple[int, int], list[range]] = {}
        """For each memory and owner, the blocks so far."""
        self._ends: dict[tuple[int, str, int], set[bytes]] = {}
        """For each memory, digest and number of tokens, the tokens of incomplete last blocks."""

    def of(self, source: AttachedDocument) -> list[range]:
        """Return the blocks of ``source`` that no earlier document has."""
        state, places = source._located
        if places is None:
            return []
        found: list[range] = []
        for owner, blocks in places.present(state.live()):
            there = self._there.setdefault((source.memory, owner), [])
            new = lacking(blocks, there)
            there += new
            found += new
        if found and self._ends_alike(source):
            found[-1] = found[-1][:-1]
        return merged(found)

    # A fork copies an incomplete last block, so its owner says nothing.
    def _ends_alike(self, source: AttachedDocument) -> bool:
        """Whether ``source`` ends with an incomplete block, and an earlier document has the same text."""
        state, size = source.state, source.document.memory.spec.block_size
        if state.digest is None or not state.tokens % size or not state.present(range(state.blocks - 1, state.blocks)):
            return False
        alike = self._ends.setdefault((source.memory, state.digest, state.tokens), set())
        tokens, before = source.document.tokens(state.blocks - 1).numpy().tobytes(), len(alike)
        alike.add(tokens)
        return len(alike) == before


def everything(sources: Sequence[AttachedDocument], beside: AttachedDocument | None = None) -> Candidates:
    """All blocks of ``sources``, each once, without the blocks of the document ``beside`` them."""
    distinct = _Distinct()
    if beside is not None:
        distinct.of(beside)
    return Candidates(tuple((source, part) for source in sources for part in distinct.of(source)))


def visible(
    sources: Sequence[AttachedDocument], *, tokens: int, start: int, sink: int, window: int | None
) -> VisibleParts:
    """Return the parts that a call sees when it continues the last of ``sources`` after ``tokens`` tokens.

    The window is counted back from token ``start``: ``tokens`` for a prompt, the beginning of the segment while
    reading. So the same tokens are seen however a segment is cut into calls. ``window=None``: nothing is continued, so
    the last document is searched like the others.
    """
    own, block_size = sources[-1], sources[-1].document.memory.spec.block_size
    first = own.state.first * block_size
    if window is None:  # its sink is attended to too, but is not the source of an answer
        return VisibleParts(range(first, min(first + sink, tokens)), everything(sources), range(tokens, tokens))
    others = everything(sources[:-1], beside=own)
    window_start = (start - window) // block_size * block_size
    if window_start <= first + sink:
        return VisibleParts(range(first, first), others, range(first, tokens))
    between = range((first + sink) // block_size, window_start // block_size)
    parts = tuple((own, part) for part in own.state.present(between) or [between[:0]])
    return VisibleParts(range(first, first + sink), Candidates((*others.parts, *parts)), range(window_start, tokens))


class DocumentStates:
    """Position-free states of runs of tokens of one document, read from its store to ``device``."""

    def __init__(self, document: Document, device: torch.device) -> None:
        self.document, self.device = document, device
        self.block_size, self.layers = document.memory.spec.block_size, document.memory.spec.layers
        self._there: dict[range, list[States]] = {}

    def prefetch(self, layers: Sequence[LayerPlan], seen: VisibleParts) -> None:
        """Prefetch what ``layers`` need of sink and window, if each read waits for a network."""
        if self.document.reads_ahead == 1:
            return
        for plan in layers:
            direct = seen.direct_for(plan.sliding if plan.local else None)
            for tokens in (direct,) if plan.local else (seen.sink, direct):
                self.document.layer(plan.index).prefetch(self._blocks(tokens))

    def _blocks(self, tokens: range) -> range:
        return range(tokens.start // self.block_size, -(-tokens.stop // self.block_size))

    def read(self, layer: int, tokens: range) -> States:
        """Return keys and values ``[G, n, D]`` of ``tokens``, which lie in stored blocks."""
        if tokens not in self._there:  # all layers at once, and only once: a few large copies are better
            self._there[tokens] = self._read(tokens)
        return self._there[tokens][layer]

    def _read(self, tokens: range) -> list[States]:
        blocks = self._blocks(tokens)
        skip = tokens.start - blocks.start * self.block_size
        kept = slice(skip, skip + len(tokens))
        gathered = self.document.gather(range(self.layers), blocks, device=self.device)
        return [(as_tokens(states["k"])[:, kept], as_tokens(states["v"])[:, kept]) for states in gathered]


def as_tokens(blocks: Tensor) -> Tensor:
    """Return blocks ``[n, G, S, D]`` as one run of tokens ``[G, n * S, D]``."""
    return blocks.transpose(0, 1).flatten(1, 2)


def as_blocks(tokens: Tensor, block_size: int) -> Tensor:
    """Return a run of tokens ``[G, n, D]`` as blocks ``[ceil(n / S), G, S, D]``, the last one padded with zeros."""
    if missing := -tokens.shape[1] % block_size:
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, missing))
    blocks: Tensor = tokens.unflatten(1, (-1, block_size))
    return blocks.transpose(0, 1)


class ShortDocument(NamedTuple):
    """Blocks of a document at one commit."""

    document: Document
    edits: int
    """Number of truncations. While it stays the same, so do the landmarks of full blocks."""
    blocks: range
    tokens: int | None
    """Tokens of the last block, if it is not full."""


ShortParts = tuple[ShortDocument, ...]
Key = tuple[int | None, int, range, int | None]
"""While the key stays the same, so do the landmarks of a document."""


class ShortDocuments:
    """Documents of few blocks, scored together. Their landmarks lie side by side, so one product scores them all.

    Each document has its own index, which is searched once for a question. For thousands of short notes that would be
    thousands of products of a few rows. This class holds the landmarks that those indexes would hold. A changed
    document is read again, the others are kept. One thread at a time, like the reader.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, bool], tuple[ShortParts, tuple[Key, ...], Tensor]] = {}

    def score(self, memory: int, layer: int, parts: ShortParts, queries: Tensor) -> Tensor:
        """Best inner product ``[H, T, n]`` of ``queries [H, T, D]`` with the landmarks of each block of ``parts``.

        ``memory`` is the number of their memory. It computes like the exact index, in the dtype of that index.
        """
        spec = parts[0].document.memory.spec
        # Landmarks of one token each, so those of an incomplete block are signs too.
        alone = spec.key_dtype == "bit" and spec.keys_per_block == spec.block_size
        signs = alone and queries.device.type == "cpu" and problem() is None
        keys = self._keys(memory, layer, parts, signs=signs).to(queries.device)
        grouped = queries.float().reshape(len(keys), -1, queries.shape[-1])
        if signs:
            packed = (PackedSigns(words, spec.keys_per_block, spec.key_dim) for words in keys)
            heads = [best_signs(of_head, rows).T for of_head, rows in zip(packed, grouped, strict=True)]
            return torch.stack(heads).reshape(*queries.shape[:2], -1)
        products = keys.flatten(1, 2) @ grouped.to(keys.dtype).transpose(1, 2)  # [G, n * P, R]
        best: Tensor = products.float().unflatten(1, keys.shape[1:3]).amax(2).transpose(1, 2)
        return best.reshape(*queries.shape[:2], -1)

    def _keys(self, memory: int, layer: int, parts: ShortParts, *, signs: bool) -> Tensor:
        """Return ``[G, n, P, D]``, or with ``signs`` the words ``[G, n, ...]`` of ``PackedSigns``."""
        of, known, keys = self._held.get((memory, layer, signs), ((), (), torch.empty(0)))
        if of is not parts:
            names = tuple((each.document.id, each.edits, each.blocks, each.tokens) for each in parts)
            if known != names:
                begun = accumulate((len(blocks) for _, _, blocks, _ in known), initial=0)
                starts = dict(zip(known, begun, strict=False))
                read = [
                    keys[:, starts[name] : starts[name] + len(each.blocks)]
                    if name in starts
                    else _read(each, layer, signs=signs)
                    for name, each in zip(names, parts, strict=True)
                ]
                keys = torch.cat(read, dim=1)
            self._held[memory, layer, signs] = parts, names, keys
        return keys


def _read(part: ShortDocument, layer: int, *, signs: bool) -> Tensor:
    """Read the landmarks of a document's blocks, in the form of an index: see ``ShortDocuments._keys``."""
    spec = part.document.memory.spec
    keys = part.document.layer(layer).landmarks(part.blocks)  # [n, G, P, D]
    if part.tokens is not None:
        keys = torch.cat([keys[:-1], incomplete_landmarks(keys[-1], part.tokens, spec.block_size)[None]])
    if signs:
        return torch.stack([pack(of_head).words for of_head in keys.unbind(1)])
    return keys.transpose(0, 1).to(index_dtype(spec.key_dtype))


def incomplete_landmarks(landmarks: Tensor, tokens: int, block_size: int) -> Tensor:
    """Correct landmarks ``[G, P, D]`` of a block that has only ``tokens`` tokens.

    A landmark is the mean over a part of its block, including places without tokens, which are zeros. A part without
    any token has the landmark of the first part.
    """
    size = block_size // landmarks.shape[1]
    filled = (tokens - size * torch.arange(landmarks.shape[1])).clamp(0, size)
    means = landmarks * (size / filled.clamp_min(1)).unsqueeze(-1)
    return torch.where((filled > 0).unsqueeze(-1), means, means[:, :1])
