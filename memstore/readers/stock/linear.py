"""Layers of a hybrid without attention: linear attention, state spaces, convolutions.

Each has one state of all tokens so far and continues from it. transformers runs them with its own cache layers, which
stand beside ours. This file copies their states between such caches and lists of tensors, which a memory stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from memstore.memory.spec import to_record
from memstore.readers.caches import CACHE, cache_with, new_layers
from memstore.store.records import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST, TOKENS = 7, 12
"""Tokens of the probe: of its first part, and in total."""
NOISE = 0.2
"""How much of the states' effect may be lost when they are passed on: rounding, in dtypes of few bits."""


class Slot(NamedTuple):
    """The place of one state in a cache."""

    layer: int
    number: int
    kind: Literal["conv", "recurrent"]


@dataclass(frozen=True, eq=False)
class LinearLayers:
    """The layers without attention, and where their states are in a cache."""

    config: Any
    """The model's configuration."""
    attending: tuple[int, ...]
    """Numbers of the other layers, which have attention."""
    slots: tuple[Slot, ...]
    layouts: tuple[Layout, ...]
    """The layout of the state in each slot, for one row."""

    def layers(self, attending: Sequence[Any], states: Sequence[Tensor] | None, rows: int) -> list[Any]:
        """Return the layers of a cache: ``attending`` in their places, the others with ``states``, in ``rows`` rows.

        Without ``states`` the others have read nothing.
        """
        made = new_layers(self.config)
        for place, layer in zip(self.attending, attending, strict=True):
            made[place] = layer
        for slot, state in zip(self.slots, states, strict=True) if states is not None else ():
            layer, all_rows = made[slot.layer], state.expand(rows, *state.shape)
            if slot.kind == "conv":
                layer.update_conv_state(all_rows, slot.number)
            else:
                type(layer).update_recurrent_state(layer, all_rows, slot.number)
                layer.update_recurrent_state = partial(_replace, layer.recurrent_states)
            layer.has_previous_state[slot.number] = True
        return made

    def states(self, layers: Sequence[Any]) -> list[Tensor]:
        """Return the states in a cache of one row. The next pass over the cache changes them."""
        return [state[0] for state in states_in(layers, self.slots)]


def _replace(states: dict[int, Tensor], state: Tensor, number: int = 0) -> Tensor:
    """Replace a state. Overwriting it, as transformers does, would change what a backward pass needs."""
    states[number] = state.to(states[number])
    return state


def find_linear_layers(model: PreTrainedModel, attending: int) -> LinearLayers | str:
    """Return the layers of ``model`` without attention, if ``attending`` others have it; or say why that is impossible.

    The function tries it out, with each token attending only to itself. A text is read in two parts that share only the
    states. The result must be the same as in one part, but different without the states of either kind. In the second
    part positions begin at 0 again, so a layer must not depend on them.
    """
    tokens = torch.arange(1, TOKENS + 1, device=model.device)[None]
    tokens = tokens % int(model.config.get_text_config(decoder=True).vocab_size)
    whole = _run(model, tokens, new_layers(model.config))[:, FIRST:]
    first = new_layers(model.config)
    _run(model, tokens[:, :FIRST], first)
    places = tuple(place for place, layer in enumerate(first) if getattr(layer, "keys", None) is not None)
    slots = tuple(slots_in(first))
    if len(places) != attending or any(slot.layer in places for slot in slots):
        return "some layers both attend and keep other states"
    if not slots:
        return "its layers do not put their states into the cache"
    states = states_in(first, slots)
    found = LinearLayers(model.config, places, slots, tuple(to_record(state[0]).layout for state in states))

    def lost(kinds: set[str]) -> float:
        """Return how far the second part is from the whole, without the states of ``kinds``."""
        given = [state * (slot.kind not in kinds) for slot, state in zip(slots, found.states(first), strict=True)]
        unread = new_layers(model.config)
        layers = found.layers([unread[place] for place in places], given, 1)
        return float((_run(model, tokens[:, FIRST:], layers) - whole).float().abs().mean())

    worth = min(lost({kind}) for kind in {slot.kind for slot in slots})
    return found if lost(set()) < NOISE * worth else "a text read in two parts gives other results than in one"


def _run(model: PreTrainedModel, tokens: Tensor, layers: list[Any]) -> Tensor:
    """Return the last states ``[1, T, hidden]`` of ``tokens [1, T]``."""
    return model.base_model(input_ids=tokens, use_cache=True, **{CACHE: cache_with(layers)})[0]  # type: ignore[no-any-return]


def slots_in(layers: Sequence[Any]) -> list[Slot]:
    """Return the slots that hold a state."""
    found = []
    for place, layer in enumerate(layers):
        for number in getattr(layer, "conv_states", ()):
            if layer.is_conv_states_initialized[number]:
                found.append(Slot(place, number, "conv"))
            if layer.is_recurrent_states_initialized[number]:
                found.append(Slot(place, number, "recurrent"))
    return found


def states_in(layers: Sequence[Any], slots: Sequence[Slot]) -> list[Tensor]:
    """Return the states in ``slots``, with a row for each row of the batch."""
    kinds = {"conv": "conv_states", "recurrent": "recurrent_states"}
    return [getattr(layers[slot.layer], kinds[slot.kind])[slot.number] for slot in slots]
