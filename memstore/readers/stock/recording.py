"""Recording an attached model: what each layer retrieved, and how much of its attention went there.

While the model runs, a layer only leaves its query and a view of its keys here. The weights are computed when the
recorder is about to write, so that one matrix product serves many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.block_attention.reference import masked_scores
from memstore.memory.traces import TIERS, Look, Recorder

if TYPE_CHECKING:
    from memstore.readers.stock.attached import Attached
    from memstore.readers.stock.call import Call, Shown
    from memstore.readers.stock.layer import LayerStates

Array = npt.NDArray[Any]


class _Seen(NamedTuple):
    """One step of one layer."""

    step: int
    query: Tensor
    """``[B, H, 1, D]``, rotated: that of the last token."""
    keys: int
    """Keys that there were."""
    mask: Tensor | None
    """``[B or 1, heads or 1, 1, M]``, for the last ``M`` of them."""
    search_us: float
    gather_us: float


class _Steps:
    """Steps of one layer that attend to the same fetched list."""

    def __init__(self, layer: int, shown: Shown, call: Call, options: dict[str, Any]) -> None:
        self.layer, self.shown, self.options = layer, shown, options
        self.candidates, self.block_size = call.candidates, call.selection.block_size
        self.seen: list[_Seen] = []
        self.keys = torch.empty(0)
        """``[B, heads, n, D]``: those of the last step, which has those of all steps before."""


class _Lists(NamedTuple):
    """What the looks of all these steps share, for one row of the batch: ``[lists, K]``, best score first."""

    documents: list[str]
    document: Array
    blocks: Array
    scores: Array
    tiers: Array

    def look(self, layer: int, row: int, weights: Array, seen: _Seen) -> Look:
        """With ``weights [H, K]``."""
        return Look(
            layer=layer,
            row=row,
            documents=self.documents,
            document=self.document,
            blocks=self.blocks,
            scores=self.scores,
            weights=weights,
            tiers=self.tiers,
            search_us=seen.search_us,
            gather_us=seen.gather_us,
        )


class Recording:
    """What is between the layers of an attached model and a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: dict[Shown, _Steps] = {}
        self._lists: dict[int, tuple[Shown, list[_Lists]]] = {}
        self._searched = 0.0
        recorder.before_writing = self.settle

    def begin(self, call: Call, ids: Tensor | None) -> None:
        """A forward pass over ``ids [B, T]`` begins."""
        if ids is not None and self._recorder.step < 0:
            self._recorder.describe(prompt=_real(call, ids).tolist())
        elif ids is not None and ids.shape[1] == 1:
            self._recorder.token(int(ids[0, 0]))
        self._searched = call.selection.search_seconds
        self._recorder.begin()

    def see(
        self, states: LayerStates, shown: Shown, q: Tensor, keys: Tensor, mask: Tensor | None, **options: Any
    ) -> None:
        """A layer attends with ``q [B, H, T, D]`` to ``keys [B, heads, n, D]``, both rotated, some retrieved."""
        if not self._recorder.active:
            return
        steps = self._waiting.get(shown)
        if steps is None:
            steps = self._waiting[shown] = _Steps(states.plan.index, shown, states.call, options)
        searched, self._searched = self._searched, states.call.selection.search_seconds
        gathered, shown.gather_seconds = shown.gather_seconds, 0.0
        steps.keys = keys
        query = q if q.shape[2] == 1 else q[:, :, -1:].clone()  # without the rest of the prompt
        mask = None if mask is None else mask[:, :, -1:]
        times = (1e6 * (self._searched - searched), 1e6 * gathered)
        steps.seen.append(_Seen(self._recorder.step, query, keys.shape[2], mask, *times))

    def settle(self) -> None:
        """Compute the weights that are waiting, and hand the looks to the recorder."""
        waiting, self._waiting = list(self._waiting.values()), {}
        for steps in waiting:
            weights = _weights(steps).cpu().numpy()
            lists = self._lists_of(steps)
            for seen, rows in zip(steps.seen, weights, strict=True):
                for row, values in enumerate(rows):
                    look = lists[row % len(lists)].look(steps.layer, row, values, seen)
                    self._recorder.look(look, step=seen.step)

    def _lists_of(self, steps: _Steps) -> list[_Lists]:
        """The lists of each row of the batch, or of all; a list serves a layer for many steps."""
        known = self._lists.get(steps.layer)
        if known is None or known[0] is not steps.shown:
            known = self._lists[steps.layer] = (steps.shown, _lists(steps))
        return known[1]


