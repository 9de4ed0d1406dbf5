"""Needles of a landmark model: what layers saw of them, and answers through a memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument
from memstore.eval.evaluation import layer_found
from memstore.eval.run import TaskPlan, draw, evaluate, memory_spec
from memstore.models.landmark.cache import LandmarkCache
from memstore.readers.caches import CACHE
from tests.eval.drts import byte_tokenizer
from tests.eval.landmarks import small_landmark
from tests.eval.test_run import noise


def test_a_layer_saw_the_needle_as_the_head_did_that_ranked_it_best() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.5, 0.2], [0.1, 0.3, 0.2, 0.4]])
    needle = torch.tensor([False, True, True, False])
    found = layer_found(3, weights, needle)
    assert (found.layer, found.rank) == (3, 0)
    assert found.weight == pytest.approx(0.7)
    assert found.margin == pytest.approx(math.log(0.5 / 0.2))
    beaten = layer_found(0, weights[1:], needle)
    assert beaten.rank == 1
    assert beaten.margin == pytest.approx(math.log(0.3 / 0.4))
    assert layer_found(0, torch.ones(1, 1), torch.tensor([True])).margin is None


def test_the_answer_through_a_memory_is_that_of_the_model_alone_and_layers_say_what_they_saw() -> None:
    model, filler, tokenizer = small_landmark(), noise(), byte_tokenizer()
    plan = TaskPlan(task="passkey", lengths=[300], samples=4, reuse=True)
    with memstore.open("ram:", spec=memory_spec(model, tokenizer)) as memory:
        (row,) = evaluate(model, tokenizer, plan, filler, memory)
    assert {layer["layer"] for layer in row.to_dict()["layers"]} <= {0, 1}
    assert any(outcome.reply.layers for outcome in row.outcomes)
    ((*samples,),) = draw(plan, 300, tokenizer, filler, model.config.tokens_per_block)
    for sample, outcome in zip(samples, row.outcomes, strict=True):
        text = [int(token) for chunk in sample.haystack(filler) for token in chunk] + sample.prompt
        cache = LandmarkCache(model.config, 1)
        options: dict[str, Any] = {"max_new_tokens": len(sample.answer), "do_sample": False, CACHE: cache}
        said = model.generate(torch.tensor([text]), **options)
        assert outcome.reply.tokens == said[0, len(text) :].tolist()


def test_a_baseline_has_no_memory() -> None:
    with pytest.raises(InvalidArgument, match="retrieves nothing"):
        memory_spec(small_landmark(attention="full"), None)
