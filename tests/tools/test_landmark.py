"""``memstore train landmark``, and what ``memstore eval`` says of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memstore.eval.needles import prose_text
from tests.eval.landmarks import save_landmark
from tests.tools.conftest import Cli

USAGE, NOT_FOUND, REFUSED = 2, 3, 5
SMALL = ("--steps", 3, "--context", 93, "--vocabulary", 300)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:30_000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_landmark(tmp_path_factory.mktemp("model") / "landmark", context_miss=True)


def test_training_on_a_text_and_its_tables(cli: Cli, text: Path, tmp_path: Path) -> None:
    folders = {kind: tmp_path / kind for kind in ("landmark", "full", "xl")}
    tokenizer: tuple[Any, ...] = ()
    for kind, folder in folders.items():
        command = ("train", "landmark", text, "--attention", kind, "--out", folder, *SMALL, *tokenizer)
        done = cli(*command, "--json")
        assert done.code == 0, done.err
        assert done.json["steps"] == 3
        tokenizer = ("--tokenizer", folders["landmark"])
    changed = cli(*command, "--seed", 1)
    assert changed.code == REFUSED
    compared = [each for kind in ("full", "xl") for each in ("--baseline", folders[kind])]
    numbers = ("--lengths", "200,400", "--local", 62, "--top-k", "1,all", "--samples", 2)
    measured = cli("eval", "perplexity", "--model", folders["landmark"], "--text", text, *compared, *numbers, "--json")
    assert measured.code == 0, measured.err
    rows = measured.json["rows"]
    assert [row["attention"] for row in rows if row["length"] == 200] == [
        "full", "truncated", "xl", "landmark", "landmark",
    ]  # fmt: skip
    assert [row["top_k"] for row in rows if row["length"] == 400] == [None, 1, "all"]
    assert all(1 < row["perplexity"] < 1000 for row in rows)
    assert len(measured.json["granularity"]) == 2 * 2 * 4


def test_tables_for_people(cli: Cli, text: Path, model: Path) -> None:
    shown = cli("eval", "perplexity", "--model", model, "--text", text, "--lengths", "50", "--cutoffs", "0.1,1")
    assert shown.code == 0, shown.err
    for words in ("By length", "By granularity of retrieval", "By cut-off", "unique blocks", "dropped"):
        assert words in shown.out


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "100", "--scored", 5], "a landmark model does not take --scored"),
        (["--lengths", "100", "--local", 15], "not a multiple"),
        (["--lengths", "100", "--top-k", "few"], "write numbers"),
        (["--lengths", "100", "--top-k", "0"], "top_k must be a whole number"),
        (["--lengths", "100", "--cutoffs", "1.5"], "threshold must be a number from 0 to 1"),
        (["--lengths", "5", "--cutoffs", "0.5"], "a shorter text retrieves nothing"),
        (["--lengths", "1M"], "fewer than the length"),
        (["--lengths", "100", "--baseline", "passkey"], "cannot be a baseline"),
    ],
)
def test_tables_that_cannot_be_are_refused(cli: Cli, text: Path, model: Path, arguments: list[Any], words: str) -> None:
    outcome = cli("eval", "perplexity", "--model", model, "--text", text, *arguments)
    assert outcome.code in (USAGE, REFUSED), outcome
    assert words in outcome.err


def test_cutoffs_need_a_context_miss_token(cli: Cli, text: Path, tmp_path: Path) -> None:
    plain = save_landmark(tmp_path / "plain")
    outcome = cli("eval", "perplexity", "--model", plain, "--text", text, "--lengths", "100", "--cutoffs", "0.5")
    assert outcome.code == USAGE
    assert "needs a model with a context-miss token" in outcome.err


def test_options_of_landmark_models_are_refused_for_a_drt(cli: Cli, text: Path) -> None:
    outcome = cli("eval", "perplexity", "--text", text, "--local", 62)
    assert outcome.code == USAGE
    assert "a DRT does not take --local" in outcome.err


def test_what_is_missing_is_named(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("train", "landmark", "nothing.txt", "--out", tmp_path / "run")
    assert outcome.code == NOT_FOUND
    assert "nothing.txt" in outcome.err
