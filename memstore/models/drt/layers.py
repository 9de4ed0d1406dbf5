"""Decoder layers of a DRT: sliding-window self-attention, and in upper layers grouped cross attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memstore.attention.gca import GroupedCrossAttention, ListStates
from memstore.attention.layers import RMSNorm, SwiGLU, merged, rotate
from memstore.attention.sliding import Window
from memstore.kernels.grouped_cross_attention import Ready
from memstore.models.drt.configuration import DRTConfig

States = tuple[Tensor, Tensor]
"""Keys and values of a layer, ``[B, G, P, D]`` each."""


class Sight(NamedTuple):
    """What self-attention of one segment sees, the same in every layer."""

    window: Window
    turns: Tensor | None
    """``[B or 1, M, 1, D / 2]``: rotary positions of the segment; None with ALiBi."""


class SelfAttention(nn.Module):
    """Sliding-window attention. Keys are cached as they are attended to, that is rotated."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        inner = self.heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, inner + 2 * self.groups * config.head_dim, bias=False)
        self.out = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, sight: Sight, past: States | None) -> tuple[Tensor, States]:
        """``x [B, M, hidden]`` -> the same, and keys and values of ``past`` and segment together."""
        qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.groups, -1))
        qk, v = qkv.split((self.heads + self.groups, self.groups), 2)
        if sight.turns is not None:
            qk = rotate(qk, sight.turns)
        q, k = qk.split((self.heads, self.groups), 2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.out(merged(sight.window.attend(q, k, v))), (k, v)


class LowerLayer(nn.Module):
    """Self-attention and feed-forward, both after a norm."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = SelfAttention(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, sight: Sight, past: States | None) -> tuple[Tensor, States]:
        """``x [B, M, hidden]`` -> the same, and the layer's keys and values."""
        attended, states = self.attention(self.attention_norm(x), sight, past)
        x = x + attended
        return x + self.feed_forward(self.norm(x)), states


class UpperLayer(LowerLayer):
    """As a lower layer, with what was retrieved added before the feed-forward layer's norm.

    The residual is taken before grouped cross attention: ``H + MLP(Norm(H + GCA(H)))``, as published.
    """

    def __init__(self, config: DRTConfig) -> None:
        super().__init__(config)
        self.cross = None
        if config.retrieval != "none":
            self.cross = GroupedCrossAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.head_dim,
                off_by_one=config.off_by_one,
                fusion=config.fusion,  # type: ignore[arg-type]  # checked by the configuration
                eps=config.rms_norm_eps,
            )

    def forward(  # type: ignore[override]  # it needs what was retrieved
        self, x: Tensor, sight: Sight, past: States | None, retrieved: Lists | None, by_list: ByList
    ) -> tuple[Tensor, States]:
        """``x [B, M, hidden]`` -> the same, and the layer's keys and values."""
        attended, states = self.attention(self.attention_norm(x), sight, past)
        x = x + attended
        found, cross = x, self.cross
        if cross is not None and isinstance(retrieved, Ready):
            found = cross.added(x, retrieved)
        elif cross is not None and retrieved is not None:
            found = x + by_list(x, lambda queries: cross(queries, retrieved))
        return x + self.feed_forward(self.norm(found)), states


Lists = ListStates | Ready
"""Lists of a segment's items; a prepared one is the same for all items of a row."""
ByList = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
"""Hands tokens ``[B, M, hidden]`` to a function by the lists they use, ``[B, C, T, hidden]``, and takes them back."""
