"""Public functions of HiLS attention: meaning is checked here, the work is done in the chosen back end.

``hils_attention`` is a layer over a whole text, to train with. The others are its steps, for those who keep keys,
values and landmarks elsewhere: a step of decoding pools the block that is complete, attends to its window, chooses, and
attends to what was chosen, and touches nothing else. *HiLS-Attention*, arXiv 2607.02980 (2026); ``reference.py`` has
the equations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import memstore.kernels.hils_attention.fused as fused
import memstore.kernels.hils_attention.reference as reference
from memstore.errors import InvalidArgument
from memstore.kernels._backends import INTEGERS, Backend, check_device, check_grouped, pick, shapes, triton_problem


def hils_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    *,
    block_size: int,
    window: int,
    top_k: int,
    softmax1: bool = False,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention to a window and to the ``top_k`` earlier blocks with the largest estimated share, in one softmax.

    HiLS-Attention (arXiv 2607.02980). Position ``t`` is a landmark where ``(t + 1) % block_size == 0``; nobody attends
    to landmarks, which attend and ask as any token does. Weights of blocks are estimates of their log-sum-exp, weights
    within a block are exact. A text that is shorter than a block is its window alone.

    Args:
        q: queries ``[B, H, T, D]``, rotated; landmarks count.
        k: keys ``[B, G, T, D]``, rotated; ``H`` is a multiple of ``G``.
        v: values ``[B, G, T, D]``.
        u: landmark queries ``[B, H, T, D]``, rotated: what tokens compare with landmarks, and landmarks with their
            block.
        block_size: tokens of a block, its landmark counted.
        window: a token sees so many positions, itself counted, and what is before them in the first one's block.
        top_k: blocks that each token chooses for each key-value head.
        softmax1: one more score of 0, whose weight is lost.
        scale: factor on the scores; ``D ** -0.5`` if None.
        backend: ``"reference"``, ``"torch"`` (any device), ``"triton"`` (a GPU, or Triton's interpreter), or
            ``"auto"``: ``"triton"`` on a GPU where it can, but for float32, else ``"torch"``.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q``; 0 where a token sees nothing. Differentiable in ``q``, ``k``, ``v`` and
        ``u`` (once; ``"reference"`` any number of times); the choice itself has no gradient.

    Raises:
        InvalidArgument: shapes, types, devices or numbers do not fit, or the back end is not available.
    """
    _check(q, k, v, u)
    _check_sizes(block_size, window, top_k)
    backend = pick(backend, q, lambda: _triton_problem(q, k, v, u, block_size))
    if not q.numel():
        return q + u + torch.stack([x.sum().to(q.dtype) for x in (k, v)]).sum()  # nothing, with gradients of 0
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options: dict[str, Any] = {
        "size": block_size,
        "window": window,
        "top_k": top_k,
        "softmax1": softmax1,
        "scale": scale,
    }
    match backend:
        case "reference":
            return reference.hils_attention(q, k, v, u, **options)
        case "triton":
            from memstore.kernels.hils_attention import triton

            return triton.hils_attention(q, k, v, u, **options)
        case _:
            return fused.hils_attention(q, k, v, u, **options)


def _triton_problem(q: Tensor, k: Tensor, v: Tensor, u: Tensor, block_size: int) -> str | None:
    """Why Triton cannot compute this, and what to do; None if it can."""
    if problem := triton_problem(q, k, v, u, largest=q.shape[-1]):
        return problem
    from memstore.kernels.hils_attention import triton

    if q.dtype == torch.float32 and q.device.type == "cuda":  # sums of three products would not stay in registers
        return "takes float16 or bfloat16 on a GPU; cast them, or use 'auto' or 'torch'"
    most, largest = triton.LONGEST, triton.LARGEST_HEAD
    if block_size > most or q.shape[-1] > largest:
        got = f"{block_size} and {q.shape[-1]}; use 'auto' or 'torch'"
        return f"has blocks of at most {most} tokens and heads of at most {largest}, got {got}"
    return None


