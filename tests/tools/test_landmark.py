"""``memstore train landmark``, and what ``memstore eval`` says of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memstore.eval.needles import prose_text
from tests.eval.landmarks import save_landmark
from tests.tools.conftest import Cli

USAGE, NOT_FOUND, REFUSED = 2, 3, 5
SMALL = ("--steps", 3, "--context", 93)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:30_000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_landmark(tmp_path_factory.mktemp("model") / "landmark", context_miss=True)


def test_training_on_a_text_and_its_perplexity(cli: Cli, text: Path, tmp_path: Path) -> None:
    folders = {kind: tmp_path / kind for kind in ("landmark", "full", "xl")}
    tokenizer: tuple[Any, ...] = ("--vocabulary", 300)
    for kind, folder in folders.items():
        command = ("train", "landmark", text, "--attention", kind, "--out", folder, *SMALL, *tokenizer)
        done = cli(*command, "--json")
        assert done.code == 0, done.err
        assert done.json["steps"] == 3
        tokenizer = ("--tokenizer", folders["landmark"])
    changed = cli(*command, "--seed", 1)
    assert changed.code == REFUSED
    numbers = ("--lengths", "200,400", "--scored", 50, "--samples", 2)
    measured = cli("eval", "perplexity", "--model", folders["landmark"], "--text", text, *numbers, "--json")
    assert measured.code == 0, measured.err
    assert [row["length"] for row in measured.json["rows"]] == [200, 400]
    assert all(1 < row["memory"] < 1000 for row in measured.json["rows"])
    refused = cli("eval", "perplexity", "--model", folders["full"], "--text", text, *numbers)
    assert refused.code == USAGE
    assert "has no landmarks and retrieves nothing" in refused.err


def test_passkeys_have_a_table_by_layer(cli: Cli, text: Path, model: Path) -> None:
    command = ("eval", "passkey", "--model", model, "--lengths", "300", "--samples", 2, "--filler", text)
    shown = cli(*command)
    assert shown.code == 0, shown.err
    assert "by layer" in shown.out
    (row,) = cli(*command, "--json").json["rows"]
    assert {"layer", "rank", "weight", "margin"} <= row["layers"][0].keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "got neither"),
        (["{text}", "--recipe", "landmark-cpu"], "trains without texts"),
        (["--recipe", "landmark-cpu", "--context", 500], "--recipe landmark-cpu does not take --context"),
        (["--recipe", "magic"], "choose one of landmark-cpu, landmark-prose-cpu"),
        (["{text}", "--recipe", "landmark-finetune"], "needs a model to start from"),
        (["{text}", "--recipe", "landmark-prose-cpu", "--preset", "tiny"], "leave --preset out"),
        (["{text}", "--attention", "sparse"], "attention must be one of"),
        (["{text}", "--attention", "full", "--context-miss"], "context_miss needs landmarks"),
        (["{text}", "--init", "{model}", "--block-size", 64], "--block-size 64 does not fit"),
        (["{text}", "--init", "{model}", "--preset", "tiny"], "--preset is for new models"),
        (["{text}", "--context", 30], "two blocks"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(
    cli: Cli, text: Path, model: Path, tmp_path: Path, arguments: list[Any], words: str
) -> None:
    filled = [str(each).format(text=text, model=model) for each in arguments]
    outcome = cli("train", "landmark", *filled, "--out", tmp_path / "run")
    assert outcome.code == USAGE, outcome
    assert words in outcome.err
    assert not (tmp_path / "run/model.safetensors").exists()


def test_what_is_missing_is_named(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("train", "landmark", "nothing.txt", "--out", tmp_path / "run")
    assert outcome.code == NOT_FOUND
    assert "nothing.txt" in outcome.err
