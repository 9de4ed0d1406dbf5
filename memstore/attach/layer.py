"""One attention layer during one call: what it has fetched from the memory, and the local tokens after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from memstore.attach.architecture import LayerPlan
from memstore.attach.visible import States
from memstore.kernels.block_attention import attend

if TYPE_CHECKING:
    from memstore.attach.call import Call

ROOM = 64
"""Tokens that a buffer has free when it is made, so that generating does not copy it at every step."""


class LayerStates(CacheLayerMixin):
    """A cache layer of transformers whose beginning comes from the memory.

    Keys and values lie in one buffer ``[B, heads, capacity, D]``: first the prefix (sink, retrieved, direct), then the
    local tokens, all at the positions they are attended at.
    """

    is_sliding = False

    def __init__(self, call: Call, plan: LayerPlan) -> None:
        super().__init__()
        self.call, self.plan = call, plan
        self.chosen: Tensor | None = None
        """``[B or 1, lists, K]`` numbers of candidates, or None while nothing is retrieved."""
        self.chosen_at = 0
        self.stale = True
        self.prefix = 0
        self.prefix_positions = torch.empty(1, 1, 0, dtype=torch.long)
        self.fresh: States | None = None
        """Position-free states of the segment, kept while reading."""

    def set_chosen(self, chosen: Tensor) -> None:
        """Attend to the candidates ``chosen`` from now on."""
        if self.chosen is None or not torch.equal(self.chosen, chosen):
            self.chosen, self.stale = chosen, True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of position-free ``q [B, H, T, D]``, ``k, v [B, G, T, D]`` over prefix and local tokens."""
        call, rotary = self.call, self.plan.rotary
        if call.reading:
            self.fresh = (k, v)
        call.see_queries(self, q)
        if self.stale:
            self._fetch_prefix(k, v)
        q, k = rotary.rotate_pair(q, k, call.local_cos_sin(rotary))
        keys, values = self._append(k, v)
        return attend(q, keys, values, mask=call.mask(self, q.dtype), **options)

    def _fetch_prefix(self, k: Tensor, v: Tensor) -> None:
        """Fill the beginning of the buffers from the memory, keeping the local tokens after it."""
        local = self._local()
        parts = self.call.prefix_states(self.plan, self.chosen)  # (keys, values, positions) of each part
        heads = max([self.plan.key_heads, *(keys.shape[1] for keys, _, _ in parts)])
        self.prefix = sum(keys.shape[2] for keys, _, _ in parts)
        self._allocate(k, v, heads, self.prefix + self.call.length + k.shape[2] + self.call.room)
        start = 0
        for keys, values, positions in parts:
            end = start + keys.shape[2]
            self.keys[:, :, start:end] = self._matching(self._rotated(keys.to(k), positions), heads)
            self.values[:, :, start:end] = self._matching(values.to(v), heads)
            start = end
        self.prefix_positions = _joined([positions for _, _, positions in parts])
        self.stale = False
        if local is not None:
            self._write(*local, at=self.prefix)

    def _rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``keys [B, heads, n, D]`` to ``positions [B or 1, heads or 1, n]``."""
        rotary = self.plan.rotary
        if positions.shape[1] == 1:
            return rotary.rotate(keys, self.call.cos_sin(rotary, positions[:, 0]))
        batch, heads, tokens, dim = keys.shape
        flat = positions.expand(batch, heads, tokens).reshape(batch * heads, tokens)
        rotated = rotary.rotate(keys.reshape(batch * heads, 1, tokens, dim), self.call.cos_sin(rotary, flat))
        return rotated.reshape(keys.shape)

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
        return key_states, value_states

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
        self.chosen, self.stale, self.is_initialized = None, True, False
        if self.plan.index == 0:
            self.call.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take over the rows that beam search goes on with."""
        if self.is_initialized:
            self.keys, self.values = self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx)
        if self.chosen is not None and len(self.chosen) > 1:
            self.chosen = self.chosen.index_select(0, beam_idx)
        if len(self.prefix_positions) > 1:
            self.prefix_positions = self.prefix_positions.index_select(0, beam_idx)
        if self.plan.index == 0:
            self.call.reorder(beam_idx)


def _joined(positions: list[Tensor]) -> Tensor:
    """Positions of all parts, ``[B or 1, heads or 1, P]``."""
    if not positions:
        return torch.empty(1, 1, 0, dtype=torch.long)
    batch, heads = (max(p.shape[i] for p in positions) for i in (0, 1))
    return torch.cat([p.expand(batch, heads, -1) for p in positions], dim=-1)
