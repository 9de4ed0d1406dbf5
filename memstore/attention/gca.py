"""Layers of grouped cross attention (GCA): encode blocks, retrieve some, attend to them.

Hu et al. 2025, *Efficient Length-Generalizable Attention via Causal Retrieval for Long-Context Language Modeling* (ICML
2025). The paper's chunk is our block; a block of ``S`` tokens counts its landmark, which is its last token.

===============================  ======================================================================================
paper                            here
===============================  ======================================================================================
chunk encoder, ``C_k``           ``BlockEncoder``: states ``c [S, d]`` of a block, shared by all upper layers
landmark ``l_k``                 the encoder's output at the landmark token
``(W_h h)^T W_l l / sqrt d``     ``CausalRetriever.queries(h) . l``; both projections are in the query, so that one
                                 landmark of a block serves every group and every index
top-k with Gumbel noise          ``choose``: noise changes which blocks are taken, in training only, never their weights
``w_k`` (softmax over the k)     ``TopBlocks.weights``
equations 2-3                    ``memstore.kernels.grouped_cross_attention``
===============================  ======================================================================================
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.attention.layers import RMSNorm, SwiGLU, merged, rotary, rotate
from memstore.kernels.block_attention import block_attention
from memstore.kernels.grouped_cross_attention import (
    FoldedList,
    PreparedList,
    Ready,
    attend,
    attend_folded,
    fold,
    grouped_cross_attention,
    prepare,
)

Fusion = Literal["grouped", "chunked"]


class TopBlocks(NamedTuple):
    """Lists of blocks, best first."""

    blocks: Tensor
    """``[..., K]`` int64; -1 if there are fewer than ``K``."""
    weights: Tensor
    """``[..., K]``: softmax of the scores; 0 for a missing block."""
    scores: Tensor
    """``[..., K]``; -inf for a missing block."""


class ListStates(NamedTuple):
    """Blocks that are ready for attention: list ``[b, c]`` has ``blocks[b, c]`` of ``keys[b]`` and ``values[b]``."""

    keys: Tensor
    """``[B, N, G, S, D]``"""
    values: Tensor
    """``[B, N, G, S, D]``"""
    blocks: Tensor
    """``[B, C, K]``; -1 for a missing block."""
    weights: Tensor
    """``[B, C, K]``"""


def choose(scores: Tensor, top_k: int, *, gumbel: float = 0.0) -> TopBlocks:
    """Return the ``top_k`` best blocks of ``scores [..., N]`` plus ``gumbel`` times Gumbel noise; -inf is never chosen.

    The noise decides which blocks are chosen. Their weights are the softmax of the scores without it.
    """
    with torch.no_grad():
        noisy = scores.detach()
        if gumbel:
            # A sum, so that -inf stays -inf.
            noisy = noisy - gumbel * torch.empty_like(noisy).exponential_().log()
        blocks = noisy.topk(min(top_k, scores.shape[-1]), -1).indices
    return weighed(scores.gather(-1, blocks), blocks)


def weighed(scores: Tensor, blocks: Tensor) -> TopBlocks:
    """Return the chosen ``blocks [..., K]`` with their ``scores [..., K]`` and weights."""
    there = scores > -math.inf
    # For an empty list the softmax, and its gradient, would be NaN.
    weights = torch.where(there, scores, torch.finfo(scores.dtype).min).softmax(-1) * there
    return TopBlocks(torch.where(there, blocks, -1), weights, scores)


class EncoderLayer(nn.Module):
    """Bidirectional self-attention within a block, and a feed-forward layer, each after a norm."""

    def __init__(self, hidden: int, inner: int, head_count: int, eps: float) -> None:
        super().__init__()
        self.head_count = head_count
        self.attention_norm = RMSNorm(hidden, eps)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps)
        self.feed_forward = SwiGLU(hidden, inner)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map ``[n, S, hidden]`` to the same shape. ``positions [S, D / 2]``: see ``rotary``."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.head_count, -1))
        qk, v = qkv.split((2 * self.head_count, self.head_count), 2)
        q, k = rotate(qk, positions.unsqueeze(1)).chunk(2, 2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        x = x + self.out(merged(F.scaled_dot_product_attention(q, k, v)))
        out: Tensor = x + self.feed_forward(self.norm(x))
        return out


class BlockEncoder(nn.Module):
    """The paper's chunk encoder: bidirectional, with positions counted within the block.

    Its output is kept for every block: the whole output as the block's states, its last token as the landmark.
    ``normalise``: landmarks have length 1, so scores are cosines times a learned factor.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        head_count: int,
        layers: int,
        *,
        theta: float = 10_000.0,
        eps: float = 1e-6,
        normalise: bool = False,
    ) -> None:
        super().__init__()
        self.theta = theta
        self.head_dim = hidden // head_count
        self.normalise = normalise
        self.input_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([EncoderLayer(hidden, inner, head_count, eps) for _ in range(layers)])
        self.norm = RMSNorm(hidden, eps)

    def forward(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Encode blocks ``[..., S, hidden]``: states ``[..., S, hidden]`` and landmarks ``[..., hidden]``."""
        x = self.input_norm(blocks.flatten(0, -3))
        positions = rotary([0], x.shape[1], self.head_dim, self.theta, x)[0]
        for layer in self.layers:
            x = layer(x, positions)
        states: Tensor = self.norm(x).view_as(blocks)
        landmarks = states[..., -1, :]
        return states, F.normalize(landmarks, dim=-1) if self.normalise else landmarks


class CausalRetriever(nn.Module):
    """Scores of landmarks for a block: ``(W_h RMSNorm(h))^T W_l l / sqrt(d)``, one per group of upper layers.

    ``tied`` leaves the projections out, as the published code does. ``normalise`` divides query and landmark by their
    lengths, and multiplies by a learned factor instead of ``1 / sqrt(d)``.
    """

    def __init__(self, hidden: int, *, tied: bool = False, normalise: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.query = None if tied else nn.Linear(hidden, hidden, bias=False)
        self.landmark = None if tied else nn.Linear(hidden, hidden, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0))) if normalise else None

    def queries(self, hidden: Tensor) -> Tensor:
        """Return queries ``[..., hidden]`` of ``h [..., hidden]`` at landmarks. Products with landmarks are scores."""
        query = self.norm(hidden)
        if self.query is not None and self.landmark is not None:
            query = F.linear(self.query(query), self.landmark.weight.T)
        if self.log_scale is not None:
            return F.normalize(query, dim=-1) * self.log_scale.exp()
        scaled: Tensor = query * hidden.shape[-1] ** -0.5
        return scaled


class BlockKeysValues(nn.Module):
    """Keys and values of the states of blocks, by one pair of projections for all upper layers."""

    def __init__(self, hidden: int, groups: int, head_dim: int) -> None:
        super().__init__()
        self.groups = groups
        self.head_dim = head_dim
        self.projection = nn.Linear(hidden, 2 * groups * head_dim, bias=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project ``[B, N, S, hidden]`` to keys and values ``[B, N, G, S, D]``."""
        both = self.projection(states).unflatten(-1, (2 * self.groups, self.head_dim)).transpose(2, 3)
        keys, values = both.chunk(2, 2)
        return keys, values


class GroupedCrossAttention(nn.Module):
    """Attention of tokens to the blocks retrieved for them: its own queries, with given keys and values.

    ``fusion="chunked"`` puts all retrieved blocks under one softmax, as in the paper's Figure 1a (RETRO, RPT). The
    retriever's scores then have no weight, and no gradient reaches it.
    """

    def __init__(
        self,
        hidden: int,
        head_count: int,
        head_dim: int,
        *,
        off_by_one: bool = True,
        fusion: Fusion = "grouped",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.head_count = head_count
        self.off_by_one = off_by_one
        self.fusion = fusion
        self.norm = RMSNorm(hidden, eps)
        self.query = nn.Linear(hidden, head_count * head_dim, bias=False)
        self.out = nn.Linear(head_count * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, retrieved: ListStates) -> Tensor:
        """Return the retrieved part, of the same shape, for ``x [B, C, T, hidden]``: the tokens of ``C`` lists."""
        q = self.query(self.norm(x)).unflatten(-1, (self.head_count, -1)).transpose(2, 3)  # [B, C, H, T, D]
        attend = self._grouped if self.fusion == "grouped" else self._chunked
        out: Tensor = self.out(attend(q, retrieved).transpose(2, 3).flatten(3))
        return out

    def prepare(self, retrieved: ListStates) -> PreparedList | None:
        """Prepare one list of each row for tokens that come one by one; None if that does not pay or fit.

        On a GPU the kernel of the other form is faster, and only that form has all gradients.
        """
        keys, values, blocks, weights = retrieved
        if self.fusion != "grouped" or keys.device.type != "cpu" or torch.is_grad_enabled():
            return None
        return prepare(keys, values, weights[:, 0], blocks[:, 0], off_by_one=self.off_by_one)

    def own(self, prepared: PreparedList) -> Ready:
        """Return the list with this layer's projections applied, if that is faster."""
        plain = type(self.query) is type(self.out) is nn.Linear  # the weights do not include what adapters add
        if not plain or prepared.keys.dtype not in (torch.float32, torch.float64):  # rounding would change the lengths
            return prepared
        query = self.query.weight * (self.norm.weight * self.norm.weight.numel() ** 0.5)
        return fold(prepared, query, self.out.weight) or prepared

    def added(self, x: Tensor, prepared: Ready) -> Tensor:
        """Return ``x [B, T, hidden]``, the tokens of each row's list, plus their retrieved part."""
        if isinstance(prepared, FoldedList):
            return attend_folded(x, self.norm.lengths(x), prepared)
        found: Tensor = self.out(attend(self.query(self.norm(x)), prepared))
        return x + found

    def _grouped(self, q: Tensor, retrieved: ListStates) -> Tensor:
        keys, values, blocks, weights = retrieved
        return grouped_cross_attention(q, keys, values, weights, blocks, off_by_one=self.off_by_one)

    def _chunked(self, q: Tensor, retrieved: ListStates) -> Tensor:
        keys, values, blocks, _ = retrieved
        batch, lists, _, _, dim = q.shape
        rows = torch.arange(batch, device=q.device)[:, None, None]
        k, v = (x[rows, blocks.clamp(min=0)].flatten(0, 1).transpose(1, 2) for x in (keys, values))  # [B*C, G, K, S, D]
        size = k.shape[3]
        there = (blocks >= 0).flatten(0, 1).repeat_interleave(size, -1)[:, None, None]
        sinks = q.new_zeros(self.head_count) if self.off_by_one else None
        # Without a sink, a list without blocks would be a softmax over nothing.
        some = there.any(-1, keepdim=True)
        out, _ = block_attention(q.flatten(0, 1), k, v, mask=there | ~some, scale=dim**-0.5, sinks=sinks)
        return (out * some).view(batch, lists, *out.shape[1:])
