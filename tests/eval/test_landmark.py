"""The landmark paper's tables: what retrieves everything is full attention, and what is skipped is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.eval.evaluation import layer_found
from memstore.eval.run import TaskPlan, draw, evaluate, memory_spec
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.evaluation import (
    attention_size,
    by_cutoff,
    by_granularity,
    by_length,
    retrieved,
    whole,
)
from memstore.readers.caches import CACHE
from tests.eval.drts import byte_tokenizer
from tests.eval.landmarks import small_landmark
from tests.eval.test_run import noise

TEXT = torch.randint(256, (400,), generator=torch.Generator().manual_seed(0))
LOCAL = 14
"""Two blocks of seven tokens."""


def silent(tokens: int) -> None:
    assert tokens > 0


@pytest.mark.parametrize("length", [40, 111])
def test_retrieving_all_blocks_is_full_landmark_attention(length: int) -> None:
    model = small_landmark()
    everything, counts = retrieved(
        model, TEXT, length, Retrieval(top_k="all", share="none"), local=LOCAL, advance=silent
    )
    assert everything == pytest.approx(whole(model, TEXT, length, silent), rel=1e-5)
    assert counts.drop_rate == 0
    few, _ = retrieved(model, TEXT, length, Retrieval(top_k=1, share="layer"), local=LOCAL, advance=silent)
    assert few != pytest.approx(everything, rel=1e-4)


def test_perplexity_is_that_of_every_token_but_the_first_of_a_piece() -> None:
    model = small_landmark(attention="full")
    with torch.no_grad():
        losses = [float(model(piece[None], labels=piece[None]).loss) for piece in TEXT[:300].view(3, 100)]
    assert whole(model, TEXT[:399], 100, silent) == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_a_model_with_full_attention_is_measured_whole_and_truncated_to_the_size_of_landmark_attention() -> None:
    model = small_landmark(attention="full")
    full, short = by_length(model, TEXT, [100, 200], local=[LOCAL], top_k=[2])
    assert (full["attention"], full["length"], full["size"]) == ("full", 100, 100)
    assert (short["attention"], short["length"], short["size"]) == ("truncated", 100, LOCAL + 14 + 14)
    assert short["perplexity"] != pytest.approx(full["perplexity"], rel=1e-4)


def test_baselines_and_landmarks_have_lines_for_all_lengths() -> None:
    lines = [
        each
        for kind in ("xl", "window")
        for each in by_length(small_landmark(attention=kind), TEXT, [50, 100], local=[LOCAL], top_k=[2])
    ]
    assert [(row["attention"], row["length"], row["size"]) for row in lines] == [
        ("xl", 50, 24),
        ("xl", 100, 24),
        ("window", 50, 12),
        ("window", 100, 12),
    ]
    heard: list[int] = []
    rows = list(by_length(small_landmark(), TEXT, [50, 100], local=[7, LOCAL], top_k=[1, "all"], advance=heard.append))
    assert [(row["length"], row["local"], row["top_k"]) for row in rows] == [
        (n, each, k) for n in (50, 100) for each in (7, LOCAL) for k in (1, "all")
    ]
    assert rows[0]["blocks"] == 7
    assert sum(heard) == 8 * 400


def test_the_size_of_attention_is_local_tokens_landmarks_and_retrieved_tokens() -> None:
    assert attention_size(51, 512, 250, 2) == 250 + 10 + 100
    assert attention_size(51, 512, 250, "all") == attention_size(51, 512, 250, 50) == 522


def test_granularity_has_four_lines_and_says_how_many_blocks_are_fetched() -> None:
    rows = list(by_granularity(small_landmark(), TEXT, [100], local=LOCAL, top_k=[2]))
    assert [(row["per_head"], row["per_token"]) for row in rows] == [
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    ]
    assert rows[-1]["unique_blocks"] <= 2 < rows[0]["unique_blocks"]
    assert len({row["perplexity"] for row in rows}) == 4


def test_what_is_under_the_cutoff_is_not_retrieved_and_counted() -> None:
    model = small_landmark(context_miss=True)
    always, none, some, all_ = by_cutoff(model, TEXT, [100], [0.0, 0.3, 1.0], local=LOCAL, top_k=2)
    assert (always["cutoff"], always["dropped"], none["dropped"]) == (None, 0, 0)
    assert none["perplexity"] == pytest.approx(always["perplexity"], rel=1e-5)
    assert 0 < some["dropped"] < all_["dropped"] == 1


def test_a_segment_longer_than_the_text_takes_no_more_room_than_the_text() -> None:
    model = small_landmark()
    rows = by_length(model, TEXT, [100], local=[105, 7 * 10**12], top_k=[2])
    assert len({row["perplexity"] for row in rows}) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lengths": [500]}, "fewer than the length 500"),
        ({"lengths": []}, "at least 2"),
        ({"local": [LOCAL + 1]}, "not a multiple of 7, the model's tokens in a block"),
        ({"local": [0]}, "not a multiple"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], says: str) -> None:
    model = small_landmark()
    given: dict[str, Any] = {"lengths": [100], "local": [LOCAL], "top_k": [2], **wrong}
    with pytest.raises(InvalidArgument, match=says):
        list(by_length(model, TEXT, **given))
    assert model.config.segment_blocks == 2
    with pytest.raises(InvalidArgument, match="no context-miss token"):
        list(by_cutoff(model, TEXT, [100], [0.1], local=LOCAL, top_k=2))


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
