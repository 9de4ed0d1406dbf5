"""Attention that also looks up single tokens in a memory: the layer of Memorizing Transformers.

Wu, Rabe, Hutchins & Szegedy 2022, *Memorizing Transformers*, sections 3.1 and 3.2. The queries of a segment attend to a
window of local text, with a bias that depends on the distance. The same queries attend to the ``top_k`` (key, value)
pairs of a memory that score highest, without positions. A gate of each head mixes the two results. Queries and keys
have length 1 and a learned scale, so keys stay comparable while the model changes.

Our names for the paper's symbols: ``gate`` is ``b_g``, ``window`` the length of the Transformer-XL cache.
``joint=True`` is the variant of a well-known reimplementation: one softmax over the found tokens and the window, and no
gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.attention.layers import States, after, merged
from memstore.attention.positions import t5_buckets
from memstore.errors import InvalidArgument
from memstore.kernels.block_attention import block_attention, merge_attention
from memstore.kernels.knn_attention import knn_attention, knn_attention_with_lse

FIRST_SCALE = 10.0
"""The factor on scores at the start of learning. It is large because cosines lie close together."""
LOOKS_BACK = 6.0
"""A bias towards one distance that outweighs a window of hundreds of tokens."""


class Neighbours(NamedTuple):
    """The tokens that a memory found for the queries of a segment."""

    keys: Tensor
    """``[B, G, N, D]``, constant"""
    values: Tensor
    """``[B, G, N, D]``, constant"""
    ids: Tensor
    """``[B, H, T, K]``: rows of ``keys`` and ``values`` for each query; -1 for nothing."""


Tell = Callable[[Tensor, Tensor, Tensor, Neighbours], None]
"""A function that is called with queries, keys and mask of a window, and the found tokens."""


class TokenMemory(Protocol):
    """Tokens that can be found again by their keys, a document for each row of a batch."""

    def search(self, queries: Tensor, top_k: int) -> Neighbours:
        """Find the ``top_k`` tokens with the largest inner products for each of ``queries [B, H, T, D]``."""
        ...

    def append(self, tokens: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Add ``tokens[b] [t_b]`` to row ``b``, with the first ``t_b`` of ``keys, values [B, G, T, D]``."""
        ...


class WindowAttention(nn.Module):
    """Causal attention to a window of text, with a bias of each head by distance (Raffel et al. 2020).

    A token sees itself and the ``window`` tokens before it, also in the segment before (Dai et al. 2019).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        key_value_heads: int | None = None,
        head_dim: int | None = None,
        window: int = 512,
        buckets: int = 32,
        farthest: int = 128,
        previous: int = 0,
    ) -> None:
        """Set up the layer. For ``buckets``, ``farthest`` see ``t5_buckets``; ``previous`` heads begin by looking back.

        The first of these heads looks at the previous token, the second at the one before that, and so on.
        """
        super().__init__()
        self.heads = heads
        self.groups = heads if key_value_heads is None else key_value_heads
        if (head_dim is None and hidden % heads) or heads % self.groups:
            raise InvalidArgument(
                "hidden must be a multiple of heads (or pass head_dim), and heads of key_value_heads; got hidden "
                f"{hidden}, heads {heads}, key_value_heads {self.groups}"
            )
        if window < 1:
            raise InvalidArgument(f"window must be at least 1, not {window}")
        if not 0 <= previous <= min(heads, buckets // 2 - 1):  # shorter distances have buckets of their own
            raise InvalidArgument(
                f"previous must be from 0 to {min(heads, buckets // 2 - 1)} for {heads} heads and {buckets} buckets, "
                f"not {previous}"
            )
        self.window, self.farthest = window, farthest
        dim = hidden // heads if head_dim is None else head_dim
        self.q = nn.Linear(hidden, heads * dim, bias=False)
        self.kv = nn.Linear(hidden, 2 * self.groups * dim, bias=False)
        self.out = nn.Linear(heads * dim, hidden, bias=False)
        bias = torch.zeros(buckets, heads)
        for head in range(previous):
            bias[head + 1, head] = LOOKS_BACK
        self.bias = nn.Parameter(bias)

    def forward(self, x: Tensor, past: States | None = None, empty: Tensor | None = None) -> tuple[Tensor, States]:
        """Return ``[B, T, hidden]`` of ``x [B, T, hidden]`` after ``past``, and the states of the segment itself.

        The first ``empty [B]`` tokens of each row of ``past`` do not exist.
        """
        q, states = self.project(x)
        k, v = after(past, states)
        return self.out(merged(self.attend(q, k, v, self.mask(q, k, empty), None))), states

    def project(self, x: Tensor) -> tuple[Tensor, States]:
        """Return queries ``[B, H, T, D]``, and keys and values ``[B, G, T, D]``."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4)
        return q, (k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
        """Return ``[B, H, T, D]``: attention of ``q`` to a window ``k, v [B, G, n, D]``."""
        grouped = self.heads != self.groups
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)

    def mask(self, q: Tensor, k: Tensor, empty: Tensor | None) -> Tensor:
        """Return the mask to add to the scores, ``[B or 1, H, T, n]``: the bias, or -inf for unseen keys.

        The last query and the last key are the same token.
        """
        queries, keys = q.shape[2], k.shape[2]
        # By distance, from the nearest future to the farthest past. Each query's piece begins one place further on.
        distance = torch.arange(1 - queries, keys, device=q.device)
        bias = self.bias[t5_buckets(distance, buckets=len(self.bias), farthest=self.farthest)]
        bias = bias.masked_fill(((distance < 0) | (distance > self.window)).unsqueeze(1), -torch.inf)
        pieces = bias.flip(0).T.unfold(1, keys, 1).flip(1)  # [H, T, n]
        if empty is None:
            return pieces.unsqueeze(0).to(q.dtype)
        missing = torch.arange(keys, device=q.device) < empty.unsqueeze(1)
        return pieces.to(q.dtype).masked_fill(missing[:, None, None], -torch.inf)


