"""Layers between the others that go on from a state of all that was read, and how their states are kept.

They are those of ``memstore.readers.stock.linear``: run by transformers, with its own layers of a cache. A memory keeps
their states as numbers; some of these models keep the last token ids among them, which float32 holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memstore.memory.rows import to_record
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

    def states(self, layers: Sequence[Any]) -> list[Tensor]:
        """Copies of the states in a cache of one row, as they are stored."""
        return [_stored(state).clone() for state in self._layers.states(layers)]


def _stored(state: Tensor) -> Tensor:
    return state if state.is_floating_point() else state.float()
