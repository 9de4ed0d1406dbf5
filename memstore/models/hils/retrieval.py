"""The earlier blocks of a HiLS layer: its own tensors, or a document of a memory and then its own tensors.

In the document, each key-value head has a layer of its own, because each head chooses for itself. The memory's layer
``n * G + g`` holds the states of head ``g`` of the ``n``-th HiLS layer. The landmarks of all query heads are in the
index of the first of these layers, as ``[kbar, b]`` for each head. They are searched with ``[s u, 1]``, so the inner
product is the estimate ``e`` itself. So any index works. With an exact index, the model chooses as without a memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.device_copies import to_device
from memstore.errors import DamagedError
from memstore.kernels.hils_attention import best_blocks
from memstore.memory import Document
from memstore.models.cache import OnError
from memstore.readers.audit import exact_scores

ESTIMATES = 1 << 22
"""Numbers held at once while blocks are chosen among tensors."""


class LatestItems:
    """The latest items, or blocks, of a stream in tensors ``[B, X, n, ...]``. When a buffer is full, they move."""

    def __init__(self, first: int = 0) -> None:
        self.first, self.count = first, 0
        """The place of the first item, and their number."""
        self._begin = 0
        self._buffers: list[Tensor] = []

    @property
    def stop(self) -> int:
        return self.first + self.count

    def extend(self, *new: Tensor) -> None:
        """Append items, of each kind of tensor."""
        end, more = self._begin + self.count, new[0].shape[2]
        if not self._buffers or end + more > self._buffers[0].shape[2]:
            needed = self.count + more
            grown = [x.new_empty(*x.shape[:2], needed + needed // 2, *x.shape[3:]) for x in new]
            for old, larger in zip(self.read() if self._buffers else (), grown, strict=False):
                larger[:, :, : self.count] = old
            self._buffers, self._begin, end = grown, 0, self.count
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, end : end + more] = x
        self.count += more

    def read(self, first: int | None = None) -> list[Tensor]:
        """Return the items ``[B, X, n, ...]`` of each kind from the place ``first`` on, by default all."""
        assert self._buffers, "nothing was put in yet"
        begin = self._begin + (0 if first is None else first - self.first)
        return [buffer[:, :, begin : self._begin + self.count] for buffer in self._buffers]

    def keep_from(self, first: int) -> None:
        """Drop items before the place ``first``."""
        gone = min(max(0, first - self.first), self.count)
        self.first, self.count, self._begin = max(self.first, first), self.count - gone, self._begin + gone

    def reorder(self, rows: Tensor) -> None:
        """Let row ``b`` be the former row ``rows[b]``."""
        self._buffers = [x.index_select(0, rows.to(x.device)) for x in self._buffers]


class ChosenChunks(NamedTuple):
    """Lists of blocks."""

    blocks: Tensor
    """``[B, G, M, K]``, ascending, -1 behind them"""
    scores: Tensor
    """``[B, H, M, K]``: estimates of each head, -inf for a missing block"""


class _AtHand(NamedTuple):
    """The blocks that the last step of one token read."""

    edits: int
    """The document's number of edits at that step."""
    lists: list[list[int]]
    """The blocks of each key-value head, all of one length."""
    keys: Tensor
    """``[G, n, S - 1, D]``"""
    values: Tensor


