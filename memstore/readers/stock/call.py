"""One sequence of forward passes over one cache: a prompt and its continuation, or a segment of a reading.

A ``Call`` has what all layers share: local tokens, their positions, and the parts of the memory that they see. For each
attention layer it has a ``LayerStates``, which is the layer of the cache for transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from memstore.device_copies import along, to_device
from memstore.errors import DamagedError, InvalidArgument
from memstore.kernels.block_attention import attend, masked_scores
from memstore.memory.spec import plain_layouts
from memstore.memory.trace_file import TIERS, Array, Look
from memstore.readers.asking import Query
from memstore.readers.observer import Choice, Draft, Observer
from memstore.readers.stock.architecture import LayerPlan
from memstore.readers.stock.selection import CandidateLists, FetchedList, LocalTokens, Selection
from memstore.readers.stock.sharded import OwnPart, ShardedSelection, attend_together
from memstore.readers.stock.visible import NOTHING, Candidates, States, VisibleParts, gather

if TYPE_CHECKING:
    from memstore.memory import Document


GATHERED_BYTES = 256 << 20
"""Bytes of states that are gathered at once, before layers copy them to their buffers."""
ROOM = 64
"""Free tokens of a new buffer, so that generating does not copy it at every step."""


class Call(LocalTokens):
    """Local tokens, the parts of the memory that they see, and the masks and positions that all layers share."""

    def __init__(
        self,
        selection: Selection,
        seen: VisibleParts = NOTHING,
        states: Callable[[int, range], States] | None = None,
        *,
        reading: bool = False,
        retrieve: bool = True,
        observers: Sequence[Observer] = (),
        recurrent: Sequence[Tensor] | None = None,
    ) -> None:
        """``states`` reads states of tokens of ``seen``; without it the call sees no memory.

        ``observers`` get each retrieval of every layer. Layers without attention continue from ``recurrent``, see
        ``LinearLayers``. Without it they have read nothing.
        """
        super().__init__(selection, seen, seen.candidates if retrieve else Candidates(()))
        self.states, self.reading, self.observers, self.recurrent = states, reading, observers, recurrent
        self.room = 0 if reading else ROOM
        self.sharded = selection if isinstance(selection, ShardedSelection) else None
        if self.sharded and observers:
            raise InvalidArgument("retrieval on several ranks cannot be recorded or asked; use generate")
        self.layers = [LayerStates(self, plan) for plan in selection.architecture.layers]
        self.attending = len(self.layers) - reading
        """Layers that attend in a forward pass. It may end before the other layers attend."""
        self.reset()

    def reset(self) -> None:
        """Start again without local tokens."""
        self.start_again()
        self.prompt = 0
        """Tokens of the prompt."""
        self.opening: Tensor | None = None
        """The first tokens ``[n]`` of the prompt, if their states existed before its pass; see ``Opening``."""
        self.chosen_at: int | None = None
        self.last_chosen: CandidateLists | None = None
        self.query: Query | None = None
        self.by_query: CandidateLists | None = None
        """The blocks that ``query`` chooses."""
        self.codes: dict[int, Tensor] = {}
        self._ahead: dict[tuple[int, int], States] = {}
        """States of a list that later layers will need."""
        everything = self.selection.everything(self.candidates)
        self.routed = everything is None
        if everything is not None and self.slots:
            self.set_chosen(everything, from_layer=0)

    def begin(self, tokens: int, padding: Tensor | None, device: torch.device, positions: Tensor | None = None) -> None:
        """Prepare a forward pass over ``tokens`` new tokens; see ``LocalTokens.stand``."""
        self.prompt = self.length + tokens if self.fresh else self.prompt
        self._ahead.clear()
        self.selection.search_seconds = 0.0
        self.stand(tokens, padding, device, positions)

    @property
    def fresh(self) -> bool:
        """Whether its first forward pass is still to come."""
        return self.length == (0 if self.opening is None else len(self.opening))

    @property
    def turned(self) -> bool:
        """Whether the model rotates queries and keys to their positions. False if they are needed without."""
        stays = self.length and self.tokens == 1 and self.selection.retrieval.every == "segment"
        return not (self.reading or self.observers or (self.selection.by_layer and not stays))

    def end(self) -> None:
        """Count the tokens as local tokens after a successful forward pass."""
        self.length += self.tokens

    def release(self) -> None:
        """Drop the layers, which refer to the call. No pass runs in it any more, so its memory is free at once."""
        self.layers = []

    def reorder(self, rows: Tensor) -> None:
        """Keep the rows with which beam search continues."""
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows)
        self.codes = {layer: codes.index_select(0, rows) for layer, codes in self.codes.items()}

    # Choosing blocks

    def set_chosen(self, chosen: CandidateLists, from_layer: int) -> None:
        """Let every layer from ``from_layer`` on that needs the memory attend to ``chosen``."""
        wanted = [states for states in self.layers[from_layer:] if not states.plan.local]
        for states in wanted:
            # This notes the tiers of the blocks before they are prefetched. After that nearly all would be in host
            # memory, even those that had to be waited for.
            states.set_chosen(chosen)
        if wanted and self.routed:
            wanted[0].searched = True
        if self.last_chosen is None or not self.last_chosen.same(chosen):
            layers = [states.plan.index for states in wanted if states.plan.index < self.attending]
            for document, blocks in self._located(self._fetchable(chosen).chosen)[1] if layers else ():
                document.prefetch(layers, blocks)
        self.last_chosen = chosen
        self.chosen_at = self.length + self.tokens

    def attend_only_to(self, chosen: CandidateLists) -> None:
        """Let every layer attend to ``chosen``, without any later choice."""
        self.slots, self.routed = chosen.numbers.shape[-1], False
        self.set_chosen(chosen, from_layer=0)

    def due(self) -> bool:
        """Whether this forward pass has to choose for all layers: it is a prompt, or ``every`` tokens have passed."""
        if not self.routed or self.selection.by_layer:
            return False
        if self.chosen_at is None or self.tokens > 1:
            return self.chosen_at is None or self.chosen_at < self.length + self.tokens
        every = self.selection.retrieval.every
        return every != "segment" and self.length + self.tokens - self.chosen_at >= every

    def see_hidden(self, layer: int, hidden: Tensor, *, again: bool = False) -> None:
        """Take the hidden states ``[B, T, hidden]`` that enter ``layer``, a layer with landmarks.

        ``again`` lets a later layer choose although an earlier one has chosen.
        """
        every = self.selection.retrieval.every
        if not self.reading and self.tokens == 1 and self.chosen_at is not None and every == "segment":
            return  # the list stays, so this token's code is not needed
        codes = self.selection.encode(layer, hidden) if self.reading else self.selection.ask(layer, hidden)
        before = None if self.reading else self.codes.get(layer)
        self.codes[layer] = codes if before is None else torch.cat((before, codes), dim=1)
        if not self.reading and (self.due() or (again and self.routed)):
            span = self.selection.retrieval.span
            rows = [self._asking(row, self.codes[layer][row])[-span:] for row in range(len(codes))]
            chosen = self.selection.route(self.candidates, layer, rows)
            self.set_chosen(chosen, from_layer=self.selection.first_layer)

    def see_queries(self, states: LayerStates, q: Tensor) -> None:
        """Take the position-free queries ``[B, H, T, D]`` of a layer that chooses for itself."""
        if not self.selection.by_layer or states.plan.local or not self.slots or not self.routed:
            return
        every = self.selection.retrieval.every
        at = self.length + self.tokens
        if self.tokens == 1 and states.chosen is not None and (every == "segment" or at - states.chosen_at < every):
            return
        rows = [self._asking(row, q[row].transpose(0, 1)).transpose(0, 1) for row in range(len(q))]
        states.set_chosen(self.selection.choose_in_layer(self.candidates, states.plan, rows, whole=self.reading))
        states.chosen_at, states.searched = at, True

    def real(self, row: int, x: Tensor) -> Tensor:
        """Drop padding from ``x [n, ...]``, which has the last ``n`` local tokens of batch row ``row``."""
        return x if self.padding is None else x[self.padding[row, -len(x) :].to(x.device)]

    def _asking(self, row: int, x: Tensor) -> Tensor:
        """Return what ``real`` returns. Raises ``InvalidArgument`` if nothing is left to choose by."""
        real = self.real(row, x)
        if not len(real):
            raise InvalidArgument(f"row {row} of the batch consists of padding only")
        return real

    def tell(
        self, states: LayerStates, queries: Tensor, turned: Tensor, keys: Tensor, mask: Tensor | None, **options: Any
    ) -> None:
        """Tell the observers what a layer attends to; see ``StockChoice``."""
        fetched, searched, states.searched = states.fetched, states.searched, False
        if fetched is None or not self.observers:
            return
        searching, self.selection.search_seconds = self.selection.search_seconds, 0.0
        gathering, fetched.gather_seconds = fetched.gather_seconds, 0.0
        spent, lengths = (1e6 * searching, 1e6 * gathering), (states.prefix, self.prompt)
        choice = StockChoice(states, fetched, searched, queries, turned, keys, mask, options, *spent, *lengths)
        for observer in self.observers:
            observer.choice(choice)

    # What a layer sees

    def prefix(
        self, plan: LayerPlan, chosen: CandidateLists | None, tiers: dict[int, str] | None
    ) -> tuple[list[States], Tensor, FetchedList | None]:
        """Return the parts of the memory that layer ``plan`` attends to, their positions, and the retrieved list.

        Keys, not yet rotated, and values of each part are ``[B or 1, heads, n, S, D]``: n runs of S tokens. Positions
        are ``[B or 1, heads or 1, P]``, for all parts together.
        """
        begun = time.perf_counter()
        direct = self.seen.direct_for(plan.sliding if plan.local else None)
        sink = range(0) if plan.local else self.seen.sink
        parts, own = [], None if chosen is None else self._fetchable(chosen)
        if sink:
            parts.append(self._run(plan, sink))
        if own is not None and own.chosen.numbers.numel():
            kept, states = self._readable(plan, own.chosen)
            parts += states
            if self.sharded is None:
                chosen = kept
        if direct:
            parts.append(self._run(plan, direct))
        positions = self._prefix_positions(chosen, len(sink), len(direct))
        if chosen is None or own is None:
            return parts, positions, None
        fetched = own.chosen if self.sharded else chosen
        return parts, positions, FetchedList(fetched, len(sink), tiers, time.perf_counter() - begun, own.void)

    def _fetchable(self, chosen: CandidateLists) -> OwnPart:
        """Return the part of a list that is fetched here: all of it, unless other ranks fetch the rest."""
        if not self.sharded:
            return OwnPart(chosen, torch.empty(0), None)
        sharded = self.sharded
        return self.kept(("own",), chosen, lambda: sharded.own_part(self.candidates, chosen))

    def _prefix_positions(self, chosen: CandidateLists | None, sink: int, direct: int) -> Tensor:
        def joined() -> Tensor:
            placement = self.placement(chosen)
            parts = [torch.arange(self.start - direct, self.start, device=self.device)[None, None]]
            if chosen is not None:
                parts.insert(0, self._own_positions(chosen, placement.retrieved))
            if sink:
                parts.insert(0, placement.sink)
            batch, heads = (max(part.shape[i] for part in parts) for i in (0, 1))
            return torch.cat([part.expand(batch, heads, -1) for part in parts], dim=-1)

        return self.kept(("positions", sink, direct), chosen, joined)

    def _own_positions(self, chosen: CandidateLists, positions: Tensor) -> Tensor:
        """Select from ``positions [B or 1, lists, K * S]`` of a list the positions that are fetched here."""
        if self.sharded is None:
            return positions
        slots, columns = positions.unflatten(-1, (-1, self.selection.block_size)), self._fetchable(chosen).columns
        if not columns.shape[-1]:  # without a list here, the other parts keep their number of heads
            return positions[:1, :1, :0]
        where = columns.to(slots.device)[..., None].expand(*columns.shape, slots.shape[-1])
        found: Tensor = slots.expand(*columns.shape[:2], -1, -1).gather(2, where).flatten(-2)
        return found

    def _run(self, plan: LayerPlan, tokens: range) -> States:
        assert self.states is not None, "only stored tokens can be visible"
        keys, values = self.states(plan.index, tokens)  # [G, n, D]
        return keys[None, :, None], values[None, :, None]

    def _located(self, chosen: CandidateLists) -> tuple[Tensor, list[tuple[Document, list[int]]]]:
        """Return the place ``[B or 1, lists, K]`` of each list entry among the distinct blocks, and these blocks."""

        def found() -> tuple[Tensor, list[tuple[Document, list[int]]]]:
            numbers, places = chosen.numbers.unique(return_inverse=True)
            return places, self.candidates.located(numbers)

        return self.kept(("located",), chosen, found)

    def tiers(self, plan: LayerPlan, chosen: CandidateLists) -> dict[int, str] | None:
        """Return the current tier of each candidate in the lists, or None without observers."""
        if not self.observers:
            return None
        located = self._located(chosen)[1]
        tiers = [tier for document, blocks in located for tier in document.layer(plan.index).tiers(blocks)]
        return dict(zip(chosen.numbers.unique().tolist(), tiers, strict=True))

    # Only prompts and answers leave blocks out, never reading, because reading stores its results. If a layer has
    # several lists, those that lost fewer blocks give up their lowest slots, so that all have one length. Damage to
    # sink, window or landmarks is always an error.
    def _readable(self, plan: LayerPlan, chosen: CandidateLists) -> tuple[CandidateLists | None, list[States]]:
        """Return the readable part of the lists in layer ``plan``, and its states. Raises if errors are not misses."""
        try:
            return chosen, [self._gathered(plan, chosen)]
        except DamagedError:
            if self.reading or self.selection.retrieval.on_error == "raise":
                raise
        self.kept(("damaged",), chosen, lambda: True)
        left = chosen.without(self._lost(plan, chosen))
        return (left, [self._gathered(plan, left)]) if left.numbers.numel() else (None, [])

    def _lost(self, plan: LayerPlan, chosen: CandidateLists) -> Tensor:
        """Return the numbers ``[n]`` of chosen candidates whose states in layer ``plan`` cannot be read."""
        lost: list[bool] = []
        for document, blocks in self._located(chosen)[1]:
            sound = set(document.layer(plan.index).sound(blocks))
            lost += [block not in sound for block in blocks]
        numbers: Tensor = chosen.numbers.unique()
        return numbers[torch.tensor(lost)]

    def _gathered(self, plan: LayerPlan, chosen: CandidateLists) -> States:
        """Return states of the blocks as ``[B, heads, K, S, D]``; the heads are the lists if there are more lists."""
        places, located = self._located(chosen)
        keys, values = self._blocks_of(plan, chosen, located)  # [n, G, S, D]
        rows, lists, groups = *chosen.numbers.shape[:2], plan.key_heads
        if rows == lists == 1:  # a list is in ascending order, so its blocks are already in place
            return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        heads = max(lists, groups)
        head = torch.arange(heads) // (heads // groups)
        pick = to_device([places.repeat_interleave(heads // lists, dim=1), head[None, :, None]], self.device)
        return keys[*pick], values[*pick]

    def _blocks_of(self, plan: LayerPlan, chosen: CandidateLists, located: list[tuple[Document, list[int]]]) -> States:
        """Return the blocks of a list, and fetch those of later layers with them: a few large copies are better.

        On a CPU this is only done if the blocks are at hand. Otherwise they are read while earlier layers compute.
        """
        if (plan.index, id(chosen)) not in self._ahead:
            later = self.layers[plan.index + 1 : self.attending]
            # If a layer is damaged, all layers that are gathered with it would be tried again.
            together = 1 if ("damaged", id(chosen)) in self.memo else self._layers_at_once(located)
            wanted = [plan.index, *(each.plan.index for each in later if each.stale and each.chosen is chosen)]
            wanted = wanted[:together]
            if self.device.type == "cpu" and not all(each.at_hand(wanted, blocks) for each, blocks in located):
                wanted = wanted[:1]
            with along(self.numbered(chosen), self.device) as where:
                for layer, states in zip(wanted, gather(located, wanted, self.device), strict=True):
                    self._ahead[layer, id(chosen)] = states
            self.kept(("where",), chosen, where)
        return self._ahead.pop((plan.index, id(chosen)))

    @staticmethod
    def _layers_at_once(located: list[tuple[Document, list[int]]]) -> int:
        """Return for how many layers blocks are gathered together."""
        block = sum(layout.nbytes for layout in plain_layouts(located[0][0].memory.spec))
        return max(1, GATHERED_BYTES // (block * sum(len(blocks) for _, blocks in located)))


class CallLayer(CacheLayerMixin):
    """Base of a cache layer whose local tokens are in a call beside a memory."""

    is_sliding = False

    def __init__(self, call: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has not annotated it
        self.keys = self.values = torch.empty(0)
        self.call = call
        """The object that holds them; ``length`` is their number."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the call makes room for states when they come."""

    def __reduce__(self) -> NoReturn:  # pickle and copy ask it
        raise InvalidArgument("a cache with a memory cannot be copied or pickled: pass the prompt again")

    def crop(self, _tokens_to_remove: int) -> None:
        """Raise, because blocks retrieved for the removed tokens would stay."""
        raise InvalidArgument(
            "a cache with a memory cannot be cropped, because blocks were retrieved for the removed tokens: "
            "generate without assistant_model and prompt_lookup_num_tokens"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows, in the same way as for beams."""
        self.reorder_cache(indices)  # type: ignore[arg-type]  # any integers work

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the local keys."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of local tokens so far."""
        return int(self.call.length)

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers before 5.16


class LayerStates(CallLayer):
    """A cache layer of transformers whose beginning comes from the memory.

    Keys and values are in one buffer ``[B, heads, capacity, D]``: first the prefix (sink, retrieved, direct), then the
    local tokens. All are at the positions where they are attended to.
    """

    keys: Tensor
    values: Tensor
    call: Call

    def __init__(self, call: Call, plan: LayerPlan) -> None:
        super().__init__(call)
        self.plan = plan
        self.chosen: CandidateLists | None = None
        """The retrieved lists, or None if there are none yet."""
        self.tiers: dict[int, str] | None = None
        """The tier of each candidate of ``chosen`` at that time; None without observers."""
        self.searched = False
        """Whether ``chosen`` was searched for since the layer last attended."""
        self.chosen_at = 0
        self.stale = True
        self.prefix = 0
        self.prefix_positions = torch.empty(1, 1, 0, dtype=torch.long)
        self.fetched: FetchedList | None = None
        """The part of ``chosen`` that was fetched."""
        self.fresh: States | None = None
        """Position-free states of the segment, kept while reading."""

    def set_chosen(self, chosen: CandidateLists) -> None:
        """Attend to the candidates ``chosen`` from now on."""
        if self.chosen is None or not self.chosen.same(chosen):
            self.chosen, self.stale = chosen, True
            self.tiers = self.call.tiers(self.plan, chosen)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of position-free ``q [B, H, T, D]``, ``k, v [B, G, T, D]`` over prefix and local tokens."""
        call, rotary = self.call, self.plan.rotary
        if call.reading:
            self.fresh = (k, v)
        call.see_queries(self, q)
        if self.stale:
            self._fetch_prefix(k, v)
        queries = q
        if not call.turned:
            q, k = rotary.rotate_pair(q, k, call.local_cos_sin(rotary))
        keys, values = self._append(k, v)
        mask = call.mask(q.dtype, self.plan.sliding, self.fetched, self.prefix_positions)
        call.tell(self, queries, q, keys, mask, **options)
        if call.sharded and self.fetched is not None:
            tokens = self.fetched.chosen.numbers.shape[-1] * call.selection.block_size
            fetched = range(self.fetched.start, self.fetched.start + tokens)
            return attend_together(call.sharded.ranks, fetched, q, keys, values, mask, **options)
        if call.reading:  # it has one pass, and only the segment's states are stored
            self.keys = self.values = torch.empty(0)
        return attend(q, keys, values, mask=mask, **options)

    def _fetch_prefix(self, k: Tensor, v: Tensor) -> None:
        """Fill the beginning of the buffers from the memory, and keep the local tokens after it."""
        local = self.local() if self.is_initialized and self.call.length else None
        parts, self.prefix_positions, self.fetched = self.call.prefix(self.plan, self.chosen, self.tiers)
        heads = max([self.plan.key_heads, *(keys.shape[1] for keys, _ in parts)])
        self.prefix = self.prefix_positions.shape[-1]
        self._allocate(k, v, heads, self.prefix + self.call.length + k.shape[2], self.call.room)
        start = 0
        for keys, values in parts:
            end = start + keys.shape[2] * keys.shape[3]
            _fill(self.keys[:, :, start:end], keys)
            _fill(self.values[:, :, start:end], values)
            start = end
        if self.prefix:
            self._rotate_prefix()
        self.stale = False
        if local is not None:
            self._write(*local, at=self.prefix)

    def _rotate_prefix(self) -> None:
        keys, rotary, positions = self.keys[:, :, : self.prefix], self.plan.rotary, self.prefix_positions
        cos_sin = self.call.prefix_cos_sin(rotary, positions, len(self.keys))
        if cos_sin is None:
            return
        if positions.shape[1] == 1:
            rotary.rotate_in_place(keys, cos_sin)
        else:  # every head has its own blocks and so its own positions
            rotated = rotary.rotate(keys.flatten(0, 1).unsqueeze(1), cos_sin)
            keys.copy_(rotated.view_as(keys))

    def all_states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of keys and values of the prefix and the local tokens, and the positions of the prefix."""
        used = self.prefix + self.call.length
        return self.keys[:, :, :used].clone(), self.values[:, :, :used].clone(), self.prefix_positions

    def begin(self, keys: Tensor, values: Tensor, prefix: Tensor) -> None:
        """Continue after the ``all_states`` of another call, which does not change."""
        self.keys, self.values, self.prefix_positions, self.prefix = keys, values, prefix, prefix.shape[-1]
        self.is_initialized, self.stale = True, False

    def local(self) -> States:
        """Return a copy of the states of the local tokens, at their positions."""
        local = slice(self.prefix, self.prefix + self.call.length)
        return self.keys[:, :, local].clone(), self.values[:, :, local].clone()

    def _allocate(self, k: Tensor, v: Tensor, heads: int, used: int, room: int) -> None:
        self.keys = k.new_empty(k.shape[0], heads, used + room, k.shape[3])
        self.values = v.new_empty(v.shape[0], heads, used + room, v.shape[3])
        self.is_initialized = True

    def _append(self, k: Tensor, v: Tensor) -> States:
        start = self.prefix + self.call.length
        end = start + k.shape[2]
        if end > self.keys.shape[2]:
            self._grow(k, v, end)
        self._write(k, v, at=start)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _write(self, k: Tensor, v: Tensor, at: int) -> None:
        heads = self.keys.shape[1]
        self.keys[:, :, at : at + k.shape[2]] = _repeated(k, heads)
        self.values[:, :, at : at + v.shape[2]] = _repeated(v, heads)

    def _grow(self, k: Tensor, v: Tensor, needed: int) -> None:
        used = self.prefix + self.call.length
        keys, values = self.keys[:, :, :used], self.values[:, :, :used]
        self._allocate(k, v, keys.shape[1], needed, max(ROOM, used // 4))
        self.keys[:, :, :used], self.values[:, :, :used] = keys, values

    # What transformers needs of a cache layer. Lengths count local tokens, not the memory.

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> States:
        """Pass the segment on. The attention function stores it, because it knows the positions."""
        if self.call.selection.ended:
            raise InvalidArgument("this cache belongs to a memory that is no longer attached. Use a new cache")
        return key_states, value_states

    def batch_repeat_interleave(self, _repeats: int) -> None:
        """Raise: pass the prompt as often as you want continuations."""
        raise InvalidArgument("a cache with a memory cannot be repeated. Pass the prompt once for each continuation")

    def reset(self) -> None:
        """Forget the local tokens and the blocks retrieved for them."""
        if self.call.selection.architecture.linear is not None:  # its layers without attention cannot go back
            raise InvalidArgument("the cache of a hybrid model cannot be reset. Use a new cache")
        self.chosen, self.fetched, self.stale, self.is_initialized = None, None, True, False
        if self.plan.index == 0:
            self.call.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows with which beam search continues."""
        if self.is_initialized:
            self.keys, self.values = self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx)
        if self.chosen is not None:
            self.chosen = self.chosen.rows(beam_idx.cpu())
        if self.fetched is not None:
            self.fetched = replace(self.fetched, chosen=self.fetched.chosen.rows(beam_idx.cpu()))
        if len(self.prefix_positions) > 1:
            self.prefix_positions = self.prefix_positions.index_select(0, beam_idx)
        if self.plan.index == 0:
            self.call.reorder(beam_idx)


def _fill(buffer: Tensor, blocks: Tensor) -> None:
    """Write ``blocks [B or 1, heads, n, S, D]`` to ``buffer [B, heads, n * S, D]``; repeat heads if it has more."""
    buffer.unflatten(2, blocks.shape[2:4]).copy_(_repeated(blocks, buffer.shape[1]))


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat the key-value heads of ``x [B, heads, ...]`` if every query head has its own list."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


@dataclass(eq=False)
class StockChoice(Choice, Draft):
    """The lists that one attention layer attends to in one forward pass; its draft is the same for the last token.

    A draft is a query and a view of the keys. Keys before the end of a step never change. So one matrix product gives
    the weights of all steps with one list. Computed at every step, the weights would take longer than attention itself.
    For sixteen steps at once they take a quarter of it.
    """

    states: LayerStates
    fetched: FetchedList
    searched: bool
    """Whether the list was searched for. With ``share="model"`` the first layer that uses a list reports the search."""
    queries: Tensor
    """``[B, H, T, D]``, without positions."""
    turned: Tensor
    """``[B, H, T, D]``, at their positions."""
    keys: Tensor
    """``[B, heads, n, D]`` at their positions: all keys that the layer attends to."""
    mask: Tensor | None
    """``[B or 1, heads or 1, T, M]``, added to the scores of the last ``M`` keys."""
    options: dict[str, Any]
    """``scale``, ``softcap`` and ``sinks`` of the attention."""
    search_us: float
    gather_us: float
    prefix: int
    """Number of keys of the memory at the beginning of ``keys``: sink, list and window."""
    prompt: int
    """Number of keys of the first forward pass, which follow."""

    @property
    def layer(self) -> int:  # type: ignore[override]  # nobody sets it
        """Its number."""
        return self.states.plan.index

    @property
    def rows(self) -> Sequence[int]:  # type: ignore[override]  # nobody sets it
        """See ``Choice``. A forward pass has one segment."""
        return range(len(self.queries))

    def draft(self) -> StockChoice:
        last, mask = self.turned, self.mask
        if last.shape[2] > 1:  # drops the rest of the prompt
            last, mask = last[:, :, -1:].clone(), None if mask is None else mask[:, :, -1:]
        return replace(self, queries=last, turned=last, mask=mask)

    @classmethod
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        """See ``Draft``. Steps that attend to the same fetched list are computed together."""
        together: dict[FetchedList, list[int]] = {}
        for place, draft in enumerate(drafts):
            together.setdefault(draft.fetched, []).append(place)
        looks: list[list[Look]] = [[] for _ in drafts]
        for places in together.values():
            steps = [drafts[place] for place in places]
            lists = _lists(steps[0])
            for place, step, *parts in zip(places, steps, *(x.cpu().numpy() for x in _weights(steps)), strict=True):
                rows = enumerate(zip(*parts, strict=True))
                looks[place] = [step._look(row, lists[row % len(lists)], *weights) for row, weights in rows]
        return looks

    def _look(self, row: int, lists: dict[str, Any], weights: Array, elsewhere: Array) -> Look:
        return Look(
            layer=self.layer,
            row=row,
            weights=weights,
            elsewhere=elsewhere,
            search_us=self.search_us,
            gather_us=self.gather_us,
            **lists,
        )


@torch.no_grad()
def _weights(steps: Sequence[StockChoice]) -> tuple[Tensor, Tensor]:
    """Return the attention on each retrieved block, best score first, and the attention elsewhere.

    They are ``[steps, B, H, K]`` and ``[steps, B, H, 4]``, both float32.
    """
    fetched, keys = steps[0].fetched, steps[-1].keys  # the keys of the last step include those of all earlier steps
    scale, softcap, sinks = (steps[0].options.get(name) for name in ("scale", "softcap", "sinks"))
    q = torch.cat([step.turned for step in steps], dim=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = masked_scores(q, keys, mask=None, scale=scale, softcap=softcap)  # [B, H, steps, n]
    _hide(scores, steps)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    entries = fetched.chosen.numbers.shape[-1]
    attention = scores.softmax(-1)
    end, prefix = fetched.start + entries * steps[0].states.call.selection.block_size, steps[0].prefix
    ends = (0, fetched.start, end, prefix, prefix + steps[0].prompt, keys.shape[2])
    sink, _, *direct = (attention[..., low:high].sum(-1) for low, high in pairwise(ends))
    elsewhere = torch.stack((sink, *direct), dim=-1)  # [B, H, steps, 4]
    retrieved = attention[..., fetched.start : end]
    weights: Tensor = retrieved.unflatten(-1, (entries, -1)).sum(-1)  # [B, H, steps, K]
    order = _order(fetched).to(weights.device)
    of_head = torch.arange(weights.shape[1]) * order.shape[1] // weights.shape[1]
    best_first: Tensor = weights.gather(-1, order[:, of_head, None].expand_as(weights))
    return best_first.permute(2, 0, 1, 3).float(), elsewhere.permute(2, 0, 1, 3).float()


def _order(fetched: FetchedList) -> Tensor:
    """Return the entries of each list, best score first: ``[B or 1, lists, K]``."""
    # Without a choice there are no scores to sort by, and the order stays.
    return fetched.chosen.scores.nan_to_num(0.0).neg().sort(dim=-1, stable=True).indices


def _hide(scores: Tensor, steps: Sequence[StockChoice]) -> None:
    """Set the scores ``[B, H, steps, n]`` of keys that a step did not see to -inf."""
    for place, each in enumerate(steps):
        keys = each.keys.shape[2]
        if keys < scores.shape[-1]:
            scores[:, :, place, keys:] = float("-inf")
        if each.mask is not None:
            mask = _repeated(each.mask[:, :, 0], scores.shape[1])
            scores[:, :, place, :keys] += F.pad(mask, (keys - mask.shape[-1], 0))


def _lists(draft: StockChoice) -> list[dict[str, Any]]:
    """Return the part of the looks that all steps with one list share: for each batch row, or one for all rows.

    Arrays are ``[lists, K]``, best score first.
    """
    chosen, tiers = draft.fetched.chosen, draft.fetched.tiers
    order = _order(draft.fetched)
    numbers = chosen.numbers.gather(-1, order)
    names, document, blocks = draft.states.call.candidates.named(numbers)
    places = [-1 if tiers is None else TIERS.index(tiers[number]) for number in numbers.ravel().tolist()]
    arrays = {
        "document": document.numpy().astype(np.int16),
        "blocks": blocks.numpy(),
        "scores": chosen.scores.gather(-1, order).float().numpy(),
        "tiers": np.array(places, np.int8).reshape(numbers.shape),
    }
    rows = range(len(numbers))
    return [{"documents": names, **{name: array[row] for name, array in arrays.items()}} for row in rows]
