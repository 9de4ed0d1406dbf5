"""Landmark attention: a softmax over landmarks decides how much attention each earlier block gets.

Mohtashami & Jaggi, *Random-Access Infinite Context Length for Transformers* (NeurIPS 2023), equations 1-4. There,
``p_j`` is the landmark of the block of token ``j``, and a query ``i`` puts the tokens into groups. The tokens of each
other block are one group. The tokens of its own block and the landmarks of the other blocks are together another group.
The landmark of its own block is ignored. A softmax runs over each group (``GroupedSoftmax``), and

    weight[i, j] = softmax within the group of i                                  for a token of the own block
    weight[i, j] = softmax within the block of j * softmax of p_j within the group of i     for the other tokens
    weight[i, j] = 0                                                              for landmarks

The softmax within a block is ``exp(s_j - LSE)``, with the log-sum-exp ``LSE`` of its scores. So all weights are *one*
softmax over ordinary tokens, of ``s_j`` in the own block and of ``s_j + s_{p_j} - LSE`` in the others. The reference
computes this, with a factor ``ramp`` on ``s_{p_j} - LSE``: 1 is the paper, 0 an ordinary softmax.

A deliberate deviation: if a block has no visible token, its landmark is ignored, because its weight could go to no
token. The equations do not cover such a block, and would lose this weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import (
    INTEGERS,
    Backend,
    check_device,
    check_grouped,
    nothing,
    pick,
    shapes,
    triton_problem,
)

if TYPE_CHECKING:
    from memstore.kernels.landmark_attention import layout


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_landmark: Tensor,
    *,
    key_padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    ramp: float = 1.0,
    causal: bool = True,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute attention in which the landmark of an earlier block decides how much weight the block gets.

    Mohtashami & Jaggi, NeurIPS 2023, equations 1-4. A block is a run of tokens up to its landmark, which is its last
    token. Tokens after the last landmark are an incomplete block. A query attends to the ordinary tokens of its own
    block and to the landmarks of earlier blocks in one softmax. The weight of a landmark goes to the ordinary tokens of
    its block, in proportion to a softmax within the block. No query attends to the landmark of its own block. Blocks
    may have any length, different in each row, and the first may be cut short. A block may consist only of its
    landmark. Such a landmark has no tokens for its weight, so it gets none.

    Args:
        q: queries ``[B, H, Tq, D]`` of the last ``Tq`` of the ``Tk`` positions.
        k: keys ``[B, G, Tk, D]``; ``H`` is a multiple of ``G``.
        v: values ``[B, G, Tk, Dv]``.
        is_landmark: ``[B, Tk]``, boolean, True for landmarks.
        key_padding: ``[B, Tk]``, boolean, True for real tokens. Padding is neither seen nor a landmark, and the output
            of its queries is 0.
        documents: ``[B, Tk]`` integers, for several documents in one row: where the number changes, a document and its
            last block end, even if the new number occurred before. Attention stays within a document.
        window: a query sees the key at its own position and ``window - 1`` positions before it; other keys are ignored.
            So a block cut by the window keeps its landmark, whose weight goes to the tokens left in the window. None:
            no limit.
        ramp: the influence of landmarks, from 0 (a causal softmax over ordinary tokens) to 1 (the paper): an ordinary
            token outside the own block has the score ``s + ramp * (s_landmark - LSE)``, with the log-sum-exp ``LSE`` of
            the scores of its block. Training begins with 0, because landmarks are not learned otherwise.
        causal: False lets a query see all of its own block, and later blocks that have a landmark.
        scale: factor on the scores; ``D ** -0.5`` if None.
        backend: ``"reference"``, ``"torch"`` (any device), ``"triton"`` (a GPU, or Triton's interpreter), or
            ``"auto"``: ``"triton"`` on a GPU if it can, except for float32, else ``"torch"``.

    Returns:
        ``[B, H, Tq, Dv]`` in the dtype of ``q``; 0 if a query sees no token. Differentiable in ``q``, ``k`` and ``v``
        (once; ``"reference"`` any number of times).

    Raises:
        InvalidArgument: shapes, types, devices or numbers do not fit, or the back end is not available.
    """
    _check(q, k, v)
    _check_rows(is_landmark, key_padding, documents, k)
    if window is not None and window < 1:
        raise InvalidArgument(
            f"window must be at least 1 (the query's own position), or None for no limit; got {window}"
        )
    if not 0 <= ramp <= 1:
        raise InvalidArgument(f"ramp must be from 0 (ordinary softmax) to 1 (landmark attention), got {ramp}")
    if not (q.numel() and v.shape[-1]):
        return nothing(q, v, k)
    rows = (is_landmark, key_padding, documents)
    if key_padding is not None:  # its states may be NaN
        there = key_padding[:, None, :, None]
        q = torch.where(there[:, :, k.shape[2] - q.shape[2] :], q, 0)
        k, v = torch.where(there, k, 0), torch.where(there, v, 0)
    backend = pick(backend, q, lambda: _triton_problem(q, k, v, rows, window, causal=causal))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options: dict[str, Any] = {"window": window, "ramp": float(ramp), "scale": scale}
    match backend:
        case "triton":
            from memstore.kernels.landmark_attention import triton

            out = triton.landmark_attention(q, k, v, rows, **options)
        case "torch":
            from memstore.kernels.landmark_attention import fused

            out = fused.landmark_attention(q, k, v, rows, causal=causal, **options)
        case _:
            return _reference(q, k, v, rows, causal=causal, **options)
    return out if key_padding is None else torch.where(there[:, :, k.shape[2] - q.shape[2] :], out, 0)


