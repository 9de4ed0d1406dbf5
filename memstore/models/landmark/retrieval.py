"""Retrieval of a landmark model: where its earlier blocks are, how it chooses among them, and what observers learn.

Blocks are tensors of its own, or blocks of a document of a memory followed by such tensors.
``memstore.attention.landmark`` chooses by their scores. A look belongs to one layer: it has one list for every query
head, or for heads that share one. The weight of a block is its part of the grouped softmax (equations 1-4) that the
last token's head computed over own tokens, local landmarks and retrieved blocks. The tokens of the block have this
weight together. With a context-miss token it is the block's part of the weight that this token let through. Local
layers always see the latest blocks without retrieval, and are left out.

Scores are computed with blocks at the places where they are attended to. If heads share a list, the largest score
counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.landmark import Questions, attend, memory_weights
from memstore.attention.positions import Rotary
from memstore.device_copies import alike, from_each, to_device
from memstore.errors import DamagedError, InvalidArgument
from memstore.kernels import grouped_cross_attention
from memstore.kernels._backends import Backend, triton_problem
from memstore.memory import Document, LayerView
from memstore.memory.trace_file import Array, Look
from memstore.models.cache import OnError, larger, ranked_look
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.packing import Packing
from memstore.readers.attachment import check_retrieval
from memstore.readers.kinds import LANDMARK, Retrieval
from memstore.readers.observer import Choice, Draft, Origin, as_array

FOREVER = 2**40
"""A number of blocks that is never reached."""
OFFERED = 64
"""The least number of older blocks that the first layer chooses among."""


class _BlockStates(NamedTuple):
    """States of blocks, without positions."""

    keys: Tensor
    """``[n, G, S, D]``"""
    values: Tensor
    """``[n, G, S, D]``"""
    sound: Tensor | None = None
    """``[n]``, in host memory: False for a block that could not be read; None if all could."""


# All three kinds of blocks search and score (``attention.landmark.Landmarks``), and have landmarks and states. They
# take numbers of rows and blocks in host memory, as all counts are: computing with them needs no GPU.
class _TensorBlocks:
    """Complete blocks of ``B`` rows in one layer, in tensors that grow by half when they are full.

    Blocks before ``first`` are stored elsewhere.
    """

    reach = FOREVER
    """Number of blocks that are searched, up to ``stop``. Older ones are treated as missing."""

    def __init__(self, rows: int, first: int = 0) -> None:
        self.first = first
        self._counts = torch.full((rows,), first)
        self._keys: Tensor | None = None  # [B, room, G, S, D]
        self._values: Tensor | None = None
        self._landmarks: Tensor | None = None  # [B, G, room, D]

    @property
    def like(self) -> Tensor:
        """Return a tensor with the dtype and the device of the states. There must be some."""
        assert self._keys is not None
        return self._keys

    def extend(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Append ``m`` blocks ``keys, values [n, m, G, S, D]`` to each of ``rows [n]``."""
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
        scores, blocks = self.score(queries, stop)
        best, at = scores.topk(min(top_k, scores.shape[-1]), -1)
        return best, torch.where(best > -math.inf, blocks[at], -1)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        seen = range(max(self.first, int(stop.min()) - self.reach), int(stop.max()))
        if self._landmarks is None or not seen:
            return queries.new_empty(*queries.shape[:3], 0), torch.empty(0, dtype=torch.int64, device=queries.device)
        keys = self._landmarks[:, :, seen.start - self.first : seen.stop - self.first].to(queries.dtype)
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
        blocks = torch.arange(seen.start, seen.stop, device=queries.device)
        return _within(scores, blocks, stop, self.reach), blocks

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        """Return landmarks ``[B, G, count, D]`` of blocks from ``first [B]`` on, undefined for numbers below 0."""
        assert self._landmarks is not None
        return _run(self._landmarks, first - self.first, count)

    def states(self, rows: Tensor, blocks: Tensor) -> tuple[_BlockStates, Tensor]:
        """Return states of some blocks, and for each of ``blocks [n]`` of ``rows [n]`` its index ``[n]`` in them."""
        assert self._keys is not None
        assert self._values is not None
        at = rows * self._keys.shape[1] + blocks - self.first
        return _BlockStates(self._keys.flatten(0, 1), self._values.flatten(0, 1)), at

    def of_row(self, row: int, first: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[n, G, S, D]`` of the blocks of ``row`` from ``first`` on."""
        assert self._keys is not None
        assert self._values is not None
        which = slice(first - self.first, int(self._counts[row]) - self.first)
        return self._keys[row, which], self._values[row, which]

    def keep_from(self, first: int) -> None:
        if first > self.first:
            gone = first - self.first
            self._keys, self._values = (None if x is None else x[:, gone:].clone() for x in (self._keys, self._values))
            self._landmarks = None if self._landmarks is None else self._landmarks[:, :, gone:].clone()
            self.first = first

    def reorder(self, rows: Tensor, there: Tensor) -> None:
        """Let row ``b`` continue from row ``rows[b]``; ``there``: ``rows`` on the device."""
        self._counts = self._counts[rows]
        self._keys, self._values, self._landmarks = (
            None if x is None else x.index_select(0, there) for x in (self._keys, self._values, self._landmarks)
        )

    def _grow(self, count: int, like: Tensor) -> None:
        held = 0 if self._keys is None else self._keys.shape[1]
        if count > held:
            room, rows = max(count, held + held // 2), len(self._counts)
            groups, _, dim = like.shape[2:]
            self._keys = larger(self._keys, like.new_zeros(rows, room, *like.shape[2:]), 1)
            self._values = larger(self._values, like.new_zeros(rows, room, *like.shape[2:]), 1)
            self._landmarks = larger(self._landmarks, like.new_zeros(rows, groups, room, dim), 2)


class _DocumentBlocks:
    """Blocks of a document that all rows share, then blocks of each row's own, which are in no index.

    With ``on_error="miss"`` a stored block that cannot be read is left out of every list that chooses it.
    """

    def __init__(self, view: LayerView, start: int, own: _TensorBlocks, *, on_error: OnError = "raise") -> None:
        """``start``: the first block that the document still has. Its blocks from ``own.first`` on are not used."""
        self._view = view
        self._start = start
        self.own = own
        self._on_error = on_error

    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        scores, blocks = self.own.search(queries, top_k, stop)
        stored = self._stored(stop)
        if not stored:
            return scores, blocks
        # One search serves all rows. Some results may be too old for some rows, so it finds more than needed.
        ahead = 0 if self.own.reach == FOREVER else int(stop.max() - stop.min())
        hits = self._view.search(self._together(queries), top_k + ahead, allowed=stored)
        shape = (*queries.shape[:3], -1)
        found, ids = (_apart(x, shape) for x in to_device([hits.scores.to(scores.dtype), hits.blocks], scores.device))
        found = _within(found, ids, stop, self.own.reach)
        return torch.cat([found, scores], -1), torch.cat([torch.where(found > -math.inf, ids, -1), blocks], -1)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        scores, blocks = self.own.score(queries, stop)
        stored = self._stored(stop)
        if not stored:
            return scores, blocks
        found, ids = self._view.score(self._together(queries), allowed=stored)
        found, ids = to_device([found.to(scores.dtype), ids], scores.device)
        found = _apart(found, (*queries.shape[:3], -1))
        return torch.cat([_within(found, ids, stop, self.own.reach), scores], -1), torch.cat([ids, blocks])

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        lowest = int(first.min().clamp(min=self._start))
        if lowest >= self.own.first:
            return self.own.landmarks(first, count)
        stored = self._view.landmarks(range(lowest, self.own.first)).squeeze(2).transpose(0, 1)
        own = self.own.landmarks(
            torch.full_like(first, self.own.first), max(0, int(first.max()) + count - self.own.first)
        )
        (stored,) = to_device([stored.to(own.dtype)], own.device)
        return _run(torch.cat([stored.expand(len(own), -1, -1, -1), own], 2), first - lowest, count)

    def states(self, rows: Tensor, blocks: Tensor) -> tuple[_BlockStates, Tensor]:
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
        return _BlockStates(keys, values, sound), which

    def _together(self, queries: Tensor) -> Tensor:
        """Return ``[B, H, T, D]`` as ``[H, B * T, D]``, on the device of the index."""
        index = self._view.index
        return queries.transpose(0, 1).flatten(1, 2).float().to("cpu" if index is None else index.device)

    def _stored(self, stop: Tensor) -> range:
        first = int(stop.min())
        return range(max(self._start, first - self.own.reach), min(self.own.first, first))

    def _read(self, blocks: list[int]) -> _BlockStates:
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
        return _BlockStates(keys, values, sound)


# In the first layer all landmarks have one key, from one embedding. So all blocks in slot 0 are equal and no index is
# kept. Which of equal blocks is taken is arbitrary; the published code leaves it to `topk` and the rounding of a
# product. The latest 64 are offered and `topk` chooses, with the same result in all but four of the published cases.
class FirstLayerBlocks:
    """Blocks of the first layer. Older blocks are all alike there, so ``search`` offers the latest ones."""

    def __init__(self, blocks: _TensorBlocks | _DocumentBlocks) -> None:
        self.own = blocks.own if isinstance(blocks, _DocumentBlocks) else blocks
        self._blocks = blocks

    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        count = min(max(OFFERED, top_k), int(stop.max()), self.own.reach)
        blocks = from_each(stop - count, count, queries.device)
        scores = self._score(queries).expand(-1, -1, -1, count)
        scores = scores.masked_fill(blocks[:, None, None] < 0, -math.inf)
        return scores, blocks.clamp(min=-1)[:, None, None].expand_as(scores)

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        first = max(0, int(stop.min()) - self.own.reach)
        blocks = torch.arange(first, int(stop.max()), device=queries.device)
        scores = self._score(queries).expand(-1, -1, -1, len(blocks))
        return _within(scores, blocks, stop, self.own.reach), blocks

    def landmarks(self, first: Tensor, count: int) -> Tensor:
        last = torch.full_like(first, self.own.first)
        return self.own.landmarks(last, 1).expand(-1, -1, count, -1)

    def states(self, rows: Tensor, blocks: Tensor) -> tuple[_BlockStates, Tensor]:
        return self._blocks.states(rows, blocks)

    def _score(self, queries: Tensor) -> Tensor:
        """Return ``[B, H, T, 1]``: the score that all older blocks have."""
        stop = torch.full((len(queries),), self.own.first + 1)
        return self.own.score(queries, stop)[0]


LayerBlocks = _TensorBlocks | _DocumentBlocks | FirstLayerBlocks


class LandmarkTable:
    """Blocks of all layers."""

    def __init__(self, layers: Sequence[_TensorBlocks] | Sequence[_DocumentBlocks]) -> None:
        self.layers: list[LayerBlocks] = [FirstLayerBlocks(layers[0]), *layers[1:]]
        self.own = [layer.own if isinstance(layer, _DocumentBlocks) else layer for layer in layers]
        """The growing tensors of each layer."""

    def limit(self, reach: int) -> None:
        """Search at most ``reach`` blocks."""
        for layer in self.own:
            layer.reach = reach

    def reorder(self, rows: Tensor, there: Tensor) -> None:
        """Let row ``b`` continue from row ``rows[b]``; ``there``: ``rows`` on the device."""
        for layer in self.own:
            layer.reorder(rows, there)


def tensor_table(layers: int, rows: int) -> LandmarkTable:
    """Return an empty table for ``rows`` rows, in tensors."""
    return LandmarkTable([_TensorBlocks(rows) for _ in range(layers)])


def document_table(
    document: Document, stop: int, near: int, rows: int, like: Tensor, *, on_error: OnError = "raise"
) -> LandmarkTable:
    """Return the blocks of ``document`` below ``stop``, the last ``near`` in tensors, with room for each row's own.

    ``like`` has the dtype and the device of the model's states. Raises ``DamagedError``.
    """
    start = document.complete_blocks.start
    first = max(start, stop - near)
    layers = []
    for number in range(document.memory.spec.layers):
        own = _TensorBlocks(rows, first)
        view = document.layer(number)
        if stop > first:
            states = view.gather(list(range(first, stop)), device=like.device)
            keys, values = (states[name].to(like.device, like.dtype).expand(rows, -1, -1, -1, -1) for name in "kv")
            own.extend(torch.arange(rows), keys, values)
        layers.append(_DocumentBlocks(view, start, own, on_error=on_error))
    return LandmarkTable(layers)


def _within(scores: Tensor, blocks: Tensor, stop: Tensor, reach: int) -> Tensor:
    """Mask ``scores [B, H, T, n]`` of ``blocks``, of any shape that fits, that a row does not see any more or yet.

    A score becomes -inf if its block is not below the row's ``stop``, or more than ``reach`` blocks below. If all rows
    have the same ``stop``, the search has done this already.
    """
    if alike(stop):
        return scores
    (ends,) = to_device([stop[:, None, None, None]], scores.device)
    return scores.masked_fill((blocks >= ends) | (blocks < ends - reach), -math.inf)


def _apart(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``[H, B * T, n]`` as ``shape``, which is ``[B, H, T, n]``."""
    rows: Tensor = x.unflatten(1, (shape[0], -1))
    return rows.transpose(0, 1).reshape(shape)


def _run(x: Tensor, first: Tensor, count: int) -> Tensor:
    """Return ``count`` of ``x [B, G, n, D]`` from ``first [B]`` in host memory on; undefined before the beginning."""
    at = from_each(first, count, x.device).clamp(min=0)
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


GATHERED = 1 << 20
"""Numbers of keys that are laid out at once for lists of single tokens; more would exceed the caches of a CPU."""


def default_retrieval(config: LandmarkConfig) -> Retrieval:
    """Return the paper's most permissive scheme: each head and token chooses for itself."""
    return Retrieval(top_k=config.retrieval_top_k, every=1, share="none", share_tokens=False)


def check_capacity(retrieval: Retrieval, capacity: int | None) -> None:
    """Raise ``InvalidArgument`` for a capacity that does not hold the blocks of a list."""
    if capacity is None:
        return
    if retrieval.top_k == "all" or retrieval.positions == "true":
        raise InvalidArgument(
            "capacity needs a top_k that is a number, and stingy or clamped positions: with top_k='all' or "
            "positions='true' every block counts"
        )
    if capacity < retrieval.top_k:
        raise InvalidArgument(f"a capacity of {capacity} blocks is less than top_k={retrieval.top_k}: raise it")


def check_lists(config: LandmarkConfig, retrieval: Retrieval) -> None:
    """Raise ``InvalidArgument`` for options that a landmark model does not support."""
    if config.attention != "landmark":
        raise InvalidArgument(f"a model with attention={config.attention!r} has no landmarks and retrieves nothing")
    if retrieval.share == "model":
        raise InvalidArgument(
            "every layer of a landmark model chooses its own blocks: Retrieval.share must be 'none', 'group' or "
            "'layer', not 'model'"
        )
    check_retrieval(LANDMARK, retrieval)
    every = retrieval.every
    if isinstance(every, int) and config.segment_tokens % every:
        raise InvalidArgument(
            f"Retrieval.every must divide the {config.segment_tokens} tokens of a segment, or be 'segment', not {every}"
        )
    if retrieval.threshold is not None and not config.context_miss:
        raise InvalidArgument("Retrieval.threshold needs a model with a context-miss token; this one has none")


class Lists(NamedTuple):
    """Lists ``[B, X, R, K]`` of blocks, and the states of all of them."""

    blocks: Tensor
    """``[B, X, R, K]``, in host memory; -1 for no block."""
    there: Tensor
    """``[B, X, R, K]``, in host memory: whether there is a block that could be read."""
    missing: Tensor | None
    """``[B, X, R, K]``: the opposite of ``there``; None if no block is missing."""
    at: Tensor
    """``[B, X, R, K]``: index of each block's states."""
    keys: Tensor
    """``[n, G, S, D]``, rotated to where they are attended to."""
    values: Tensor
    """``[n, G, S - 1, D]``"""
    fetched: int
    """Number of blocks that were fetched."""
    rows: int
    """Number of rows they were fetched for."""

    @property
    def heads(self) -> int:
        """Return ``Y``, the heads with a layout of their own: key-value heads if query heads share lists."""
        return max(self.blocks.shape[1], self.keys.shape[1])


class ListLayout(NamedTuple):
    """The states of lists, laid out for ``attend``."""

    keys: Tensor
    """``[B, Y, R, K, S, D]``"""
    values: Tensor
    """``[B, Y, R, K, S - 1, D]``"""
    bias: Tensor | None


def fetch(table: LayerBlocks, blocks: Tensor, slots: Tensor, rotary: Rotary, size: int) -> Lists:
    """Fetch ``blocks [B, X, R, K]``, each for one of ``slots [B, X, R, K]`` of ``size`` positions; in host memory."""
    there = blocks >= 0
    rows = torch.arange(len(blocks))[:, None, None, None].expand_as(blocks)
    count, most = int(blocks.max()) + 1, int(slots.max()) + 1
    # A block may be in several slots. Each of them is an entry, but the block is fetched once.
    named, entry = (rows * count + blocks)[there].unique(return_inverse=True)
    places, at_there = (entry * most + slots[there]).unique(return_inverse=True)
    row, block = named.div(count, rounding_mode="floor"), named % count
    found, which = table.states(row, block)
    source = which[places.div(most, rounding_mode="floor")]
    at = torch.zeros_like(blocks).masked_scatter(there, at_there)
    if found.sound is not None:
        there = there & found.sound[source][at]
    positions = (places % most)[:, None, None] * size + torch.arange(size)
    missing = [] if bool(there.all()) else [~there]
    source, positions, at, *missing = to_device([source, positions, at, *missing], found.keys.device)
    keys = rotary.rotate(found.keys[source], rotary.turns(positions, found.keys.dtype))
    values = found.values[..., :-1, :][source]
    gone = missing[0] if missing else None
    return Lists(blocks, there, gone, at, keys, values, len(named), int(row.unique().numel()))


def show(lists: Lists, which: slice) -> ListLayout:
    """Lay out the states of some of the R lists."""
    at = lists.at[:, :, which]
    groups, heads = lists.keys.shape[1], lists.heads
    group = (torch.arange(heads, device=at.device) // (heads // groups))[None, :, None, None]
    at = at.expand(-1, heads, -1, -1) * groups + group
    bias = None
    if lists.missing is not None:
        missing = lists.missing[:, :, which]
        bias = torch.zeros((), device=at.device).masked_fill(missing, -math.inf)[:, :, :, None, None, :, None]
    # Each row is all that one head needs of a block, so it is copied at once, not number by number.
    keys, values = (
        x.flatten(0, 1).flatten(1).index_select(0, at.flatten()).view(*at.shape, *x.shape[2:])
        for x in (lists.keys, lists.values)
    )
    return ListLayout(keys, values, bias)


def attend_each(q: Tensor, lists: Lists, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention ``[B, H, M, D]`` and log-sum-exps of ``q [B, H, M, D]``, each token to a list of its own."""
    if q.device.type == "cuda" and q.dtype != torch.float32 and triton_problem(q, largest=q.shape[-1]) is None:
        return attend_in_place(q, lists, scale)
    numbers = q.shape[0] * lists.heads * lists.blocks.shape[3] * lists.keys.shape[2] * q.shape[3]
    step = max(1, GATHERED // max(1, numbers))
    outs = []
    for start in range(0, q.shape[2], step):
        which = slice(start, start + step)
        shown = show(lists, which)
        outs.append(attend(q[:, :, which].unsqueeze(3), shown.keys, shown.values, scale=scale, bias=shown.bias))
    out, lse = (torch.cat(parts, 2) for parts in zip(*outs, strict=True))
    return out.squeeze(3), lse.squeeze(3)


def attend_in_place(q: Tensor, lists: Lists, scale: float, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Compute ``attend_each`` by a kernel that reads the states of lists in place: grouped cross attention.

    A block's weight is the weight of its landmark in the softmax over the list. Its ordinary tokens share that weight.
    """
    batch, heads, tokens, dim = q.shape
    groups = lists.keys.shape[1]
    at = lists.at.repeat_interleave(heads // lists.at.shape[1], 1)  # [B, H, M, K]

    def by_group(x: Tensor) -> Tensor:
        """Return ``[B, H, M, n]`` as ``[G, B * H / G * M, n]``: lists of a key-value head."""
        grouped: Tensor = x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 3)
        return grouped

    asked, entries = by_group(q), by_group(at)
    marks = lists.keys[:, :, -1].transpose(0, 1)  # [G, n, D]
    chosen = marks.gather(1, entries.flatten(1).unsqueeze(-1).expand(-1, -1, dim)).unflatten(1, entries.shape[1:])
    scores = (chosen @ asked.unsqueeze(-1)).squeeze(-1).float() * scale  # [G, lists, K]
    if lists.missing is not None:
        missing = by_group(lists.missing.repeat_interleave(heads // lists.missing.shape[1], 1))
        scores, entries = scores.masked_fill(missing, -math.inf), entries.masked_fill(missing, -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    keys, values = (x.transpose(0, 1).unsqueeze(2) for x in (lists.keys[:, :, :-1], lists.values))
    given: dict[str, Any] = {"scale": scale, "off_by_one": False, "backend": backend}
    out = grouped_cross_attention(asked[:, :, None, None], keys, values, weights.to(q.dtype), entries, **given)

    def by_head(x: Tensor) -> Tensor:
        """Return ``[G, B * H / G * M, ...]`` as ``[B, H, M, ...]``."""
        alone: Tensor = x.unflatten(1, (batch, heads // groups, tokens)).transpose(0, 1).flatten(1, 2)
        return alone

    return by_head(out[:, :, 0, 0]).float(), by_head(lse)


@dataclass
class SearchCounts:
    """Counts of searches in the memory. A segment here is a forward pass, for each row by itself."""

    queries: int = 0
    """How often a query head of a token had blocks in memory."""
    dropped: int = 0
    """How often the context-miss token's weight was below the threshold, so that nothing was retrieved."""
    searches: list[int] = field(default_factory=list)
    """Lists that were chosen, in each layer."""
    segments: list[int] = field(default_factory=list)
    """Segments for which blocks were fetched, in each layer."""
    fetched: list[int] = field(default_factory=list)
    """Blocks that were fetched, in each layer; within a segment each counts once."""

    @classmethod
    def of(cls, config: LandmarkConfig) -> SearchCounts:
        """Return counts of zero."""
        return cls(0, 0, *([0] * config.num_hidden_layers for _ in range(3)))


class LastLists(NamedTuple):
    """The lists that the last token of each row uses, as they were fetched."""

    blocks: Tensor
    """``[B, X, K]``; -1 for none."""
    there: Tensor
    """``[B, X, K]``: whether there is a block that could be read."""
    landmarks: Tensor
    """``[B, Y, K, D]``, rotated to their places."""
    tiers: Array
    """``[B, X, K]``: tiers of the blocks before they were fetched."""


class LastTokens:
    """Indices of the last tokens of a segment's rows in its stream."""

    def __init__(self, packing: Packing, rows: Sequence[int]) -> None:
        """``rows``: rows that have no more tokens after the segment."""
        self.rows = rows
        at: list[int] = packing.slots.masked_fill(packing.slots >= packing.items, 0).amax(1).tolist()
        self.at = at if len(at) == packing.rows else at * packing.rows  # 0 for a row without tokens

    def of(self, x: Tensor) -> Tensor:
        """Return ``x [B, X, R, ...]`` at the last token of each row, ``[B, X, ...]``; R is 1 if all tokens share it."""
        if x.shape[2] < 2:
            return x[:, :, 0] if x.shape[2] else x.flatten(2)
        if len(x) == 1:
            return x[:, :, self.at[0]].clone()  # so that the rest of a long call can be freed
        rows, at = to_device([torch.arange(len(x)), torch.tensor(self.at)], x.device)
        return x[rows, :, at]

    def lists(self, lists: Lists, tiers: Array) -> LastLists:
        """Return the part of ``lists`` that the last tokens use."""
        groups, heads = lists.keys.shape[1], lists.heads
        group = torch.arange(heads, device=lists.at.device)[:, None] // (heads // groups)
        at = self.of(lists.at).expand(-1, heads, -1)
        blocks, there = to_device([self.of(lists.blocks), self.of(lists.there)], at.device)
        return LastLists(blocks, there, lists.keys[:, :, -1][at, group], tiers)


@dataclass(eq=False)
class LandmarkChoice(Choice):
    """The lists of blocks that one layer uses in one segment. Local layers see the latest blocks and have none."""

    layer: int
    searched: bool
    table: LayerBlocks
    """The blocks that the layer searches."""
    ask: Callable[[], Questions]
    """Computes the queries of the segment's search, when an observer needs them."""
    blocks: Tensor
    """``[B, X, R, K]``, in host memory: the lists, -1 for no block."""
    queries: Tensor
    """``[B, H, M, D]``, rotated."""
    local: Tensor
    """``[B, H, M]``: log-sum-exp of the scores of own tokens and local landmarks."""
    found: Tensor
    """``[B, H, M]``: log-sum-exp of the scores of the landmarks in the lists."""
    opened: Tensor | None
    """``[B, H, M]``: the part that the context-miss token lets through; None if the model has none."""
    last: LastTokens
    lists: LastLists | None
    """None if there was no observer when they were fetched."""
    origin: Origin
    spent: tuple[float, float]
    """Microseconds of searching, and of gathering."""

    @property
    def rows(self) -> Sequence[int]:  # type: ignore[override]  # it is never set
        return self.last.rows

    def shares(self) -> tuple[Tensor, Tensor]:
        """Return how the last item of the segment weighs every block in memory, in the first row.

        These are weights ``[H, N]`` from 0 to 1, and the blocks ``[N]``.
        """
        weights, blocks = memory_weights(self.table, self.ask().tokens(slice(-1, None)))
        return weights[0, :, 0], blocks[0]

    def draft(self) -> Draft:
        assert self.lists is not None, "lists are traced from the beginning of a cache"
        *lists, tiers = self.lists
        opened = self.found[..., :0] if self.opened is None else self.opened
        what = *lists, *(self.last.of(x) for x in (self.queries, self.local, self.found, opened))
        return _LandmarkDraft(self.layer, self.rows, what, tiers, self.origin, self.spent)


@dataclass(eq=False)
class _LandmarkDraft(Draft):
    """The attention of one layer, kept for a report to observers."""

    layer: int
    rows: Sequence[int]
    what: Sequence[Tensor]
    """The arguments of ``weighed``."""
    tiers: Array
    origin: Origin
    spent: tuple[float, float]

    @classmethod
    @torch.no_grad()
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        # Rows of one shape are computed together, for 2% of a token. One by one, as they come, they would cost 5 to 8%.
        alike: defaultdict[tuple[torch.Size, ...], list[tuple[int, int]]] = defaultdict(list)
        for place, draft in enumerate(drafts):
            for row in draft.rows:
                alike[tuple(x.shape for x in draft.what)].append((place, row))
        looks: list[list[Look]] = [[] for _ in drafts]
        for places in alike.values():
            rows = zip(*([x[row] for x in drafts[place].what] for place, row in places), strict=True)
            computed = zip(*map(as_array, weighed(*map(torch.stack, rows))), strict=True)
            for (place, row), (blocks, scores, weights) in zip(places, computed, strict=True):
                if (blocks >= 0).any():
                    draft = drafts[place]
                    look = ranked_look(
                        draft.layer, row, draft.origin, blocks, scores, weights, draft.tiers[row], draft.spent
                    )
                    looks[place].append(look)
        return looks


def weighed(
    blocks: Tensor, there: Tensor, landmarks: Tensor, queries: Tensor, local: Tensor, found: Tensor, opened: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks and scores ``[n, X, K]`` and weights ``[n, H, K]``; -1, -inf and 0 for no block.

    ``blocks``, ``there`` and ``landmarks`` as in ``LastLists``. ``queries [n, H, D]`` are rotated. ``local [n, H]`` is
    the log-sum-exp of own tokens and local landmarks, ``found [n, H]`` of the landmarks in the list. ``opened [n, H]``
    is the part that the context-miss token lets through; empty if the model has none.
    """
    blocks = blocks.masked_fill(~there, -1)
    asking = queries.unflatten(1, (landmarks.shape[1], -1)).to(landmarks.dtype)
    scores = (asking @ landmarks.transpose(-1, -2)).flatten(1, 2).float() * asking.shape[-1] ** -0.5
    hidden = (blocks < 0).repeat_interleave(scores.shape[1] // blocks.shape[1], 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    gated = opened.numel() > 0
    total = found if gated else torch.logaddexp(local, found)
    weights = torch.exp(scores - total.unsqueeze(-1)).masked_fill(hidden, 0.0)
    if gated:
        weights = weights * opened.unsqueeze(-1)
    return blocks, scores.unflatten(1, (blocks.shape[1], -1)).amax(2), weights
