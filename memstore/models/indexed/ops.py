"""Choosing by an index, and attention over the rows that were chosen, by the kernels.

**Ties.** Of keys with equal scores the one at the smallest position comes first: in one piece, in slices and in parts
that are chosen from one after the other. Scores of the ReLU kind are exactly zero for keys that no head likes, so ties
are no accident.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memstore.kernels import index_scores, latent_attention

Mode = Literal["relu_sum", "max"]


class Chosen(NamedTuple):
    """What queries have chosen."""

    ids: Tensor
    """``[S, k]`` int64: keys (or units of them), ascending, with -1 for unused behind them."""
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
    """The ``k`` best of ``keys [T, D]`` for each of ``queries [S, H, D]``.

    With ``"relu_sum"`` the score of a key is ``sum_h w[s, h] * relu(scale * q[s, h] . k[t])`` (DeepSeek-V3.2, equation
    1), with ``weights [S, H]`` or, where None, all ones. With ``"max"``, and one head, ids are those of runs of
    ``unit`` keys, and a run's score is the best product in it (MiniMax-M3). ``limit [S]``: how many keys each query
    may see, the first ones; None: all.
    """
    units = -(-len(keys) // unit)
    seen = torch.full((len(queries),), len(keys), device=queries.device) if limit is None else limit
    found = index_scores.choose(
        queries, weights, keys, scale=scale, limit=seen, k=max(1, min(k, units)), relu=mode == "relu_sum", block=unit
    )
    return _ascending(*found)


def merged(parts: list[Chosen], k: int) -> Chosen:
    """The ``k`` best of what was chosen from parts of the keys, which follow each other."""
    return _ascending(*index_scores.merge_choices([part.ids for part in parts], [part.scores for part in parts], k))


def _ascending(ids: Tensor, scores: Tensor) -> Chosen:
    """What was chosen, in the order of the keys; unused places last."""
    last = torch.iinfo(ids.dtype).max
    order = ids.masked_fill(ids < 0, last).argsort(1)
    return Chosen(ids.gather(1, order), scores.gather(1, order))


def attend_rows(
    queries: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention of ``queries [S, H, D]`` to ``keys [N, D]`` and ``values [N, V]`` at ``ids [S, k]``, -1 for none.

    ``[S, H, V]``. Values that are the beginning of the keys are read with them: multi-head latent attention with the
    up-projections absorbed (DeepSeek-V2, section 2.1.2). ``sinks [H]`` are logits of the softmax that have no value.
    """
    rows = keys.unsqueeze(1)
    shared = values.data_ptr() == keys.data_ptr() and values.stride(0) == keys.stride(0)
    found = rows[..., : values.shape[1]] if shared else values.unsqueeze(1)
    return latent_attention.attend_rows(queries, rows, found, ids, scale=scale, sinks=sinks)[0]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of ``scores [S, H, k]`` beside ``sinks [H]``, which take their part and have no value."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype)[None, :, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
