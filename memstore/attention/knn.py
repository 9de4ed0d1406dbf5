"""Attention that also looks up single tokens in a memory: the layer of Memorizing Transformers.

Wu, Rabe, Hutchins & Szegedy 2022, *Memorizing Transformers*, sections 3.1 and 3.2. The queries of a segment attend to a
window of local text, with a bias that depends on the distance, and with the same queries to the ``top_k`` (key, value)
pairs of a memory that score highest, without any position. A gate of each head mixes the two results. Queries and keys
have length 1 and a learned scale, so that keys stay comparable while the model changes under them.

Ours to the paper's symbols: ``gate`` is ``b_g``, ``window`` the length of the Transformer-XL cache. ``joint=True`` is
the variant of a well-known reimplementation: one softmax over what was found and the window, and no gate.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.attention.layers import merged
from memstore.attention.positions import t5_buckets
from memstore.errors import InvalidArgument
from memstore.kernels.block_attention import block_attention, merge_attention
from memstore.kernels.knn_attention import knn_attention, knn_attention_with_lse

States = tuple[Tensor, Tensor]
"""Keys and values ``[B, G, n, D]``."""


class Neighbours(NamedTuple):
    """What a memory found for the queries of a segment."""

    keys: Tensor
    """``[B, G, N, D]``, constant"""
    values: Tensor
    """``[B, G, N, D]``, constant"""
    ids: Tensor
    """``[B, H, T, K]``: rows of ``keys`` and ``values`` for each query; -1 for nothing."""


class TokenMemory(Protocol):
    """Tokens that can be found again by their keys."""

    def search(self, queries: Tensor, top_k: int) -> Neighbours:
        """The ``top_k`` tokens with the largest inner products for each of ``queries [B, H, T, D]``."""
        ...


class KNNAttention(nn.Module):
    """Causal attention to a window, and to tokens that a memory finds.

    The layer only reads from a memory. Whoever calls it appends the states that it returns before the next segment is
    searched for, so that a segment never finds itself; while training that is after the backward pass, which needs what
    was found as it was.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        key_value_heads: int | None = None,
        head_dim: int | None = None,
        window: int = 512,
        top_k: int = 32,
        joint: bool = False,
        buckets: int = 32,
        farthest: int = 128,
        first_scale: float = 10.0,
        first_gate: float = 0.0,
    ) -> None:
        """``buckets`` and ``farthest`` are those of ``t5_buckets``; the rest are heads, tokens and first values."""
        super().__init__()
        self.heads = heads
        self.groups = heads if key_value_heads is None else key_value_heads
        if (head_dim is None and hidden % heads) or heads % self.groups:
            raise InvalidArgument(
                "hidden must be a multiple of heads (or give head_dim), and that of key_value_heads, "
                f"not {hidden}, {heads}, {self.groups}"
            )
        if window < 1 or top_k < 1:
            raise InvalidArgument(f"window and top_k must be at least 1, not {window} and {top_k}")
        self.window, self.top_k, self.joint, self.farthest = window, top_k, joint, farthest
        dim = hidden // heads if head_dim is None else head_dim
        self.q = nn.Linear(hidden, heads * dim, bias=False)
        self.kv = nn.Linear(hidden, 2 * self.groups * dim, bias=False)
        self.out = nn.Linear(heads * dim, hidden, bias=False)
        self.scale = nn.Parameter(torch.full((heads,), math.log(first_scale)))
        """The logarithm of the factor on the scores of each head."""
        self.bias = nn.Parameter(torch.zeros(buckets, heads))
        self.gate = None if joint else nn.Parameter(torch.full((heads,), first_gate))

    def forward(
        self, x: Tensor, past: States | None = None, memory: TokenMemory | None = None
    ) -> tuple[Tensor, States, Neighbours | None]:
        """``x [B, T, hidden]`` after ``past``, at most ``window`` tokens of before.

        Returns ``[B, T, hidden]``, the states of the segment itself, and what was found.
        """
        q, states = self.project(x)
        found = None if memory is None else memory.search(q.detach(), self.top_k)
        out = self.attend(q, states, past, found)
        return self.out(merged(out)), states, found

    def project(self, x: Tensor) -> tuple[Tensor, States]:
        """Queries ``[B, H, T, D]`` and keys and values ``[B, G, T, D]``; queries and keys have length 1."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4)
        return F.normalize(q, dim=-1), (F.normalize(k, dim=-1), v)

    def attend(self, q: Tensor, states: States, past: States | None, found: Neighbours | None) -> Tensor:
        """``[B, H, T, D]`` of ``q`` over the window, that is ``past`` and the segment, and over what was found."""
        k, v = states if past is None else (torch.cat(pair, 2) for pair in zip(past, states, strict=True))
        factor = self.scale.exp()
        scaled, bias = q * factor[:, None, None], self.window_bias(q.shape[2], k.shape[2]).to(q.dtype)
        if found is None:
            return F.scaled_dot_product_attention(scaled, k, v, bias, scale=1.0, enable_gqa=self.heads != self.groups)
        if self.gate is None:
            outs = [
                block_attention(scaled, k, v, mask=bias, scale=1.0),
                knn_attention_with_lse(q, *found, scale=factor),
            ]
            return merge_attention(*zip(*outs, strict=True))[0]
        local = F.scaled_dot_product_attention(scaled, k, v, bias, scale=1.0, enable_gqa=self.heads != self.groups)
        return knn_attention(q, *found, scale=factor, local=local, gate=self.gate)

    def window_bias(self, queries: int, keys: int) -> Tensor:
        """What is added to local scores, ``[1, H, T, keys]``: by distance, -inf for what is ahead or too far back.

        The last query and the last key are the same token. A token sees itself and ``window`` tokens before it.
        """
        device = self.bias.device
        distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
        buckets = t5_buckets(distance, buckets=len(self.bias), farthest=self.farthest)
        visible = (distance >= 0) & (distance <= self.window)
        return self.bias[buckets].permute(2, 0, 1).masked_fill(~visible, -torch.inf).unsqueeze(0)
