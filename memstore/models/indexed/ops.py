"""Choosing by an index, and attention to the chosen rows, by the kernels.

**Ties.** Among keys with equal scores, the one at the smallest position comes first: in one piece, in slices, and when
choosing part by part. Scores of the ReLU kind are exactly zero for keys that no head likes, so ties are common.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memstore.kernels import index_scores, latent_attention

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
    keys: Tensor,
    scale: float,
    limit: Tensor | None,
    k: int,
    mode: Mode = "relu_sum",
    unit: int = 1,
) -> Chosen:
    """Choose the ``k`` best of ``keys [T, D]`` for each of ``queries [S, H, D]``.

    With ``"relu_sum"`` the score of a key is ``sum_h w[s, h] * relu(scale * q[s, h] . k[t])`` (DeepSeek-V3.2, equation
    1). The weights are ``weights [S, H]``, or all ones if None. With ``"max"``, and one head, ids number runs of
    ``unit`` keys, and a run's score is the best product in it (MiniMax-M3). ``limit [S]``: how many of the first keys
    each query may see; None: all.
    """
    units = -(-len(keys) // unit)
    seen = torch.full((len(queries),), len(keys), device=queries.device) if limit is None else limit
    found = index_scores.choose(
        queries, weights, keys, scale=scale, limit=seen, k=max(1, min(k, units)), relu=mode == "relu_sum", block=unit
    )
    return _ascending(*found)


def merged(parts: list[Chosen], k: int) -> Chosen:
    """Return the ``k`` best of choices from consecutive parts of the keys."""
    return _ascending(*index_scores.merge_choices([part.ids for part in parts], [part.scores for part in parts], k))


def _ascending(ids: Tensor, scores: Tensor) -> Chosen:
    """Return the choice in the order of the keys, with unused places last."""
    last = torch.iinfo(ids.dtype).max
    order = ids.masked_fill(ids < 0, last).argsort(1)
    return Chosen(ids.gather(1, order), scores.gather(1, order))


def attend_rows(
    queries: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attend with ``queries [S, H, D]`` to ``keys [N, D]`` and ``values [N, V]`` at ``ids [S, k]``, -1 for none.

    The result is ``[S, H, V]``. If values are the beginning of the keys, they are read together: multi-head latent
    attention with the up-projections absorbed (DeepSeek-V2, section 2.1.2). ``sinks [H]`` are logits of the softmax
    without a value.
    """
    rows = keys.unsqueeze(1)
    shared = values.data_ptr() == keys.data_ptr() and values.stride(0) == keys.stride(0)
    found = rows[..., : values.shape[1]] if shared else values.unsqueeze(1)
    return latent_attention.attend_rows(queries, rows, found, ids, scale=scale, sinks=sinks)[0]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return weights of ``scores [S, H, k]`` beside ``sinks [H]``, which take their part but have no value."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype)[None, :, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
