"""HiLS attention by its definition, with all scores in memory: the reference for faster forms.

*HiLS-Attention* (Hierarchical Landmark Sparse attention, arXiv 2607.02980, 2026). A block has ``S`` positions. The last
one is its landmark; no token attends to landmarks. Token ``t`` sees the blocks from ``edge(t) = floor((t - W + 1) /
S)`` on directly. This is the window; its left edge is widened to the beginning of its block. All blocks before the edge
are candidates. With ``s = D ** -0.5``, queries ``q``, landmark queries ``u``, and ``m`` the ``u`` of a landmark,

    p_j = softmax over the tokens j of block c of s m . k_j
    kbar_c = sum_j p_j k_j          b_c = - sum_j p_j ln p_j                                       (pool_landmarks)
    e_c = s u . kbar_c + b_c                                          a first-order estimate of ln sum_j exp(s q . k_j)
    o_w, L = attention to the window, and its log-sum-exp                                        (window_attention)
    C = the K candidates with the largest  max over the heads of a group of  e_c - ln(exp L + sum_c' exp e_c')
                                                                                                    (choose_blocks)
    w = softmax over [e_c for c in C, L]  (softmax1: and a 0, whose weight is lost)                  (block_weights)
    o = w_L o_w + sum over C of w_c  sum_j softmax over the tokens j of c of (s q . k_j)  v_j        (attend_chosen)

Everything except the choice has a gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import shapes


def hils_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, *, size: int, window: int, top_k: int, softmax1: bool, scale: float
) -> Tensor:
    """Take ``q, u [B, H, T, D]``, ``k, v [B, G, T, D]`` -> ``[B, H, T, D]``: all equations above."""
    out, lse = window_attention(q, k, v, size=size, window=window, first=0, widened=True, scale=scale)
    lse = lse.to(q.dtype)
    keys, values = in_blocks(k, size), in_blocks(v, size)
    kbar, bias = pool_landmarks(u[:, :, size - 1 :: size], keys, scale=scale)
    place = {"size": size, "window": window, "first": 0}
    blocks, scores = choose_blocks(u, kbar, bias, lse, groups=k.shape[1], top_k=top_k, scale=scale, **place)
    weights = block_weights(scores, lse, softmax1=softmax1)
    chunks = attend_chosen(q, keys, values, blocks, weights[..., :-1], scale=scale)
    return (chunks + weights[..., -1:] * out).to(q.dtype)


def check_sizes(block_size: int, window: int, top_k: int = 1) -> None:
    """Raise ``InvalidArgument`` for sizes that no text can have."""
    if block_size < 2:
        raise InvalidArgument(f"block_size includes the landmark, so it must be at least 2, got {block_size}")
    if window < 1 or top_k < 1:
        raise InvalidArgument(f"window and top_k must be at least 1, got {window} and {top_k}")


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Turn ``[B, G, T, D]`` into the tokens of complete blocks, ``[B, G, N, S - 1, D]``."""
    whole = x.shape[2] // size * size
    blocks: Tensor = x[:, :, :whole].unflatten(2, (whole // size, size))
    return blocks[:, :, :, :-1]


def pool_landmarks(m: Tensor, keys: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Pool landmarks of complete blocks: the mean key under the landmark's query, and the entropy of its weights.

    Args:
        m: ``[B, H, N, D]``: the landmark query ``u`` of each block's landmark.
        keys: ``[B, G, N, S - 1, D]``: rotated keys of the block's tokens, without the landmark.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        Mean keys ``[B, H, N, D]`` in the dtype of ``m``, and entropies ``[B, H, N]`` in float32 or better. Raises
        ``InvalidArgument`` for shapes that do not fit.
    """
    if m.dim() != 4 or keys.dim() != 5 or keys.shape[2] != m.shape[2] or keys.shape[-1] != m.shape[-1]:
        raise InvalidArgument(f"expected m [B, H, N, D] and keys [B, G, N, S - 1, D], got {shapes(m=m, keys=keys)}")
    if len(m) != len(keys) or not keys.shape[1] or m.shape[1] % keys.shape[1] or not keys.shape[3]:
        raise InvalidArgument(f"H must be a multiple of G, and a block must have tokens; got {shapes(m=m, keys=keys)}")
    scale = m.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(m.dtype, torch.float32)
    keys = keys.to(wide).repeat_interleave(m.shape[1] // keys.shape[1], 1)
    scores = scale * (keys @ m.to(wide).unsqueeze(-1)).squeeze(-1)  # [B, H, N, S - 1]
    logs = scores.log_softmax(-1)
    p = logs.exp()
    return (p.unsqueeze(-2) @ keys).squeeze(-2).to(m.dtype), -(p * logs).sum(-1)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, size: int, window: int, first: int, widened: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with ``q [B, H, M, D]`` of the last ``M`` positions of ``k, v [B, G, T, D]``, which begin at ``first``.

    Returns the output ``[B, H, M, D]`` and its log-sum-exp ``[B, H, M]``; 0 and -inf for queries that see nothing.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(heads, 1) for x in (k, v))
    place = torch.arange(first, first + k.shape[2], device=q.device)
    at = place[k.shape[2] - q.shape[2] :, None]
    start = (at - window + 1).div(size, rounding_mode="floor") * size if widened else at - window + 1
    seen = (place >= start) & (place <= at) & (place % size != size - 1)
    scores = (scale * q.to(wide) @ keys.mT).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    blind = lse.isneginf().unsqueeze(-1)
    weights = torch.where(blind, 0.0, (scores - torch.where(blind, 0.0, lse.unsqueeze(-1))).exp())
    return (weights @ values).to(q.dtype), lse


def choose_blocks(
    u: Tensor,
    kbar: Tensor,
    bias: Tensor,
    lse: Tensor,
    *,
    groups: int,
    size: int,
    window: int,
    top_k: int,
    first: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Take ``u [B, H, M, D]`` at ``first`` and later, ``kbar [B, H, N, D]``, ``bias [B, H, N]``, ``lse [B, H, M]``.

    Returns the chosen blocks of each of ``G = groups`` key-value heads ``[B, G, M, K]``, ascending, filled up with -1.
    Also returns the estimates ``[B, H, M, K]`` of each head for them, filled up with -inf.
    """
    scores = estimates(u, kbar, bias, scale=scale)
    edge = edges(first, u.shape[2], size, window, u.device)
    candidate = torch.arange(kbar.shape[2], device=u.device) < edge[:, None]
    return best_blocks(scores.masked_fill(~candidate, -math.inf), lse, groups=groups, top_k=top_k)


def edges(first: int, count: int, size: int, window: int, device: torch.device) -> Tensor:
    """Return the first block of each window, for ``count`` positions from ``first`` on: ``[count]``."""
    return (torch.arange(first, first + count, device=device) - window + 1).div(size, rounding_mode="floor")


def estimates(u: Tensor, kbar: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    """Return ``e [B, H, M, N]``."""
    wide = torch.promote_types(u.dtype, torch.float32)
    return scale * u.to(wide) @ kbar.to(wide).mT + bias.to(wide).unsqueeze(-2)


def best_blocks(scores: Tensor, lse: Tensor, *, groups: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose among all candidates by their estimates ``scores [B, H, M, N]``, -inf for other blocks."""
    total = torch.logaddexp(lse.to(scores.dtype), scores.logsumexp(-1)).unsqueeze(-1)
    likely = torch.where(scores.isneginf(), scores, scores - total).unflatten(1, (groups, -1)).amax(2)
    kept = min(top_k, scores.shape[-1])
    best, blocks = likely.detach().topk(kept, -1)
    blocks = torch.where(best.isneginf(), scores.shape[-1], blocks).sort(-1).values
    blocks = F.pad(blocks, (0, top_k - kept), value=scores.shape[-1])
    at = blocks.repeat_interleave(scores.shape[1] // groups, 1)
    chosen = F.pad(scores, (0, 1), value=-math.inf).gather(-1, at)
    return blocks.masked_fill(blocks == scores.shape[-1], -1), chosen


def block_weights(scores: Tensor, lse: Tensor, *, softmax1: bool = False) -> Tensor:
    """Return weights of chosen blocks and, last, of the window: one softmax over ``scores [B, H, M, K]`` and ``lse``.

    ``lse`` is ``[B, H, M]``; ``softmax1`` adds a score of 0, whose weight is dropped. Returns ``[B, H, M, K + 1]``.
    """
    if scores.shape[:-1] != lse.shape:
        raise InvalidArgument(f"expected scores [B, H, M, K] and lse [B, H, M], got {shapes(scores=scores, lse=lse)}")
    logits = torch.cat([scores, lse.to(scores.dtype).unsqueeze(-1)], -1)
    if softmax1:
        return F.pad(logits, (0, 1)).softmax(-1)[..., :-1]
    blind = logits.isneginf().all(-1, keepdim=True)  # a landmark at the beginning whose window is only itself
    return torch.where(blind, 0.0, torch.where(blind, 0.0, logits).softmax(-1))


def attend_chosen(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, weights: Tensor, *, scale: float) -> Tensor:
    """Take ``q [B, H, M, D]``, ``keys, values [B, G, N, S - 1, D]``, ``blocks [B, G, M, K]``, ``weights [B, H, M, K]``.

    Returns the sum over the chosen blocks of weight times attention to the block: ``[B, H, M, D]``.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1] // keys.shape[1]
    keys, values = (x.to(wide).repeat_interleave(heads, 1) for x in (keys, values))
    scores = scale * torch.einsum("bhmd,bhnsd->bhmns", q.to(wide), keys)
    of_all = torch.einsum("bhmns,bhnsd->bhmnd", scores.softmax(-1), values)
    at = blocks.repeat_interleave(heads, 1)
    chosen = F.pad(of_all, (0, 0, 0, 1)).gather(
        3, at.where(at >= 0, keys.shape[2])[..., None].expand(-1, -1, -1, -1, q.shape[-1])
    )
    return (weights.unsqueeze(-1) * chosen).sum(3)
