"""A sequence of forward passes (a prompt and its continuation, or a text being read), and the layers of its cache.

An ``IndexedCall`` continues after a document. Each of its rows has tokens of its own (*local* ones, without padding).
Token ``t`` of a row is token ``t`` of the document, or ``t - tokens`` of its own. In each layer, the call takes the
states of a segment's tokens, and lets them choose among the units of the document and of the row. It gathers the rows
that a few queries chose, verified if they come from the store, and attends to them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.device_copies import to_device
from memstore.errors import InvalidArgument
from memstore.kernels.block_attention import block_attention, merge_attention
from memstore.kernels.latent_attention import attend_rows
from memstore.models.cache import ranked_look
from memstore.models.indexed.family import IndexedLayer, spread
from memstore.models.indexed.keys import DocumentKeys, Rows
from memstore.models.indexed.ops import Chosen, choose, softmax
from memstore.readers.observer import Choice, Draft, Looks, Observer, Origin, as_array
from memstore.readers.stock.call import CallLayer


@dataclass(eq=False)
class IndexChoice(Choice):
    """The choice of one layer. It includes the tokens that are always seen, with a score of NaN."""

    layer: int
    rows: Sequence[int]
    described: IndexedLayer
    call: IndexedCall
    query: Tensor
    """``[H, D]``"""
    ids: Tensor
    """``[lists, K]``: tokens, counted from the document's first; -1 for unused."""
    scores: Tensor | None
    """``[lists, K]``; None if the choice is another layer's."""
    weights: Tensor
    """``[H, K]``: each token's part of the layer's attention."""
    spent: tuple[float, float]
    """Microseconds of choosing, and of gathering."""
    near: tuple[Tensor, Tensor] | None = None
    """The tokens ``[W]`` of a window beside the chosen ones, and their weights ``[H, W]``."""

    @property
    def searched(self) -> bool:  # type: ignore[override]  # it is never set
        return self.scores is not None

    def draft(self) -> Draft:
        """Return the tokens, best score first; see ``Choice``."""
        call, row, size = self.call, self.rows[0], self.call.document.memory.spec.block_size
        ids, weights = as_array(self.ids), as_array(self.weights)
        scores = np.full(ids.shape, np.nan, np.float32) if self.scores is None else as_array(self.scores)
        scores = np.where(ids < 0, -np.inf, scores)
        source = self.layer if self.described.source is None else self.described.source
        tiers = call.origin.tiers(call.slots.at[source], ids // size)
        look = ranked_look(self.layer, row, call.origin, ids, scores, weights, tiers, self.spent)
        near, seen = (np.empty(0, np.int64), weights[:, :0]) if self.near is None else map(as_array, self.near)
        ids, shares = look.blocks, np.concatenate([look.weights, seen], 1)
        own = np.concatenate([ids[look.by_head()], near[None].repeat(len(seen), 0)], 1) - call.tokens
        asked = call.asked[row] if call.counts[row] else np.inf
        window = (own < 0) & (np.arange(own.shape[1]) >= ids.shape[1])
        spans = [np.zeros_like(window), window, (own >= 0) & (own < asked), own >= asked]  # it has no sink
        look = replace(
            look,
            document=np.where((ids >= 0) & (ids < call.tokens), 0, -1).astype(np.int16),
            blocks=ids // size,
            offsets=np.where(ids < 0, -1, ids % size),
            elsewhere=np.stack([(shares * span).sum(1) for span in spans], 1),
        )
        return Looks([look])


TABLE = 1 << 23
"""Numbers in the rows that are read together for a few queries: at most 32 MB of float32."""
DENSE = 4096
"""Rows that are attended to at once if a layer sees everything."""


class Slots(NamedTuple):
    """The places of layers in a memory: the layers that store something, in order, and those with landmarks."""

    layers: Sequence[IndexedLayer]
    """The layer of each slot."""
    at: Mapping[int, int]
    """The slot by the number of the layer, also for layers that attend to another one's rows."""
    indexed: Mapping[int, IndexedLayer]
    """Layers with an index, by slot."""


def slots_of(layers: Sequence[IndexedLayer]) -> Slots:
    """Assign a slot to each layer that stores rows or index keys."""
    own = [layer for layer in layers if layer.source is None or layer.key_width]
    at = {layer.index: slot for slot, layer in enumerate(own)}
    return Slots(own, at, {slot: layer for slot, layer in enumerate(own) if layer.key_width})


class Local:
    """The states of one row's own tokens: rows of each slot, index keys, and entries."""

    def __init__(self, slots: Slots, keys: DocumentKeys, pending: Mapping[int, Tensor]) -> None:
        """``pending``: states of the document's last tokens for entries that are not complete yet."""
        like = keys.like
        self.rows = {slot: Rows(each.own_width, like) for slot, each in enumerate(slots.layers) if each.source is None}
        self.keys = {slot: keys.of[slot].behind() for slot in slots.indexed}
        self.raw = {slot: Rows(each.key_width, like) for slot, each in slots.indexed.items()}
        """The input of index keys, in the form in which it is stored."""
        self.entries = {slot: Rows(each.entry_width, like) for slot, each in slots.indexed.items() if each.raw_width}
        self.pending = {
            slot: pending.get(slot, like.new_empty(0, slots.indexed[slot].raw_width)) for slot in self.entries
        }
        """``[m, raw_width]``, starting ``lookback`` units before the incomplete one."""

    def compress(self, slot: int, layer: IndexedLayer, raw: Tensor) -> None:
        """Make the entries of all units that the next tokens complete; these have the states ``raw [n, raw_width]``."""
        keys = self.keys[slot]
        first = keys.first + keys.units
        before, raw = min(first, layer.lookback), torch.cat([self.pending[slot], raw])
        if (whole := len(raw) // layer.unit - before) > 0:
            made, entries = layer.compress(raw[: (before + whole) * layer.unit], first, before)
            keys.keys.append(made)
            self.raw[slot].append(spread(made, layer.unit))
            self.entries[slot].append(entries)
            raw = raw[(before + whole - min(first + whole, layer.lookback)) * layer.unit :]
        self.pending[slot] = raw.clone()

    def copy(self) -> Local:
        """Return a copy that continues independently."""
        other: Local = object.__new__(Local)
        other.rows = {slot: rows.copy() for slot, rows in self.rows.items()}
        other.keys = {slot: keys.copy() for slot, keys in self.keys.items()}
        other.raw = {slot: rows.copy() for slot, rows in self.raw.items()}
        other.entries = {slot: rows.copy() for slot, rows in self.entries.items()}
        other.pending = dict(self.pending)
        return other


class IndexedCall:
    """A sequence of forward passes after a document, as this module describes."""

    def __init__(self, slots: Slots, keys: DocumentKeys, rows: int) -> None:
        """Continue after the document of ``keys``, as they know it."""
        self.slots, self.keys, self.document, self.like = slots, keys, keys.document, keys.like
        self.observers: Sequence[Observer] = ()
        self.tokens = keys.tokens
        """Tokens of the document."""
        self.length = 0
        """Tokens so far, including their padding."""
        self.pending: dict[int, Tensor] = {}
        """States of the document's last tokens for entries that are not complete yet, by slot; see ``Local``."""
        self.locals = [Local(slots, keys, self.pending) for _ in range(rows)]
        self.counts = [0] * rows
        """Tokens of each row before the current pass, without padding."""
        self.asked = [0] * rows
        """Tokens of each row's first pass: the question."""
        self.origin = Origin(self.document, self.like.device, stored=self.document.n_blocks)
        self.ended = False
        self.only: int | None = None
        """The only row of a pass; None: all rows, with their padding."""
        self._real: list[Tensor | None] = [None] * rows
        self._new = 0
        self._choices: dict[int, list[Tensor]] = {}

    def begin(self, count: int, mask: Tensor | None) -> Tensor:
        """Begin a pass and return positions ``[B, count]``; ``mask [B, count]`` is False on padding."""
        if self.ended:
            raise InvalidArgument(
                "this cache belongs to a memory that is no longer attached, or to a pass that failed; use a new cache"
            )
        self._new, self._choices = count, {}
        self._real = [None] * len(self.locals)
        first = torch.tensor(self.counts, device=self.like.device)[:, None] + self.tokens
        if mask is None:
            return first + torch.arange(count, device=self.like.device)
        for row, real in enumerate(mask):
            self._real[row] = None if bool(real.all()) else real.nonzero().flatten()
        return first + (mask.long().cumsum(1) - 1).clamp(min=0)

    def end(self) -> None:
        """Count the tokens of a pass that succeeded."""
        new = [self._new if real is None else len(real) for real in self._real]
        self.asked = [asked if count else n for asked, count, n in zip(self.asked, self.counts, new, strict=True)]
        self.counts = [count + n for count, n in zip(self.counts, new, strict=True)]
        self.length += self._new
        self._choices = {}

    def reorder(self, rows: list[int]) -> None:
        """Keep the rows with which beam search continues."""
        if self.observers and rows != list(range(len(self.locals))):
            raise InvalidArgument(
                "a traced call keeps the order of its rows: generate without beams, or without a trace"
            )
        used: set[int] = set()
        chosen = []
        for row in rows:
            chosen.append(self.locals[row].copy() if row in used else self.locals[row])
            used.add(row)
        self.locals, self.counts = chosen, [self.counts[row] for row in rows]

    def reset(self) -> None:
        """Forget the local tokens."""
        self.locals = [Local(self.slots, self.keys, self.pending) for _ in self.locals]
        self.counts, self.length = [0] * len(self.locals), 0

    def settle(self, tokens: int) -> None:
        """Note that the local tokens, of one row, are stored: the document now has ``tokens``."""
        self.tokens, self.pending = tokens, self.locals[0].pending
        self.reset()

    def attend(self, layer: IndexedLayer, hidden: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Return the output of ``layer`` for ``hidden [B, S, hidden]``."""
        asked = layer.states(hidden, given)
        out = asked.query.new_zeros(*asked.query.shape[:3], layer.value.stop - layer.value.start)
        for place, row in enumerate(range(len(self.locals)) if self.only is None else [self.only]):
            local, real = self.locals[row], self._real[row]
            pick = slice(None) if real is None or self.only is not None else real
            mine = asked.of(place, pick)
            slot = self.slots.at.get(layer.index, -1)
            if mine.rows is not None:
                local.rows[slot].append(mine.rows)
            if mine.key is not None:
                local.keys[slot].extend(mine.key)
                local.raw[slot].append(mine.key)
            if mine.raw is not None:
                local.compress(slot, layer, mine.raw)
            if len(mine.query):
                out[place, pick] = self._attend(layer, row, mine.query, mine.ask, mine.weights)
        return asked.finish(out)

    def _attend(
        self, layer: IndexedLayer, row: int, query: Tensor, ask: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """Return the attention of a row's queries ``[S, H, D]``: ``[S, H, V]``."""
        places = torch.arange(len(query), device=query.device) + self.tokens + self.counts[row]
        source = self.slots.at[layer.index if layer.source is None else layer.source]
        if layer.sees == "all":
            return self._dense(layer, source, row, query, places)
        if layer.sees == "entries":
            return self._with_entries(layer, row, query, ask, weights, places)
        begun = time.perf_counter()
        scores: Tensor | None = None
        if layer.sees == "chosen":
            if ask is None:
                ids = self._choices[layer.takes if layer.takes is not None else -1][row]
            else:
                best = self._best(layer, row, ask, weights, places)
                chosen = _tokens(layer, best, places.repeat_interleave(layer.lists))
                ids, scores = (each.unflatten(0, (-1, layer.lists)) for each in chosen)  # [S, lists, K]
                self._choices.setdefault(layer.index, [torch.empty(0)] * len(self.locals))[row] = ids
        else:
            offsets = torch.arange(1 - layer.sees, 1, device=query.device)
            ids = (places[:, None] + offsets).clamp(min=-1)[:, None]
        chosen_at = time.perf_counter()
        pieces = _pieces(ids, layer.row_width, int(places[-1]) + 1)
        out = [self._mix(layer, source, row, query[some], ids[some]) for some in pieces]
        if self.observers and layer.sees == "chosen":
            again = time.perf_counter()
            table, at = self._table(layer, source, row, ids[-1:])
            spent = 1e6 * (chosen_at - begun), 1e6 * (time.perf_counter() - again)
            parts, last = self.weights(layer, query[-1], table, at[0]), None if scores is None else scores[-1]
            self._tell(IndexChoice(layer.index, [row], layer, self, query[-1], ids[-1], last, parts, spent))
        return torch.cat(out)

    def _best(self, layer: IndexedLayer, row: int, ask: Tensor, weights: Tensor | None, places: Tensor) -> Chosen:
        """Return the units that index queries ``ask [S, heads, D]`` choose, for each of ``lists`` in turn."""
        slot, unit = self.slots.at[layer.index], layer.unit
        stored, own = self.keys.of[slot], self.locals[row].keys[slot]
        if layer.lists > 1:  # each head chooses for itself
            ask, weights = ask.flatten(0, 1)[:, None], None
            places = places.repeat_interleave(layer.lists)
        run = 1 if layer.pooled else unit
        limit = places + 1 if run > 1 else (places + 1) // unit
        behind = own.keys.view if layer.pooled else torch.cat([own.keys.view, own.tail])
        keys, scale, codes = [stored.keys.view, behind], layer.index_scale, stored.keys.codes
        chosen = choose(ask, weights, keys, scale, limit, layer.top, layer.mode, run, codes)
        if layer.by_query:
            tied = ((limit > layer.top) & (chosen.scores == 0).any(1)).nonzero().flatten().tolist()
            all_keys = torch.cat(keys).float() if tied else keys[0]
            for at in tied:
                scores = (ask[at].float() @ all_keys[: limit[at]].T).T.relu().sum(-1) * scale
                chosen.ids[at] = scores.topk(layer.top).indices.sort().values
                chosen.scores[at] = scores[chosen.ids[at]]
        return chosen

    def _rows(self, layer: IndexedLayer, source: int, row: int, tokens: Tensor) -> Tensor:
        """Return stored and local rows ``[n, row_width]`` of ``tokens [n]``, ascending."""
        there = int((tokens < self.tokens).sum())
        parts = []
        if there:
            (stored,) = to_device([self.document.layer(source).rows(tokens[:there].cpu())], self.like.device)
            parts.append(stored[:, : layer.own_width])
        if there < len(tokens):
            parts.append(self.locals[row].rows[source].view[tokens[there:] - self.tokens])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _with_entries(
        self, layer: IndexedLayer, row: int, query: Tensor, ask: Tensor | None, weights: Tensor | None, places: Tensor
    ) -> Tensor:
        """Attend with queries ``[S, H, D]`` to their windows and to entries, in one softmax."""
        begun, slot = time.perf_counter(), self.slots.at[layer.index]
        window = (places[:, None] + torch.arange(1 - layer.window, 1, device=query.device)).clamp(min=-1)
        if ask is None:
            units = torch.arange(int(places[-1] + 1) // layer.unit, device=query.device).expand(len(query), -1)
            best = Chosen(torch.where(units < (places[:, None] + 1) // layer.unit, units, -1), torch.empty(0))
        else:
            best = self._best(layer, row, ask, weights, places)
        chosen_at, gathering = time.perf_counter(), 0.0
        out = []
        for some in _pieces(torch.cat([window, best.ids], 1)[:, None], layer.row_width, int(places[-1]) + 1):
            again = time.perf_counter()
            table, near = self._table(layer, slot, row, window[some])
            units, far = _distinct(best.ids[some])
            table = torch.cat([table, self._entries(layer, slot, row, units)])
            gathering = time.perf_counter() - again
            ids = torch.cat([near, torch.where(far < 0, -1, far + len(table) - len(units))], 1)
            rows = table[:, None]
            out.append(attend_rows(query[some], rows, rows, ids, scale=layer.scaling, sinks=layer.sinks)[0])
        if self.observers and ask is not None:
            near, parts = self.weights(layer, query[-1], table, ids[-1:]).tensor_split([window.shape[1]], 1)
            begins = torch.where(best.ids[-1:] < 0, -1, best.ids[-1:] * layer.unit)
            spent = 1e6 * (chosen_at - begun), 1e6 * gathering
            found = layer.index, [row], layer, self, query[-1], begins, best.scores[-1:], parts, spent
            self._tell(IndexChoice(*found, near=(window[-1], near)))
        return torch.cat(out)

    def _tell(self, choice: IndexChoice) -> None:
        for observer in self.observers:
            observer.choice(choice)

    def _entries(self, layer: IndexedLayer, slot: int, row: int, units: Tensor) -> Tensor:
        """Return entries ``[n, D]`` of ``units [n]``, ascending."""
        stored, local = self.keys.of[slot], self.locals[row]
        there = int((units < stored.units).sum())
        mine = units[there:] - stored.units
        if not layer.entry_width:
            return torch.cat([stored.keys.view[units[:there]], local.keys[slot].keys.view[mine]])
        tokens = units[:there, None] * layer.unit + torch.arange(layer.unit, device=units.device)
        (rows,) = to_device([self.document.layer(slot).rows(tokens.flatten().cpu())], self.like.device)
        parts = rows[:, layer.own_width : layer.row_width].unflatten(0, (there, layer.unit)).flatten(1)
        return torch.cat([parts[:, : layer.entry_width], local.entries[slot].view[mine]])

    def _mix(self, layer: IndexedLayer, source: int, row: int, query: Tensor, ids: Tensor) -> Tensor:
        """Attend with ``query [S, H, D]`` to the tokens ``ids [S, lists, K]``."""
        table, places = self._table(layer, source, row, ids)
        rows = table.unflatten(1, (layer.groups, -1))
        if 1 < layer.lists < layer.groups:
            places = places.repeat_interleave(layer.groups // layer.lists, 1)
        keys, values = rows[..., layer.key], rows[..., layer.value]
        return attend_rows(query, keys, values, places, scale=layer.scaling, sinks=layer.sinks)[0]

    def _table(self, layer: IndexedLayer, source: int, row: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of all tokens in ``ids [S, lists, K]``, and the place of each id among them; -1 stays."""
        tokens, places = _distinct(ids)
        return self._rows(layer, source, row, tokens), places

    def _dense(self, layer: IndexedLayer, source: int, row: int, query: Tensor, places: Tensor) -> Tensor:
        """Attend with ``query [S, H, D]`` to all tokens up to each query's place, ``DENSE`` rows at a time."""
        last, found = int(places[-1]) + 1, None
        asked = query.transpose(0, 1)[None].float()  # [1, H, S, D]
        for start in range(0, last, DENSE):
            tokens = torch.arange(start, min(start + DENSE, last), device=query.device)
            rows = self._rows(layer, source, row, tokens).float().unflatten(1, (layer.groups, -1)).transpose(0, 1)[None]
            given = asked, rows[..., layer.key], rows[..., layer.value]
            sinks = None if start else layer.sinks  # they count once
            part = block_attention(*given, mask=tokens <= places[:, None], scale=layer.scaling, sinks=sinks)
            found = part if found is None else merge_attention(*zip(found, part, strict=True))
        assert found is not None, "a token sees itself"
        return found[0][0].transpose(0, 1).to(query.dtype)

    def weights(self, layer: IndexedLayer, query: Tensor, table: Tensor, at: Tensor) -> Tensor:
        """Return the part of the attention of ``query [H, D]`` on each of the rows ``at [lists, K]``: ``[H, K]``."""
        at = at.repeat_interleave(layer.groups // len(at), 0)
        keys = table.unflatten(1, (layer.groups, -1))[..., layer.key].transpose(0, 1)
        keys = keys.gather(1, at.clamp(min=0)[..., None].expand(-1, -1, keys.shape[2]))
        scores = query.unflatten(0, (layer.groups, -1)).float() @ keys.mT.float() * layer.scaling
        scores = scores.masked_fill(at[:, None] < 0, -torch.inf)
        return softmax(scores.flatten(0, 1)[None], layer.sinks)[0]

    def logits(self, layer: IndexedLayer, row: int, query: Tensor) -> Tensor:
        """Return scaled products ``[H, N]`` of ``query [H, D]`` with all tokens of ``row``, chosen or not; float32.

        For a layer that sees entries: with all entries, then with the tokens of the window.
        """
        source = self.slots.at[layer.index if layer.source is None else layer.source]
        count, found = self.tokens + len(self.locals[row].rows[source]), []
        seen: list[tuple[Any, range]] = [(self._rows, range(count))]
        if layer.sees == "entries":
            units = range(self.keys.of[source].units + self.locals[row].keys[source].units)
            seen = [(self._entries, units), (self._rows, range(max(0, count - layer.window), count))]
        for rows, start, stop in (
            (rows, start, min(start + DENSE, all_of_them.stop))
            for rows, all_of_them in seen
            for start in all_of_them[::DENSE]
        ):
            table = rows(layer, source, row, torch.arange(start, stop, device=query.device)).float()
            keys = table.unflatten(1, (layer.groups, -1))[..., layer.key]
            products = torch.einsum("ghd,ngd->ghn", query.unflatten(0, (layer.groups, -1)).float(), keys)
            found.append(products.flatten(0, 1) * layer.scaling)
        return torch.cat(found, 1)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ``ids``, ascending and without -1, and the place of each id among them; -1 stays."""
    last = int(ids.max()) + 1 if ids.numel() else 0
    if last <= ids.numel() * 64:  # then marking all that there could be is faster than sorting all that there are
        seen = torch.zeros(last + 1, dtype=torch.bool, device=ids.device)
        seen[ids + 1] = True
        seen[0] = False
        return seen[1:].nonzero().flatten(), (seen.cumsum(0) - 1)[ids + 1]
    found, places = ids.unique(return_inverse=True)
    unused = int(found[0] < 0)
    return found[unused:], places - unused


def _pieces(ids: Tensor, width: int, tokens: int) -> list[slice]:
    """Split queries into parts whose rows are gathered together: all of them, if there are few ``tokens``."""
    count, chosen = len(ids), ids[0].numel()
    step = count if tokens * width <= TABLE else max(1, TABLE // max(1, chosen * width))
    return [slice(start, start + step) for start in range(0, count, step)]


def _tokens(layer: IndexedLayer, best: Chosen, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens ``[n, K]`` of the units in ``best`` and of the always seen ones, and the scores of their units."""
    ids, scores, unit = best.ids, best.scores, layer.unit
    if unit == 1:
        return ids, scores
    if layer.own is not None:
        own = places[:, None] // unit - torch.arange(layer.own, device=ids.device)
        among = (ids[:, :, None] == own[:, None]).any(2)
        # After the units that are always chosen, the best of the others follow while there is room.
        order = scores.masked_fill(among, torch.inf).sort(dim=1, descending=True, stable=True).indices
        room = (layer.top - (own >= 0).sum(1).clamp(max=layer.top))[:, None]
        others = (~among.gather(1, order)).cumsum(1) <= room
        keep = torch.zeros_like(among).scatter(1, order, others) & ~among
        ids = torch.cat([own.clamp(min=-1), torch.where(keep, ids, -1)], 1)
        scores = torch.cat([torch.full_like(own, torch.nan, dtype=scores.dtype), scores], 1)
    tokens = ids[..., None] * unit + torch.arange(unit, device=ids.device)
    tokens = torch.where((ids[..., None] < 0) | (tokens > places[:, None, None]), -1, tokens).flatten(1)
    scores = scores.repeat_interleave(unit, 1)
    if layer.own is None and layer.tail and unit > 1:
        first = (places + 1) // unit * unit
        behind = first[:, None] + torch.arange(unit - 1, device=ids.device)
        tokens = torch.cat([tokens, torch.where(behind > places[:, None], -1, behind)], 1)
        scores = F.pad(scores, (0, unit - 1), value=torch.nan)
    return tokens, scores


class LocalLayer(CallLayer):
    """A layer of a transformers cache whose tokens an ``IndexedCall`` keeps."""

    indexer_position_ids = None
    """Positions of index keys. Some models would collect them; here they are not needed."""

    call: IndexedCall

    def __init__(self, call: IndexedCall, *, first: bool) -> None:
        super().__init__(call)
        self._first = first

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "indexer_position_ids":
            super().__setattr__(name, value)

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Raise an error: layers give their states to the call instead."""
        raise InvalidArgument("this cache belongs to a memory that is no longer attached; use a new cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        if self._first:
            self.call.reorder([row for row in range(len(self.call.locals)) for _ in range(repeats)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows with which beam search continues."""
        if self._first:
            self.call.reorder(beam_idx.tolist())

    def reset(self) -> None:
        """Forget the local tokens."""
        if self._first:
            self.call.reset()