class KNNAttention(WindowAttention):
    """Attention to a window, and to tokens that a memory finds.

    The layer only reads from a memory. The caller appends the returned states before the search of the next segment, so
    a segment never finds itself. In training it appends them after the backward pass, which needs the found tokens
    unchanged.
    """

    def __init__(self, hidden: int, heads: int, *, top_k: int = 32, joint: bool = False, **window: Any) -> None:
        """Set up the layer; for ``window`` see ``WindowAttention``. Gates begin half open."""
        super().__init__(hidden, heads, **window)
        if top_k < 1:
            raise InvalidArgument(f"top_k must be at least 1, not {top_k}")
        self.top_k = top_k
        self.scale = nn.Parameter(torch.full((heads,), math.log(FIRST_SCALE)))
        """The logarithm of the factor on the scores of each head."""
        self.gate = None if joint else nn.Parameter(torch.zeros(heads))

    def forward(
        self,
        x: Tensor,
        past: States | None = None,
        empty: Tensor | None = None,
        memory: TokenMemory | None = None,
        tell: Tell | None = None,
    ) -> tuple[Tensor, States]:
        """Attend as ``WindowAttention`` does; ``memory`` is searched with the queries of the segment.

        ``tell`` is called with the arguments of ``weights_of``, from which the layer's mix follows.
        """
        q, states = self.project(x)
        found = None if memory is None else memory.search(q.detach(), self.top_k)
        k, v = after(past, states)
        mask = self.mask(q, k, empty)
        if found is not None and tell is not None:
            tell(q, k, mask, found)
        return self.out(merged(self.mix(q, k, v, mask, found))), states

    @torch.no_grad()
    def weights_of(self, q: Tensor, k: Tensor, mask: Tensor, found: Neighbours) -> tuple[Tensor, Tensor]:
        """Return scores and weights ``[B, H, T, K]`` of the found tokens, where weights are their parts in ``mix``.

        Without ``joint`` the weights sum to the gate. With it they sum to the part of one softmax that the window
        leaves. Where nothing was found, the score is -inf and the weight 0.
        """
        factor = self.scale.exp()[:, None, None]
        scores = factor * products(q, found.keys, found.ids)
        lse = scores.logsumexp(-1, keepdim=True)
        if self.gate is None:
            local = (q * factor) @ k.repeat_interleave(self.heads // self.groups, 1).transpose(-1, -2) + mask
            lse = torch.logaddexp(lse, local.logsumexp(-1, keepdim=True))
        weights = torch.exp(scores - lse.nan_to_num(neginf=0.0))
        return scores, weights if self.gate is None else weights * self.gate.sigmoid()[:, None, None]

    def project(self, x: Tensor) -> tuple[Tensor, States]:
        """Project as ``WindowAttention`` does; queries and keys have length 1."""
        q, (k, v) = super().project(x)
        return F.normalize(q, dim=-1), (F.normalize(k, dim=-1), v)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, found: Neighbours | None) -> Tensor:
        """Return ``[B, H, T, D]``: attention of ``q`` to a window and to the found tokens."""
        factor = self.scale.exp()
        scaled = q * factor[:, None, None]
        if found is not None and self.gate is None:
            local = block_attention(scaled, k, v, mask=mask, scale=1.0)
            far = knn_attention_with_lse(q, *found, scale=factor)
            return merge_attention(*zip(local, far, strict=True))[0]
        out = self.attend(scaled, k, v, mask, 1.0)
        if found is None or self.gate is None:
            return out
        return knn_attention(q, *found, scale=factor, local=out, gate=self.gate)


def products(queries: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Return products of ``queries [B, H, T, D]`` with ``keys [B, G, N, D]`` at ``ids [B, H, T, K]``, -inf for -1."""
    batch, heads = queries.shape[:2]
    if not keys.shape[2]:
        return queries.new_full(ids.shape, -torch.inf)
    rows = torch.arange(batch, device=ids.device)[:, None, None, None]
    groups = (torch.arange(heads, device=ids.device) // (heads // keys.shape[1]))[:, None, None]
    found = keys[rows, groups, ids.clamp(min=0)]  # [B, H, T, K, D]
    return torch.einsum("bhtd,bhtkd->bhtk", queries.to(found.dtype), found).masked_fill(ids < 0, -torch.inf)
