from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.eval.evaluation import evaluation_of
from memstore.eval.needles import prose_text
from memstore.eval.perplexity import losses, perplexity, places
from memstore.models.drt.evaluation import after_window, without_retrieval
from memstore.models.hils import HilsCache
from memstore.models.hils.evaluation import after_window as hils_windows
from memstore.models.landmark import LandmarkCache
from memstore.models.landmark.evaluation import after_window as segments_alone
from memstore.models.memorizing.evaluation import MemorizingScorer
from memstore.readers.kinds import encode, kind_of
from tests.eval.drts import byte_tokenizer, small_drt
from tests.eval.landmarks import small_landmark
from tests.eval.memorizing import small_memorizing
from tests.models import hils


def text(count: int) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(0))


def one_pass(model: Any, tokens: Tensor, scored: int) -> float:
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, -scored - 1 : -1]
    return float(F.cross_entropy(logits, tokens[-scored:]).exp())


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_perplexities_are_those_of_one_pass(positions: str) -> None:
    model, tokens = small_drt(positions=positions), text(1200)
    rows = perplexity(model, tokens, [200, 601, 1200], after_window, scored=90, samples=1)
    assert [row["length"] for row in rows] == [200, 601, 1200]
    for row in rows:
        assert row["scored"] == 90
        assert row["memory"] == pytest.approx(one_pass(model, tokens[-row["length"] :], 90), rel=1e-4)
        assert row["window"] == pytest.approx(
            one_pass(without_retrieval(model), tokens[-row["length"] :], 90), rel=1e-4
        )
        assert row["memory"] != pytest.approx(row["window"], rel=1e-3)


def test_samples_are_at_the_same_places_for_all_lengths() -> None:
    assert places(1000, 400, 1) == [1000]
    assert places(1000, 400, 3) == [400, 700, 1000]
    assert places(400, 400, 3) == [400]
    model, tokens = small_drt(), text(600)
    heard: list[int] = []
    (row,) = perplexity(model, tokens, [200], after_window, scored=50, samples=3, advance=heard.append)
    expected = [one_pass(model, tokens[end - 200 : end], 50) for end in (200, 400, 600)]
    assert row["memory"] == pytest.approx(float(torch.tensor(expected).log().mean().exp()), rel=1e-4)
    assert row.keys() == {"length", "scored", "window", "memory", "ratio"}
    assert sum(heard) == 600


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lengths": [1001]}, "the text has 1,000 tokens"),
        ({"lengths": [51]}, "no room for context before the 50 scored tokens"),
        ({"samples": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_told(wrong: dict[str, Any], says: str) -> None:
    options: dict[str, Any] = {"lengths": [200], "scored": 50, **wrong}
    with pytest.raises(InvalidArgument, match=says):
        perplexity(small_drt(), text(1000), bare=after_window, **options)


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
def test_a_hils_model_is_measured_with_its_blocks_and_with_windows_alone(kind: str) -> None:
    model = hils.make(kind)
    tokens = text(700) % model.config.vocab_size
    rows = perplexity(model, tokens, [100, 301, 700], hils_windows, scored=60, samples=1)
    cache = HilsCache(model.config, 1)
    cache.top_k = 0
    alone = losses(model, cache, tokens)[-60:].mean().exp()
    for row in rows:
        assert row["memory"] == pytest.approx(one_pass(model, tokens[-row["length"] :], 60), rel=1e-4)
        assert row["window"] != pytest.approx(row["memory"], rel=1e-3)
    assert rows[-1]["window"] == pytest.approx(float(alone), rel=1e-4)
    assert hils_windows(model, tokens[:16], 10) == pytest.approx(
        losses(model, HilsCache(model.config, 1), tokens[:16])[-10:]
    )


def test_a_landmark_model_is_measured_with_its_blocks_and_with_segments_alone() -> None:
    model, tokens = small_landmark(), text(400)
    rows = perplexity(model, tokens, [100, 400], segments_alone, scored=60, samples=1)
    whole = losses(model, LandmarkCache(model.config, 1), tokens)[-60:].mean().exp()
    assert rows[-1]["memory"] == pytest.approx(float(whole), rel=1e-4)
    assert all(row["window"] != pytest.approx(row["memory"], rel=1e-3) for row in rows)
    size = model.config.segment_tokens
    with torch.no_grad():
        last = model(tokens[None, 399 - size : 399]).logits[0]
    expected = F.cross_entropy(last, tokens[400 - size :], reduction="none")
    assert segments_alone(model, tokens, 60)[-size:] == pytest.approx(expected, rel=1e-4)
    for begin in (0, 60, 300, 339):  # where a text begins changes nothing
        assert segments_alone(model, tokens[begin:], 60)[-size:] == pytest.approx(expected, rel=1e-4)
    assert rows[0]["window"] == pytest.approx(rows[1]["window"], rel=1e-4)


def test_a_memorizing_transformer_is_measured_with_its_memory_and_with_windows_alone() -> None:
    model, words = small_memorizing(), prose_text()[:200]
    measure, tokens = evaluation_of(kind_of(model)).perplexity, torch.tensor(encode(byte_tokenizer(), words))
    assert measure is not None
    sizes: dict[str, Any] = {"lengths": [100, 200], "scored": 60, "samples": 1}
    rows = measure(model, byte_tokenizer(), [words], Path("model"), **sizes, show=False).data["rows"]
    whole = {size: MemorizingScorer(model).losses(tokens, size)[-60:].mean().exp() for size in (0, 500)}
    assert rows[-1]["memory"] == pytest.approx(float(whole[500]), abs=1e-3)
    assert rows[-1]["window"] == pytest.approx(float(whole[0]), abs=1e-3)
    assert rows[0]["window"] == pytest.approx(rows[-1]["window"], rel=1e-3)
    assert rows[0]["memory"] != pytest.approx(rows[-1]["memory"], rel=1e-3)
