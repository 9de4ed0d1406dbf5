"""``memstore train memorizing``, and what ``memstore eval perplexity`` says of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memstore.eval.needles import prose_text
from tests.eval.memorizing import save_memorizing
from tests.tools.conftest import Cli

USAGE, NOT_FOUND, REFUSED = 2, 3, 5
SMALL = ("--steps", 3, "--batch", 2, "--vocabulary", 300, "--window", 32)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:4_000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_memorizing(tmp_path_factory.mktemp("model") / "memorizing")


@pytest.mark.slow
def test_training_without_a_memory_giving_it_late_and_measuring(cli: Cli, text: Path, tmp_path: Path) -> None:
    command = ("train", "memorizing", text, "--out", tmp_path / "without", "--memory-size", 0, *SMALL)
    done = cli(*command, "--json")
    assert done.code == 0, done.err
    assert (done.json["steps"], done.json["memory_size"]) == (3, 0)
    assert cli(*command, "--seed", 1).code == REFUSED
    late = ("--init", tmp_path / "without", "--memory-size", "1K", "--refresh-every", 2, "--steps", 3)
    done = cli("train", "memorizing", text, "--out", tmp_path / "with", *late, "--json")
    assert done.code == 0, done.err
    assert done.json["memory_size"] == 1024
    numbers = ("--lengths", "200,1K", "--scored", 100)
    measured = cli("eval", "perplexity", "--model", tmp_path / "with", "--text", text, *numbers, "--json")
    assert measured.code == 0, measured.err
    assert [row["length"] for row in measured.json["rows"]] == [200, 1024]
    assert all(1 < row["memory"] < 300 for row in measured.json["rows"])


@pytest.mark.slow
def test_a_stock_model_gets_a_memory_and_is_measured(cli: Cli, text: Path, model_folder: Path, tmp_path: Path) -> None:
    small = ("--layer", 1, "--window", 32, "--memory-size", 64, "--batch", 2, "--steps", 3)
    done = cli("train", "memorizing", text, "--init", model_folder, *small, "--out", tmp_path / "remembers", "--json")
    assert done.code == 0, done.err
    assert (done.json["layer"], done.json["trained_parameters"]) == (1, 8)
    command = ("eval", "perplexity", "--model", tmp_path / "remembers", "--text", text)
    (row,) = cli(*command, "--lengths", "1K", "--scored", 100, "--json").json["rows"]
    assert row["memory"] != row["window"]


def test_options_of_other_models_are_refused(
    cli: Cli, text: Path, model: Path, model_folder: Path, tmp_path: Path
) -> None:
    for init, option, value, words in (
        (model_folder, "--vocabulary", 300, "a stock model does not take --vocabulary"),
        (model, "--layer", 1, "a Memorizing Transformer does not take --layer"),
        (model_folder, "--layer", 7, "layer must be from -3 to 2, not 7"),
        (model_folder, "--window", 32, "has 3 layers, but the default layer is the 6th from the end"),
    ):
        refused = cli("train", "memorizing", text, "--init", init, option, value, "--out", tmp_path / "run")
        assert refused.code == USAGE, refused
        assert words in refused.err


def test_a_text_that_is_too_short_is_refused(cli: Cli, text: Path, model: Path) -> None:
    outcome = cli("eval", "perplexity", "--model", model, "--text", text, "--lengths", "1M")
    assert outcome.code == USAGE, outcome
    assert "fewer than the length 1,048,576" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to train on"),
        (["{text}", "--init", "{model}", "--window", 32], "--window 32 does not fit"),
        (["{text}", "--init", "{model}", "--preset", "tiny"], "--preset is for new models"),
        (["{text}", "--preset", "huge"], "there is no preset"),
        (["{text}", "--refresh-every", 0], "--refresh-every"),
        (
            ["{text}", "--memory-size", "8G"],
            "--memory-size must be a number of tokens of at least 0, such as 512 or 8K",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(
    cli: Cli, text: Path, model: Path, tmp_path: Path, arguments: list[Any], words: str
) -> None:
    filled = [str(each).format(text=text, model=model) for each in arguments]
    outcome = cli("train", "memorizing", *filled, "--out", tmp_path / "run")
    assert outcome.code == USAGE, outcome
    assert words in outcome.err
    assert not (tmp_path / "run/model.safetensors").exists()


def test_models_that_cannot_be_asked_are_refused(cli: Cli, text: Path, model: Path) -> None:
    asked = cli("eval", "passkey", "--model", model, "--lengths", "300", "--samples", 1, "--filler", text)
    assert asked.code == REFUSED, asked
    assert "which was not trained on needles" in asked.err
