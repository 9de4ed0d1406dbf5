"""HiLS attention: blocks are chosen and weighted by an estimate of their log-sum-exp, beside a window.

``hils_attention`` is a layer over a whole text, for training. The others are its steps, for callers that store keys,
values and landmarks themselves. A decoding step pools a complete block, attends to its window, chooses blocks, attends
to them, and touches nothing else. *HiLS-Attention*, arXiv 2607.02980 (2026); ``reference.py`` has the equations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import Backend, check_device, check_grouped, pick, shapes, triton_problem
from memstore.kernels.hils_attention import fused, reference
from memstore.kernels.hils_attention.fused import attend_chosen as attend_chosen
from memstore.kernels.hils_attention.fused import best_blocks as best_blocks
from memstore.kernels.hils_attention.fused import choose_blocks as choose_blocks
from memstore.kernels.hils_attention.fused import window_attention as window_attention
from memstore.kernels.hils_attention.reference import block_weights as block_weights
from memstore.kernels.hils_attention.reference import pool_landmarks as pool_landmarks


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
    reference.check_sizes(block_size, window, top_k)
    backend = pick(backend, q, lambda: _triton_problem(q, k, v, u, block_size))
    if not q.numel():
        return q + u + torch.stack([x.sum().to(q.dtype) for x in (k, v)]).sum()  # zero, with gradients of 0
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    sizes = fused.Sizes(block_size, window, top_k, softmax1, scale)
    with torch.autocast(q.device.type, enabled=False):  # sums are in float32, autocast would round their products
        match backend:
            case "reference":
                return reference.hils_attention(q, k, v, u, **sizes._asdict())
            case "triton":
                from memstore.kernels.hils_attention import triton

                return triton.hils_attention(q, k, v, u, sizes)
            case _:
                return fused.hils_attention(q, k, v, u, sizes)


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


def _check(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape or u.shape != q.shape or q.shape[2] != k.shape[2]:
        raise InvalidArgument(f"expected q, u [B, H, T, D] and k, v [B, G, T, D], got {shapes(q=q, k=k, v=v, u=u)}")
    check_grouped(q, k, v, "q [B, H, T, D] and k, v [B, G, T, D]")
    check_device(q=q, k=k, v=v, u=u)
