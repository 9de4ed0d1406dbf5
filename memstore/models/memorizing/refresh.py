"""Keys that are stored while training grow old: how far they are from those of the present weights, and new ones.

Wu et al. 2022, section 3.2: the memory keeps what earlier weights computed, and keys of length 1 shift less. Keys of
the layer with the memory depend on the windows of the layers below it and on nothing that was retrieved, so they are
computed again from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.knn import States, after
from memstore.attention.knn_memory import RecentTokens
from memstore.errors import InvalidArgument
from memstore.models.memorizing.modeling import MemorizingForCausalLM


@torch.no_grad()
def key_shift(
    model: MemorizingForCausalLM, memory: RecentTokens, texts: Sequence[Tensor], *, oldest: int | None = None
) -> float | None:
    """1 minus the mean cosine of the keys in ``memory`` and those of the present weights; None if it has no token.

    Args:
        model: whose weights they are.
        memory: what it remembers.
        texts: for each row what was read of its document ``[n]``, all of it; empty for rows that are left out.
        oldest: compare only so many tokens of a row, those that were stored first; all if None.

    Raises ``InvalidArgument`` for texts that are shorter than what the memory has of them.
    """
    cosines = []
    for row, text in enumerate(texts):
        numbers = memory.numbers(row)[:oldest] if len(text) else range(0)
        if numbers:
            keys, _ = present_states(model, text, numbers)
            stored = memory.keys[row][:, _slots(memory, numbers)]
            cosines.append(F.cosine_similarity(stored.double(), keys.double(), dim=-1).flatten())
    return 1 - float(torch.cat(cosines).mean()) if cosines else None


def refresh(model: MemorizingForCausalLM, memory: RecentTokens, texts: Sequence[Tensor]) -> None:
    """Replace keys and values in ``memory`` by those of the present weights; see ``key_shift`` for ``texts``."""
    for row, text in enumerate(texts):
        numbers = memory.numbers(row)
        if numbers and len(text):
            slots = _slots(memory, numbers)
            for ring, states in zip((memory.keys, memory.values), present_states(model, text, numbers), strict=True):
                ring[row].index_copy_(1, slots, states.to(ring.dtype))


@torch.no_grad()
def present_states(model: MemorizingForCausalLM, text: Tensor, numbers: range) -> States:
    """Keys and values ``[G, len(numbers), D]`` of the memory's layer for some tokens of the document ``text [n]``.

    Only tokens that these depend on are read: a window for each layer below.
    """
    layer, window = model.config.memory_layer, model.config.window
    if layer is None:
        raise InvalidArgument("this model has no layer with a memory: its memory_layer is None")
    if numbers.stop > len(text):
        raise InvalidArgument(f"the memory has tokens up to {numbers.stop:,} of a text of {len(text):,}")
    first = max(0, numbers.start - layer * window)
    layers = model.model.layers
    windows: list[States | None] = [None] * layer
    parts = []
    for part in text[first : numbers.stop].to(model.device).split(window):
        x = model.model.embed_tokens(part[None])
        for number in range(layer):
            x, states = layers[number](x, windows[number], None, None)
            k, v = after(windows[number], states)
            windows[number] = k[:, :, -window:], v[:, :, -window:]
        parts.append(layers[layer].attention.project(layers[layer].attention_norm(x))[1])
    keys, values = (torch.cat(each, 2)[0, :, numbers.start - first :] for each in zip(*parts, strict=True))
    return keys, values


def _slots(memory: RecentTokens, numbers: range) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, device=memory.keys.device) % memory.capacity