def pool_landmarks(m: Tensor, keys: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Landmarks of complete blocks: the mean key under the landmark's own query, and the entropy of that mean.

    Args:
        m: ``[B, H, N, D]``: the landmark query ``u`` of each block, at its landmark's place.
        keys: ``[B, G, N, S - 1, D]``: those of the block's tokens, rotated, without the landmark.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        Mean keys ``[B, H, N, D]`` in the dtype of ``m``, and entropies ``[B, H, N]`` in float32 or better. Raises
        ``InvalidArgument`` for shapes that do not fit.
    """
    if m.dim() != 4 or keys.dim() != 5 or keys.shape[2] != m.shape[2] or keys.shape[-1] != m.shape[-1]:
        raise InvalidArgument(f"expected m [B, H, N, D] and keys [B, G, N, S - 1, D], got {shapes(m=m, keys=keys)}")
    if len(m) != len(keys) or not keys.shape[1] or m.shape[1] % keys.shape[1] or not keys.shape[3]:
        raise InvalidArgument(f"H must be a multiple of G, and blocks have tokens, got {shapes(m=m, keys=keys)}")
    return reference.pool_landmarks(m, keys, scale=_scale(m, scale))


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    window: int,
    first: int = 0,
    widened: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to the last ``window`` positions without landmarks, and its log-sum-exp.

    Args:
        q: queries ``[B, H, M, D]``, those of the last ``M`` positions of the keys.
        k: keys ``[B, G, T, D]``.
        v: values ``[B, G, T, D]``.
        block_size: tokens of a block, its landmark counted.
        window: positions that a query sees, its own counted.
        first: the position of the first key; those before it are as if they were not there.
        widened: down to the beginning of the first position's block, as HiLS layers see it; else exactly.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        ``[B, H, M, D]`` in the dtype of ``q`` and ``[B, H, M]`` in float32 or better; 0 and -inf where nothing is
        seen. Only the output is differentiable, once. Raises ``InvalidArgument`` for what does not fit.
    """
    check_grouped(q, k, v)
    _check_sizes(block_size, window, 1)
    if q.shape[2] > k.shape[2] or first < 0:
        raise InvalidArgument(f"queries are those of the last keys, from position 0 on: {shapes(q=q, k=k)}, {first=}")
    place = {"size": block_size, "window": window, "first": first}
    return fused.window_attention(q, k, v, widened=widened, scale=_scale(q, scale), **place)


def choose_blocks(
    u: Tensor,
    kbar: Tensor,
    bias: Tensor,
    lse: Tensor,
    *,
    groups: int,
    block_size: int,
    window: int,
    top_k: int,
    first: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` blocks with the largest estimated share of attention, among those before each token's window.

    A block's estimate is ``scale * u . kbar + bias``. Its share is taken of all candidates and the window, for each
    head; where heads share a list, the largest share counts.

    Args:
        u: landmark queries ``[B, H, M, D]`` at positions from ``first`` on.
        kbar: mean keys ``[B, H, N, D]`` of the blocks from 0 on.
        bias: entropies ``[B, H, N]``.
        lse: ``[B, H, M]``: log-sum-exp of the window.
        groups: key-value heads, each of which has a list.
        block_size: tokens of a block, its landmark counted.
        window: as in ``hils_attention``.
        top_k: blocks of a list.
        first: the position of the first query.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        Blocks ``[B, G, M, K]``, ascending, then -1; and estimates ``[B, H, M, K]``, -inf there. Raises
        ``InvalidArgument`` for what does not fit.
    """
    fit = u.dim() == 4 and kbar.shape[:2] == u.shape[:2] and kbar.shape[-1] == u.shape[-1]
    if not fit or bias.shape != kbar.shape[:-1] or lse.shape != u.shape[:-1] or groups < 1 or u.shape[1] % groups:
        raise InvalidArgument(f"shapes do not fit {groups} groups: {shapes(u=u, kbar=kbar, bias=bias, lse=lse)}")
    _check_sizes(block_size, window, top_k)
    place = {"size": block_size, "window": window, "top_k": top_k, "first": first}
    return fused.choose_blocks(u, kbar, bias, lse, groups=groups, scale=_scale(u, scale), **place)


def best_blocks(scores: Tensor, lse: Tensor, *, groups: int, top_k: int) -> tuple[Tensor, Tensor]:
    """What ``choose_blocks`` makes of estimates ``scores [B, H, M, N]`` that are known: blocks, and their scores."""
    return fused.best_blocks(scores, lse, groups=groups, top_k=top_k)


def block_weights(scores: Tensor, lse: Tensor, *, softmax1: bool = False) -> Tensor:
    """Weights of chosen blocks and, last, of the window: one softmax over ``scores [B, H, M, K]`` and ``lse``.

    ``lse [B, H, M]``; ``softmax1``: beside one more score of 0. Returns ``[B, H, M, K + 1]``.
    """
    if scores.shape[:-1] != lse.shape:
        raise InvalidArgument(f"expected scores [B, H, M, K] and lse [B, H, M], got {shapes(scores=scores, lse=lse)}")
    return reference.block_weights(scores, lse, softmax1=softmax1)


def attend_chosen(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, weights: Tensor, *, scale: float | None = None
) -> Tensor:
    """Attention to each chosen block by itself, summed with the weights of the blocks.

    Args:
        q: queries ``[B, H, M, D]``.
        keys: ``[B, G, N, S - 1, D]``: those of the blocks' tokens.
        values: shaped like ``keys``.
        blocks: ``[B, G, M, K]``, int64: the chosen ones, below ``N``; -1 for none.
        weights: ``[B, H, M, K]``, 0 where there is none.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        ``[B, H, M, D]`` in float32 or better. Not differentiable. Raises ``InvalidArgument`` for what does not fit.
    """
    fit = q.dim() == 4 and keys.dim() == 5 and keys.shape == values.shape and keys.shape[-1] == q.shape[-1]
    fit = fit and blocks.shape[:3] == (len(q), keys.shape[1], q.shape[2])
    if not fit or weights.shape != (*q.shape[:-1], blocks.shape[-1]) or blocks.dtype not in INTEGERS:
        given = shapes(q=q, keys=keys, values=values, blocks=blocks, weights=weights)
        raise InvalidArgument(f"shapes do not fit: {given}")
    check_device(q=q, keys=keys, values=values, blocks=blocks, weights=weights)
    return fused.attend_chosen(q, keys, values, blocks, weights, scale=_scale(q, scale))


def _scale(x: Tensor, scale: float | None) -> float:
    return float(x.shape[-1] ** -0.5) if scale is None else float(scale)


def _check(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape or u.shape != q.shape or q.shape[2] != k.shape[2]:
        raise InvalidArgument(f"expected q, u [B, H, T, D] and k, v [B, G, T, D], got {shapes(q=q, k=k, v=v, u=u)}")
    check_grouped(q, k, v)
    check_device(q=q, k=k, v=v, u=u)


def _check_sizes(block_size: int, window: int, top_k: int) -> None:
    if block_size < 2:
        raise InvalidArgument(f"block_size counts the landmark, so it is at least 2, got {block_size}")
    if window < 1 or top_k < 1:
        raise InvalidArgument(f"window and top_k are at least 1, got {window} and {top_k}")
