"""Families that choose tokens, or pools of them, and store latents: DeepSeek-V3.2, GLM, A.X-K2, Hy4, dots3, Mistral.

For each token, a latent and one rotated key that all heads share are stored (multi-head latent attention, DeepSeek-V2,
section 2.1). Queries meet latents. The key half of the up-projection is applied to the query, the value half to the
output of attention, so no row is ever expanded.

The index (DeepSeek-V3.2, section 2.1, equation 1) has a key for each token. The key's score is a weighted sum, over
index heads, of ReLU products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memstore.models.indexed.family import IndexedFamily, IndexedLayer, Projections, matrix, turned


class _LatentLayer(IndexedLayer):
    """Latent attention, with or without an index of single tokens."""

    interleaved = True
    """How the attention's own queries and keys are rotated."""
    index_interleaved = False
    """How the index's queries and keys are rotated."""
    index_turns_last = False
    """Whether the last numbers of an index query and key are rotated, instead of the first."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        self.latent, self.rope = int(module.kv_lora_rank), int(module.qk_rope_head_dim)
        self.row_width = self.latent + self.rope
        self.key, self.value = slice(0, self.row_width), slice(0, self.latent)
        self.scaling = float(module.scaling)
        up = matrix(module.kv_b_proj, self.latent).unflatten(0, (module.num_heads, -1))
        self.to_key, self.to_value = up.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        self.indexer = module.indexer
        if self.indexer is not None:
            self.key_width = self.index_dim = int(self.indexer.head_dim)
            self.index_scale = float(self.indexer.softmax_scale)
            self.top = int(self.indexer.index_topk)

    def states(self, hidden: Tensor, given: Mapping[str, Any]) -> Projections:
        cos_sin = given.get("position_embeddings")
        residual, queries, finish = self.queries(hidden)
        q_pass, q_rope = queries.split([queries.shape[-1] - self.rope, self.rope], -1)
        query = torch.cat([torch.einsum("bshn,hnc->bshc", q_pass, self.to_key), self.turn(q_rope, cos_sin)], -1)
        rows = None
        if self.source is None:
            latent, k_rope = self.latents(hidden)
            rows = torch.cat([latent, self.turn(k_rope, cos_sin)], -1)
        made = partial(self.output, finish)
        if self.indexer is None:
            return Projections(query, made, rows)
        ask, key = self.index_states(hidden, residual, cos_sin)
        return Projections(query, made, rows, key, ask, self.index_weights(hidden))

    def queries(self, hidden: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return the input of index queries, queries ``[B, S, H, D]``, and a function for values ``[B, S, H, V]``."""
        module = self.module
        residual = module.q_a_layernorm(module.q_a_proj(hidden))
        return residual, module.q_b_proj(residual).unflatten(-1, (module.num_heads, -1)), lambda values: values

    def latents(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents ``[B, S, C]``, and keys ``[B, S, R]`` before rotation."""
        latent, k_rope = self.module.kv_a_proj_with_mqa(hidden).split([self.latent, self.rope], -1)
        return self.module.kv_a_layernorm(latent), k_rope

    def turn(self, x: Tensor, cos_sin: Any) -> Tensor:
        return turned(x, *cos_sin, interleaved=self.interleaved)

    def index_states(self, hidden: Tensor, residual: Tensor, cos_sin: Any) -> tuple[Tensor, Tensor]:
        """Return index queries ``[B, S, heads, D]`` and keys ``[B, S, D]``."""
        ask = self.indexer.wq_b(residual).unflatten(-1, (self.indexer.n_heads, -1))
        return self.index_turn(ask, cos_sin), self.index_turn(self.index_key(hidden), cos_sin)

    def index_key(self, hidden: Tensor) -> Tensor:
        """Return index keys ``[B, S, D]`` before rotation."""
        key: Tensor = self.indexer.k_norm(self.indexer.wk(hidden))
        return key

    def index_turn(self, x: Tensor, cos_sin: Any) -> Tensor:
        rest = x.shape[-1] - self.rope
        if self.index_turns_last:
            still, moved = x.split([rest, self.rope], -1)
            return torch.cat([still, turned(moved, *cos_sin, interleaved=self.index_interleaved)], -1)
        moved, still = x.split([self.rope, rest], -1)
        return torch.cat([turned(moved, *cos_sin, interleaved=self.index_interleaved), still], -1)

    def index_weights(self, hidden: Tensor) -> Tensor:
        """Return the weight of each index head, ``[B, S, heads]``."""
        project = self.indexer.weights_proj
        weights: Tensor = project(hidden.to(project.weight.dtype)).float() * self.indexer.n_heads**-0.5
        return weights

    def output(self, finish: Callable[[Tensor], Tensor], gathered: Tensor) -> Tensor:
        """Return the module's output for the attention's result, ``[B, S, H, C]``."""
        values = torch.einsum("bshc,hvc->bshv", gathered, self.to_value)
        out: Tensor = self.module.o_proj(finish(values).flatten(-2))
        return out


class DeepseekV32(IndexedFamily):
    """Every layer chooses."""

    layer: type[_LatentLayer] = _LatentLayer

    def made(self) -> list[IndexedLayer]:
        """See ``IndexedFamily``; a layer without an index uses the choice of the last one that has one."""
        layers: list[IndexedLayer] = []
        last = None
        for number, block in enumerate(self.decoder.layers):
            if not hasattr(block.self_attn, "indexer"):
                continue  # it has no attention
            layer = self.layer(block.self_attn, number)
            layer.takes, last = (last, last) if layer.indexer is None else (None, number)
            layers.append(layer)
        return layers


class _SharedLayer(_LatentLayer):
    index_interleaved = True
    extra = 1


class GlmMoeDsa(DeepseekV32):
    """Some layers use the choice of the one before."""

    layer = _SharedLayer


class _GatedLayer(_LatentLayer):
    def queries(self, hidden: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Split a projection of the query latent, before and after the norm, into queries and the output's gate."""
        module = self.module
        compressed = module.q_a_proj(hidden)
        residual = module.q_a_layernorm(compressed)
        both = module.q_gate_proj(torch.cat([residual, compressed], -1)).unflatten(-1, (module.num_heads, -1))
        queries, gate = both.split([module.qk_head_dim, module.v_head_dim], -1)
        return residual, queries, lambda values: (values * gate.float().sigmoid()).to(values.dtype)


class AXK2(DeepseekV32):
    """Every layer chooses, and its output is gated."""

    layer = _GatedLayer


class _SinkLayer(_LatentLayer):
    interleaved = False
    index_turns_last = True
    extra = 1

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        self.sinks = module.sinks

    def queries(self, hidden: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Gate the output by the hidden states."""
        residual, queries, _ = super().queries(hidden)
        gate = self.module.gate_proj(hidden).unflatten(-1, (self.module.num_heads, -1)).sigmoid()
        return residual, queries, lambda values: values * gate

    def index_key(self, hidden: Tensor) -> Tensor:
        """Norm keys in the norm's own dtype."""
        norm = self.indexer.k_norm
        key: Tensor = norm(self.indexer.wk(hidden).to(norm.weight.dtype)).to(hidden.dtype)
        return key


class HYV4(DeepseekV32):
    """Layers share choices, with sinks in the softmax, and gates."""

    layer = _SinkLayer


class _NeighbourLayer(_SinkLayer):
    interleaved = index_interleaved = True


class HYV4Vision(HYV4):
    """The text part of the model of pictures and text; neighbouring numbers are rotated in pairs."""

    layer = _NeighbourLayer


class _DotsLayer(_LatentLayer):
    index_interleaved = True

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        if module.sliding_window is not None:
            self.sees = int(module.sliding_window)

    def queries(self, hidden: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Scale the latents of queries; each head has a gate."""
        module = self.module
        residual = module.q_a_layernorm(module.q_a_proj(hidden)) * module.q_lora_scale
        gate = module.g_proj(hidden).unsqueeze(-1).sigmoid()
        return residual, module.q_b_proj(residual).unflatten(-1, (module.num_heads, -1)), lambda values: values * gate

    def latents(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the latents, and norm the shared key."""
        module = self.module
        latent, k_rope = module.kv_a_proj_with_mqa(hidden).split([self.latent, self.rope], -1)
        return module.kv_a_layernorm(latent) * module.kv_lora_scale, module.k_rope_only_layernorm(k_rope)

    def turn(self, x: Tensor, cos_sin: Any) -> Tensor:
        return super().turn(x, cos_sin).to(x.dtype)


class Dots3Note(DeepseekV32):
    """Some layers choose; the others see a window."""

    layer = _DotsLayer

    def made(self) -> list[IndexedLayer]:
        layers = super().made()
        for layer, kind in zip(layers, self.config.layer_types, strict=True):
            if kind == "full_attention":
                layer.sees, layer.takes = "all", None
            elif kind == "sliding_attention":
                layer.takes = None
        return layers


class _PoolLayer(_LatentLayer):
    """Pools of tokens are chosen; queries and keys have no positions."""

    extra = 1

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        if self.indexer is not None:
            self.unit = int(self.indexer.index_kpool)
            self.key_width, self.top = 2 * self.index_dim, self.top // self.unit

    def turn(self, x: Tensor, cos_sin: Any) -> Tensor:  # noqa: ARG002 - it has no positions
        return x

    index_turn = turn

    def index_key(self, hidden: Tensor) -> Tensor:
        """Return each token's key with the gates of its numbers in the pool."""
        gate = torch.nn.functional.linear(hidden, self.indexer.index_kpool_compress_gate)
        return torch.cat([super().index_key(hidden), gate], -1)

    def pool(self, raw: Tensor, first: Tensor) -> Tensor:  # noqa: ARG002 - it has no positions
        """Return the mean of a pool's keys, weighted by the softmax of gates and places."""
        key, gate = raw.split(self.index_dim, -1)
        parts = (gate.float() + self.indexer.index_kpool_compress_ape.float()).softmax(1).to(key.dtype)
        pooled: Tensor = (parts * key).sum(1)
        return pooled


class Glm5Next(DeepseekV32):
    """Linear layers, and between them layers that choose pools or use the choice of the one before."""

    layer = _PoolLayer
    linear = True

    def made(self) -> list[IndexedLayer]:
        if not self.config.index_kpool_always_select_tail:
            raise self.refused(
                "index_kpool_always_select_tail is False, so its first tokens have nothing to choose from"
            )
        if self.config.qk_rope_head_dim:
            raise self.refused(
                f"its attention has no positions, but qk_rope_head_dim is {self.config.qk_rope_head_dim}"
            )
        return super().made()


class _ScaledLayer(_LatentLayer):
    """Queries grow with the logarithm of their position, and rows may be another layer's."""

    index_interleaved = True
    extra = 1

    def states(self, hidden: Tensor, given: Mapping[str, Any]) -> Projections:
        """See ``IndexedLayer``; a factor of each head and position commutes with rotation."""
        asked, positions = super().states(hidden, given), given["position_ids"]
        query = self.module.softmax_scaling(asked.query, positions, head_dim_first=False)
        if asked.ask is None:
            return replace(asked, query=query)
        ask = self.indexer.softmax_scaling(asked.ask, positions, head_dim_first=False)
        return replace(asked, query=query, ask=ask)

    def queries(self, hidden: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return queries without a latent: this family has none."""
        module = self.module
        return hidden, module.q_proj(hidden).unflatten(-1, (module.num_heads, -1)), lambda values: values

    def index_states(self, hidden: Tensor, residual: Tensor, cos_sin: Any) -> tuple[Tensor, Tensor]:
        """Make index queries from normalised hidden states."""
        return super().index_states(hidden, self.indexer.q_input_norm(residual), cos_sin)


class MistralLarge4(DeepseekV32):
    """Layers share choices and rows; some have no positions."""

    layer = _ScaledLayer

    def made(self) -> list[IndexedLayer]:
        """See ``IndexedFamily``; a layer shares the rows of the last one with rows and the same use of positions."""
        layers, given = super().made(), dict[bool, int]()
        for layer in layers:
            kind = bool(layer.module.use_rope)
            if layer.module.is_kv_shared_layer:
                layer.source = given[kind]
            if layer.module.store_full_length_kv:
                given[kind] = layer.index
        return layers
