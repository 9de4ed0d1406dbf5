"""Families with usual keys and values, and an index of blocks or runs of tokens, such as MiniMax-M3."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memstore.models.indexed.family import IndexedFamily, IndexedLayer, Projections, turned


class _GroupedLayer(IndexedLayer):
    """Grouped query attention: a row has key and value of each key-value head, one pair after the other."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        self.dim, self.groups = int(module.head_dim), module.k_proj.out_features // module.head_dim
        self.row_width = 2 * self.groups * self.dim
        self.key, self.value = slice(0, self.dim), slice(self.dim, 2 * self.dim)
        self.scaling = float(module.scaling)
        self.indexer = module.indexer

    def pair(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Return rows of ``hidden [B, S, hidden]``."""
        module = self.module
        key = turned_first(module.k_norm(module.k_proj(hidden).unflatten(-1, (self.groups, -1))), *cos_sin)
        value = module.v_proj(hidden).unflatten(-1, (self.groups, -1))
        return torch.stack([key, value], -2).flatten(2)


def turned_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first numbers of ``x [B, S, ..., D]``, as many as ``cos, sin [B, S, R]`` have."""
    moved, still = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    return torch.cat([turned(moved, cos, sin), still], -1)


class _BlockLayer(_GroupedLayer):
    """An index head for each key-value head scores blocks by their best product, without weights."""

    mode, pooled = "max", False

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        if self.indexer is None:
            self.sees = "all"
            return
        self.key_width = self.index_dim = int(self.indexer.head_dim)
        self.unit, self.top = int(self.indexer.block_size), int(self.indexer.topk_blocks)
        self.own = int(self.indexer.local_blocks)

    @property
    def lists(self) -> int:
        return 1 if self.indexer is None else int(self.indexer.num_heads)

    def states(self, hidden: Tensor, given: Mapping[str, Any]) -> Projections:
        module, cos_sin = self.module, given["position_embeddings"]
        query = turned_first(module.q_norm(module.q_proj(hidden).unflatten(-1, (-1, self.dim))), *cos_sin)
        rows = self.pair(hidden, cos_sin)
        if self.indexer is None:
            return Projections(query, self.output, rows)
        indexer, (cos, sin) = self.indexer, (x[..., : self.index_dim] for x in cos_sin)
        ask = indexer.q_norm(indexer.q_proj(hidden).unflatten(-1, (-1, self.index_dim)))
        key = indexer.k_norm(indexer.k_proj(hidden))
        return Projections(query, self.output, rows, turned_first(key, cos, sin), turned_first(ask, cos, sin))

    def output(self, gathered: Tensor) -> Tensor:
        """Return the module's output for the attention of the heads, ``[B, S, H, D]``."""
        out: Tensor = self.module.o_proj(gathered.flatten(2))
        return out


class MiniMaxM3(IndexedFamily):
    """Layers that choose blocks, and layers that see everything."""

    def made(self) -> list[IndexedLayer]:
        layers = [_BlockLayer(block.self_attn, number) for number, block in enumerate(self.decoder.layers)]
        rotated = 2 * len(self.decoder.rotary_emb.inv_freq)
        for at in layers:
            if 0 < at.index_dim < rotated:
                raise self.refused(f"its index keys have {at.index_dim} numbers, but {rotated} are rotated")
            if at.groups % at.lists:
                raise self.refused(f"its index has {at.lists} heads, which do not divide {at.groups} key-value heads")
        return [*layers]


class _RunLayer(_GroupedLayer):
    """An index that chooses runs of tokens by the mean of their keys; one choice serves all heads."""

    by_query = True

    def __init__(self, module: Any, index: int, rotary: Any) -> None:
        super().__init__(module, index)
        self.rotary = rotary
        self.key_width = self.index_dim = int(self.indexer.index_head_dim)
        self.unit, self.top = int(self.indexer.compress_ratio), int(self.indexer.block_topk)
        self.index_scale = self.index_dim**-0.5

    def states(self, hidden: Tensor, given: Mapping[str, Any]) -> Projections:
        module, cos_sin = self.module, given["position_embeddings"]
        query, gate = module.q_proj(hidden).unflatten(-1, (-1, 2 * self.dim)).chunk(2, -1)
        query = turned_first(module.q_norm(query), *cos_sin)
        ask, key = self.index_states(hidden, cos_sin)
        return Projections(query, partial(self.output, gate.flatten(2)), self.pair(hidden, cos_sin), key, ask)

    def index_states(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return index queries ``[B, S, heads, D]``, and keys ``[B, S, D]`` that have no position yet."""
        indexer, dim = self.indexer, self.index_dim
        ask, key = indexer.index_qk_proj(hidden).split([indexer.index_n_heads * dim, dim], -1)
        return turned_first(indexer.q_layernorm(ask.unflatten(-1, (-1, dim))), *cos_sin), key

    def pool(self, raw: Tensor, first: Tensor) -> Tensor:
        """Return the mean of a run's keys, normalised and rotated to the position of its first token."""
        key = self.indexer.k_layernorm(raw.float().mean(1).to(raw.dtype))
        cos, sin = self.rotary(raw, first.expand(3, 1, -1))
        return turned_first(key[None], cos, sin)[0]

    def output(self, gate: Tensor, gathered: Tensor) -> Tensor:
        out: Tensor = self.module.o_proj(gathered.flatten(2) * gate.sigmoid())
        return out


class Qwen4Exp(IndexedFamily):
    """Linear layers, and between them layers that choose runs of tokens."""

    linear = True

    def made(self) -> list[IndexedLayer]:
        blocks = enumerate(self.decoder.layers)
        rotary = self.decoder.rotary_emb
        return [_RunLayer(block.self_attn, at, rotary) for at, block in blocks if hasattr(block, "self_attn")]
