"""Choosing by an index, by its kernel.

**Ties.** Among keys with equal scores, the one at the smallest position comes first: in one piece, in slices, and when
choosing part by part. Scores of the ReLU kind are exactly zero for keys that no head likes, so ties are common. A model
that always breaks them alike is followed instead (``IndexedLayer.by_query``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memstore.kernels import index_scores

Mode = Literal["relu_sum", "max"]


class Chosen(NamedTuple):
    """The choices of queries."""

    ids: Tensor
    """``[S, k]`` int64: keys (or units of keys), ascending, then -1 for unused."""
    scores: Tensor
    """``[S, k]`` float32, -inf for unused."""


@torch.no_grad()
def choose(
    queries: Tensor,
    weights: Tensor | None,
    keys: Tensor | Sequence[Tensor],
    scale: float,
    limit: Tensor | None,
    k: int,
    mode: Mode = "relu_sum",
    unit: int = 1,
    codes: index_scores.IndexCodes | None = None,
) -> Chosen:
    """Choose the ``k`` best of ``keys [T, D]``, or of several such tensors, for each of ``queries [S, H, D]``.

    With ``"relu_sum"`` the score of a key is ``sum_h w[s, h] * relu(scale * q[s, h] . k[t])`` (DeepSeek-V3.2, equation
    1). The weights are ``weights [S, H]``, or all ones if None. With ``"max"``, and one head, ids number runs of
    ``unit`` keys, and a run's score is the best product in it (MiniMax-M3). ``limit [S]``: how many of the first keys
    each query may see; None: all. ``codes``: of the first keys.
    """
    count = len(keys) if isinstance(keys, Tensor) else sum(map(len, keys))
    seen = torch.full((len(queries),), count, device=queries.device) if limit is None else limit
    units = -(-count // unit)
    k, relu = max(1, min(k, units)), mode == "relu_sum"
    ids, scores = index_scores.choose(
        queries, weights, keys, scale=scale, limit=seen, k=k, relu=relu, block=unit, codes=codes
    )
    order = ids.masked_fill(ids < 0, torch.iinfo(ids.dtype).max).argsort(1)  # unused places last
    return Chosen(ids.gather(1, order), scores.gather(1, order))


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return weights of ``scores [S, H, k]`` beside ``sinks [H]``, which take their part but have no value."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype)[None, :, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
