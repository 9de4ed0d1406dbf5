"""Public functions of HiLS attention: they check arguments and call the chosen back end.

``hils_attention`` is a layer over a whole text, for training. The others are its steps, for callers that store keys,
values and landmarks themselves. A decoding step pools a complete block, attends to its window, chooses blocks, attends
to them, and touches nothing else. *HiLS-Attention*, arXiv 2607.02980 (2026); ``reference.py`` has the equations.
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
    """Attend to a window and to the ``top_k`` earlier blocks with the largest estimated share, in one softmax.

    HiLS-Attention (arXiv 2607.02980). Position ``t`` is a landmark if ``(t + 1) % block_size == 0``. No token attends
    to landmarks, but they attend and choose like any token. Weights of blocks use estimates of their log-sum-exp;
    weights within a block are exact. A text shorter than a block has only its window.

    Args:
        q: queries ``[B, H, T, D]``, rotated, landmarks included.
        k: keys ``[B, G, T, D]``, rotated; ``H`` is a multiple of ``G``.
        v: values ``[B, G, T, D]``.
        u: landmark queries ``[B, H, T, D]``, rotated: tokens compare them with landmarks, and landmarks with their
            block.
        block_size: tokens of a block, landmark included.
        window: positions that a token sees, itself included; the first one's block is seen from its beginning.
        top_k: blocks that each token chooses for each key-value head.
        softmax1: add a score of 0, whose weight is dropped.
        scale: factor on the scores; ``D ** -0.5`` if None.
        backend: ``"reference"``, ``"torch"`` (any device), ``"triton"`` (a GPU, or Triton's interpreter), or
            ``"auto"``: ``"triton"`` on a GPU if it can, except for float32, else ``"torch"``.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q``; 0 if a token sees nothing. Differentiable in ``q``, ``k``, ``v`` and
        ``u`` (once; ``"reference"`` any number of times); the choice itself has no gradient.

    Raises:
        InvalidArgument: shapes, types, devices or numbers do not fit, or the back end is not available.
    """
    _check(q, k, v, u)
    _check_sizes(block_size, window, top_k)
    backend = pick(backend, q, lambda: _triton_problem(q, k, v, u, block_size))
    if not q.numel():
        return q + u + torch.stack([x.sum().to(q.dtype) for x in (k, v)]).sum()  # zero, with gradients of 0
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
    """Say why Triton cannot compute this, and what to do; None if it can."""
    if problem := triton_problem(q, k, v, u, largest=q.shape[-1]):
        return problem
    from memstore.kernels.hils_attention import triton

    if q.dtype == torch.float32 and q.device.type == "cuda":  # sums of three products would not stay in registers
        return "takes float16 or bfloat16 on a GPU; convert the tensors, or use 'auto' or 'torch'"
    most, largest = triton.LONGEST, triton.LARGEST_HEAD
    if block_size > most or q.shape[-1] > largest:
        got = f"{block_size} and {q.shape[-1]}; use 'auto' or 'torch'"
        return f"takes blocks of at most {most} tokens and heads of at most {largest}, got {got}"
    return None


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
    """Attend to the last ``window`` positions without landmarks; also return the log-sum-exp.

    Args:
        q: queries ``[B, H, M, D]`` of the last ``M`` positions of the keys.
        k: keys ``[B, G, T, D]``.
        v: values ``[B, G, T, D]``.
        block_size: tokens of a block, landmark included.
        window: positions that a query sees, its own included.
        first: the position of the first key; earlier positions are ignored.
        widened: extend the window to the beginning of the first position's block, as HiLS layers do; else keep it
            exact.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        ``[B, H, M, D]`` in the dtype of ``q`` and ``[B, H, M]`` in float32 or better; 0 and -inf for queries that see
        nothing. Only the output is differentiable, once. Raises ``InvalidArgument`` for arguments that do not fit.
    """
    check_grouped(q, k, v)
    _check_sizes(block_size, window, 1)
    if q.shape[2] > k.shape[2] or first < 0:
        raise InvalidArgument(
            f"the queries must belong to the last keys, and first must be at least 0; got {shapes(q=q, k=k)}, "
            f"first={first!r}"
        )
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
    """Choose the ``top_k`` blocks with the largest estimated share of attention before each token's window.

    A block's estimate is ``scale * u . kbar + bias``. For each head, its share is relative to all candidates and the
    window. If heads share a list, the largest share counts.

    Args:
        u: landmark queries ``[B, H, M, D]`` at positions from ``first`` on.
        kbar: mean keys ``[B, H, N, D]`` of the blocks from 0 on.
        bias: entropies ``[B, H, N]``.
        lse: log-sum-exp of the window ``[B, H, M]``.
        groups: key-value heads, with a list each.
        block_size: tokens of a block, landmark included.
        window: as in ``hils_attention``.
        top_k: blocks of a list.
        first: the position of the first query.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        Blocks ``[B, G, M, K]``, ascending, then -1; and estimates ``[B, H, M, K]``, -inf there. Raises
        ``InvalidArgument`` for arguments that do not fit.
    """
    fit = u.dim() == 4 and kbar.shape[:2] == u.shape[:2] and kbar.shape[-1] == u.shape[-1]
    if not fit or bias.shape != kbar.shape[:-1] or lse.shape != u.shape[:-1] or groups < 1 or u.shape[1] % groups:
        raise InvalidArgument(f"the shapes do not fit {groups} groups: {shapes(u=u, kbar=kbar, bias=bias, lse=lse)}")
    _check_sizes(block_size, window, top_k)
    place = {"size": block_size, "window": window, "top_k": top_k, "first": first}
    return fused.choose_blocks(u, kbar, bias, lse, groups=groups, scale=_scale(u, scale), **place)


def best_blocks(scores: Tensor, lse: Tensor, *, groups: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose blocks as in ``choose_blocks`` by known estimates ``scores [B, H, M, N]``; return their scores too."""
    return fused.best_blocks(scores, lse, groups=groups, top_k=top_k)


def block_weights(scores: Tensor, lse: Tensor, *, softmax1: bool = False) -> Tensor:
    """Return weights of chosen blocks and, last, of the window: one softmax over ``scores [B, H, M, K]`` and ``lse``.

    ``lse`` is ``[B, H, M]``; ``softmax1`` adds a score of 0. Returns ``[B, H, M, K + 1]``.
    """
    if scores.shape[:-1] != lse.shape:
        raise InvalidArgument(f"expected scores [B, H, M, K] and lse [B, H, M], got {shapes(scores=scores, lse=lse)}")
    return reference.block_weights(scores, lse, softmax1=softmax1)


def attend_chosen(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, weights: Tensor, *, scale: float | None = None
) -> Tensor:
    """Attend to each chosen block by itself, and sum with the weights of the blocks.

    Args:
        q: queries ``[B, H, M, D]``.
        keys: ``[B, G, N, S - 1, D]``, of the blocks' tokens.
        values: shaped like ``keys``.
        blocks: chosen blocks ``[B, G, M, K]``, int64 below ``N``; -1 for none.
        weights: ``[B, H, M, K]``, 0 for none.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        ``[B, H, M, D]`` in float32 or better. Not differentiable. Raises ``InvalidArgument`` for arguments that do not
        fit.
    """
    fit = q.dim() == 4 and keys.dim() == 5 and keys.shape == values.shape and keys.shape[-1] == q.shape[-1]
    fit = fit and blocks.shape[:3] == (len(q), keys.shape[1], q.shape[2])
    if not fit or weights.shape != (*q.shape[:-1], blocks.shape[-1]) or blocks.dtype not in INTEGERS:
        given = shapes(q=q, keys=keys, values=values, blocks=blocks, weights=weights)
        raise InvalidArgument(f"the shapes do not fit: {given}")
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
        raise InvalidArgument(f"block_size includes the landmark, so it must be at least 2, got {block_size}")
    if window < 1 or top_k < 1:
        raise InvalidArgument(f"window and top_k must be at least 1, got {window} and {top_k}")
