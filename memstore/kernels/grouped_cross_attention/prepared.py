"""Grouped cross attention to the same list many times, as in decoding token by token.

In a small model the cost of a token is mainly the number of operations on it. So work that does not depend on the
queries is done once for a list: blocks are joined, keys transposed and scaled, values multiplied by the weights of
their blocks. Softmax-off-by-one becomes an ordinary softmax, with one more key and value of zeros in each block. Each
token then needs two products with a softmax between them. In a small model these products also include the projections
of the queries and of the results (``fold``).

The weights are in the values, so this form gives the retriever no separate gradient; it is for inference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FOLDED = 1 << 18
"""Numbers in the keys of a row up to which projections are folded into a list; more would take longer to read."""


class PreparedList(NamedTuple):
    """One list of blocks for each row, ready for ``attend``. ``S'`` is ``S``, or ``S + 1`` with softmax-off-by-one."""

    keys: Tensor
    """``[B * G, D, K * S']``"""
    values: Tensor
    """``[B * G, K * S', Dv]``"""
    size: int
    """S'"""
    groups: int
    """G"""


def prepare(
    k: Tensor, v: Tensor, weights: Tensor, blocks: Tensor, *, scale: float | None = None, off_by_one: bool = True
) -> PreparedList:
    """Prepare ``k, v [B, K, G, S, D]`` of the chosen ``blocks [B, K]`` (-1: none) with their ``weights [B, K]``."""
    there = (blocks >= 0)[:, :, None, None, None]
    # The states of a missing block may be NaN.
    keys = torch.where(there, k * (k.shape[-1] ** -0.5 if scale is None else scale), 0)
    values = torch.where(there, (v * weights[:, :, None, None, None]).to(v.dtype), 0)
    if off_by_one:
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
    batch, chosen, groups, size, _ = keys.shape
    return PreparedList(
        keys.permute(0, 2, 4, 1, 3).reshape(batch * groups, -1, chosen * size),
        values.transpose(1, 2).reshape(batch * groups, chosen * size, -1),
        size,
        groups,
    )


def attend(q: Tensor, prepared: PreparedList) -> Tensor:
    """Attend with projected queries ``[B, T, H * D]`` to the list of their row -> ``[B, T, H * Dv]``."""
    keys, values, size, _ = prepared
    batch, tokens, inner = q.shape
    many, dim, joined = keys.shape
    rows = batch * tokens * inner // (many * dim)  # R * T: the heads of a group count as more queries
    if tokens != 1:
        q = q.view(batch, tokens, inner // dim, dim).transpose(1, 2).contiguous()
    scores = torch.bmm(q.view(many, rows, dim), keys)
    p = scores.view(many, rows, joined // size, size).softmax(-1).view(many, rows, joined)
    out = torch.bmm(p, values)
    if tokens == 1:
        return out.view(batch, 1, -1)
    return out.view(batch, inner // dim, tokens, values.shape[2]).transpose(1, 2).flatten(2)


class FoldedList(NamedTuple):
    """A prepared list that includes the projections of one layer: the heads' keys and values side by side."""

    keys: Tensor
    """``[B, hidden, H * K * S']``"""
    values: Tensor
    """``[B, H * K * S', hidden]``"""
    size: int
    """S'"""


Ready = PreparedList | FoldedList
"""A list of each row, ready for the tokens of one layer."""


def fold(prepared: PreparedList, query: Tensor, out: Tensor) -> FoldedList | None:
    """Fold a layer's weights ``query [H * D, hidden]`` and ``out [hidden, H * Dv]`` into ``prepared``.

    Return None if the result is so large that two small products before and after are faster.
    """
    keys, values, size, groups = prepared
    many, dim, joined = keys.shape
    if len(query) // dim * joined * len(out) > FOLDED:
        return None
    by_head = keys.view(many // groups, groups, dim, joined), query.view(groups, -1, dim, len(out))
    folded_keys = torch.einsum("bgdj,grdn->bngrj", *by_head).flatten(2)
    by_head = values.view(many // groups, groups, joined, -1), out.view(len(out), groups, -1, values.shape[2])
    folded_values = torch.einsum("bgjv,ngrv->bgrjn", *by_head).flatten(1, 3)
    return FoldedList(folded_keys, folded_values, size)


def attend_folded(x: Tensor, lengths: Tensor, folded: FoldedList) -> Tensor:
    """Return ``x [B, T, hidden]`` plus its result, divided by ``lengths [B, T, 1]``, from the list of its row."""
    keys, values, size = folded
    scores = torch.bmm(x, keys).div_(lengths)
    p = scores.view(*scores.shape[:2], keys.shape[2] // size, size).softmax(-1).view(scores.shape)
    return torch.baddbmm(x, p, values)
