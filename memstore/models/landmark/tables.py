"""Where a landmark model finds its earlier blocks: tensors of its own, or a document of a memory and then those."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import DamagedError
from memstore.memory import Document, LayerView
from memstore.transfer import alike, from_each, to_device

OnError = Literal["raise", "miss"]
"""What becomes of a stored block that cannot be read: an error, or a list without it."""


FOREVER = 2**40
"""More blocks than there will be."""
OFFERED = 64
"""Older blocks that the first layer chooses among, at least."""


class BlockStates(NamedTuple):
    """States of blocks, without positions."""

    keys: Tensor
    """``[n, G, S, D]``"""
    values: Tensor
    """``[n, G, S, D]``"""
    sound: Tensor | None = None
    """``[n]``, in host memory: False for a block that could not be read; None where all could."""


class LayerBlocks(ABC):
    """Complete blocks of ``B`` rows in one layer: ``attention.landmark.Landmarks``, and the states behind them.

    Numbers of rows and blocks that are given are in host memory, as all counts are: what depends on them needs no GPU.
    """

    reach = FOREVER
    """Blocks that are searched, up to ``stop``: what is older is as if it were not there."""

    @abstractmethod
    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""

    @abstractmethod
    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""

    @abstractmethod
    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """Landmarks ``[B, G, count, D]`` of blocks from ``first [B]`` on; anything for numbers below 0."""

    @abstractmethod
    def states(self, rows: Tensor, blocks: Tensor) -> tuple[BlockStates, Tensor]:
        """States of some blocks, and which of them ``[n]`` are those of ``blocks [n]`` of ``rows [n]``."""


class TensorBlocks(LayerBlocks):
    """Blocks held in tensors, which grow by half when they are full; those before ``first`` are somebody else's."""

    def __init__(self, rows: int, first: int = 0) -> None:
        self.first = first
        self._counts = torch.full((rows,), first)
        self._keys: Tensor | None = None  # [B, room, G, S, D]
        self._values: Tensor | None = None
        self._landmarks: Tensor | None = None  # [B, G, room, D]

    @property
    def stop(self) -> int:
        """One more than the last block of any row."""
        return int(self._counts.max())

    @property
    def like(self) -> Tensor:
        """Something with the type and the device of the states. Only where there are some."""
        assert self._keys is not None
        return self._keys

    def extend(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Append ``keys, values [n, m, G, S, D]`` to ``rows [n]``: m blocks each."""
        count, counts = keys.shape[1], self._counts[rows]
        self._grow(int(counts.max()) - self.first + count, keys)
        assert self._keys is not None
        assert self._values is not None
        assert self._landmarks is not None
        if alike(counts) and torch.equal(rows, torch.arange(len(self._counts))):
            new = slice(int(counts[0]) - self.first, int(counts[0]) - self.first + count)
            self._keys[:, new], self._values[:, new] = keys, values
            self._landmarks[:, :, new] = keys[..., -1, :].transpose(1, 2)
        else:
            places = counts[:, None] - self.first + torch.arange(count)  # [n, m]
            row, column = to_device([rows[:, None], places], keys.device)
            self._keys[row, column] = keys
            self._values[row, column] = values
            self._landmarks[row, :, column] = keys[..., -1, :]
        self._counts[rows] += count

    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        scores, blocks = self.score(queries, stop)
        best, at = scores.topk(min(top_k, scores.shape[-1]), -1)
        return best, torch.where(best > -math.inf, blocks[at], -1)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        seen = range(max(self.first, int(stop.min()) - self.reach), int(stop.max()))
        if self._landmarks is None or not seen:
            return queries.new_empty(*queries.shape[:3], 0), torch.empty(0, dtype=torch.int64, device=queries.device)
        keys = self._landmarks[:, :, seen.start - self.first : seen.stop - self.first].to(queries.dtype)
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
        blocks = torch.arange(seen.start, seen.stop, device=queries.device)
        return _within(scores, blocks, stop, self.reach), blocks

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """See ``LayerBlocks``."""
        assert self._landmarks is not None
        return _run(self._landmarks, first - self.first, count)

    def states(self, rows: Tensor, blocks: Tensor) -> tuple[BlockStates, Tensor]:
        """See ``LayerBlocks``."""
        assert self._keys is not None
        assert self._values is not None
        at = rows * self._keys.shape[1] + blocks - self.first
        return BlockStates(self._keys.flatten(0, 1), self._values.flatten(0, 1)), at

    def of_row(self, row: int, first: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n, G, S, D]`` of the blocks of ``row`` from ``first`` on."""
        assert self._keys is not None
        assert self._values is not None
        which = slice(first - self.first, int(self._counts[row]) - self.first)
        return self._keys[row, which], self._values[row, which]

    def keep_from(self, first: int) -> None:
        """Let blocks before ``first`` go."""
        if first > self.first:
            gone = first - self.first
            self._keys, self._values = (None if x is None else x[:, gone:].clone() for x in (self._keys, self._values))
            self._landmarks = None if self._landmarks is None else self._landmarks[:, :, gone:].clone()
            self.first = first

    def reorder(self, rows: Tensor, there: Tensor) -> None:
        """Let row ``b`` be what row ``rows[b]`` was; ``there``: the same on the device."""
        self._counts = self._counts[rows]
        self._keys, self._values, self._landmarks = (
            None if x is None else x.index_select(0, there) for x in (self._keys, self._values, self._landmarks)
        )

    def _grow(self, count: int, like: Tensor) -> None:
        held = 0 if self._keys is None else self._keys.shape[1]
        if count > held:
            room, rows = max(count, held + held // 2), len(self._counts)
            groups, _, dim = like.shape[2:]
            self._keys = _larger(self._keys, like.new_zeros(rows, room, *like.shape[2:]), 1)
            self._values = _larger(self._values, like.new_zeros(rows, room, *like.shape[2:]), 1)
            self._landmarks = _larger(self._landmarks, like.new_zeros(rows, groups, room, dim), 2)


class DocumentBlocks(LayerBlocks):
    """Blocks of a document that all rows share, then blocks of each row's own, which are in no index.

    With ``on_error="miss"`` a stored block that cannot be read is left out of every list that chooses it.
    """

    def __init__(self, view: LayerView, start: int, own: TensorBlocks, *, on_error: OnError = "raise") -> None:
        """``start``: the first block of the document that is still there; those from ``own.first`` on are not used."""
        self._view = view
        self._start = start
        self.own = own
        self._on_error = on_error

    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        scores, blocks = self.own.search(queries, top_k, stop)
        stored = self._stored(stop)
        if not stored:
            return scores, blocks
        # One search serves all rows, and what it finds may be too old for some: then there is enough beside it.
        ahead = 0 if self.reach == FOREVER else int(stop.max() - stop.min())
        hits = self._view.search(self._together(queries), top_k + ahead, allowed=stored)
        shape = (*queries.shape[:3], -1)
        found, ids = (_apart(x, shape) for x in to_device([hits.scores.to(scores.dtype), hits.blocks], scores.device))
        found = _within(found, ids, stop, self.reach)
        return torch.cat([found, scores], -1), torch.cat([torch.where(found > -math.inf, ids, -1), blocks], -1)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        scores, blocks = self.own.score(queries, stop)
        stored = self._stored(stop)
        if not stored:
            return scores, blocks
        found, ids = self._view.score(self._together(queries), allowed=stored)
        found, ids = to_device([found.to(scores.dtype), ids], scores.device)
        found = _apart(found, (*queries.shape[:3], -1))
        return torch.cat([_within(found, ids, stop, self.reach), scores], -1), torch.cat([ids, blocks])

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """See ``LayerBlocks``."""
        lowest = int(first.min().clamp(min=self._start))
        if lowest >= self.own.first:
            return self.own.landmarks(first, count)
        stored = self._view.landmarks(range(lowest, self.own.first)).squeeze(2).transpose(0, 1)
        own = self.own.landmarks(
            torch.full_like(first, self.own.first), max(0, int(first.max()) + count - self.own.first)
        )
        (stored,) = to_device([stored.to(own.dtype)], own.device)
        return _run(torch.cat([stored.expand(len(own), -1, -1, -1), own], 2), first - lowest, count)

    def states(self, rows: Tensor, blocks: Tensor) -> tuple[BlockStates, Tensor]:
        """See ``LayerBlocks``."""
        theirs = blocks < self.own.first
        if not bool(theirs.any()):
            return self.own.states(rows, blocks)
        stored, places = blocks[theirs].unique(return_inverse=True)
        found = self._read(stored.tolist())
        if bool(theirs.all()):
            return found, places
        own, at = self.own.states(rows[~theirs], blocks[~theirs])
        (at,) = to_device([at], own.keys.device)
        keys, values = (torch.cat([a, b[at]]) for a, b in ((found.keys, own.keys), (found.values, own.values)))
        sound = None if found.sound is None else F.pad(found.sound, (0, len(at)), value=True)
        which = torch.arange(len(stored), len(stored) + len(at))
        which = torch.empty_like(blocks).masked_scatter(~theirs, which).masked_scatter(theirs, places)
        return BlockStates(keys, values, sound), which

    def _together(self, queries: Tensor) -> Tensor:
        """``[B, H, T, D]`` -> ``[H, B * T, D]``, where the index is."""
        index = self._view.index
        return queries.transpose(0, 1).flatten(1, 2).float().to("cpu" if index is None else index.device)

    def _stored(self, stop: Tensor) -> range:
        first = int(stop.min())
        return range(max(self._start, first - self.reach), min(self.own.first, first))

    def _read(self, blocks: list[int]) -> BlockStates:
        like, sound = self.own.like, None
        try:
            states = self._view.gather(blocks, device=like.device)
        except DamagedError:
            if self._on_error == "raise":
                raise
            whole = self._view.sound(blocks)
            sound = torch.isin(torch.tensor(blocks), torch.tensor(whole, dtype=torch.int64))
            (there,) = to_device([sound.nonzero().squeeze(1)], like.device)
            read = self._view.gather(whole, device=like.device)
            states = {name: x.new_zeros(len(blocks), *x.shape[1:]).index_copy(0, there, x) for name, x in read.items()}
        keys, values = (states[name].to(like.device, like.dtype) for name in ("k", "v"))
        return BlockStates(keys, values, sound)


# In the first layer all landmarks have one key, that of one embedding, so all blocks in slot 0 are equal and no index
# is kept. Which of equal blocks is taken is arbitrary; the published code leaves it to `topk` and the rounding of a
# product. The latest 64 are offered and `topk` chooses, which gives its result in all but four of the published cases.
class FirstLayerBlocks(LayerBlocks):
    """Blocks of the first layer, where all landmarks have the same key: that of one and the same embedding.

    So among older blocks, which stand in one slot, there is nothing to search for, and they are in no index. Any of
    them is as good as another; ``search`` offers the latest few.
    """

    def __init__(self, blocks: TensorBlocks | DocumentBlocks) -> None:
        self.own = blocks.own if isinstance(blocks, DocumentBlocks) else blocks
        self._blocks = blocks

    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        count = min(max(OFFERED, top_k), int(stop.max()), self.own.reach)
        blocks = from_each(stop - count, count, queries.device)
        scores = self._score(queries).expand(-1, -1, -1, count)
        scores = scores.masked_fill(blocks[:, None, None] < 0, -math.inf)
        return scores, blocks.clamp(min=-1)[:, None, None].expand_as(scores)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        first = max(0, int(stop.min()) - self.own.reach)
        blocks = torch.arange(first, int(stop.max()), device=queries.device)
        scores = self._score(queries).expand(-1, -1, -1, len(blocks))
        return _within(scores, blocks, stop, self.own.reach), blocks

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """See ``LayerBlocks``."""
        last = torch.full_like(first, self.own.first)
        return self.own.landmarks(last, 1).expand(-1, -1, count, -1)

    def states(self, rows: Tensor, blocks: Tensor) -> tuple[BlockStates, Tensor]:
        """See ``LayerBlocks``."""
        return self._blocks.states(rows, blocks)

    def _score(self, queries: Tensor) -> Tensor:
        """``[B, H, T, 1]``."""
        stop = torch.full((len(queries),), self.own.first + 1)
        return self.own.score(queries, stop)[0]


class LandmarkTable:
    """``LayerBlocks`` of all layers."""

    def __init__(self, layers: Sequence[TensorBlocks] | Sequence[DocumentBlocks]) -> None:
        self.layers: list[LayerBlocks] = [FirstLayerBlocks(layers[0]), *layers[1:]]
        self.own = [layer.own if isinstance(layer, DocumentBlocks) else layer for layer in layers]
        """The tensors of each layer, which grow."""
        self._layers = layers

    def limit(self, reach: int) -> None:
        """Search so many blocks and no more; see ``LayerBlocks.reach``."""
        for layer in (*self._layers, *self.own):
            layer.reach = reach

    def reorder(self, rows: Tensor, there: Tensor) -> None:
        """Let row ``b`` be what row ``rows[b]`` was; ``there``: the same on the device."""
        for layer in self.own:
            layer.reorder(rows, there)


def tensor_table(layers: int, rows: int) -> LandmarkTable:
    """Blocks of ``rows`` rows in tensors."""
    return LandmarkTable([TensorBlocks(rows) for _ in range(layers)])


def document_table(
    document: Document, stop: int, near: int, rows: int, like: Tensor, *, on_error: OnError = "raise"
) -> LandmarkTable:
    """Blocks of ``document`` below ``stop``, the last ``near`` of them in tensors, with room for those of each row.

    ``like`` has the type and the device of what the model computes. Raises ``DamagedError``.
    """
    start = document.complete_blocks.start
    first = max(start, stop - near)
    layers = []
    for number in range(document.memory.spec.layers):
        own = TensorBlocks(rows, first)
        view = document.layer(number)
        if stop > first:
            states = view.gather(list(range(first, stop)), device=like.device)
            keys, values = (states[name].to(like.device, like.dtype).expand(rows, -1, -1, -1, -1) for name in "kv")
            own.extend(torch.arange(rows), keys, values)
        layers.append(DocumentBlocks(view, start, own, on_error=on_error))
    return LandmarkTable(layers)


def _within(scores: Tensor, blocks: Tensor, stop: Tensor, reach: int) -> Tensor:
    """``scores [B, H, T, n]`` without those of ``blocks``, of any shape that fits, that a row sees no more or not yet.

    -inf where a row's last block that counts is before ``blocks`` or more than ``reach`` blocks behind. Where all rows
    have the same ``stop`` nothing else was looked for.
    """
    if alike(stop):
        return scores
    (ends,) = to_device([stop[:, None, None, None]], scores.device)
    return scores.masked_fill((blocks >= ends) | (blocks < ends - reach), -math.inf)


def _apart(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[H, B * T, n]`` -> ``shape``, that is ``[B, H, T, n]``."""
    rows: Tensor = x.unflatten(1, (shape[0], -1))
    return rows.transpose(0, 1).reshape(shape)


def _run(x: Tensor, first: Tensor, count: int) -> Tensor:
    """``count`` of ``x [B, G, n, D]`` from ``first [B]`` on, which is in host memory; anything before the beginning."""
    at = from_each(first, count, x.device).clamp(min=0)
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _larger(old: Tensor | None, new: Tensor, dim: int) -> Tensor:
    if old is not None:
        new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new
