"""A family that attends to entries made of several tokens: DeepSeek-V4.

Every layer sees a window of tokens, whose one shared head is key and value at once. Most layers also see entries. Each
entry is made from the tokens of a unit by a softmax of gates (DeepSeek-V4, section 2.3). An index chooses among entries
of 4 tokens and the 4 before them (equations 9 to 17). Entries of 128 tokens are all seen (equations 20 to 23). The
output is rotated back, because values are rotated keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memstore.models.indexed.family import IndexedFamily, IndexedLayer, Projections


def turned_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last numbers of ``x [B, S, ..., D]`` in pairs of neighbours, and keep their order.

    ``cos, sin [B, S, R / 2]`` have every angle once. The order is kept because values are rotated here too.
    """
    shape = (*cos.shape[:2], *[1] * (x.dim() - 3), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    still, moved = x[..., : -2 * cos.shape[-1]], x[..., -2 * cos.shape[-1] :].float()
    a, b = moved[..., 0::2], moved[..., 1::2]
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([still, pairs.to(x.dtype)], -1)


class _EntryLayer(IndexedLayer):
    """A window, with the entries that an index chooses, all entries, or none."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        dim = self.dim = int(module.head_dim)
        self.window, self.row_width = int(module.sliding_window), dim
        self.key = self.value = slice(0, dim)
        self.scaling, self.sinks = float(module.scaling), module.sinks
        compressor = self.compressor = module.compressor
        if compressor is None:
            self.sees = self.window
            return
        self.sees = "entries"
        self.unit, indexer = int(compressor.compress_rate), getattr(compressor, "indexer", None)
        self.indexer = indexer
        if indexer is None:
            self.index_dim, self.raw_width = dim, 2 * dim
        else:
            self.index_dim, self.top, self.lookback = int(indexer.head_dim), int(indexer.index_topk), 1
            self.index_scale, self.entry_width = float(indexer.scorer.softmax_scale), dim
            self.raw_width = 4 * (dim + self.index_dim)
            self.row_width += -(-dim // self.unit)
        self.key_width = -(-self.index_dim // self.unit)

    def states(self, hidden: Tensor, given: Mapping[str, Any]) -> Projections:
        module, cos_sin = self.module, given["position_embeddings"][self.module.rope_layer_type]
        residual = module.q_a_norm(module.q_a_proj(hidden))
        query = module.q_b_norm(module.q_b_proj(residual).unflatten(-1, (-1, self.dim)))
        rows = turned_last(module.kv_norm(module.kv_proj(hidden)), *cos_sin)
        made = Projections(turned_last(query, *cos_sin), partial(self.output, cos_sin), rows)
        if self.compressor is None:
            return made
        makers = [self.compressor] if self.indexer is None else [self.compressor, self.indexer]
        raw = torch.cat([part(hidden) for maker in makers for part in (maker.kv_proj, maker.gate_proj)], -1)
        if self.indexer is None:
            return Projections(made.query, made.finish, rows, raw=raw)
        ask = self.indexer.q_b_proj(residual).unflatten(-1, (-1, self.index_dim))
        scorer = self.indexer.scorer
        weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling
        ask = turned_last(ask, *given["position_embeddings"]["compress"])
        return Projections(made.query, made.finish, rows, ask=ask, weights=weights, raw=raw)

    def compress(self, raw: Tensor, first: int, before: int) -> tuple[Tensor, Tensor]:
        if self.indexer is None:
            key, gate = raw.split(self.dim, -1)
            made = _mean(self.compressor, key, gate, self.unit)
            return self._placed(self.compressor, made, first), made[:, :0]
        wide, narrow = 2 * self.dim, 2 * self.index_dim
        of_entry, its_gate, key, gate = raw.split([wide, wide, narrow, narrow], -1)
        keys = _overlapping(self.indexer, key, gate, self.unit, before)
        entries = _overlapping(self.compressor, of_entry, its_gate, self.unit, before)
        return self._placed(self.indexer, keys, first), self._placed(self.compressor, entries, first)

    def _placed(self, maker: Any, made: Tensor, first: int) -> Tensor:
        """Return entries ``[n, D]``, rotated to the beginnings of their units."""
        made = maker.kv_norm(made)[None]
        positions = (torch.arange(made.shape[1], device=made.device) + first)[None] * self.unit
        return turned_last(made, *maker.rotary_emb(made, position_ids=positions, layer_type="compress"))[0]

    def pool(self, raw: Tensor, first: Tensor) -> Tensor:  # noqa: ARG002 - they have positions
        """Join the parts of a key, which lie in the landmarks of its tokens."""
        return raw.flatten(1)[:, : self.index_dim]

    def output(self, cos_sin: tuple[Tensor, Tensor], gathered: Tensor) -> Tensor:
        """Rotate the attention of the heads back, and return the module's output for it."""
        cos, sin = cos_sin
        back = turned_last(gathered, cos, -sin).flatten(2).unflatten(-1, (self.module.config.o_groups, -1))
        out: Tensor = self.module.o_b_proj(self.module.o_a_proj(back).flatten(2))
        return out


def _mean(maker: Any, key: Tensor, gate: Tensor, unit: int) -> Tensor:
    """Return means ``[n, D]`` of whole units of ``key, gate [n * unit, D]``, by the softmax of gates and places."""
    parts = (gate.unflatten(0, (-1, unit)) + maker.position_bias).softmax(1, dtype=torch.float32)
    mean: Tensor = (key.unflatten(0, (-1, unit)) * parts.to(key.dtype)).sum(1)
    return mean


def _overlapping(maker: Any, key: Tensor, gate: Tensor, unit: int, before: int) -> Tensor:
    """Return the same means, if the first half of each token's numbers counts in the unit after its own.

    ``before``: number of units, 0 or 1, at the start of ``key, gate [m, 2 D]`` that already have their entries.
    """
    key, gate = key.unflatten(0, (-1, unit)), gate.unflatten(0, (-1, unit)) + maker.position_bias
    (earlier, own), (earlier_gate, own_gate) = (x.chunk(2, -1) for x in (key, gate))
    if before:
        own, own_gate = own[1:], own_gate[1:]
        earlier, earlier_gate = earlier[:-1], earlier_gate[:-1]
    else:  # the first unit has none before it
        earlier = torch.cat([torch.zeros_like(earlier[:1]), earlier[:-1]])
        earlier_gate = torch.cat([torch.full_like(earlier_gate[:1], -torch.inf), earlier_gate[:-1]])
    both, gates = torch.cat([earlier, own], 1), torch.cat([earlier_gate, own_gate], 1)
    return (both * gates.softmax(1, dtype=torch.float32).to(both.dtype)).sum(1)


class DeepseekV4(IndexedFamily):
    """Layers with a window alone, with chosen entries of 4 tokens, and with all entries of 128."""

    def made(self) -> list[IndexedLayer]:
        return [_EntryLayer(block.self_attn, number) for number, block in enumerate(self.decoder.layers)]
