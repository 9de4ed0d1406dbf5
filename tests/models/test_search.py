"""Searching by text with the models that come with the package, which were made to find a passkey."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.eval.evaluation import needle_blocks
from memstore.eval.filler import load_filler
from memstore.eval.run import memory_spec
from memstore.eval.tasks import TASKS, Phrases, Sample, plant
from memstore.models.landmark import LandmarkReader
from memstore.readers.kinds import LANDMARK_PASSKEY, PASSKEY, TWO_HOP, load_folder, shipped_model

TOKENS = 4_000


@dataclass
class Haystack:
    """A document with a passkey in it, and the model that has read it."""

    reader: Any
    sample: Sample
    needle: range


def haystack(name: str, task: str) -> Iterator[Haystack]:
    model, tokenizer = load_folder(shipped_model(name))
    filler, rng = load_filler(tokenizer, at_most=TOKENS), random.Random(1)
    sample = plant(TASKS[task](Phrases(tokenizer), rng), TOKENS, filler, model.config.tokens_per_block, rng, start=0)
    with memstore.open("ram:", spec=memory_spec(model, tokenizer)) as memory:
        reader = memstore.attach(model, memory, document="book").open()
        reader.read(sample.haystack(filler))
        yield Haystack(reader, sample, needle_blocks(sample.hops[0], model.config.tokens_per_block))


@pytest.fixture(scope="module")
def drt() -> Iterator[Haystack]:
    yield from haystack(PASSKEY, "passkey")


@pytest.fixture(scope="module")
def landmark() -> Iterator[Haystack]:
    yield from haystack(LANDMARK_PASSKEY, "passkey")


def test_a_drt_finds_the_passkey(drt: Haystack) -> None:
    assert drt.reader.search(drt.sample.prompt, 3)[0].block in drt.needle


def test_a_drt_searches_with_the_queries_of_an_answer(drt: Haystack) -> None:
    reader = drt.reader
    model, size = reader.model, reader.model.config.tokens_per_block
    missing = -(len(reader) + len(drt.sample.prompt)) % size
    prompt = [*drt.sample.prompt[:missing], *drt.sample.prompt]  # which ends a block of the document
    with torch.no_grad():
        output = model(torch.tensor([prompt]), past_key_values=reader.cache(), output_retrieval=True)
    (chosen,) = output.retrieval
    found = reader.search(prompt, chosen.blocks.shape[-1])
    assert [match.block for match in found] == chosen.blocks[0, -1].tolist()
    differences = torch.tensor([match.score for match in found]).diff()
    weights = chosen.weights[0, -1]
    assert torch.allclose(weights.log().diff(), differences, atol=1e-3)


def test_the_question_may_end_anywhere_in_a_block(drt: Haystack) -> None:
    for words in range(1, 40):
        assert len(drt.reader.search(list(range(5, 5 + words)), 2)) == 2


def test_each_group_of_a_drt_searches_for_itself() -> None:
    for found in haystack(TWO_HOP, "two-hop"):
        reader, config = found.reader, found.reader.model.config
        first = config.lower_layers
        groups = [
            reader.search(found.sample.prompt, 8, layer=layer) for layer in (first, first + config.upper_layers[0])
        ]
        assert groups[0] == reader.search(found.sample.prompt, 8)
        assert groups[0] == reader.search(found.sample.prompt, 8, layer=first + config.upper_layers[0] - 1)
        assert groups[0] != groups[1]
        assert any(match.block in found.needle for match in groups[0])  # among other links, which look alike
        with pytest.raises(InvalidArgument, match="an upper layer"):
            reader.search([5], layer=0)


def test_a_landmark_model_finds_the_passkey(landmark: Haystack) -> None:
    found = landmark.reader.search(landmark.sample.prompt, 3)
    assert found[0].block in landmark.needle
    assert all(0 < match.score <= 1 for match in found)


def test_a_landmark_model_searches_blocks_that_all_fit_into_a_list(landmark: Haystack) -> None:
    prompt, model = landmark.sample.prompt, landmark.reader.model
    with memstore.open("ram:", spec=landmark.reader.memory.spec) as memory:
        reader = LandmarkReader(model, memory, "short", retrieval=Retrieval(top_k=1000, every=1, share="none")).open()
        reader.read(range(5, 5 + 2 * model.config.segment_tokens))
        found = reader.search(prompt, 1000)
    assert {match.block for match in found} == set(range(2 * model.config.segment_blocks))


def test_one_layer_of_a_landmark_model_gives_no_more_than_all_of_them(landmark: Haystack) -> None:
    reader, prompt = landmark.reader, landmark.sample.prompt
    layers = reader.memory.spec.index_layers
    every = {match.block: match.score for match in reader.search(prompt, 10_000)}
    single = [{m.block: m.score for m in reader.search(prompt, 10_000, layer=layer)} for layer in layers]
    assert every == {block: max(each.get(block, 0) for each in single) for block in every}
    with pytest.raises(InvalidArgument, match="layers with landmarks"):
        reader.search(prompt, layer=0)


@pytest.mark.parametrize("tokens", [[], [-1], [10**6]])
def test_what_is_no_text_is_refused(drt: Haystack, landmark: Haystack, tokens: list[int]) -> None:
    for reader in (drt.reader, landmark.reader):
        with pytest.raises(InvalidArgument):
            reader.search(tokens)


def test_a_document_that_is_too_short_gives_nothing(drt: Haystack, landmark: Haystack) -> None:
    for each in (drt, landmark):
        with memstore.open("ram:", spec=each.reader.memory.spec) as memory:
            reader = memstore.attach(each.reader.model, memory, document="short").open()
            reader.read([5, 6, 7])
            assert reader.search([5, 6]) == []
