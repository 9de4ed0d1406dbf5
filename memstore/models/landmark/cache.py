"""The state of a landmark model between segments, and how its queries see it.

Text is cut into segments of ``segment_blocks`` blocks, counted from its beginning. The tokens of the present segment
are *local*: they attend to each other directly. The blocks of all segments before it are *in memory*, and are
retrieved. So what a token sees depends on its place only, not on how the text was cut into calls. A text in one call,
in pieces, or token by token gives the same result, if each token chooses for itself. (If tokens share a list, the
tokens of one call choose it together.)

Keys are kept without positions, and rotated to the place where they are attended to: see
``memstore.attention.positions``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.landmark import Questions, attend, choose, gated, joined, joined_by_gate, local_bias
from memstore.attention.layers import States, after
from memstore.attention.positions import Turns, final_slots, local_slot, searching_slots
from memstore.device_copies import alike, from_each, numbers, to_device
from memstore.errors import InvalidArgument
from memstore.models.cache import CountedCache, of_rows
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.retrieval import (
    FOREVER,
    LandmarkChoice,
    LandmarkTable,
    LastLists,
    LastTokens,
    ListLayout,
    Lists,
    SearchCounts,
    attend_each,
    check_capacity,
    check_lists,
    default_retrieval,
    fetch,
    show,
    tensor_table,
)
from memstore.models.packing import Packing
from memstore.readers.kinds import Retrieval
from memstore.readers.observer import as_array


# Baselines are the same class without landmarks, so a table compares nothing but attention. Transformer-XL is computed
# in one pass: every window sees the one before it, detached, as its cache.
class WindowCache(CountedCache):
    """Keys and values that the baselines' next tokens can see: all, a window, or two windows side by side.

    Keys are kept rotated to their true positions. No gradient flows into the cache.
    """

    config: LandmarkConfig

    def __init__(self, config: LandmarkConfig, rows: int) -> None:
        super().__init__(config, rows)
        self.states: list[States | None] = [None] * config.num_hidden_layers
        """``[B, G, P, D]`` of each layer."""
        self.places: Tensor | None = None
        """``[B, P]``: positions of the states; -1 for none."""
        self._packing: Packing | None = None
        self._turns: Turns | None = None
        self._visible: Tensor | None = None

    @property
    def step(self) -> int:
        """Return how many tokens one forward pass takes at most."""
        return self.config.segment_tokens

    @property
    def offsets(self) -> list[int]:
        """Return the tokens of each row. There are no blocks: all tokens count as one block that never ends."""
        return self.counts

    def begin(self, packing: Packing, ending: Sequence[int] = ()) -> None:  # noqa: ARG002 - no observers
        """Compute where the segment's items are, and what each sees."""
        device = packing.ids.device
        at = torch.tensor(self.counts, device=device)[:, None] + torch.arange(packing.items, device=device)
        here = torch.where(packing.real, at, -1)
        self._packing, self._turns = packing, self.config.rotary.turns(at.unsqueeze(1))
        self.places = here if self.places is None else torch.cat([self.places, here], 1)
        places, first = self.places[:, None], self._first(at).clamp(min=0)[..., None]
        # The filling at the end of a row sees itself, so that its output is finite.
        itself = F.pad(torch.eye(packing.items, dtype=torch.bool, device=device), (places.shape[-1] - packing.items, 0))
        self._visible = ((places >= first) & (places <= at[..., None]) | itself).unsqueeze(1)

    def _first(self, places: Tensor) -> Tensor:
        """Return the first position that a token at each of ``places`` sees; below 0 if it sees all."""
        match self.config.attention:
            case "window":
                return places - self.config.window + 1
            case "xl":
                return (places.div(self.config.window, rounding_mode="floor") - 1) * self.config.window
            case _:
                return torch.zeros_like(places)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:  # noqa: ARG002 - the baselines have none
        assert self._turns is not None
        rotary = self.config.rotary
        q, k = rotary.rotate(q, self._turns), rotary.rotate(k, self._turns)
        k, v = after(self.states[layer], (k, v))
        self.states[layer] = (k.detach(), v.detach())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible, enable_gqa=q.shape[1] != k.shape[1])

    def end(self) -> None:
        """Count the segment's tokens, and drop states that no token will see again."""
        assert self._packing is not None
        assert self.places is not None
        self.count(self._packing)
        first = self._first(torch.tensor(self.counts, device=self.places.device)).clamp(min=0)
        needed = (self.places >= first[:, None]).any(0)
        if not bool(needed.all()):
            self.places = self.places[:, needed]
            self.states = [
                None if each is None else (each[0][:, :, needed], each[1][:, :, needed]) for each in self.states
            ]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.places = None if self.places is None else self.places[beam_idx.to(self.places.device)]
        self.states = of_rows(self.states, beam_idx)