def facts(attached: Attached) -> dict[str, Any]:
    """What a trace of ``attached`` tells about it."""
    selection, memory = attached.selection, attached.memories[0]
    first = 0 if selection.by_layer else selection.first_layer
    layers = [plan for plan in attached.architecture.layers if not plan.local and plan.index >= first]
    return {
        "mechanism": "attach",
        "model": (memory.get_info("model") or {}).get("name"),
        "layers": [plan.index for plan in layers],
        "heads": max(plan.heads for plan in layers),
        "top_k": attached.retrieval.top_k,
        "block_size": attached.block_size,
    }


def _real(call: Call, ids: Tensor) -> Tensor:
    """The tokens of the first row that are not padding."""
    return ids[0] if call.padding is None else ids[0][call.padding[0, -ids.shape[1] :].to(ids.device)]


@torch.no_grad()
def _weights(steps: _Steps) -> Tensor:
    """``[steps, B, H, K]`` float32: the attention that each retrieved block got, best score first."""
    scale, softcap, sinks = (steps.options.get(name) for name in ("scale", "softcap", "sinks"))
    q = torch.cat([seen.query for seen in steps.seen], dim=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = masked_scores(q, steps.keys, mask=None, scale=scale, softcap=softcap)  # [B, H, steps, n]
    _hide(scores, steps.seen)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    entries = steps.shown.chosen.numbers.shape[-1]
    retrieved = scores.softmax(-1)[..., steps.shown.start :][..., : entries * steps.block_size]
    weights: Tensor = retrieved.unflatten(-1, (entries, -1)).sum(-1)  # [B, H, steps, K]
    order = _order(steps.shown).to(weights.device)
    of_head = torch.arange(weights.shape[1]) * order.shape[1] // weights.shape[1]
    best_first: Tensor = weights.gather(-1, order[:, of_head, None].expand_as(weights))
    return best_first.permute(2, 0, 1, 3).float()


def _order(shown: Shown) -> Tensor:
    """``[B or 1, lists, K]``: the entries of each list, best score first."""
    # Where nobody had to choose there are no scores to sort by, and the order stays.
    return shown.chosen.scores.nan_to_num(0.0).neg().sort(dim=-1, stable=True).indices


def _hide(scores: Tensor, seen: Sequence[_Seen]) -> None:
    """Set the scores ``[B, H, steps, n]`` of what a step did not see to -inf."""
    for place, each in enumerate(seen):
        if each.keys < scores.shape[-1]:
            scores[:, :, place, each.keys :] = float("-inf")
        if each.mask is not None:
            mask, heads = each.mask[:, :, 0], scores.shape[1]
            mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
            scores[:, :, place, : each.keys] += F.pad(mask, (each.keys - mask.shape[-1], 0))


def _lists(steps: _Steps) -> list[_Lists]:
    """See ``Recording._lists_of``."""
    chosen, tiers = steps.shown.chosen, steps.shown.tiers
    order = _order(steps.shown)
    numbers = chosen.numbers.gather(-1, order)
    names, document, blocks = steps.candidates.named(numbers)
    places = [-1 if tiers is None else TIERS.index(tiers[number]) for number in numbers.ravel().tolist()]
    arrays = (
        document.numpy().astype(np.int16),
        blocks.numpy(),
        chosen.scores.gather(-1, order).float().numpy(),
        np.array(places, np.int8).reshape(numbers.shape),
    )
    return [_Lists(names, *(array[row] for array in arrays)) for row in range(len(numbers))]
