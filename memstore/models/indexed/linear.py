"""Layers between the others that go on from a state of all that was read, and how their states are kept.

They are those of ``memstore.readers.stock.linear``: run by transformers, with its own layers of a cache. A memory keeps
their states as numbers; some of these models keep the last token ids among them, which float32 holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.memory.rows import to_record
from memstore.models.indexed.call import Slots
from memstore.models.indexed.family import IndexedLayer
from memstore.readers.caches import CACHE
from memstore.readers.stock.linear import LinearLayers, slots_in, states_in
from memstore.store.records import Layout

LARGEST = 1 << 24
"""Whole numbers below are exact in float32."""


class CarriedStates:
    """The states of the layers of a decoder that do not attend."""

    def __init__(self, decoder: Any, attending: Sequence[int]) -> None:
        """``attending``: the numbers of the other layers. The decoder is run with one token, without a memory."""
        from transformers import DynamicCache

        cache = DynamicCache(config=decoder.config)
        with torch.no_grad():
            decoder(
                input_ids=torch.ones(1, 1, dtype=torch.int64, device=decoder.device), use_cache=True, **{CACHE: cache}
            )
        slots = tuple(slots_in(cache.layers))
        found = states_in(cache.layers, slots)
        self._dtypes = [state.dtype for state in found]
        layouts = tuple(to_record(_stored(state[0])).layout for state in found)
        self._layers = LinearLayers(decoder.config, tuple(attending), slots, layouts)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of what is stored: the state of each, of one row."""
        return self._layers.layouts

    def layers(self, attending: Sequence[Any], states: Sequence[Tensor] | None, rows: int) -> list[Any]:
        """Layers of a cache: ``attending`` in their places, and others that go on from stored ``states``."""
        if states is not None:
            states = [state.to(dtype) for state, dtype in zip(states, self._dtypes, strict=True)]
        return self._layers.layers(attending, states, rows)

    def states(self, layers: Sequence[Any], row: int = 0) -> list[Tensor]:
        """Copies of the states of one row in a cache, as they are stored."""
        return [_stored(state[row]).clone() for state in states_in(layers, self._layers.slots)]

    def put(self, layers: Sequence[Any], states: Sequence[Sequence[Tensor]]) -> None:
        """Let the rows of a cache go on from the ``states`` of each."""
        for state, of_rows in zip(states_in(layers, self._layers.slots), zip(*states, strict=True), strict=True):
            state.copy_(torch.stack(of_rows))


class PendingStates:
    """What tokens have given for entries that are not made yet, kept in the same way; see ``Local.pending``."""

    def __init__(self, slots: Slots, dtype: torch.dtype) -> None:
        self._layers = {slot: layer for slot, layer in slots.indexed.items() if layer.raw_width}
        self._dtype = str(dtype).removeprefix("torch.")

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """As many tokens as there may be at most."""
        return tuple(Layout(self._dtype, (_most(each), each.raw_width)) for each in self._layers.values())

    def layers(self, attending: Sequence[Any], states: Sequence[Tensor] | None, rows: int) -> list[Any]:  # noqa: ARG002
        """``attending``, whose call goes on from stored ``states``."""
        call = attending[0].call
        for (slot, layer), state in zip(self._layers.items(), states or (), strict=states is not None):
            first = max(0, call.tokens // layer.unit - layer.lookback) * layer.unit
            call.pending[slot] = state[: call.tokens - first]
        call.reset()
        return list(attending)

    def states(self, layers: Sequence[Any]) -> list[Tensor]:
        """Copies of what one row has, padded, as they are stored."""
        pending = layers[0].call.locals[0].pending
        return [
            F.pad(pending[slot], (0, 0, 0, _most(each) - len(pending[slot]))) for slot, each in self._layers.items()
        ]


def _most(layer: IndexedLayer) -> int:
    return max(1, (layer.lookback + 1) * layer.unit - 1)


def _stored(state: Tensor) -> Tensor:
    return state if state.is_floating_point() else state.float()
