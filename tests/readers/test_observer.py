"""Whoever watches a retrieval is told of each layer once a pass, whatever else watches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memstore import Retrieval
from memstore.memory import Traces
from memstore.models.drt import DRTReader
from memstore.models.drt.retrieval import DRTChoice
from memstore.models.landmark import LandmarkReader
from memstore.models.landmark.retrieval import LandmarkChoice
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice, Choices, Recording
from memstore.readers.stock.call import StockChoice
from tests.models import drt, landmark
from tests.readers.models import generate, tiny
from tests.readers.test_retrieval import LAYERS, SHARES, prompt, reading


@pytest.mark.parametrize("share", SHARES)
def test_each_layer_of_a_stock_model_tells_once_a_pass_and_the_one_that_searched_says_so(share: Any) -> None:
    model, told = tiny("llama"), Choices(StockChoice, lambda choice: (choice.layer, choice.searched))
    with reading(model, Retrieval(top_k=2, share=share, every=2)) as attached:
        attached.observers.append(told)
        generate(model, prompt(), max_new_tokens=3, do_sample=False)
        layers = list(range(attached.selection.first_layer if share == "model" else 0, LAYERS))
    assert [layer for layer, _ in told] == layers * 3
    searching = [layer for layer, searched in told if searched]
    assert searching == (layers[:1] if share == "model" else layers) * 2, "for the prompt and two tokens later"


def test_reading_and_searching_by_text_are_not_told() -> None:
    model, told = tiny("llama"), Choices(StockChoice, lambda choice: choice)
    with reading(model, Retrieval(top_k=2)) as attached:
        attached.observers.append(told)
        attached.search(prompt()[0], 2)
        attached.read(torch.arange(400) % 97, "another")
    assert told == []


@pytest.mark.parametrize("kind", ["drt", "landmark"])
def test_observers_hear_the_same_and_only_of_their_kind(kind: str) -> None:
    of: type[Choice] = DRTChoice if kind == "drt" else LandmarkChoice
    one, other = (Choices(of, lambda choice: (choice.layer, choice.searched)) for _ in range(2))
    foreign = Choices(StockChoice, lambda choice: choice)
    reader: Any
    if kind == "drt":
        reader, text = DRTReader(drt.make(), "ram:"), drt.tokens(90)[0]
    else:
        model = landmark.make(segment_blocks=2, num_hidden_layers=3)
        reader, text = (
            LandmarkReader(model, "ram:", retrieval=Retrieval(top_k=2, share="layer")),
            landmark.tokens(90)[0],
        )
    with reader, torch.no_grad(), Traces(None, "ram:").record() as recorder:
        reader.read(text[:60])
        cache = reader.cache()
        cache.observers += [one, foreign, Recording(recorder), other]
        for piece in text[None, 60:].split([20, 1, 9], 1):
            reader.model(piece, **{CACHE: cache})
    assert one == other
    assert any(searched for _, searched in one)
    assert foreign == []
