"""Where a landmark model finds its earlier blocks: tensors of its own, or a document of a memory and then those."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memstore.errors import DamagedError
from memstore.memory import Document, LayerView

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
    """``[n]``: False for a block that could not be read; None where all could."""


class LayerBlocks(ABC):
    """Complete blocks of ``B`` rows in one layer: ``attention.landmark.Landmarks``, and the states behind them."""

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
    def states(self, rows: Tensor, blocks: Tensor) -> BlockStates:
        """States of ``blocks [n]`` of ``rows [n]``."""


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
        count = keys.shape[1]
        self._grow(int(self._counts[rows].max()) - self.first + count, keys)
        assert self._keys is not None
        assert self._values is not None
        assert self._landmarks is not None
        places = self._counts[rows, None] - self.first + torch.arange(count)  # [n, m]
        rows, columns = rows[:, None].to(keys.device), places.to(keys.device)
        self._keys[rows, columns] = keys
        self._values[rows, columns] = values
        self._landmarks[rows, :, columns] = keys[..., -1, :]
        self._counts[rows[:, 0].cpu()] += count

    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        scores, blocks = self.score(queries, stop)
        best, at = scores.topk(min(top_k, scores.shape[-1]), -1)
        return best, torch.where(best > -math.inf, blocks[at], -1)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        count = int(stop.max()) - self.first
        if self._landmarks is None or count <= 0:
            return queries.new_empty(*queries.shape[:3], 0), torch.empty(0, dtype=torch.int64, device=queries.device)
        keys = self._landmarks[:, :, :count].to(queries.dtype)
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
        blocks = self.first + torch.arange(count, device=queries.device)
        return _within(scores, blocks, stop, self.reach), blocks

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """See ``LayerBlocks``."""
        assert self._landmarks is not None
        at = (first[:, None] - self.first + torch.arange(count, device=first.device)).clamp(min=0)
        groups, dim = self._landmarks.shape[1], self._landmarks.shape[3]
        return self._landmarks.gather(2, at[:, None, :, None].expand(-1, groups, -1, dim))

    def states(self, rows: Tensor, blocks: Tensor) -> BlockStates:
        """See ``LayerBlocks``."""
        assert self._keys is not None
        assert self._values is not None
        return BlockStates(self._keys[rows, blocks - self.first], self._values[rows, blocks - self.first])

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

    def reorder(self, rows: Tensor) -> None:
        """Let row ``b`` be what row ``rows[b]`` was."""
        self._counts = self._counts[rows.cpu()]
        self._keys, self._values, self._landmarks = (
            None if x is None else x.index_select(0, rows.to(x.device))
            for x in (self._keys, self._values, self._landmarks)
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
        hits = self._view.search(_together(queries), top_k + ahead, allowed=stored)
        shape = (*queries.shape[:3], -1)
        found, ids = _apart(hits.scores, shape).to(scores), _apart(hits.blocks, shape).to(blocks.device)
        found = _within(found, ids, stop, self.reach)
        return torch.cat([found, scores], -1), torch.cat([torch.where(found > -math.inf, ids, -1), blocks], -1)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        scores, blocks = self.own.score(queries, stop)
        stored = self._stored(stop)
        if not stored:
            return scores, blocks
        found, ids = self._view.score(_together(queries), allowed=stored)
        found, ids = _apart(found, (*queries.shape[:3], -1)).to(scores), ids.to(blocks.device)
        return torch.cat([_within(found, ids, stop, self.reach), scores], -1), torch.cat([ids, blocks])

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """See ``LayerBlocks``."""
        lowest = int(first.min().clamp(min=self._start))
        if lowest >= self.own.first:
            return self.own.landmarks(first, count)
        stored = self._view.landmarks(range(lowest, self.own.first)).squeeze(2).transpose(0, 1)
        stop = torch.full_like(first, self.own.first)
        own = self.own.landmarks(stop, max(0, int(first.max()) + count - self.own.first))
        both = torch.cat([stored.to(own).expand(len(own), -1, -1, -1), own], 2)
        at = (first[:, None] - lowest + torch.arange(count, device=first.device)).clamp(min=0)
        return both.gather(2, at[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3]))

    def states(self, rows: Tensor, blocks: Tensor) -> BlockStates:
        """See ``LayerBlocks``."""
        theirs = blocks < self.own.first
        if not bool(theirs.any()):
            return self.own.states(rows, blocks)
        stored = blocks[theirs].unique()
        found = self._read(stored.tolist())
        at = torch.searchsorted(stored, blocks).clamp(max=len(stored) - 1)
        keys, values = found.keys[at], found.values[at]
        sound = None if found.sound is None else found.sound[at]
        if bool(theirs.all()):
            return BlockStates(keys, values, sound)
        own, which = self.own.states(rows, blocks.clamp(min=self.own.first)), theirs[:, None, None, None]
        sound = None if sound is None else sound | ~theirs
        return BlockStates(torch.where(which, keys, own.keys), torch.where(which, values, own.values), sound)

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
            read = self._view.gather(whole, device=like.device)
            states = {name: _filled(x, sound.to(x.device)) for name, x in read.items()}
        keys, values = (states[name].to(like.device, like.dtype) for name in ("k", "v"))
        return BlockStates(keys, values, None if sound is None else sound.to(like.device))


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
        blocks = stop[:, None] - count + torch.arange(count, device=stop.device)
        scores = self._score(queries).expand(-1, -1, -1, count)
        scores = scores.masked_fill(blocks[:, None, None] < 0, -math.inf)
        return scores, blocks.clamp(min=-1)[:, None, None].expand_as(scores)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Landmarks``."""
        blocks = torch.arange(int(stop.max()), device=queries.device)
        scores = self._score(queries).expand(-1, -1, -1, len(blocks))
        return _within(scores, blocks, stop, self.own.reach), blocks

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """See ``LayerBlocks``."""
        last = torch.full_like(first, self.own.first)
        return self.own.landmarks(last, 1).expand(-1, -1, count, -1)

    def states(self, rows: Tensor, blocks: Tensor) -> BlockStates:
        """See ``LayerBlocks``."""
        return self._blocks.states(rows, blocks)

    def _score(self, queries: Tensor) -> Tensor:
        """``[B, H, T, 1]``."""
        stop = torch.full((len(queries),), self.own.first + 1, device=queries.device)
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

    def reorder(self, rows: Tensor) -> None:
        """Let row ``b`` be what row ``rows[b]`` was."""
        for layer in self.own:
            layer.reorder(rows)


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
    """``scores [B, H, T, n]`` without those of ``blocks``, of any shape that fits, that no row can see any more or yet.

    -inf where a row's last block that counts is before ``blocks`` or more than ``reach`` blocks behind.
    """
    ends = stop[:, None, None, None]
    hidden = (blocks >= ends) | (blocks < ends - reach)
    return scores.masked_fill(hidden, -math.inf) if bool(hidden.any()) else scores


def _together(queries: Tensor) -> Tensor:
    """``[B, H, T, D]`` -> ``[H, B * T, D]``, on the CPU, where indexes are."""
    return queries.transpose(0, 1).flatten(1, 2).float().cpu()


def _apart(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[H, B * T, n]`` -> ``shape``, that is ``[B, H, T, n]``."""
    rows: Tensor = x.unflatten(1, (shape[0], -1))
    return rows.transpose(0, 1).reshape(shape)


def _filled(x: Tensor, there: Tensor) -> Tensor:
    """``x [m, ...]`` at the m places that are ``there [n]``, zeros at the others."""
    whole = x.new_zeros(len(there), *x.shape[1:])
    whole[there] = x
    return whole


def _larger(old: Tensor | None, new: Tensor, dim: int) -> Tensor:
    if old is not None:
        new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new