class HilsTable:
    """The blocks of one HiLS layer: first the document's, shared by all rows, then each row's own, without an index.

    With ``on_error="miss"`` a stored block that cannot be read is left out of every list that chooses it.
    """

    def __init__(
        self, number: int, groups: int, *, document: Document | None = None, stop: int = 0, on_error: OnError = "raise"
    ) -> None:
        """``number``: the layer's number among HiLS layers. Blocks of the document from ``stop`` on are not used."""
        self.groups, self.document, self._on_error = groups, document, on_error
        self.layers = range(number * groups, (number + 1) * groups)
        """The layers of the memory."""
        self.own = LatestItems(stop)
        """Keys and values ``[B, G, n, S - 1, D]``, and landmarks ``[B, H, n, D + 1]`` (mean keys, then entropies) in
        float32 or better."""
        self._at_hand: _AtHand | None = None

    def copy(self) -> HilsTable:
        """Return a table that continues independently."""
        other = copy(self)
        other.own, other._at_hand = copy(self.own), None
        return other

    def choose(self, asked: Tensor, lse: Tensor, edges: Sequence[int], top_k: int) -> ChosenChunks:
        """Choose the best ``top_k`` blocks before ``edges``, ascending; each of the ``M`` queries has its own edge.

        ``asked [B, H, M, D + 1]``: scaled landmark queries and a 1. ``lse [B, H, M]``: the window's log-sum-exp.
        """
        parts = []
        for rows, stop in self._runs(edges, asked):
            scores, blocks = self.estimates(asked[:, :, rows], stop, top_k)
            edge = torch.tensor(edges[rows], device=scores.device)[:, None]
            there = (blocks >= 0) & (blocks < edge)
            heads = there if there.dim() == 2 else there.repeat_interleave(scores.shape[1] // self.groups, 1)
            scores = scores.masked_fill(~heads, -math.inf)
            at, found = best_blocks(scores, lse[:, :, rows], groups=self.groups, top_k=top_k)
            known = blocks.expand(*at.shape[:3], -1) if blocks.dim() == 2 else blocks
            known = F.pad(known, (0, 1), value=-1).gather(-1, at.where(at >= 0, known.shape[-1]))
            parts.append(_ordered(known, found))
        return ChosenChunks(*(torch.cat(part, 2) for part in zip(*parts, strict=True)))

    def _runs(self, edges: Sequence[int], asked: Tensor) -> Iterator[tuple[slice, int]]:
        """Yield queries that are compared with blocks together, and the first block that none of them sees."""
        start, many = 0, len(edges)
        size = max(1, ESTIMATES // max(1, asked.shape[0] * asked.shape[1] * max(1, edges[-1])))
        while start < many:
            stop = min(start + size, many)
            if self.own.first and edges[start] < edges[stop - 1]:  # an index is searched up to one block
                stop = next(at for at in range(start, stop) if edges[at] > edges[start])
            yield slice(start, stop), max(0, edges[stop - 1])
            start = stop

    def estimates(self, asked: Tensor, stop: int, top_k: int | None) -> tuple[Tensor, Tensor]:
        """Return scores ``[B, H, m, n]`` of blocks before ``stop``, and the blocks ``[1, n]`` or ``[B, G, m, n]``.

        They include the best ``top_k`` blocks; None: all blocks.
        """
        count = max(0, min(stop, self.own.stop) - self.own.first)
        blocks = torch.arange(self.own.first, self.own.first + count, device=asked.device)[None]
        scores = asked.new_empty(*asked.shape[:3], 0)
        if count:
            scores = asked @ self.own.read()[2][:, :, :count].mT
        stored = self._stored(stop)
        if not stored:
            return scores, blocks
        found, ids = self._found(asked, stored, top_k)
        if ids.dim() == 4:
            blocks = blocks.expand(*ids.shape[:3], -1)
        return torch.cat([found, scores], -1), torch.cat([ids, blocks], -1)

    def _stored(self, stop: int) -> range:
        """Return the document's blocks before ``stop``."""
        if self.document is None:
            return range(0)
        return range(self.document.complete_blocks.start, min(stop, self.own.first))

    def _found(self, asked: Tensor, stored: range, top_k: int | None) -> tuple[Tensor, Tensor]:
        """Return estimates for blocks of the document; see ``estimates``."""
        assert self.document is not None
        view, shape = self.document.layer(self.layers[0]), asked.shape[:3]
        assert view.index is not None
        queries = asked.transpose(0, 1).flatten(1, 2).float().to(view.index.device)  # [H, B * m, D + 1]

        def apart(x: Tensor) -> Tensor:
            """Reshape ``[H, B * m, n]`` to ``[B, H, m, n]``."""
            rows: Tensor = x.unflatten(1, (shape[0], -1))
            return rows.transpose(0, 1)

        shared = shape[1] > self.groups  # heads that share a list need each other's scores of all blocks
        dense = self.document.memory.index_capabilities.dense
        if top_k is None or (shared and dense):
            all_of_them = torch.arange(stored.start, stored.stop)
            found = view.score(queries, allowed=stored) if dense else (exact_scores(view, queries, stored), all_of_them)
            scores, ids = to_device(list(found), asked.device)
            return apart(scores).to(asked.dtype), ids[None]
        hits = view.search(queries, min(top_k, len(stored)), allowed=stored)
        scores, ids = to_device([hits.scores, hits.blocks], asked.device)
        if not shared:
            return apart(scores).to(asked.dtype), apart(ids)
        return self._rescored(asked, apart(ids))

    # Some indexes only find the best blocks of each head. A list, however, is chosen by the largest share that a block
    # has in any head. So the blocks that any head found are candidates, and every head scores all of them.
    def _rescored(self, asked: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Score all blocks that the heads of a group found, ``ids [B, H, m, k]``, for each head: ``[B, H, m, n]``."""
        assert self.document is not None
        together = ids.unflatten(1, (self.groups, -1)).transpose(2, 3).flatten(3).sort(-1).values  # [B, G, m, R * k]
        again = F.pad(together[..., 1:] == together[..., :-1], (1, 0))
        together = together.masked_fill(again, -1)
        wanted = together[together >= 0].unique()
        if not len(wanted):
            return asked.new_empty(*asked.shape[:3], 0), together[..., :0]
        view = self.document.layer(self.layers[0])
        marks = torch.cat([view.landmarks(range(block, block + 1)) for block in wanted.tolist()]).squeeze(2)
        (marks,) = to_device([marks.transpose(0, 1).to(asked.dtype)], asked.device)  # [H, n, D + 1]
        at = torch.searchsorted(wanted, together).clamp(max=len(wanted) - 1)
        heads = asked.shape[1] // self.groups
        return (asked @ marks.mT).gather(-1, at.repeat_interleave(heads, 1)), together

    def states(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values ``[B, G, n, S - 1, D]`` of ``blocks [B, G, M, K]``, and their places, -1 for none."""
        own = self.own
        stored = (blocks >= 0) & (blocks < own.first)
        if not bool(stored.any()):
            return own.read()[0], own.read()[1], torch.where(blocks >= 0, blocks - own.first, -1)
        lists = [blocks[:, group][stored[:, group]].unique().tolist() for group in range(self.groups)]
        read = self._step if blocks.shape[2] == 1 else self._read
        keys, values, lists = read(lists, blocks.device)
        most = keys.shape[1]
        at = torch.full_like(blocks, -1)
        for group, listed in enumerate(lists):
            if listed:
                known, order = torch.tensor(listed, device=blocks.device).sort()
                place = torch.searchsorted(known, blocks[:, group].contiguous()).clamp(max=len(known) - 1)
                at[:, group] = order[place].where(known[place] == blocks[:, group], -1)
        keys, values = (x.expand(len(blocks), *x.shape) for x in (keys, values))
        if bool((blocks >= own.first).any()):
            at = torch.where(blocks >= own.first, blocks - own.first + most, at)
            keys, values = (torch.cat(both, 2) for both in zip((keys, values), own.read()[:2], strict=True))
        return keys, values, at

    # From one token to the next, a head mostly chooses the same blocks. These stay in place. A step reads only the new
    # blocks, and only the lists of the last step are held.
    def _step(self, wanted: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Read as ``_read`` does, but reuse the blocks of the last step."""
        assert self.document is not None
        held, edits = self._at_hand, self.document.state.edits
        self._at_hand = None  # until it is complete again
        if held is not None and held.edits == edits and [*map(len, held.lists)] == [*map(len, wanted)]:
            missing = [sorted({*new}.difference(old)) for new, old in zip(wanted, held.lists, strict=True)]
            if 2 * sum(map(len, missing)) <= sum(map(len, wanted)):
                with suppress(DamagedError):  # the read below meets it again
                    self._at_hand = self._exchanged(held, wanted, missing, device)
                    return self._at_hand.keys, self._at_hand.values, self._at_hand.lists
        keys, values, lists = self._read(wanted, device)
        if len({*map(len, lists)}) == 1:
            self._at_hand = _AtHand(edits, lists, keys, values)
        return keys, values, lists

    def _exchanged(
        self, held: _AtHand, wanted: list[list[int]], missing: list[list[int]], device: torch.device
    ) -> _AtHand:
        """Replace blocks of ``held`` that are no longer wanted by the ``missing`` ones."""
        assert self.document is not None
        if not any(missing):
            return held
        read = self.document.gather_each(self.layers, missing, device=device)
        heads, places, lists = list[int](), list[int](), [*map(list, held.lists)]
        for group, (blocks, new) in enumerate(zip(lists, missing, strict=True)):
            free = [place for place, block in enumerate(blocks) if block not in wanted[group]]
            for place, block in zip(free, new, strict=True):
                blocks[place] = block
            heads, places = heads + [group] * len(new), places + free
        at = tuple(to_device([torch.tensor(heads), torch.tensor(places)], held.keys.device))
        held.keys[at], held.values[at] = read["k"], read["v"]
        return held._replace(lists=lists)

    def _read(self, wanted: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Read stored blocks, a list for each head: keys, values ``[G, n, S - 1, D]``, and the lists that were read."""
        assert self.document is not None
        try:
            read = self.document.gather_each(self.layers, wanted, device=device)
        except DamagedError:
            if self._on_error == "raise":
                raise
            pairs = zip(self.layers, wanted, strict=True)
            wanted = [self.document.layer(layer).sound(blocks) for layer, blocks in pairs]
            read = self.document.gather_each(self.layers, wanted, device=device)
        counts = [len(each) for each in wanted]
        keys, values = (_in_rows(read[name], counts) for name in ("k", "v"))
        return keys, values, wanted

    def tiers(self, blocks: Tensor) -> list[list[str]]:
        """Return the tier of each of ``blocks [G, K]``; "own" for blocks outside the memory, empty for none."""
        found = []
        for layer, of_head in zip(self.layers, blocks.tolist(), strict=True):
            stored = [block for block in of_head if 0 <= block < self.own.first]
            tiers = iter([] if self.document is None else self.document.layer(layer).tiers(stored))
            found.append(["" if block < 0 else next(tiers) if block < self.own.first else "own" for block in of_head])
        return found


def _ordered(blocks: Tensor, scores: Tensor) -> ChosenChunks:
    """Sort ``blocks [B, G, m, K]`` and their ``scores [B, H, m, K]`` by block, -1 last."""
    order = blocks.where(blocks >= 0, torch.iinfo(blocks.dtype).max).argsort(-1)
    of_heads = order.repeat_interleave(scores.shape[1] // blocks.shape[1], 1)
    return ChosenChunks(blocks.gather(-1, order), scores.gather(-1, of_heads))


def _in_rows(x: Tensor, counts: list[int]) -> Tensor:
    """Return ``x [sum of counts, ...]`` as ``[len(counts), most, ...]``, with padding behind each count."""
    most = max(counts)
    if min(counts) == most:
        alike: Tensor = x.unflatten(0, (len(counts), most))
        return alike
    rows = x.new_zeros(len(counts), most, *x.shape[1:])
    for row, part in zip(rows, x.split(counts), strict=True):
        row[: len(part)] = part
    return rows
