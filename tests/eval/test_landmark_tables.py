"""The landmark paper's tables: what retrieves everything is full attention, and what is skipped is counted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.landmark_tables import (
    attention_size,
    by_cutoff,
    by_granularity,
    by_length,
    main,
    retrieved,
    whole,
)
from memstore import Retrieval
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.eval.needles import prose_text
from memstore.readers.kinds import shipped_model
from tests.eval.landmarks import save_landmark, small_landmark

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
    assert counts.dropped == 0
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


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:30_000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_landmark(tmp_path_factory.mktemp("model") / "landmark", context_miss=True)


def run(model: Path, text: Path, *options: Any) -> None:
    main([str(each) for each in ("--model", model, "--text", text, *options)])


def test_a_model_is_compared_with_its_baselines(
    text: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("full", "xl")
    baselines = [save_landmark(tmp_path / kind, attention=kind) for kind in kinds]
    compared = [each for folder in baselines for each in ("--baseline", folder)]
    numbers = ("--lengths", "200,400", "--local", 56, "--top-k", "1,all", "--samples", 2)
    run(model, text, *compared, *numbers, "--json")
    measured = json.loads(capsys.readouterr().out)
    rows = measured["rows"]
    assert [row["attention"] for row in rows if row["length"] == 200] == [
        "full", "truncated", "xl", "landmark", "landmark",
    ]  # fmt: skip
    assert [row["top_k"] for row in rows if row["length"] == 400] == [None, 1, "all"]
    assert all(row["perplexity"] > 1 for row in rows)
    assert len(measured["granularity"]) == 2 * 2 * 4


def test_tables_for_people(text: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, text, "--lengths", "50", "--cutoffs", "0.1,1")
    shown = capsys.readouterr().out
    for words in ("By length", "By granularity of retrieval", "By cut-off", "unique blocks", "dropped"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "100", "--local", 15], "not a multiple"),
        (["--lengths", "100", "--top-k", "few"], "write numbers"),
        (["--lengths", "100", "--top-k", "0"], "top_k must be a whole number"),
        (["--lengths", "100", "--cutoffs", "1.5"], "threshold must be a number from 0 to 1"),
        (["--lengths", "5", "--cutoffs", "0.5"], "a shorter text retrieves nothing"),
        (["--lengths", "1M"], "fewer than the length"),
        (["--lengths", "100", "--baseline", shipped_model("passkey")], "cannot be a baseline"),
    ],
)
def test_tables_that_cannot_be_are_refused(text: Path, model: Path, arguments: list[Any], words: str) -> None:
    with pytest.raises((InvalidArgument, UnsupportedModel), match=words):
        run(model, text, *arguments)


def test_cutoffs_need_a_context_miss_token(text: Path, tmp_path: Path) -> None:
    plain = save_landmark(tmp_path / "plain")
    with pytest.raises(InvalidArgument, match="needs a model with a context-miss token"):
        run(plain, text, "--lengths", "100", "--cutoffs", "0.5")


def test_a_baseline_has_no_tables_of_its_own(text: Path, tmp_path: Path) -> None:
    full = save_landmark(tmp_path / "full", attention="full")
    with pytest.raises(UnsupportedModel, match="pass it with --baseline"):
        run(full, text)