class _Frame(NamedTuple):
    """The segment in progress, in one layer: room for ``F`` blocks."""

    keys: Tensor
    """``[B, G, F * S, D]`` without positions"""
    turned: Tensor
    """``[B, G, F * S, D]``, rotated to their positions"""
    values: Tensor
    """``[B, G, F * S, D]``"""


class _KeptList(NamedTuple):
    """A list that further tokens use."""

    blocks: Tensor
    """``[B, X, 1, K]``, in host memory like all fields except ``shown``."""
    shown: ListLayout
    run: Tensor
    """``[B]``: the run of tokens that the list is for."""
    made: Tensor
    """``[B, X, 1]``: whether the list has been chosen."""

    def reordered(self, rows: Tensor, there: Tensor) -> _KeptList:
        """Return the lists with row ``b`` taken from row ``rows[b]``; ``there``: ``rows`` on the device."""
        keys, values, bias = self.shown
        shown = ListLayout(keys[there], values[there], None if bias is None else bias[there])
        return _KeptList(self.blocks[rows], shown, self.run[rows], self.made[rows])


class _MemoryAttention(NamedTuple):
    """Attention of a segment's queries to the memory."""

    out: Tensor
    """``[B, H, M, D]``"""
    lse: Tensor
    """``[B, H, M]``"""
    blocks: Tensor
    """``[B, X, R, K]``, in host memory: the lists that the queries attended to."""
    searched: bool
    """Whether the lists were searched for in this segment. If not, they are older or hold every block."""


class _View:
    """Where the items of one segment are and what they see of each other: the same in every layer."""

    def __init__(self, cache: LandmarkCache, packing: Packing) -> None:
        self.packing = packing
        self.size = cache.config.block_size
        device, rotary = packing.ids.device, cache.config.rotary
        items, slots = cache.items, local_slot(cache.blocks, cache.slots)
        self.uniform = packing.uniform and alike(items)
        if self.uniform and alike(slots):
            items, slots = items[:1], slots[:1]
        # The filling of a row may lie beyond its segment, where there is no room.
        room = cache.config.segment_blocks * self.size
        first = numbers(items.tolist(), device)
        start = numbers((slots * self.size).tolist(), device)
        self.places = (first[:, None] + torch.arange(packing.items, device=device)).clamp(max=room - 1)  # [B or 1, M]
        self.real = torch.arange(packing.items) < torch.tensor(packing.lengths)[:, None]
        """``[B, M]``, in host memory: False for the filling of a row."""
        positions = (start[:, None] + self.places).unsqueeze(1)
        self.turns = rotary.turns(positions)
        self.remembers = bool((cache.blocks > 0).any())
        self.older: Turns | None = None
        """Rotations of queries for landmarks in slot 0, which have no positions."""
        if self.remembers:
            self.older = rotary.turns(positions - (self.size - 1))
        last = min(int(items.max()) + packing.items, room) - 1
        blocks = last // self.size + 1 if packing.items else 1
        self.seen = blocks * self.size
        """Number of local places that any item may see."""
        self.bias, self.own = local_bias(self.places, blocks, self.size)


