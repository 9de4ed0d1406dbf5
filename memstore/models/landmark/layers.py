"""Decoder layers of a landmark model. Their parameters have the names that Llama's have, so weights fit both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from memstore.attention.layers import RMSNorm, merged
from memstore.models.landmark.configuration import LandmarkConfig

if TYPE_CHECKING:
    from memstore.models.landmark.cache import LandmarkCache


class LandmarkSight(Protocol):
    """What attends: the whole stream of a training step, or a cache at inference. It applies positions."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:
        """``q [B, H, M, D]``, ``k, v [B, G, M, D]`` without positions -> ``[B, H, M, D]``.

        ``context_miss [1, G, 1, D]``: the key of the context-miss token, where the model has one.
        """


def norm(config: LandmarkConfig) -> nn.Module:
    """RMSNorm for Llama, LayerNorm without bias for the paper's GPT-2-like model."""
    if config.architecture == "llama":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=False)


class ResidualLinear(nn.Linear):
    """A projection into the residual stream. GPT-2's start smaller, the more layers add to it."""


class Attention(nn.Module):
    """Projections around what ``LandmarkSight`` attends to."""

    def __init__(self, config: LandmarkConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.dim = config.head_dim
        inner, outer = config.num_attention_heads * self.dim, config.num_key_value_heads * self.dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, outer, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, outer, bias=config.attention_bias)
        self.o_proj = ResidualLinear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context_miss: Tensor | None, sight: LandmarkSight) -> Tensor:
        """``x [B, M, hidden]``, and the context-miss token ``[1, 1, hidden]`` -> ``[B, M, hidden]``."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        gate = None if context_miss is None else self._heads(self.k_proj(context_miss))
        projected: Tensor = self.o_proj(merged(sight.attend(self.number, q, k, v, gate)))
        return projected

    def keep(self, x: Tensor, cache: LandmarkCache) -> None:
        """Give ``cache`` the keys and values of ``x [B, M, hidden]``."""
        cache.keep(self.number, self._heads(self.k_proj(x)), self._heads(self.v_proj(x)))

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        return heads


class GatedFeedForward(nn.Module):
    """``down(silu(gate x) * up x)``: SwiGLU (Shazeer 2020), as in Llama."""

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualLinear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` -> the same."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class FeedForward(nn.Module):
    """``down(gelu(up x))``, as in GPT-2."""

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualLinear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` -> the same."""
        down: Tensor = self.down_proj(F.gelu(self.up_proj(x)))
        return down


class Layer(nn.Module):
    """Self-attention and feed-forward, both after a norm."""

    def __init__(self, config: LandmarkConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = norm(config)
        self.self_attn = Attention(config, number)
        self.post_attention_layernorm = norm(config)
        self.mlp = GatedFeedForward(config) if config.architecture == "llama" else FeedForward(config)

    def keep(self, x: Tensor, cache: LandmarkCache) -> None:
        """Give ``cache`` what ``x [B, M, hidden]`` leaves in this layer, and compute nothing else."""
        self.self_attn.keep(self.input_layernorm(x), cache)

    def forward(self, x: Tensor, context_miss: Tensor | None, sight: LandmarkSight) -> tuple[Tensor, Tensor | None]:
        """``x [B, M, hidden]``, and the context-miss token ``[1, 1, hidden]`` where there is one -> the same."""
        if context_miss is None:
            x = x + self.self_attn(self.input_layernorm(x), None, sight)
            return x + self.mlp(self.post_attention_layernorm(x)), None
        x = x + self.self_attn(self.input_layernorm(x), self.input_layernorm(context_miss), sight)
        # It stands before everything, so it has nothing to attend to.
        context_miss = context_miss + self.mlp(self.post_attention_layernorm(context_miss))
        return x + self.mlp(self.post_attention_layernorm(x)), context_miss
