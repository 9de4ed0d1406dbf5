"""Where a DRT finds its earlier blocks: tensors of its own, or a document of a memory."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from typing import Literal, Protocol

import torch
from torch import Tensor

from memstore.attention.gca import TopBlocks, weighed
from memstore.errors import DamagedError
from memstore.transfer import to_device

OnError = Literal["raise", "miss"]
"""What becomes of a stored block that cannot be read: an error, or a list without it."""


class BlockTable(ABC):
    """Complete blocks of ``B`` rows, numbered from 0 in each row."""

    @abstractmethod
    def extend(self, first: list[int], counts: list[int], states: Tensor, landmarks: Tensor) -> None:
        """Add the first ``counts[b]`` of ``states [B, n, S, d]``, ``landmarks [B, n, e]`` as blocks ``first[b] ...``.

        Blocks that are there already are left as they are.
        """

    @abstractmethod
    def search(self, queries: Tensor, limits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Scores and blocks ``[B, n, <= top_k]`` for ``queries [B, n, e]``, among blocks below ``limits [B, n]``.

        Best first; score -inf and block -1 where there are fewer.
        """

    @abstractmethod
    def gather(self, blocks: Tensor) -> Tensor:
        """States ``[B, m, S, d]`` of ``blocks [B, m]``; anything where a block is -1."""

    # Blocks that cannot be read leave the list before its weights are computed, so those of the others sum to one. A
    # list that has lost all its blocks is empty; the one before it is not used in its place. Lists are read once to
    # see, and again to use, which the host cache makes cheap.
    def readable(self, scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Lists ``[B, n, K]`` without the blocks that cannot be read: -inf and -1 at the end of a list instead."""
        return scores, blocks

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Let row ``b`` be what row ``rows[b]`` was."""


class TensorTable(BlockTable):
    """Blocks held in tensors, which grow by half when they are full; those before ``first`` are somebody else's."""

    def __init__(self, rows: int, first: int = 0) -> None:
        self._rows = rows
        self._first = first
        self._counts = [0] * rows
        self._states: Tensor | None = None
        self._landmarks: Tensor | None = None

    def extend(self, first: list[int], counts: list[int], states: Tensor, landmarks: Tensor) -> None:
        """See ``BlockTable``."""
        self._grow(max(f - self._first + n for f, n in zip(first, counts, strict=True)), states, landmarks)
        assert self._states is not None
        assert self._landmarks is not None
        for row, (start, count) in enumerate(zip(first, counts, strict=True)):
            known = max(0, self._counts[row] + self._first - start)
            if count > known:
                place = slice(self._counts[row], start - self._first + count)
                self._states[row, place] = states[row, known:count]
                self._landmarks[row, place] = landmarks[row, known:count]
                self._counts[row] = start - self._first + count

    def search(self, queries: Tensor, limits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """See ``BlockTable``."""
        count = max(self._counts)
        if self._landmarks is None or not count:
            empty = queries.new_full((*queries.shape[:2], 0), -math.inf)
            return empty, empty.long()
        scores = queries @ self._landmarks[:, :count].to(queries.dtype).transpose(1, 2)
        blocks = self._first + torch.arange(count, device=queries.device)
        scores = scores.masked_fill(blocks >= limits.unsqueeze(-1), -math.inf)
        best, at = scores.topk(min(top_k, count), -1)
        return best, torch.where(best > -math.inf, blocks[at], -1)

    def gather(self, blocks: Tensor) -> Tensor:
        """See ``BlockTable``."""
        assert self._states is not None
        rows = torch.arange(self._rows, device=blocks.device).unsqueeze(1)
        return self._states[rows, (blocks - self._first).clamp(min=0)]

    def reorder(self, rows: Tensor) -> None:
        """See ``BlockTable``."""
        self._counts = [self._counts[row] for row in rows.tolist()]
        self._rows = len(rows)
        if self._states is not None and self._landmarks is not None:
            self._states = self._states.index_select(0, rows.to(self._states.device))
            self._landmarks = self._landmarks.index_select(0, rows.to(self._landmarks.device))

    def _grow(self, count: int, states: Tensor, landmarks: Tensor) -> None:
        held = 0 if self._states is None else self._states.shape[1]
        if count > held:
            room = max(count, held + held // 2)
            self._states = _larger(self._states, room, states)
            self._landmarks = _larger(self._landmarks, room, landmarks)


def _larger(old: Tensor | None, room: int, like: Tensor) -> Tensor:
    new = like.new_zeros((like.shape[0], room, *like.shape[2:]))
    if old is not None:
        new[:, : old.shape[1]] = old
    return new


class SearchableLayer(Protocol):
    """What is needed of a layer of a document (``memstore.memory.LayerView``)."""

    def search(self, queries: Tensor, top_k: int, *, allowed: range | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, blocks and offsets ``[H, T, top_k]``."""

    def gather(self, blocks: list[int], *, device: torch.device | None = None) -> dict[str, Tensor]:
        """States of blocks, on ``device`` (None: the CPU). Raises ``DamagedError``."""

    def sound(self, blocks: list[int]) -> list[int]:
        """Those of ``blocks`` that can be read."""


class MemoryTable(BlockTable):
    """Blocks of a document that all rows share, then blocks of each row's own.

    What is generated or asked stays in tensors; the document does not change. With ``on_error="miss"`` a stored block
    that cannot be read is left out of every list that chooses it, as if it were not there.
    """

    def __init__(
        self,
        view: SearchableLayer,
        blocks: range,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_error: OnError = "raise",
    ) -> None:
        self._view = view
        self._on_error = on_error
        self._blocks = blocks
        self._own = TensorTable(rows, blocks.stop)
        self._dtype = dtype
        self._device = device

    def extend(self, first: list[int], counts: list[int], states: Tensor, landmarks: Tensor) -> None:
        """See ``BlockTable``."""
        if any(f + n > self._blocks.stop for f, n in zip(first, counts, strict=True)):
            self._own.extend(first, counts, states, landmarks)

    def search(self, queries: Tensor, limits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """See ``BlockTable``."""
        scores, blocks = self._search_document(queries, limits, top_k)
        own_scores, own_blocks = self._own.search(queries, limits, top_k)
        if not own_scores.shape[-1]:
            return scores, blocks
        scores, blocks = torch.cat([scores, own_scores], -1), torch.cat([blocks, own_blocks], -1)
        scores, at = scores.topk(min(top_k, scores.shape[-1]), -1)
        return scores, blocks.gather(-1, at)

    def gather(self, blocks: Tensor) -> Tensor:
        """See ``BlockTable``."""
        flat = blocks.flatten().tolist()
        stored = sorted({block for block in flat if block in self._blocks})
        if not stored:
            return self._own.gather(blocks)
        if len(stored) == len(flat):
            states = self._read(flat)
            return states.view(*blocks.shape, *states.shape[1:])
        places = {block: place for place, block in enumerate(stored)}
        (at,) = to_device([torch.tensor([places.get(block, 0) for block in flat])], blocks.device)
        at = at.view_as(blocks)
        states = self._read(stored)[at]
        if max(flat) < self._blocks.stop:
            return states
        own = (blocks >= self._blocks.stop)[..., None, None]
        return torch.where(own, self._own.gather(blocks), states)

    def readable(self, scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """See ``BlockTable``. Everything, unless ``on_error`` is "miss": then ``gather`` says what is wrong."""
        lost = self._lost(blocks) if self._on_error == "miss" else []
        if not lost:
            return scores, blocks
        left_out = torch.isin(blocks, torch.tensor(lost, device=blocks.device))
        scores, at = scores.masked_fill(left_out, -math.inf).sort(dim=-1, descending=True, stable=True)
        return scores, blocks.masked_fill(left_out, -1).gather(-1, at)

    def reorder(self, rows: Tensor) -> None:
        """See ``BlockTable``."""
        self._own.reorder(rows)

    def _lost(self, blocks: Tensor) -> list[int]:
        """Those stored ``blocks`` that cannot be read."""
        stored = [block for block in blocks.unique().tolist() if block in self._blocks]
        try:
            self._view.gather(stored)
        except DamagedError:
            return sorted(set(stored) - set(self._view.sound(stored)))
        return []

    def _read(self, blocks: list[int]) -> Tensor:
        return self._view.gather(blocks, device=self._device)["c"].to(self._device, self._dtype)

    def _search_document(self, queries: Tensor, limits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        flat, bounds = queries.flatten(0, 1), [min(limit, self._blocks.stop) for limit in limits.flatten().tolist()]
        shape = (*queries.shape[:2], top_k)
        if len(set(bounds)) == 1 and bounds[0] > self._blocks.start:
            found, ids = self._search_below(bounds[0], flat, top_k)
            return found.view(shape), ids.view(shape)
        scores = queries.new_full((len(flat), top_k), -math.inf)
        blocks = torch.full((len(flat), top_k), -1, device=queries.device)
        for bound in set(bounds):
            if bound > self._blocks.start:
                which = [i for i, each in enumerate(bounds) if each == bound]
                scores[which], blocks[which] = self._search_below(bound, flat[which], top_k)
        return scores.view(shape), blocks.view(shape)

    def _search_below(self, bound: int, queries: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """``queries [n, e]`` -> scores and blocks ``[n, top_k]``."""
        scores, blocks, _ = self._view.search(queries[None].float(), top_k, allowed=range(self._blocks.start, bound))
        return scores[0].to(queries.dtype), blocks[0]


def random_choice(limits: Tensor, top_k: int) -> TopBlocks:
    """Random blocks below ``limits [B, n]`` with equal weights; the same for the same limit, wherever it is drawn."""
    rows = [[_sample(int(limit), top_k) for limit in row] for row in limits.tolist()]
    blocks = torch.tensor(rows, device=limits.device).view(*limits.shape, top_k)
    return weighed(torch.where(blocks >= 0, 0.0, -math.inf), blocks)


def _sample(limit: int, top_k: int) -> list[int]:
    chosen = random.Random(limit).sample(range(limit), min(limit, top_k))  # noqa: S311 - a baseline, not a secret
    return chosen + [-1] * (top_k - len(chosen))