# The published code takes every complete block into memory at the next call; `segment_blocks=1` does the same. It puts
# retrieved blocks on top of the queries if the cache holds exactly k blocks, and fails with fewer. Here positions are
# true until there are more than k blocks.
class LandmarkCache(CountedCache):
    """The ``past_key_values`` of a model with landmarks.

    The model makes one if none is given. ``Reader.cache`` makes one that continues a document of a memory. No gradient
    flows through it. For each segment the model calls ``begin``, ``attend`` once for each layer, and ``end``.
    """

    config: LandmarkConfig

    def __init__(
        self,
        config: LandmarkConfig,
        rows: int,
        *,
        retrieval: Retrieval | None = None,
        table: LandmarkTable | None = None,
        blocks: int = 0,
        capacity: int | None = None,
    ) -> None:
        """Start after ``blocks`` blocks of the table, a multiple of ``config.segment_blocks``.

        ``retrieval``: how blocks are chosen. By default each head and token chooses ``config.retrieval_top_k`` of them,
        the paper's most permissive scheme. ``capacity``: how many of the latest blocks in memory each row sees; None:
        all. Raises ``InvalidArgument`` for options that a landmark model does not support.
        """
        super().__init__(config, rows, blocks * config.tokens_per_block)
        self._retrieval = default_retrieval(config) if retrieval is None else retrieval
        check_lists(config, self.retrieval)
        check_capacity(self.retrieval, capacity)
        self.table = tensor_table(config.num_hidden_layers, rows) if table is None else table
        self.capacity = capacity
        if capacity is not None:
            self.table.limit(capacity - self.slots)  # the latest blocks have slots of their own and are not searched
        self.blocks = torch.full((rows,), blocks)
        """``[B]``: blocks of each row that are in memory."""
        self.items = torch.zeros(rows, dtype=torch.int64)
        """``[B]``: stream items of each row after these blocks."""
        self.unstored = FOREVER
        """Blocks from this number on are not stored yet. A reader needs them even if they are out of reach."""
        self.asked = SearchCounts.of(config)
        self._frames: list[_Frame | None] = [None] * config.num_hidden_layers
        self._kept: list[_KeptList | None] = [None] * config.num_hidden_layers
        self._recent: dict[int, Tensor] = {}
        self._segment = torch.zeros(rows, dtype=torch.int64)
        self._run = torch.zeros(rows, dtype=torch.int64)
        self._view: _View | None = None
        self._search_seconds = 0.0
        # For observers, if there are any:
        self._last: LastTokens | None = None
        self._last_lists: dict[int, LastLists] = {}
        self._spent: dict[int, tuple[float, float]] = {}

    @property
    def retrieval(self) -> Retrieval:
        """Return how blocks are chosen. This never changes, because local tokens come after ``top_k`` slots."""
        return self._retrieval

    @property
    def step(self) -> int:
        """Return how many tokens one forward pass takes at most; passes end at multiples of it."""
        every = self.retrieval.every
        return every if isinstance(every, int) and every > 1 else self.config.segment_tokens

    @property
    def slots(self) -> int:
        """Return how many of the latest blocks have slots of their own, in which they keep their distance."""
        top_k = self.retrieval.top_k
        return FOREVER if top_k == "all" or self.retrieval.positions == "true" else top_k

    def begin(self, packing: Packing, ending: Sequence[int] = ()) -> None:
        """Begin a segment: ``packing`` has its stream items, ``ending`` the rows that end with it.

        Raises ``InvalidArgument`` if it continues beyond the end of a segment of ``segment_blocks`` blocks.
        """
        if int((self.items + torch.tensor(packing.lengths)).max()) > self._room:
            raise InvalidArgument(
                f"this call goes beyond the end of a segment, after {self.config.segment_tokens} tokens of a row; "
                "cut the tokens there, as the model does"
            )
        self._new_run(packing)
        self._view = _View(self, packing)
        if self.observers:
            self._last = LastTokens(packing, ending)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:
        """Return attention ``[B, H, M, D]`` for ``q [B, H, M, D]``, ``k, v [B, G, M, D]`` without positions.

        Each layer must be called once, in order. ``context_miss [1, G, 1, D]``: the key of the context-miss token.
        """
        assert self._view is not None, "begin() comes first"
        view, scale = self._view, q.shape[-1] ** -0.5
        frame = self._written(layer, k.detach(), v.detach())
        turned = self.config.rotary.rotate(q, view.turns)
        keys, values = (
            x[:, :, : view.seen].unflatten(2, (-1, view.size)).unsqueeze(2) for x in (frame.turned, frame.values)
        )
        out, lse = attend(turned.unsqueeze(2), keys, values[..., :-1, :], scale=scale, bias=view.bias, own=view.own)
        local = out.squeeze(2), lse.squeeze(2)
        weight = called = None
        if context_miss is not None:
            before = self.config.rotary.turns(torch.full((), -1, device=q.device))
            gate = self.config.rotary.rotate(context_miss, before).repeat_interleave(q.shape[1] // k.shape[1], 1)
            weight, called = gated(local, (turned * gate).sum(-1) * scale, self.retrieval.threshold or 0.0)
        found = self._retrieved(layer, q, turned, called) if view.remembers else None
        if found is not None and self._last is not None and self._watched(layer):
            choice = LandmarkChoice(
                layer=layer,
                searched=found.searched,
                table=self.table.layers[layer],
                ask=lambda: self._questions(layer, q, turned),
                blocks=found.blocks,
                queries=turned,
                local=local[1],
                found=found.lse,
                opened=None if weight is None or called is None else weight * called,
                last=self._last,
                lists=self._last_lists.get(layer),
                origin=self.origin,
                spent=self._spent.pop(layer, (0.0, 0.0)),
            )
            self.tell(choice)
        if weight is not None and called is not None:
            memory = torch.zeros_like(local[0]) if found is None else found.out
            return joined_by_gate(local[0], memory, weight, called).to(q.dtype)
        return (local[0] if found is None else joined(local, found[:2])).to(q.dtype)

    def _watched(self, layer: int) -> bool:
        """Return whether a layer has observers. Local layers retrieve nothing."""
        return bool(self.observers) and layer not in self.config.local_layers

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the states of ``layer`` without attending, for callers that do not need its output.

        ``k, v [B, G, M, D]`` have no positions.
        """
        self._written(layer, k.detach(), v.detach())

    def end(self) -> None:
        """End the segment. Its items count, and if a row has filled its segment, its blocks go into memory."""
        assert self._view is not None, "begin() comes first"
        packing = self._view.packing
        self.items += torch.tensor(packing.lengths)
        self.count(packing)
        full = (self.items == self._room).nonzero().flatten()
        if len(full):
            for own, frame in zip(self.table.own, self._frames, strict=True):
                assert frame is not None
                own.extend(full, *(self._in_blocks(x) for x in self._rows_of(frame, full)))
            self.blocks[full] += self.config.segment_blocks
            self.items[full] = 0
            self._segment[full] += 1
            self._run[full] += 1
            self._recent.clear()
            self._forget()
        self._view = None

    def _rows_of(self, frame: _Frame, rows: Tensor) -> list[Tensor]:
        if len(rows) == self.rows:
            return [frame.keys, frame.values]
        (there,) = to_device([rows], frame.keys.device)
        return [frame.keys[there], frame.values[there]]

    def _forget(self) -> None:
        """Drop blocks that no row will see again, once there are as many of them as are kept."""
        if self.capacity is None:
            return
        first = min(int(self.blocks.min()) - self.capacity, self.unstored)
        for own in self.table.own:
            if first - own.first >= self.capacity:
                own.keep_from(first)

    def states(self, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[n, G, S, D]`` of the blocks from ``first`` on. The last one may end in zeros.

        The cache has a single row. Blocks that the table no longer holds are missing (``stored``).
        """
        frame, size, held = self._frames[layer], self.config.block_size, int(self.items[0])
        assert frame is not None
        keys, values = (self._in_blocks(x)[0, : -(-held // size)].clone() for x in (frame.keys, frame.values))
        if held % size:
            keys[-1, :, held % size :] = 0
            values[-1, :, held % size :] = 0
        memory = int(self.blocks[0])
        if first >= memory:
            return keys[first - memory :], values[first - memory :]
        before = self.table.own[layer].of_row(0, first)
        return torch.cat([before[0], keys]), torch.cat([before[1], values])

    def stored(self, stop: int) -> None:
        """Drop blocks below ``stop``, which are in the table's document now. Only the latest stay in tensors too."""
        self.unstored = stop
        near = self.slots if self.slots < FOREVER else 1
        for own in self.table.own:
            own.keep_from(min(stop, int(self.blocks[0])) - near)

    def put_local(self, layer: int, keys: Tensor, values: Tensor, items: int) -> None:
        """Begin in the middle of a segment: ``keys, values [n, G, S, D]`` are its blocks, which hold ``items``.

        Call ``resume`` afterwards.
        """
        keys, values = (x.transpose(0, 1).flatten(1, 2)[None, :, :items] for x in (keys, values))  # [1, G, items, D]
        frame = self._frame(layer, keys)
        start = local_slot(self.blocks[:1], self.slots) * self.config.block_size
        turns = self.config.rotary.turns(from_each(start, items, keys.device))
        fresh = (keys, self.config.rotary.rotate(keys, turns), values)
        for held, new in zip(frame, fresh, strict=True):
            held[:, :, :items] = new

    def resume(self, tokens: int) -> None:
        """Continue a segment that has ``tokens`` already in every row: see ``put_local``."""
        self.items[:] = tokens + tokens // self.config.tokens_per_block
        self.counts = [count + tokens for count in self.counts]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        rows = beam_idx.cpu()
        if torch.equal(rows, torch.arange(self.rows)):
            return
        super().reorder_cache(rows)
        self.blocks, self.items = self.blocks[rows], self.items[rows]
        self._segment, self._run = self._segment[rows], self._run[rows]
        self.table.reorder(rows, beam_idx)
        self._recent.clear()
        self._frames = [None if frame is None else _Frame(*(x[beam_idx] for x in frame)) for frame in self._frames]
        self._kept = [None if kept is None else kept.reordered(rows, beam_idx) for kept in self._kept]

    @property
    def _room(self) -> int:
        return self.config.segment_blocks * self.config.block_size

    @property
    def _lists(self) -> int:
        """Return ``X``, the number of lists of a layer."""
        lists = {"none": self.config.num_attention_heads, "group": int(self.config.num_key_value_heads)}
        return lists.get(self.retrieval.share, 1)

    def _new_run(self, packing: Packing) -> None:
        """Count the runs of tokens that use one list."""
        every = self.retrieval.every
        if every == "segment":  # it begins with the segment, and a prompt within it chooses again
            self._run += torch.tensor(packing.counts) > 1
        else:
            self._run += torch.tensor(self.counts) % every == 0

    def _frame(self, layer: int, like: Tensor) -> _Frame:
        frame = self._frames[layer]
        if frame is None:
            shape = (self.rows, like.shape[1], self._room, like.shape[3])
            frame = self._frames[layer] = _Frame(*(like.new_zeros(shape) for _ in range(3)))
        return frame

    def _written(self, layer: int, k: Tensor, v: Tensor) -> _Frame:
        """Return the layer's frame, with the segment's keys and values in it."""
        frame, view = self._frame(layer, k), self._view
        assert view is not None
        fresh = (k, self.config.rotary.rotate(k, view.turns), v)
        if view.uniform:
            start = int(self.items[0])
            for held, new in zip(frame, fresh, strict=True):
                held[:, :, start : start + new.shape[2]] = new
            return frame
        rows, items = to_device(view.real.nonzero(as_tuple=True), k.device)
        places = view.places.expand(self.rows, -1)[rows, items]
        for held, new in zip(frame, fresh, strict=True):
            held[rows, :, places] = new[rows, :, items]
        return frame

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Return ``[n, G, F * S, D]`` as ``[n, F, G, S, D]``."""
        blocks: Tensor = x.unflatten(2, (-1, self.config.block_size))
        return blocks.transpose(1, 2)

    def _retrieved(self, layer: int, q: Tensor, turned: Tensor, called: Tensor | None) -> _MemoryAttention | None:
        """Return attention to blocks in memory; None if no query asks for it."""
        view = self._view
        assert view is not None
        asks = (view.real & (self.blocks > 0)[:, None]).unsqueeze(1).expand(-1, q.shape[1], -1)  # [B, H, M]
        self.asked.queries += (asking := int(asks.sum()))
        if called is not None:
            asks = asks & called.cpu()  # waits for a GPU: only the GPU knows the result
            self.asked.dropped += asking - int(asks.sum())
        if not bool(asks.any()):
            return None
        scale = q.shape[-1] ** -0.5
        latest = layer in self.config.local_layers or int(self.blocks.max()) <= self._top_k
        if not latest and self.retrieval.every == 1 and not self.retrieval.share_tokens:
            wanted = asks.unflatten(1, (self._lists, -1)).any(2)
            blocks = self._chosen(layer, self._questions(layer, q, turned), wanted)
            return _MemoryAttention(*attend_each(turned, self._fetched(layer, blocks), scale), blocks, searched=True)
        before = self._kept[layer]
        kept = self._latest(layer) if latest else self._one_list(layer, q, turned, asks)
        shown = kept.shown
        out, lse = attend(turned.unsqueeze(2), shown.keys, shown.values, scale=scale, bias=shown.bias)
        return _MemoryAttention(out.squeeze(2), lse.squeeze(2), kept.blocks, searched=not latest and kept is not before)

    @property
    def _top_k(self) -> int:
        top_k = self.retrieval.top_k
        return FOREVER if top_k == "all" else top_k

    def _latest(self, layer: int) -> _KeptList:
        """Return the list of the latest blocks. It needs no search, and serves the whole segment."""
        kept = self._kept[layer]
        if kept is None or not torch.equal(kept.run, self._segment):
            count = min(self._top_k, int(self.blocks.max()))
            first = (self.blocks - count)[:, None] + torch.arange(count)
            made = torch.ones(self.rows, 1, 1, dtype=torch.bool)
            kept = self._keep(layer, first.clamp(min=-1)[:, None, None], self._segment, made)
        return kept

    def _one_list(self, layer: int, q: Tensor, turned: Tensor, asks: Tensor) -> _KeptList:
        """Return one list for all tokens of the segment, chosen now or before."""
        wanted = asks.unflatten(1, (self._lists, -1)).any(2).any(-1, keepdim=True)  # [B, X, 1]
        kept, made = self._kept[layer], torch.zeros_like(wanted)
        if kept is not None and kept.made.shape == made.shape:
            made = kept.made & (kept.run == self._run)[:, None, None]
        needed = wanted & ~made
        if kept is not None and not bool(needed.any()):
            return kept
        questions = self._questions(layer, q, turned)
        if not self.retrieval.share_tokens:
            questions = questions.tokens(slice(0, 1))
        blocks = self._chosen(layer, questions, needed)
        if kept is not None and bool(made.any()):
            blocks = _mixed(needed, blocks, kept.blocks)
        return self._keep(layer, blocks, self._run, made | needed)

    def _keep(self, layer: int, blocks: Tensor, run: Tensor, made: Tensor) -> _KeptList:
        shown = show(self._fetched(layer, blocks), slice(None))
        kept = self._kept[layer] = _KeptList(blocks, shown, run.clone(), made)
        return kept

    def _fetched(self, layer: int, blocks: Tensor) -> Lists:
        """Return lists ``blocks [B, X, R, K]``, which are in host memory, with the states of all of them."""
        last = self._last if self._watched(layer) else None
        if last is not None:  # before the fetch, which moves blocks to a faster tier
            held = range(self.table.own[layer].first, self.origin.stored)
            tiers = self.origin.tiers(layer, as_array(last.of(blocks)), held)
        searching, self._search_seconds = self._search_seconds, 0.0
        begun = time.perf_counter()
        table, size = self.table.layers[layer], self.config.block_size
        lists = fetch(table, blocks, self._final_slots(blocks), self.config.rotary, size)
        self.asked.segments[layer] += lists.rows
        self.asked.fetched[layer] += lists.fetched
        if last is not None:
            self._spent[layer] = (searching * 1e6, (time.perf_counter() - begun) * 1e6)
            self._last_lists[layer] = last.lists(lists, tiers)
        return lists

    def _chosen(self, layer: int, questions: Questions, wanted: Tensor) -> Tensor:
        retrieval, begun = self.retrieval, time.perf_counter()
        assert isinstance(retrieval.top_k, int)
        self.asked.searches[layer] += int(wanted.sum())
        blocks = choose(
            self.table.layers[layer],
            questions,
            retrieval.top_k,
            lists=self._lists,
            share_tokens=wanted.shape[2] < questions.older.shape[2],
            pool=retrieval.pool,
            wanted=wanted,
        )
        self._search_seconds = time.perf_counter() - begun
        return blocks

    def _questions(self, layer: int, q: Tensor, turned: Tensor) -> Questions:
        """Return the queries for a search, with blocks at the places they have during the search."""
        view, scale = self._view, q.shape[-1] ** -0.5
        assert view is not None
        assert view.older is not None
        count = min(self.slots, int(self.blocks.max()))
        first = self.blocks - count
        recent = turned.unflatten(1, (self.config.num_key_value_heads, -1)).flatten(2, 3)
        scores = recent @ self._recent_landmarks(layer, first, count).to(q.dtype).transpose(-1, -2)
        scores = scores.unflatten(2, (-1, q.shape[2])).flatten(1, 2) * scale  # [B, H, M, count]
        if int(first.min()) < 0:
            missing = from_each(first, count, q.device) < 0
            scores = scores.masked_fill(missing[:, None, None], -math.inf)
        return Questions(self.config.rotary.rotate(q, view.older) * scale, scores, first, view.real)

    def _recent_landmarks(self, layer: int, first: Tensor, count: int) -> Tensor:
        """Return landmarks ``[B, G, count, D]`` of the latest blocks, in their slots. They serve a whole segment."""
        if layer not in self._recent:
            rotary, size = self.config.rotary, self.config.block_size
            blocks = first[:, None] + torch.arange(count)
            slots = searching_slots(blocks, self.blocks[:, None], self.slots)
            keys = self.table.layers[layer].landmarks(first, count)
            (places,) = to_device([(slots * size + size - 1).unsqueeze(1)], keys.device)
            turns = rotary.turns(places, keys.dtype)
            self._recent[layer] = rotary.rotate(keys, turns)
        return self._recent[layer]

    def _final_slots(self, blocks: Tensor) -> Tensor:
        count = self.blocks[:, None, None, None]
        match self.retrieval.positions:
            case "stingy":
                return final_slots(blocks, count, self.slots)
            case "clamped":
                return searching_slots(blocks, count, self.slots)
            case _:
                return blocks.clamp(min=0)


def _mixed(new: Tensor, blocks: Tensor, before: Tensor) -> Tensor:
    """Return lists ``blocks [B, X, 1, K]`` where ``new [B, X, 1]`` is set, and ``before`` elsewhere."""
    width = max(blocks.shape[-1], before.shape[-1])
    blocks, before = (F.pad(x, (width - x.shape[-1], 0), value=-1) for x in (blocks, before))
    return torch.where(new.unsqueeze(-1), blocks, before)