def _triton_problem(
    q: Tensor, k: Tensor, v: Tensor, rows: layout.Rows, window: int | None, *, causal: bool
) -> str | None:
    """Say why Triton cannot compute this, and what to do; None if it can."""
    if not causal:
        return "supports causal attention only; use 'auto' or 'torch'"
    if problem := triton_problem(q, k, v, largest=max(q.shape[-1], v.shape[-1])):
        return problem
    from memstore.kernels.landmark_attention import triton

    longest = triton.tiles(rows, window=window).size
    if longest > triton.LONGEST:
        return f"takes blocks of at most {triton.LONGEST} tokens, got {longest}; use 'auto' or 'torch'"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_grouped(q, k, v, "q [B, H, Tq, D], k [B, G, Tk, D] and v [B, G, Tk, Dv]")
    check_device(q=q, k=k, v=v)
    if q.shape[2] > k.shape[2]:
        raise InvalidArgument(
            "the queries must belong to the last positions, so there must be at least as many keys as queries; "
            f"got {shapes(q=q, k=k, v=v)}"
        )


def _check_rows(is_landmark: Tensor, key_padding: Tensor | None, documents: Tensor | None, k: Tensor) -> None:
    expected = (k.shape[0], k.shape[2])
    for name, x, kind, types in (
        ("is_landmark", is_landmark, "boolean", (torch.bool,)),
        ("key_padding", key_padding, "boolean", (torch.bool,)),
        ("documents", documents, "int32 or int64", INTEGERS),
    ):
        if x is None:
            continue
        if tuple(x.shape) != expected or x.dtype not in types:
            raise InvalidArgument(
                f"{name} must be [B, Tk] = {list(expected)} and {kind}, got {list(x.shape)} of {x.dtype}"
            )
        check_device(**{name: x, "k": k})


def _reference(
    q: Tensor, k: Tensor, v: Tensor, rows: layout.Rows, *, window: int | None, ramp: float, scale: float, causal: bool
) -> Tensor:
    """Attend by the definition, with all weights in memory."""
    from memstore.kernels.landmark_attention.layout import numbered

    dtype = torch.promote_types(q.dtype, torch.float32)
    is_landmark, key_padding, documents = rows
    tokens, first = k.shape[2], k.shape[2] - q.shape[2]
    real = torch.ones_like(is_landmark) if key_padding is None else key_padding
    landmark = is_landmark & real
    block, document = numbered(landmark, documents)
    landmark_at, complete = _landmarks(landmark, block)
    position = torch.arange(tokens, device=q.device)
    back = position[first:, None] - position  # [Tq, Tk]

    visible = real[:, first:, None] & real[:, None] & (document[:, first:, None] == document[:, None])
    if causal:
        visible = visible & (back >= 0)
    if window is not None:
        visible = visible & (back < window)
    own = block[:, first:, None] == block[:, None]  # [B, Tq, Tk]
    marks = landmark_at[:, None].expand_as(own)
    handed = visible.gather(2, marks) & complete[:, None]  # the landmark of another block is visible
    ordinary = (visible & ~landmark[:, None] & (own | handed)).unsqueeze(1)

    heads = q.shape[1] // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(heads, dim=1) for x in (k, v))
    scores = scale * q.to(dtype) @ keys.mT  # [B, H, Tq, Tk]
    inside = _within_blocks(scores, ordinary, block)
    bias = ramp * (scores.gather(3, marks.unsqueeze(1).expand_as(scores)) - inside)
    total = torch.where(own.unsqueeze(1), scores, scores + bias).masked_fill(~ordinary, float("-inf"))
    sees = ordinary.any(-1, keepdim=True)
    weights = torch.where(sees, total, 0).softmax(-1) * sees
    return (weights @ values).to(q.dtype)


def _landmarks(landmark: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each token's landmark (any position if it has none), and whether it has one."""
    tokens = landmark.shape[1]
    position = torch.arange(tokens, device=landmark.device)
    following = torch.where(landmark, position, tokens).flip(1).cummin(1).values.flip(1)
    at = following.clamp(max=tokens - 1)
    return at, (following < tokens) & (block.gather(1, at) == block)


def _within_blocks(scores: Tensor, ordinary: Tensor, block: Tensor) -> Tensor:
    """Return the log-sum-exp of the ordinary scores of each token's block: ``[B, H, Tq, Tk]``; finite if empty."""
    place = block[:, None, None].expand_as(scores)
    masked = scores.masked_fill(~ordinary, float("-inf"))
    none = torch.full_like(scores, float("-inf"))
    highest = none.scatter_reduce(3, place, masked, "amax").gather(3, place).detach()
    highest = highest.masked_fill(highest.isinf(), 0)
    grown = (scores - highest).masked_fill(~ordinary, float("-inf")).exp()
    total = torch.zeros_like(scores).scatter_add(3, place, grown).gather(3, place)
    return highest + torch.where(total > 0, total, 1).log()
