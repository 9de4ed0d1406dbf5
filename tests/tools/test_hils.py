"""``memstore train hils``, and what ``memstore`` does with its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memstore.eval.needles import prose_text
from memstore.models.hils import HilsForCausalLM
from tests.tools.conftest import Cli

USAGE = 2


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:30_000])
    return path


@pytest.mark.slow
def test_a_model_is_trained_read_with_and_asked(cli: Cli, text: Path, tmp_path: Path) -> None:
    model, memory = tmp_path / "model", tmp_path / "m.mem"
    small = ("--steps", 3, "--context", 93, "--vocabulary", 300, "--block-size", 16)
    trained = cli("train", "hils", text, "--out", model, *small, "--json")
    assert trained.code == 0, trained.err
    assert HilsForCausalLM.from_pretrained(model).config.chunk_size == 16
    more = cli("train", "hils", text, "--init", model, "--out", tmp_path / "more", "--steps", 2, "--json")
    assert more.code == 0, more.err
    other = cli("train", "hils", text, "--init", model, "--out", tmp_path / "x", "--block-size", 32)
    assert (other.code, "does not fit" in other.err) == (USAGE, True)
    assert cli("read", text, memory, "--model", model).code == 0
    asked = cli("ask", memory, "What is an assert statement?", "--model", model, "--trace", "--max-tokens", 4, "--json")
    assert asked.code == 0, asked.err
    for verb in (
        ("verify", memory),
        ("stats", memory),
        ("trace", memory),
        ("ls", memory),
    ):
        assert cli(*verb).code == 0, verb
    audited = cli("audit", memory, "What is an assert statement?", "--model", model, "--json")
    assert audited.code == 0, audited.err
    assert audited.json["mechanism"] == "hils"
    found = cli("search", memory, "assert", "--model", model, "--json")
    assert found.code == 0, found.err
    measured = cli("eval", "passkey", "--model", model, "--lengths", "300", "--samples", 2, "--filler", text, "--json")
    assert measured.code == 0, measured.err
    (row,) = measured.json["rows"]
    assert {"layer", "rank", "weight", "margin"} <= row["layers"][0].keys()
    sizes = ("--lengths", "200,600", "--scored", 50, "--samples", 2)
    compared = cli("eval", "perplexity", "--model", model, "--text", text, *sizes, "--json")
    assert compared.code == 0, compared.err
    assert [row["length"] for row in compared.json["rows"]] == [200, 600]
    assert all(row["memory"] > 1 and row["window"] > 1 for row in compared.json["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of them"),
        (["{text}", "--recipe", "hils-passkey-cpu"], "one of them"),
        (["--recipe", "hils-passkey-cpu", "--context", 500], "does not take --context"),
        (["--recipe", "magic"], "choose one of hils-passkey-cpu"),
        (["{text}", "--context", 30], "two blocks"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(
    cli: Cli, text: Path, tmp_path: Path, arguments: list[Any], words: str
) -> None:
    outcome = cli("train", "hils", *(str(each).format(text=text) for each in arguments), "--out", tmp_path / "run")
    assert outcome.code == USAGE, outcome
    assert words in outcome.err
    assert not (tmp_path / "run/model.safetensors").exists()
