"""``memstore train indexed``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memstore.eval.needles import prose_text
from tests.tools.conftest import Cli
from tests.train.helpers import use_little_text

pytest.importorskip("transformers.models.dots3_note", reason="this transformers has no dots3")

USAGE = 2


def test_a_model_with_an_index_is_trained(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_little_text(monkeypatch)
    done = cli("train", "indexed", "--out", tmp_path / "model", "--steps", 3, "--seed", 2, "--json")
    assert done.code == 0, done.err
    assert (done.json["recipe"], done.json["steps"]) == ("indexed-cpu", 3)
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "dots3_note_text"
    text = tmp_path / "text.txt"
    text.write_text(prose_text()[:20_000])
    asked = cli(
        "eval", "passkey", "--model", tmp_path / "model", "--lengths", 300, "--samples", 2, "--filler", text, "--json"
    )
    assert asked.code == 0, asked.err
    (row,) = asked.json["rows"]
    assert (row["samples"], row["length"], row["margin"]) == (2, 300, None)


def test_what_the_recipe_cannot_do_is_refused(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    for more, said in (
        ((text,), "unexpected extra argument"),
        (("--recipe", "passkey-cpu"), "there is no recipe 'passkey-cpu'"),
        (("--vocabulary", 300), "--vocabulary"),
    ):
        done = cli("train", "indexed", "--out", tmp_path / "model", *more)
        assert done.code == USAGE
        assert said in done.err
