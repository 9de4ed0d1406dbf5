"""The best blocks found so far, and how to merge more into them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BestBlocks(NamedTuple):
    """At most ``k`` blocks for each of ``R`` queries, in any order; missing ones have id -1 and score -inf."""

    scores: Tensor
    """``[R, k]`` float32"""
    ids: Tensor
    """``[R, k]``"""
    places: Tensor
    """``[R, k]``: see ``chunks.py``"""


def nothing(rows: int, k: int, device: torch.device) -> BestBlocks:
    """Return the best blocks before any block was scored."""
    scores = torch.full((rows, k), -torch.inf, device=device)
    none = torch.full((rows, k), -1, dtype=torch.int64, device=device)
    return BestBlocks(scores, none, none)


def choose(scores: Tensor, ids: Tensor, places: Tensor, k: int) -> BestBlocks:
    """Return the ``k`` best of ``scores [R, n]``, with ``ids`` and ``places`` of ``[n]`` or ``[R, n]``."""
    columns = top(scores, ids, min(k, scores.shape[1]))
    chosen = (each.expand_as(scores).gather(1, columns) for each in (ids, places))
    return BestBlocks(scores.gather(1, columns), *chosen)


def merge(one: BestBlocks, other: BestBlocks, k: int) -> BestBlocks:
    """Return the ``k`` best blocks of both."""
    scores, ids, places = (torch.cat(pair, 1) for pair in zip(one, other, strict=True))
    columns = order(scores, ids)[:, :k]
    return BestBlocks(scores.gather(1, columns), ids.gather(1, columns), places.gather(1, columns))


def top(scores: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return columns ``[R, k]`` of the ``k`` largest ``scores [R, n]``; smaller ids win among equal scores."""
    largest, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    columns, worst = columns[:, :k], largest[:, k - 1 : k]
    # topk takes any of several equal scores. Only if the last place is contested, choose again by id.
    contested = (largest[:, k:] == worst).any(1).nonzero().squeeze(1)
    if contested.numel():
        rivals, limit, numbers = scores[contested], worst[contested], ids.expand_as(scores)[contested]
        rank = torch.where(rivals == limit, -1.0 - numbers.double(), -torch.inf).masked_fill(rivals > limit, 0.0)
        columns[contested] = rank.topk(k, dim=1, sorted=False).indices
    return columns


def order(scores: Tensor, ids: Tensor) -> Tensor:
    """Return columns that sort ``[R, n]``: best score first, equal scores by ascending id, empty places last."""
    by_id = ids.argsort(dim=1)
    return by_id.gather(1, scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True))
