"""The cache of a HiLS model from one call to the next, and the choices that its layers report.

Keys are kept rotated, because positions are absolute. A window layer keeps its window. A HiLS layer also keeps its
window, and complete blocks with their landmarks in a ``HilsTable``. Input is cut into pieces of at most a window, so
every block that a token may choose is complete before its piece. So the result does not depend on the pieces.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memstore.attention.positions import Turns
from memstore.kernels.hils_attention import attend_chosen, block_weights, pool_landmarks, window_attention
from memstore.memory.trace_file import TIERS, Look
from memstore.models.cache import ModelCache, ranked_look
from memstore.models.hils.configuration import HilsConfig
from memstore.models.hils.retrieval import ChosenChunks, HilsTable, LatestItems
from memstore.models.packing import Packing
from memstore.readers.kinds import Retrieval
from memstore.readers.observer import Choice, Draft, Looks, Origin, as_array


class HilsCache(ModelCache):
    """The ``past_key_values`` of a HiLS model: rows are computed together while they have one length, then one by one.

    The model makes it if none is given. ``Reader.cache`` makes it to continue after a document of a memory. No
    gradients go through it.
    """

    config: HilsConfig

    def __init__(
        self,
        config: HilsConfig,
        rows: int,
        *,
        retrieval: Retrieval | None = None,
        tables: Sequence[HilsTable] | None = None,
        tokens: int = 0,
    ) -> None:
        """``tables``: one for each HiLS layer. ``tokens``: length of the document before each row."""
        super().__init__(config, rows)
        groups, layers = config.num_key_value_heads, config.hils_layers
        self.top_k = config.hils_topk if retrieval is None else retrieval.top_k
        """Blocks that a token chooses; 0 means windows alone."""
        made = [HilsTable(n, groups) for n in range(len(layers))] if tables is None else tables
        self.tables = dict(zip(layers, made, strict=True))
        self.tokens = tokens
        """Tokens of each row, including the document's tokens."""
        self.recent = {layer: LatestItems() for layer in range(config.num_hidden_layers)}
        self._rotary = {hils: config.rotary(hils=hils) for hils in (False, True)}
        self._turns: dict[bool, Turns] = {}
        self._items, self._last = 0, False
        self.apart: list[HilsCache] = []
        """A cache for each row, once rows have different lengths. The rest of this object is then out of date."""
        self.first_row = 0
        """The number of the first row, for observers."""

    def __repr__(self) -> str:
        tokens = max((each.tokens for each in self.apart), default=self.tokens)
        return f"{type(self).__name__}({self.rows} rows of {tokens} tokens)"

    def split(self) -> list[HilsCache]:
        """Split the cache: from now on, each row has a cache of its own."""
        if not self.apart:
            self.apart = [self._row(number) for number in range(self.rows)]
        for each in self.apart:
            each.observers = self.observers
        return self.apart

    def _row(self, number: int) -> HilsCache:
        one = copy.copy(self)
        one.recent = {layer: copy.copy(recent) for layer, recent in self.recent.items()}
        one.tables = {layer: table.copy() for layer, table in self.tables.items()}
        one._select(torch.tensor([number]))
        one.first_row = number
        return one

    @property
    def offsets(self) -> list[int]:
        """Tokens that wait in the incomplete block of each row."""
        return [self.tokens % self.config.tokens_per_block] * self.rows

    @property
    def place(self) -> int:
        """The place in the stream where the next items begin."""
        return self.tokens + self.tokens // self.config.tokens_per_block

    def begin(self, packing: Packing, *, last: bool = True) -> None:
        """Begin a piece, which ends within a window or at its end; ``last``: the last piece of this call."""
        places = torch.arange(self.place, self.place + packing.items, device=packing.ids.device)
        positions = self.config.positions(places)
        self._turns = {hils: rotary.turns(positions) for hils, rotary in self._rotary.items()}
        self._items, self._last = packing.items, last
        self._counted = packing.counts[0]

    def turns(self, *, hils: bool) -> Turns:
        return self._turns[hils]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, u: Tensor | None) -> Tensor:
        """See ``HilsStream``; for the piece's items."""
        q, k, v = q.detach(), k.detach(), v.detach()
        config, recent = self.config, self.recent[layer]
        recent.extend(k, v)
        keys, values = recent.read()
        if u is None:
            window, widened = config.sliding_window, False
        else:
            window, widened = config.hils_sliding_window, True
        near, lse = window_attention(
            q, keys, values, block_size=config.chunk_size, window=window, first=recent.first, widened=widened
        )
        if u is None:
            return near
        out = self._far(layer, q, u.detach(), near, lse.to(q.dtype))
        self._complete(layer, u.detach())
        return out

    def keep(self, layer: int, k: Tensor, v: Tensor, u: Tensor | None) -> None:
        """Store as ``attend`` does in ``layer``, if no attention is needed."""
        self.recent[layer].extend(k.detach(), v.detach())
        if u is not None:
            self._complete(layer, u.detach())

    def _far(self, layer: int, q: Tensor, u: Tensor, near: Tensor, lse: Tensor) -> Tensor:
        """Attend to the window and the chosen blocks in one softmax."""
        config, table = self.config, self.tables[layer]
        first = self.place - config.hils_sliding_window + 1
        edges = [place // config.chunk_size for place in range(first, first + self._items)]
        wide = torch.promote_types(q.dtype, torch.float32)
        if edges[-1] <= 0 or not self.top_k:
            weights = block_weights(lse.new_empty(*lse.shape, 0), lse, softmax1=config.enable_softmax1)
            return (weights * near).to(q.dtype)
        u = u.to(wide) * q.shape[-1] ** -0.5
        asked = torch.cat([u, u.new_ones(*u.shape[:-1], 1)], -1)
        begun = time.perf_counter()
        top_k = edges[-1] if self.top_k == "all" else self.top_k
        blocks, scores = table.choose(asked, lse, edges, top_k)
        found = time.perf_counter()
        tiers = table.tiers(blocks[0, :, -1]) if self.observers else []
        keys, values, at = table.states(blocks)
        missing = (at < 0) & (blocks >= 0)
        if bool(missing.any()):  # unreadable blocks count as not chosen
            blocks = blocks.masked_fill(missing, -1)
            scores = scores.masked_fill(missing.repeat_interleave(q.shape[1] // table.groups, 1), -torch.inf)
        gathered = time.perf_counter()
        weights = block_weights(scores, lse, softmax1=config.enable_softmax1)
        chosen = attend_chosen(q, keys, values, at, weights[..., :-1])
        if self.observers and edges[-1] > 0:
            spent = ((found - begun) * 1e6, (gathered - found) * 1e6)
            rows = range(self.rows) if self._last else range(0)
            self.tell(
                HilsChoice(layer, rows, ChosenChunks(blocks, scores), weights[..., :-1], tiers, self.origin, spent,
                           table, asked, lse, edges[-1], self.first_row)
            )  # fmt: skip
        return torch.addcmul(chosen, weights[..., -1:], near.to(wide)).to(q.dtype)

    def _complete(self, layer: int, u: Tensor) -> None:
        """Move the blocks that are now complete into the table."""
        size, recent = self.config.chunk_size, self.recent[layer]
        done, now = self.place // size, (self.place + self._items) // size
        if done == now:
            return
        states = (x[:, :, : (now - done) * size] for x in recent.read(done * size))
        keys, values = (x.unflatten(2, (now - done, size))[:, :, :, :-1] for x in states)
        m = u[:, :, size - 1 - self.place % size :: size]
        kbar, bias = pool_landmarks(m, keys)
        self.tables[layer].own.extend(keys, values, torch.cat([kbar.to(bias.dtype), bias.unsqueeze(-1)], -1))

    def end(self) -> None:
        """End the piece: all layers have attended, and its tokens are counted."""
        self.tokens += self._counted
        for layer, recent in self.recent.items():
            recent.keep_from(self.edge(layer))

    def edge(self, layer: int) -> int:
        """Return the place of the first item that the next items still see in the window of ``layer``."""
        if layer not in self.tables:
            return max(0, self.place - self.config.sliding_window + 1)
        size, window = self.config.chunk_size, int(self.config.hils_sliding_window)
        # When the incomplete block is complete, all of it is needed.
        return max(0, min((self.place - window + 1) // size, self.place // size) * size)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.apart:
            self.apart = [self.apart[row]._row(0) for row in beam_idx.tolist()]
        else:
            self._select(beam_idx)

    def _select(self, beam_idx: Tensor) -> None:
        self.rows = len(beam_idx)
        for recent in self.recent.values():
            recent.reorder(beam_idx)
        for table in self.tables.values():
            table.own.reorder(beam_idx)


@dataclass(eq=False)
class HilsChoice(Choice):
    """The blocks that one layer chose for the tokens of a piece. A trace shows those of the last token."""

    layer: int
    rows: Sequence[int]
    chosen: ChosenChunks
    weights: Tensor
    """``[B, H, M, K]``: weights of the chosen blocks in all that the layer attends to."""
    tiers: list[list[str]]
    """``[G][K]``: tiers of the blocks of the first row's last token."""
    origin: Origin
    spent: tuple[float, float]
    """Microseconds of choosing, and of gathering."""
    table: HilsTable
    asked: Tensor
    """``[B, H, M, D + 1]``"""
    lse: Tensor
    """``[B, H, M]``: log-sum-exp of the window."""
    stop: int
    """The first block that the last token sees in its window."""
    first_row: int = 0
    """The number of the first row in the cache of all rows of the call."""

    searched = True

    def shares(self) -> tuple[Tensor, Tensor]:
        """Return shares ``[H, N]`` of all blocks before the window, and these blocks ``[N]``.

        They are for the first row's last token, and come from a softmax over all blocks and the window, as if all were
        chosen.
        """
        scores, blocks = self.table.estimates(self.asked[:1, :, -1:], self.stop, None)
        scores = scores[0, :, 0]
        total = torch.logaddexp(scores.logsumexp(-1), self.lse[0, :, -1].to(scores.dtype))
        return (scores - total.unsqueeze(-1)).exp(), blocks[0]

    def draft(self) -> Draft:
        return Looks([self._look(row) for row in self.rows])

    def _look(self, row: int) -> Look:
        blocks, scores = (as_array(x[row, :, -1]) for x in self.chosen)
        weights = as_array(self.weights[row, :, -1])
        best = scores.reshape(len(blocks), -1, scores.shape[-1]).max(1)  # over the heads that share a list
        tiers = [[-1 if row or not tier else TIERS.index(tier) for tier in of_head] for of_head in self.tiers]
        number, given = self.first_row + row, np.array(tiers, np.int8)
        return ranked_look(self.layer, number, self.origin, blocks, best, weights, given, self.spent)
