"""The lists of blocks that a stock model with a memory has searched for, as an observer hears of them, and fetched."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest

from memstore.memory import Document
from memstore.readers.observer import Choice, Observer
from memstore.readers.stock import call, reading
from memstore.readers.stock.call import Call, StockChoice
from memstore.readers.stock.visible import gather


class Entry(NamedTuple):
    """The blocks of one document in one list."""

    document: str
    blocks: list[int]
    """Oldest first."""
    scores: list[float]
    """Comparable within one list only."""
    step: int
    """Local tokens seen when the list was chosen (the length of the prompt, for a prompt)."""
    row: int
    layer: int
    """The layer that attends to it. With ``share="model"`` all layers from this one on do."""
    head: int
    """Which of the layer's lists this is; 0 where all heads share one."""


class Lists(list[Entry], Observer):
    """Those that were searched for, as they are told."""

    def choice(self, choice: Choice) -> None:
        if not (isinstance(choice, StockChoice) and choice.searched):
            return
        call, chosen = choice.states.call, choice.states.chosen
        assert chosen is not None
        step = call.length + call.tokens
        for row, lists in enumerate(zip(chosen.numbers.tolist(), chosen.scores.tolist(), strict=True)):
            for head, (numbers, scores) in enumerate(zip(*lists, strict=True)):
                parts: dict[Document, tuple[list[int], list[float]]] = {}
                for number, score in zip(numbers, scores, strict=True):
                    document, block = call.candidates.locate(number)
                    blocks, values = parts.setdefault(document, ([], []))
                    blocks.append(block)
                    values.append(score)
                self += [Entry(each.name, *part, step, row, choice.layer, head) for each, part in parts.items()]


def lists_of(reader: Any) -> Lists:
    """What ``reader`` has searched for since this was called first."""
    for observer in reader.observers:
        if isinstance(observer, Lists):
            return observer
    reader.observers.append(lists := Lists())
    return lists


def lists_of_reading(patch: pytest.MonkeyPatch) -> Lists:
    """What is searched for from now on where a text is read, of which observers are not told."""
    lists = Lists()
    patch.setattr(reading, "Call", partial(Call, observers=[lists]))
    return lists


def layers_fetched(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """The layers that states of lists are fetched for from now on, those of one copy together."""
    found: list[list[int]] = []

    def fetch(located: Any, layers: Any, device: Any) -> Any:
        found.append([*layers])
        return gather(located, layers, device)

    patch.setattr(call, "gather", fetch)
    return found
