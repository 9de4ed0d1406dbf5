"""One attention layer during one call: what it has fetched from the memory, and the local tokens after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from memstore.errors import InvalidArgument
from memstore.kernels.block_attention import attend
from memstore.readers.stock.architecture import LayerPlan
from memstore.readers.stock.selection import CandidateLists
from memstore.readers.stock.visible import States

if TYPE_CHECKING:
    from memstore.readers.stock.call import Call, FetchedList

ROOM = 64
"""Tokens that a buffer has free when it is made, so that generating does not copy it at every step."""


class LayerStates(CacheLayerMixin):
    """A cache layer of transformers whose beginning comes from the memory.

    Keys and values lie in one buffer ``[B, heads, capacity, D]``: first the prefix (sink, retrieved, direct), then the
    local tokens, all at the positions they are attended at.
    """

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, call: Call, plan: LayerPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has not annotated it
        self.keys = self.values = torch.empty(0)
        self.call, self.plan = call, plan
        self.chosen: CandidateLists | None = None
        """What is retrieved; None while nothing is."""
        self.tiers: dict[int, str] | None = None
        """Where each candidate of ``chosen`` was then; None where nobody was watching."""
        self.searched = False
        """``chosen`` was searched for since the layer last attended."""
        self.chosen_at = 0
        self.stale = True
        self.prefix = 0
        self.prefix_positions = torch.empty(1, 1, 0, dtype=torch.long)
        self.fetched: FetchedList | None = None
        """What was fetched of ``chosen``."""
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
        q, k = rotary.rotate_pair(q, k, call.local_cos_sin(rotary))
        keys, values = self._append(k, v)
        mask = call.mask(self, q.dtype)
        call.tell(self, queries, q, keys, mask, **options)
        return attend(q, keys, values, mask=mask, **options)

    def _fetch_prefix(self, k: Tensor, v: Tensor) -> None:
        """Fill the beginning of the buffers from the memory, keeping the local tokens after it."""
        local = self._local()
        parts, self.prefix_positions, self.fetched = self.call.prefix(self.plan, self.chosen, self.tiers)
        heads = max([self.plan.key_heads, *(keys.shape[1] for keys, _ in parts)])
        self.prefix = self.prefix_positions.shape[-1]
        self._allocate(k, v, heads, self.prefix + self.call.length + k.shape[2] + self.call.room)
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
        cos_sin = self.call.prefix_cos_sin(rotary, positions)
        if cos_sin is None:
            return
        if positions.shape[1] == 1:
            keys.copy_(rotary.rotate(keys, cos_sin))
        else:  # every head has its own blocks and so its own positions
            rotated = rotary.rotate(keys.flatten(0, 1).unsqueeze(1), cos_sin)
            keys.copy_(rotated.view_as(keys))

    def _local(self) -> States | None:
        if not self.is_initialized or not self.call.length:
            return None
        local = slice(self.prefix, self.prefix + self.call.length)
        return self.keys[:, :, local].clone(), self.values[:, :, local].clone()

    def _allocate(self, k: Tensor, v: Tensor, heads: int, capacity: int) -> None:
        self.keys = k.new_empty(k.shape[0], heads, capacity, k.shape[3])
        self.values = v.new_empty(v.shape[0], heads, capacity, v.shape[3])
        self.is_initialized = True

    def _append(self, k: Tensor, v: Tensor) -> States:
        start = self.prefix + self.call.length
        end = start + k.shape[2]
        if end > self.keys.shape[2]:
            self._grow(end)
        self._write(k, v, at=start)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _write(self, k: Tensor, v: Tensor, at: int) -> None:
        heads = self.keys.shape[1]
        self.keys[:, :, at : at + k.shape[2]] = self._matching(k, heads)
        self.values[:, :, at : at + v.shape[2]] = self._matching(v, heads)

    def _matching(self, x: Tensor, heads: int) -> Tensor:
        """Repeat key-value heads where every query head has a list of its own."""
        return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)

    def _grow(self, needed: int) -> None:
        used = self.prefix + self.call.length
        keys, values = self.keys[:, :, :used], self.values[:, :, :used]
        self._allocate(keys, values, keys.shape[1], needed + max(ROOM, used // 4))
        self.keys[:, :, :used], self.values[:, :, :used] = keys, values

    # What transformers asks of a cache layer. Lengths are those of the local tokens: the memory does not count.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers are made when the prefix is fetched."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> States:
        """Hand the segment on; it is stored by the attention function, which knows the positions."""
        if self.call.selection.ended:
            raise InvalidArgument("this cache belongs to a memory that is no longer attached; start with a new one")
        return key_states, value_states

    def crop(self, _tokens_to_remove: int) -> None:
        """Not possible: what was retrieved for the removed tokens would stay."""
        raise InvalidArgument(
            "a cache with a memory cannot be cut back, for blocks were chosen by the tokens that would go: generate "
            "without assistant_model and prompt_lookup_num_tokens"
        )

    def batch_repeat_interleave(self, _repeats: int) -> None:
        """Not possible: pass the prompt as often as you want continuations."""
        raise InvalidArgument("a cache with a memory cannot be repeated; pass the prompt once for each continuation")

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same as for beams."""
        self.reorder_cache(indices)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the local keys."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Local tokens so far."""
        return self.call.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Forget the local tokens and what was retrieved for them."""
        self.chosen, self.fetched, self.stale, self.is_initialized = None, None, True, False
        if self.plan.index == 0:
            self.call.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take over the rows that beam search goes on with."""
        if self.is_initialized:
            self.keys, self.values = self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx)
        if self.chosen is not None:
            self.chosen = self.chosen.rows(beam_idx.cpu())
        if self.fetched is not None:
            self.fetched = replace(self.fetched, chosen=self.fetched.chosen.rows(beam_idx.cpu()))
        if len(self.prefix_positions) > 1:
            self.prefix_positions = self.prefix_positions.index_select(0, beam_idx.cpu())
        if self.plan.index == 0:
            self.call.reorder(beam_idx)


def _fill(buffer: Tensor, blocks: Tensor) -> None:
    """Write ``blocks [B or 1, heads, n, S, D]`` to ``buffer [B, heads, n * S, D]``; heads repeat where it has more."""
    repeats = buffer.shape[1] // blocks.shape[1]
    blocks = blocks if repeats == 1 else blocks.repeat_interleave(repeats, dim=1)
    buffer.unflatten(2, blocks.shape[2:4]).copy_(blocks)
