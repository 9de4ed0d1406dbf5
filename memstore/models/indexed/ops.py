"""Choosing by an index, and attention over rows that were gathered: plain PyTorch.

**Ties.** Of keys with equal scores the one at the smallest position comes first: in one piece, in slices and in parts
that are chosen from one after the other. Scores of the ReLU kind are exactly zero for keys that no head likes, so ties
are no accident.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Mode = Literal["relu_sum", "max"]
SLICE = 1 << 17
"""Products of queries and keys that are held at once: 512 KB of float32, what a processor keeps near."""
SCORED = 1 << 16
"""Keys whose scores are held at once."""
TOGETHER = 32
"""Queries that are scored together."""
GATHERED = 1 << 23
"""Numbers of rows that are held at once for attention: 32 MB of float32."""


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
    parts = [
        _choose(queries[rows], None if weights is None else weights[rows], keys, scale, seen, k, mode, unit)
        for rows, seen in _queries(len(queries), limit)
    ]
    if len(parts) == 1:
        return parts[0]
    return Chosen(torch.cat([part.ids for part in parts]), torch.cat([part.scores for part in parts]))


def merged(parts: list[Chosen], k: int) -> Chosen:
    """The ``k`` best of what was chosen from parts of the keys, which follow each other."""
    ids, scores = (torch.cat([part[place] for part in parts], 1) for place in (0, 1))
    best = _best(scores, k)
    taken = best.ids.clamp(min=0)
    return _packed(Chosen(torch.where(best.ids < 0, -1, ids.gather(1, taken)), best.scores))


def attend_latent(
    q_latent: Tensor,
    q_rope: Tensor,
    table: Tensor,
    ids: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of ``q_latent [S, H, C]``, ``q_rope [S, H, R]`` to rows ``ids [S, k]`` of ``table [N, C + R]``.

    The first C numbers of a row are its value and, with the others, its key: multi-head latent attention with the
    up-projections absorbed (DeepSeek-V2, section 2.1.2). -1 is no row; ``sinks [H]`` are logits of the softmax that
    have no value. ``[S, H, C]`` in the type of the queries; computed in float32.
    """
    queries = q_latent if not q_rope.shape[-1] else torch.cat([q_latent, q_rope], -1)
    return attend_rows(queries, table, table[:, : q_latent.shape[-1]], ids, scale, sinks)


def attend_rows(
    queries: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention of ``queries [S, H, D]`` to ``keys [N, D]`` and ``values [N, V]`` at ``ids [S, k]``, -1 for none.

    ``[S, H, V]``. Values that are the beginning of the keys are gathered with them. See ``attend_latent``.
    """
    shared = values.data_ptr() == keys.data_ptr() and values.stride(0) == keys.stride(0)
    width = keys.shape[1] + (0 if shared else values.shape[1])
    out = []
    for rows in range(0, len(ids), step := max(1, GATHERED // max(1, ids.shape[1] * width))):
        some = ids[rows : rows + step]
        absent = some < 0
        flat, shape = some.clamp(min=0).flatten(), (*some.shape, -1)
        gathered = keys.index_select(0, flat).view(shape).float()
        scores = queries[rows : rows + step].float() @ gathered.transpose(1, 2) * scale
        scores = scores.masked_fill_(absent[:, None], -torch.inf)
        part = gathered[..., : values.shape[1]] if shared else values.index_select(0, flat).view(shape).float()
        out.append((softmax(scores, sinks) @ part).to(queries.dtype))
    return torch.cat(out) if len(out) != 1 else out[0]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of ``scores [S, H, k]`` beside ``sinks [H]``, which take their part and have no value."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype)[None, :, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def _queries(count: int, limit: Tensor | None) -> list[tuple[slice, Tensor | None]]:
    pieces = [slice(start, start + TOGETHER) for start in range(0, count, TOGETHER)]
    return [(piece, None if limit is None else limit[piece]) for piece in pieces] or [(slice(0, 0), limit)]


def _choose(
    queries: Tensor,
    weights: Tensor | None,
    keys: Tensor,
    scale: float,
    limit: Tensor | None,
    k: int,
    mode: Mode,
    unit: int,
) -> Chosen:
    found: list[Chosen] = []
    step = SCORED // unit * unit or unit
    for start in range(0, max(1, len(keys)), step):
        scores = _scores(queries, weights, keys[start : start + step], scale, mode)
        if limit is not None:
            places = torch.arange(start, start + scores.shape[1], device=scores.device)
            scores.masked_fill_(places >= limit[:, None], -torch.inf)
        if unit > 1:
            missing = -scores.shape[1] % unit
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf).unflatten(1, (-1, unit)).amax(2)
        best = _best(scores, k)
        found.append(best._replace(ids=torch.where(best.ids < 0, -1, best.ids + start // unit)))
        if len(found) > 1:  # so that there are never more than two
            found = [merged(found, k)]
    return found[0]


def _scores(queries: Tensor, weights: Tensor | None, keys: Tensor, scale: float, mode: Mode) -> Tensor:
    """``[S, T]`` float32."""
    rows, heads, _ = queries.shape
    scores = torch.empty(rows, len(keys), device=keys.device)
    flat = (queries.float() * scale).flatten(0, 1)
    step = max(1, SLICE // max(1, rows * heads))
    for start in range(0, len(keys), step):
        products = flat @ keys[start : start + step].float().T  # [S * H, n]
        if mode == "max":
            scores[:, start : start + step] = products
        elif weights is None:
            scores[:, start : start + step] = products.relu_().view(rows, heads, -1).sum(1)
        else:
            weighed = weights.float()[:, None] @ products.relu_().view(rows, heads, -1)
            scores[:, start : start + step] = weighed[:, 0]
    return scores


def _best(scores: Tensor, k: int) -> Chosen:
    """The columns of the ``k`` best of ``scores [S, N]``, ascending; of equal ones the first."""
    if scores.shape[1] <= k:
        columns = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
        return _packed(Chosen(columns, scores))
    best = scores.topk(k, sorted=False)
    columns, least = best.indices, best.values.amin(1, keepdim=True)
    # ``topk`` takes any of several equal ones, by the layout of its input.
    tied = ((scores >= least).sum(1) > k) & (least[:, 0] > -torch.inf)
    for row in tied.nonzero().flatten().tolist():
        above = (scores[row] > least[row]).nonzero().flatten()
        equal = (scores[row] == least[row]).nonzero().flatten()[: k - len(above)]
        columns[row] = torch.cat([above, equal])
    columns = columns.sort(1).values
    return _packed(Chosen(columns, scores.gather(1, columns)))


def _packed(chosen: Chosen) -> Chosen:
    """With what has no score left out, and the unused places at the end."""
    void = chosen.scores == -torch.inf
    if not bool(void.any()):
        return chosen
    order = void.to(torch.int8).sort(dim=1, stable=True).indices
    ids = torch.where(void, -1, chosen.ids)
    return Chosen(ids.gather(1, order), chosen.scores.gather(1, order))
