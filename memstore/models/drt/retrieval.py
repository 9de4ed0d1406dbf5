"""Retrieval of a DRT: where its earlier blocks are, how it chooses among them, and what observers learn of it.

Blocks are tensors of its own, or belong to a document of a memory (``BlockTable``). Each group of upper layers chooses
one list of blocks at the end of a block of text. The list serves all tokens of the next block, all layers of the group
and all heads. So a look has one list, and the number of the *first* layer of its group. Its weights come from grouped
cross attention, and are the same for every head. They do not show the part of sliding-window attention, which is added,
not shared. With ``fusion="chunked"`` blocks have no weights: NaN.

A segment that starts from nothing retrieves blocks of its own, and in training also blocks shared with it.

All lists are chosen at once, with gradients; ``cache.py`` is for segments that continue one another.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.gca import BlockKeysValues, ListStates, TopBlocks, choose, weighed
from memstore.device_copies import numbers, to_device
from memstore.errors import DamagedError, InvalidArgument
from memstore.memory import LayerView
from memstore.memory.trace_file import Array, Look
from memstore.models.cache import OnError, larger, ranked_look
from memstore.models.drt.configuration import DRTConfig
from memstore.models.packing import Packing
from memstore.readers.observer import Choice, Draft, Looks, Origin, as_array
from memstore.readers.ranks import Ranks

FEW = 4
"""Segments of at most this many stream items are attended item by item, not by whole blocks."""


class DRTPacking(Packing):
    """One segment ``[B, T]`` as a stream ``[B, M]``, and the lists that its items use."""

    def __init__(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        offsets: Sequence[int],
        block_size: int,
        *,
        landmark_uses_own: bool,
    ) -> None:
        """``offsets``: tokens that wait in each row's incomplete block. ``mask [B, T]``: False for padding."""
        super().__init__(input_ids, mask, offsets, block_size)
        self.shift = int(landmark_uses_own)

    @property
    def by_item(self) -> bool:
        """Return whether every item gets its own list, because there are few items or rows are not aligned."""
        return self.items <= FEW or not self.aligned

    @property
    def grows(self) -> bool:
        """Return whether all rows are alike and complete no block."""
        return self.uniform and not self.blocks[0]

    @property
    def one_list(self) -> bool:
        """Return whether every item uses the previous list, because no row gets to where the next one starts."""
        ends = [o + n for o, n in zip(self.offsets, self.lengths, strict=True)]
        return bool(max(ends) + self.shift <= self.block_size)

    @property
    def lists(self) -> int:
        """Return how many lists ``C`` a segment uses, in the order of its items."""
        return self.items if self.by_item else self._frames

    def list_numbers(self, device: torch.device) -> Tensor:
        """Return each place's list in a segment, ``[B or 1, C]``: 0 is the previous one, ``1 + j`` its block j's."""
        if not self.by_item:
            return torch.arange(self._frames, device=device)[None]
        starts = numbers(self.offsets[:1] if self.aligned else self.offsets, device)[:, None]
        place = starts + self.shift + torch.arange(self.items, device=device)
        return place.div(self.block_size, rounding_mode="floor")

    @property
    def _first(self) -> int:
        """Return the place of the first item within its frame, if rows are aligned."""
        return self.offsets[0] + self.shift

    @property
    def _frames(self) -> int:
        return -(-(self._first + self.items) // self.block_size)

    def by_list(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``function`` of ``[B, C, T, d]``, a list ``C`` for every ``T`` items, to ``x [B, M, d]``."""
        if self.by_item:
            return function(x.unsqueeze(2)).squeeze(2)
        right = self._frames * self.block_size - self._first - self.items
        framed = F.pad(x, (0, 0, self._first, right)) if right or self._first else x
        out = function(framed.unflatten(1, (self._frames, self.block_size))).flatten(1, 2)
        return out[:, self._first : self._first + self.items]


class BlockTable:
    """Complete blocks of ``B`` rows, numbered from 0 in each row, in tensors that grow by half when they are full.

    Blocks before ``first`` are stored elsewhere.
    """

    def __init__(self, rows: int, first: int = 0) -> None:
        self._rows = rows
        self._first = first
        self._counts = [0] * rows
        self._states: Tensor | None = None
        self._landmarks: Tensor | None = None

    def extend(self, first: list[int], counts: list[int], states: Tensor, landmarks: Tensor) -> None:
        """Add the first ``counts[b]`` of ``states [B, n, S, d]``, ``landmarks [B, n, e]`` as blocks ``first[b] ...``.

        Existing blocks stay as they are.
        """
        needed = max(f - self._first + n for f, n in zip(first, counts, strict=True))
        if needed <= 0:
            return
        held = 0 if self._states is None else self._states.shape[1]
        if needed > held:
            room = max(needed, held + held // 2)
            self._states = larger(self._states, states.new_zeros(len(states), room, *states.shape[2:]), 1)
            self._landmarks = larger(self._landmarks, landmarks.new_zeros(len(landmarks), room, landmarks.shape[2]), 1)
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
        """Return scores and blocks ``[B, n, <= top_k]`` for ``queries [B, n, e]``, below the blocks ``limits [B, n]``.

        They come best first. If there are fewer, the score is -inf and the block -1.
        """
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
        """Return states ``[B, m, S, d]`` of ``blocks [B, m]``, undefined where a block is -1."""
        assert self._states is not None
        rows = torch.arange(self._rows, device=blocks.device).unsqueeze(1)
        return self._states[rows, (blocks - self._first).clamp(min=0)]

    # Blocks that cannot be read leave the list before its weights are computed, so the weights of the others sum to
    # one. A list that has lost all its blocks is empty. The previous list does not take its place. Lists are read once
    # to check them, and again to use them; the host cache makes this cheap.
    def readable(self, scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return lists ``[B, n, K]`` without the blocks that cannot be read; -inf and -1 fill the end of a list."""
        return scores, blocks

    def reorder(self, rows: Tensor) -> None:
        """Let row ``b`` continue from row ``rows[b]``."""
        self._counts = [self._counts[row] for row in rows.tolist()]
        self._rows = len(rows)
        if self._states is not None and self._landmarks is not None:
            self._states = self._states.index_select(0, rows.to(self._states.device))
            self._landmarks = self._landmarks.index_select(0, rows.to(self._landmarks.device))


class MemoryTable(BlockTable):
    """Blocks of a document that all rows share, then blocks of each row's own.

    Blocks of answers and questions stay in tensors. The document does not change. With ``on_error="miss"`` a stored
    block that cannot be read is left out of every list that chooses it, as if it did not exist.
    """

    def __init__(
        self,
        view: LayerView,
        blocks: range,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_error: OnError = "raise",
    ) -> None:
        super().__init__(rows, blocks.stop)
        self._view = view
        self._on_error = on_error
        self._blocks = blocks
        self._dtype = dtype
        self._device = device

    def search(self, queries: Tensor, limits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        scores, blocks = self._search_document(queries, limits, top_k)
        own_scores, own_blocks = super().search(queries, limits, top_k)
        if not own_scores.shape[-1]:
            return scores, blocks
        scores, blocks = torch.cat([scores, own_scores], -1), torch.cat([blocks, own_blocks], -1)
        scores, at = scores.topk(min(top_k, scores.shape[-1]), -1)
        return scores, blocks.gather(-1, at)

    def gather(self, blocks: Tensor) -> Tensor:
        flat = blocks.flatten().tolist()
        stored = sorted({block for block in flat if block in self._blocks})
        if not stored:
            return super().gather(blocks)
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
        return torch.where(own, super().gather(blocks), states)

    def readable(self, scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out unreadable blocks if ``on_error`` is "miss". Otherwise return all, and let ``gather`` raise."""
        lost = self._lost(blocks) if self._on_error == "miss" else []
        if not lost:
            return scores, blocks
        left_out = torch.isin(blocks, torch.tensor(lost, device=blocks.device))
        scores, at = scores.masked_fill(left_out, -math.inf).sort(dim=-1, descending=True, stable=True)
        return scores, blocks.masked_fill(left_out, -1).gather(-1, at)

    def _lost(self, blocks: Tensor) -> list[int]:
        """Return the stored ``blocks`` that cannot be read."""
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
        """Return scores and blocks ``[n, top_k]`` for ``queries [n, e]``."""
        scores, blocks, _ = self._view.search(queries[None].float(), top_k, allowed=range(self._blocks.start, bound))
        return scores[0].to(queries.dtype), blocks[0]


def random_choice(limits: Tensor, top_k: int) -> TopBlocks:
    """Return random blocks below ``limits [B, n]``, with equal weights. The same limit always gives the same blocks."""
    rows = [[_sample(int(limit), top_k) for limit in row] for row in limits.tolist()]
    blocks = torch.tensor(rows, device=limits.device).view(*limits.shape, top_k)
    return weighed(torch.where(blocks >= 0, 0.0, -math.inf), blocks)


def _sample(limit: int, top_k: int) -> list[int]:
    chosen = random.Random(limit).sample(range(limit), min(limit, top_k))  # noqa: S311 - a baseline, not a secret
    return chosen + [-1] * (top_k - len(chosen))


class GroupSearch(NamedTuple):
    """The choice of a group in one segment: a list where each block ends."""

    queries: Tensor
    """``[B, n, e]``"""
    limits: Tensor
    """``[B, n]``: the group chose among the blocks below this one."""
    chosen: TopBlocks
    """``[B, n, K]``"""
    tiers: Array
    """``[B, n, K]``: tiers of the blocks before they were fetched."""
    search_us: float
    gather_us: float


@dataclass(eq=False)
class DRTChoice(Choice):
    """The lists that one group of upper layers uses in one segment."""

    layer: int
    """The first layer of the group."""
    searched: bool
    rows: Sequence[int]
    group: int
    lookup: GroupSearch | None
    """None if no block ends in the segment. Its tokens then use the previous list."""
    looks: list[Look]
    """The lists that the last token of each row uses."""

    def draft(self) -> Draft:
        return Looks(self.looks)


class ListsInUse:
    """Tracks which list each row of a cache uses: the previous one, until a block ends and the next block is read."""

    def __init__(self, config: DRTConfig, rows: int, origin: Origin) -> None:
        self._origin = origin
        self._heads, self._text = config.num_attention_heads, config.tokens_per_block
        self._weighs = config.fusion == "grouped"
        self._layers = group_layers(config)
        self._last: list[list[Look | None]] = [[None] * rows for _ in self._layers]

    def choice(self, group: int, packing: DRTPacking, lookup: GroupSearch | None) -> DRTChoice:
        """Return what observers learn of ``group`` in a segment."""
        last = self._last[group]
        used = last[:]
        if lookup is not None:
            each = zip(packing.offsets, packing.counts, packing.blocks, strict=True)
            for row, (offset, count, ended) in enumerate(each):
                # List 0 is the previous one, list 1 + j the choice of the j-th block completed here. While the last
                # token uses the last list, it is one look: a recorder then writes it once for many steps.
                number = (offset + max(count, 1) - 1) // self._text
                fresh = {j: self._look(group, row, j - 1, lookup) for j in {number, ended} if j}
                used[row], last[row] = fresh.get(number, used[row]), fresh.get(ended, last[row])
        told = [look for look in used if look is not None]
        for row, look in enumerate(used):
            if look is not None and look is last[row] and look.search_us:  # nobody searches for it again
                last[row] = replace(look, search_us=0.0, gather_us=0.0)
        return DRTChoice(self._layers[group], lookup is not None, range(len(used)), group, lookup, told)

    def _look(self, group: int, row: int, number: int, lookup: GroupSearch) -> Look | None:
        chosen = lookup.chosen
        blocks, scores, weights = (as_array(x[row, number]) for x in (chosen.blocks, chosen.scores, chosen.weights))
        if not (blocks >= 0).any():
            return None
        weights = weights if self._weighs else np.full_like(weights, np.nan)
        spent = lookup.search_us, lookup.gather_us
        by_head, tiers = np.repeat(weights[None], self._heads, 0), lookup.tiers[row, number][None]
        layer = self._layers[group]
        return ranked_look(layer, row, self._origin, blocks[None], scores[None], by_head, tiers, spent)


def group_layers(config: DRTConfig) -> list[int]:
    """Return the number of the first layer of each group of upper layers."""
    return [config.lower_layers + sum(config.upper_layers[:group]) for group in range(len(config.upper_layers))]


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks of others that a row may retrieve in training: distractors that need no reading.

    A block depends on a window of tokens only. So blocks of other rows, or of earlier steps, are like blocks that a row
    would find in a longer document. The trainer marks those that hold no answer to another row's question.
    """

    rows: Tensor | None = None
    """``[B, T]``: True for tokens whose blocks other rows may retrieve."""
    states: Tensor | None = None
    """``[P, S, hidden]``: states of further blocks, such as those of earlier steps."""
    landmarks: Tensor | None = None
    """``[P, hidden]``"""
    ranks: Ranks | None = None
    """Processes that train together, each with its own rows. Each may retrieve the ``rows`` of all.

    All pass it at the same step, and all run backward: the gradients of every rank's loss go back to the block.
    """

    def check(self, config: DRTConfig, input_ids: Tensor) -> None:
        """Raise ``InvalidArgument`` if these blocks cannot be retrieved for ``input_ids [B, T]``."""
        if config.retrieval in ("random", "none"):
            raise InvalidArgument(
                f"a model with retrieval={config.retrieval!r} does not choose blocks; leave shared out"
            )
        if (self.states is None) != (self.landmarks is None):
            raise InvalidArgument("pass shared states and their landmarks together")
        if self.rows is not None and self.rows.shape != input_ids.shape:
            raise InvalidArgument(
                f"expected shared.rows for {list(input_ids.shape)} tokens, got {list(self.rows.shape)}"
            )


def retrieve(
    config: DRTConfig,
    block_states: BlockKeysValues,
    packing: DRTPacking,
    queries: Tensor,
    blocks: tuple[Tensor, Tensor],
    shared: SharedBlocks | None = None,
    *,
    gumbel: float = 0.0,
) -> tuple[TopBlocks, ListStates]:
    """Return what ``queries [B, n, e]`` choose among the blocks before their own, and the lists of a segment's items.

    ``blocks`` are states ``[B, n, S, hidden]`` and landmarks ``[B, n, e]``; ``block_states`` makes their keys and
    values. ``shared`` are further blocks to choose from. ``gumbel`` is the factor on the noise added to scores.
    """
    states, landmarks = blocks
    rows, count = queries.shape[:2]
    if config.retrieval == "random":
        limits = torch.arange(count, device=queries.device).expand(rows, -1)
        chosen = random_choice(limits, config.retrieval_top_k)
    elif shared is None:
        scores = queries @ landmarks.transpose(1, 2)
        scores = scores.masked_fill(~_earlier(count, queries.device), -torch.inf)
        chosen = choose(scores, config.retrieval_top_k, gumbel=gumbel)
    else:
        scores, states = _with_shared(packing, queries, states, landmarks, shared)
        return _of_all_rows(block_states, packing, choose(scores, config.retrieval_top_k, gumbel=gumbel), states)
    keys, values = block_states(states)
    lists, weights = _shifted(chosen, packing.list_numbers(queries.device))
    return chosen, ListStates(keys, values, lists, weights.to(keys.dtype))


def with_other_ranks(shared: SharedBlocks, packing: DRTPacking, blocks: tuple[Tensor, Tensor] | None) -> SharedBlocks:
    """Return ``shared``, with the blocks that other ranks share added to its further states, by one collective.

    Raises ``InvalidArgument``, on all ranks, if one has no complete block.
    """
    if shared.ranks is None:
        return shared
    free = None if blocks is None else _free(packing, shared, blocks[0])
    count = -1 if free is None else int(free.sum())
    device = packing.ids.device
    counts = torch.stack(shared.ranks.gathered(torch.tensor(count, device=device))).tolist()
    if min(counts) < 0 or blocks is None or free is None:
        raise InvalidArgument(
            f"ranks share blocks, but rank {counts.index(-1)} has none: each row must have at least the tokens of a "
            "block"
        )
    states, landmarks = (part[free].flatten(1) for part in blocks)
    own = torch.cat([states, landmarks], -1)
    # Padded even if nobody shares anything: backward waits for all, whatever each has found.
    told = shared.ranks.joined(F.pad(own, (0, 0, 0, max(*counts, 1) - count)))
    others = [each[:count] for each, count in zip(told, counts, strict=True)]
    others[shared.ranks.rank] = told[shared.ranks.rank, :0]
    states, landmarks = torch.cat(others).split([states.shape[1], landmarks.shape[1]], -1)
    states = states.unflatten(-1, blocks[0].shape[2:])
    if shared.states is not None and shared.landmarks is not None:
        states = torch.cat([states, shared.states.to(states.dtype)])
        landmarks = torch.cat([landmarks, shared.landmarks.to(landmarks.dtype)])
    return replace(shared, states=states, landmarks=landmarks, ranks=None)


def as_one_row(packing: DRTPacking) -> Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]:
    """Return ``packing.by_list`` for rows that share all their blocks, so that attention sees them as one row."""

    def by_list(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return packing.by_list(
            x, lambda framed: function(framed.flatten(0, 1).unsqueeze(0)).squeeze(0).unflatten(0, framed.shape[:2])
        )

    return by_list


def _with_shared(
    packing: DRTPacking, queries: Tensor, states: Tensor, landmarks: Tensor, shared: SharedBlocks
) -> tuple[Tensor, Tensor]:
    """Return scores ``[B, n, N]`` of the blocks of all rows and ``shared``, -inf if not allowed; and their states."""
    rows, count = queries.shape[:2]
    earlier = _earlier(count, queries.device)
    own = torch.eye(rows, dtype=torch.bool, device=queries.device)[:, None, :, None] & earlier[None, :, None, :]
    free = _free(packing, shared, states)
    own = own | (~torch.eye(rows, dtype=torch.bool, device=queries.device)[:, None, :, None] & free[None, None])
    scores = torch.einsum("bnd,cmd->bncm", queries, landmarks).masked_fill(~own, -torch.inf).flatten(2)
    states = states.flatten(0, 1)
    if shared.states is not None and shared.landmarks is not None:
        scores = torch.cat([scores, queries @ shared.landmarks.to(queries.dtype).T], -1)
        states = torch.cat([states, shared.states.to(states.dtype)])
    return scores, states


def _free(packing: DRTPacking, shared: SharedBlocks, states: Tensor) -> Tensor:
    """Return which blocks of ``states [B, n, S, hidden]`` other rows may retrieve, ``[B, n]``."""
    count = states.shape[1]
    if shared.rows is None:
        return torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    free = packing.joined(None, _spread(packing, shared.rows))[0].squeeze(-1).all(-1)
    there = torch.tensor(packing.blocks, device=free.device)[:, None]
    return free & (torch.arange(count, device=free.device) < there)


def _of_all_rows(
    block_states: BlockKeysValues, packing: DRTPacking, chosen: TopBlocks, states: Tensor
) -> tuple[TopBlocks, ListStates]:
    """Return keys and values of the blocks ``states [N, S, hidden]`` that any row chose, with all rows as one."""
    needed, places = chosen.blocks.clamp(min=0).unique(return_inverse=True)
    keys, values = block_states(states[needed].unsqueeze(0))
    here = chosen._replace(blocks=torch.where(chosen.blocks >= 0, places, -1))
    blocks, weights = _shifted(here, packing.list_numbers(states.device))
    lists, weights = (x.flatten(0, 1).unsqueeze(0) for x in (blocks, weights))
    return chosen, ListStates(keys, values, lists, weights.to(keys.dtype))


def _earlier(count: int, device: torch.device) -> Tensor:
    """Return ``[n, n]``: whether block ``i`` may retrieve block ``j``."""
    return torch.ones(count, count, dtype=torch.bool, device=device).tril(-1)


def _shifted(chosen: TopBlocks, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return lists by their numbers: 0 is empty, ``1 + j`` is the choice of block ``j``."""
    blocks = F.pad(chosen.blocks, (0, 0, 1, 0), value=-1)
    weights = F.pad(chosen.weights, (0, 0, 1, 0))
    at = numbers[0].clamp(max=blocks.shape[1] - 1)
    return blocks[:, at], weights[:, at]


def _spread(packing: DRTPacking, tokens: Tensor) -> Tensor:
    """Return a flag of each token ``[B, T]`` as a stream ``[B, M, 1]``; True for landmarks."""
    stream = torch.ones(packing.rows, packing.items + 1, dtype=torch.bool, device=tokens.device)
    stream.scatter_(1, packing.slots.expand(packing.rows, -1), tokens)
    return stream[:, : packing.items].unsqueeze(-1)
