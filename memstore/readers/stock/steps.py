"""Steps of one token of a stock model, to be recorded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from memstore.readers.graphs import Steps


class CallSteps(Steps):
    """Those of a ``Call``: each token goes into the buffers of the layers, which are attended to as a whole."""

    cache: Any  # a Call, which knows these steps

    @property
    def place(self) -> int:
        """See ``Steps``: among the local tokens."""
        return int(self.cache.length)

    def same(self) -> Hashable | None:
        """See ``Steps``: while no list is due, nobody watches, and all buffers have room."""
        call = self.cache
        if call.reading or not call.length or call.padding is not None or call.observers or call.selection.ended:
            return None
        if call.sharded or call.selection.architecture.linear is not None:
            return None  # what ranks tell each other is not recorded, nor are states that layers go on from
        if call.routed and call.slots:
            alone = call.selection.by_layer
            missing = any(each.chosen is None and not each.plan.local for each in call.layers)
            if call.selection.retrieval.every != "segment" or (missing if alone else call.chosen_at is None):
                return None
        if any(each.stale or each.keys.shape[2] <= each.prefix + call.length for each in call.layers):
            return None
        return call.chosen_at, *((id(each.chosen), each.prefix, each.keys.shape) for each in call.layers)

    def buffers(self) -> list[Tensor]:
        """See ``Steps``."""
        return [x for states in self.cache.layers for x in (states.keys, states.values)]

    def use(self, buffers: list[Tensor]) -> None:
        """See ``Steps``."""
        for states, keys, values in zip(self.cache.layers, buffers[::2], buffers[1::2], strict=True):
            states.keys, states.values = keys, values

    def back(self) -> None:
        """See ``Steps``."""
        self.cache.length -= 1

    def on(self, _: Tensor | None) -> None:
        """See ``Steps``."""
        self.cache.length += 1
