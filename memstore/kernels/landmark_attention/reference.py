"""Landmark attention as in the paper, with all weights in memory: the reference for faster forms.

Mohtashami & Jaggi, *Random-Access Infinite Context Length for Transformers* (NeurIPS 2023), equations 1-4. There,
``p_j`` is the landmark of the block of token ``j``, and a query ``i`` puts the tokens into groups. The tokens of each
other block are one group. The tokens of its own block and the landmarks of the other blocks are together another group.
The landmark of its own block is ignored. A softmax runs over each group (``GroupedSoftmax``), and

    weight[i, j] = softmax within the group of i                                  for a token of the own block
    weight[i, j] = softmax within the block of j * softmax of p_j within the group of i     for the other tokens
    weight[i, j] = 0                                                              for landmarks

The softmax within a block is ``exp(s_j - LSE)``, with the log-sum-exp ``LSE`` of its scores. So all weights are *one*
softmax over ordinary tokens, of ``s_j`` in the own block and of ``s_j + s_{p_j} - LSE`` in the others. The code
computes this, with a factor ``ramp`` on ``s_{p_j} - LSE``: 1 is the paper, 0 an ordinary softmax.

A deliberate deviation: if a block has no visible token, its landmark is ignored, because its weight could go to no
token. The equations do not cover such a block, and would lose this weight.
"""

from __future__ import annotations

import torch
from torch import Tensor


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_landmark: Tensor,
    *,
    key_padding: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    ramp: float,
    scale: float,
    causal: bool,
) -> Tensor:
    """Take ``q [B, H, Tq, D]``, ``k, v [B, G, Tk, D]``, ``is_landmark [B, Tk]`` -> ``[B, H, Tq, Dv]``."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    tokens, first = k.shape[2], k.shape[2] - q.shape[2]
    real = torch.ones_like(is_landmark) if key_padding is None else key_padding
    landmark = is_landmark & real
    block, document = numbered(landmark, documents)
    landmark_at, complete = landmarks(landmark, block)
    position = torch.arange(tokens, device=q.device)
    back = position[first:, None] - position  # [Tq, Tk]

    visible = real[:, first:, None] & real[:, None] & (document[:, first:, None] == document[:, None])
    if causal:
        visible = visible & (back >= 0)
    if window is not None:
        visible = visible & (back < window)
    own = block[:, first:, None] == block[:, None]  # [B, Tq, Tk]
    rows = landmark_at[:, None].expand_as(own)
    handed = visible.gather(2, rows) & complete[:, None]  # the landmark of another block is visible
    ordinary = (visible & ~landmark[:, None] & (own | handed)).unsqueeze(1)

    heads = q.shape[1] // k.shape[1]
    queries = torch.where(real[:, None, first:, None], q, 0).to(dtype)
    keys, values = (torch.where(real[:, None, :, None], x, 0).to(dtype).repeat_interleave(heads, dim=1) for x in (k, v))
    scores = scale * queries @ keys.mT  # [B, H, Tq, Tk]
    inside = within_blocks(scores, ordinary, block)
    bias = ramp * (scores.gather(3, rows.unsqueeze(1).expand_as(scores)) - inside)
    total = torch.where(own.unsqueeze(1), scores, scores + bias).masked_fill(~ordinary, float("-inf"))
    sees = ordinary.any(-1, keepdim=True)
    weights = torch.where(sees, total, 0).softmax(-1) * sees
    return (weights @ values).to(q.dtype)


def numbered(landmark: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Number the block and the document of each token, ``[B, Tk]`` each, counted from 0 along a row.

    A block ends with its landmark, or with its document; a document ends where the number in ``documents`` changes.
    """
    begins = torch.zeros_like(landmark)
    if documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    document = begins.cumsum(1)
    begins = begins.clone()
    begins[:, 1:] |= landmark[:, :-1]
    return begins.cumsum(1), document


def landmarks(landmark: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each token's landmark (any position if it has none), and whether it has one."""
    tokens = landmark.shape[1]
    position = torch.arange(tokens, device=landmark.device)
    following = torch.where(landmark, position, tokens).flip(1).cummin(1).values.flip(1)
    at = following.clamp(max=tokens - 1)
    return at, (following < tokens) & (block.gather(1, at) == block)


def within_blocks(scores: Tensor, ordinary: Tensor, block: Tensor) -> Tensor:
    """Return the log-sum-exp of the ordinary scores of each token's block: ``[B, H, Tq, Tk]``; finite if empty."""
    place = block[:, None, None].expand_as(scores)
    masked = scores.masked_fill(~ordinary, float("-inf"))
    none = torch.full_like(scores, float("-inf"))
    highest = none.scatter_reduce(3, place, masked, "amax").gather(3, place).detach()
    highest = highest.masked_fill(highest.isinf(), 0)
    grown = (scores - highest).masked_fill(~ordinary, float("-inf")).exp()
    total = torch.zeros_like(scores).scatter_add(3, place, grown).gather(3, place)
    return highest + torch.where(total > 0, total, 1).log()
