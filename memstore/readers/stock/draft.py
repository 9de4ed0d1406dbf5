"""What a stock model with a memory has retrieved, for traces.

While the model runs, a layer only leaves its query and a view of its keys in a draft. Keys before the end of a step
never change, so one matrix product gives the weights of all steps that attend to one list. Computed at every step they
would take longer than attention itself; for sixteen steps at once they take a quarter of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.block_attention.reference import masked_scores
from memstore.memory.trace_file import TIERS, Array, Look
from memstore.readers.observer import Draft
from memstore.readers.stock.selection import FetchedList
from memstore.readers.stock.visible import Candidates


@dataclass(eq=False)
class StockDraft(Draft):
    """One layer at one step."""

    layer: int
    fetched: FetchedList
    candidates: Candidates
    block_size: int
    query: Tensor
    """``[B, H, 1, D]``, turned: that of the last token."""
    keys: Tensor
    """``[B, heads, n, D]``"""
    mask: Tensor | None
    """``[B or 1, heads or 1, 1, M]``"""
    prefix: int
    """Keys of the memory, with which ``keys`` begins: sink, list and window."""
    prompt: int
    """Keys of the first forward pass, which follow."""
    options: dict[str, Any]
    search_us: float
    gather_us: float

    @classmethod
    def looks(cls, drafts: Sequence[Self]) -> list[list[Look]]:
        """See ``Draft``; steps that attend to the same fetched list are computed together."""
        together: dict[FetchedList, list[int]] = {}
        for place, draft in enumerate(drafts):
            together.setdefault(draft.fetched, []).append(place)
        looks: list[list[Look]] = [[] for _ in drafts]
        for places in together.values():
            steps = [drafts[place] for place in places]
            lists = _lists(steps[0])
            for place, step, *parts in zip(places, steps, *(x.cpu().numpy() for x in _weights(steps)), strict=True):
                rows = enumerate(zip(*parts, strict=True))
                looks[place] = [step._look(row, lists[row % len(lists)], *weights) for row, weights in rows]
        return looks

    def _look(self, row: int, lists: _Lists, weights: Array, elsewhere: Array) -> Look:
        return Look(
            layer=self.layer,
            row=row,
            weights=weights,
            elsewhere=elsewhere,
            search_us=self.search_us,
            gather_us=self.gather_us,
            **lists._asdict(),
        )


class _Lists(NamedTuple):
    """What the looks of all steps with one list share, for one row of the batch: ``[lists, K]``, best score first."""

    documents: list[str]
    document: Array
    blocks: Array
    scores: Array
    tiers: Array


@torch.no_grad()
def _weights(steps: Sequence[StockDraft]) -> tuple[Tensor, Tensor]:
    """The attention that each retrieved block got, best score first, and what went elsewhere.

    ``[steps, B, H, K]`` and ``[steps, B, H, 4]``, both float32.
    """
    fetched, keys = steps[0].fetched, steps[-1].keys  # those of the last step include those of all before it
    scale, softcap, sinks = (steps[0].options.get(name) for name in ("scale", "softcap", "sinks"))
    q = torch.cat([step.query for step in steps], dim=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = masked_scores(q, keys, mask=None, scale=scale, softcap=softcap)  # [B, H, steps, n]
    _hide(scores, steps)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    entries = fetched.chosen.numbers.shape[-1]
    attention = scores.softmax(-1)
    end, prefix = fetched.start + entries * steps[0].block_size, steps[0].prefix
    ends = (0, fetched.start, end, prefix, prefix + steps[0].prompt, keys.shape[2])
    sink, _, *direct = (attention[..., low:high].sum(-1) for low, high in pairwise(ends))
    elsewhere = torch.stack((sink, *direct), dim=-1)  # [B, H, steps, 4]
    retrieved = attention[..., fetched.start : end]
    weights: Tensor = retrieved.unflatten(-1, (entries, -1)).sum(-1)  # [B, H, steps, K]
    order = _order(fetched).to(weights.device)
    of_head = torch.arange(weights.shape[1]) * order.shape[1] // weights.shape[1]
    best_first: Tensor = weights.gather(-1, order[:, of_head, None].expand_as(weights))
    return best_first.permute(2, 0, 1, 3).float(), elsewhere.permute(2, 0, 1, 3).float()


def _order(fetched: FetchedList) -> Tensor:
    """``[B or 1, lists, K]``: the entries of each list, best score first."""
    # Where nobody had to choose there are no scores to sort by, and the order stays.
    return fetched.chosen.scores.nan_to_num(0.0).neg().sort(dim=-1, stable=True).indices


def _hide(scores: Tensor, steps: Sequence[StockDraft]) -> None:
    """Set the scores ``[B, H, steps, n]`` of what a step did not see to -inf."""
    for place, each in enumerate(steps):
        keys = each.keys.shape[2]
        if keys < scores.shape[-1]:
            scores[:, :, place, keys:] = float("-inf")
        if each.mask is not None:
            mask, heads = each.mask[:, :, 0], scores.shape[1]
            mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
            scores[:, :, place, :keys] += F.pad(mask, (keys - mask.shape[-1], 0))


def _lists(draft: StockDraft) -> list[_Lists]:
    """The lists of each row of the batch, or of all."""
    chosen, tiers = draft.fetched.chosen, draft.fetched.tiers
    order = _order(draft.fetched)
    numbers = chosen.numbers.gather(-1, order)
    names, document, blocks = draft.candidates.named(numbers)
    places = [-1 if tiers is None else TIERS.index(tiers[number]) for number in numbers.ravel().tolist()]
    arrays = (
        document.numpy().astype(np.int16),
        blocks.numpy(),
        chosen.scores.gather(-1, order).float().numpy(),
        np.array(places, np.int8).reshape(numbers.shape),
    )
    return [_Lists(names, *(array[row] for array in arrays)) for row in range(len(numbers))]
