"""``memstore train router``, and what is read with what it wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.conftest import Cli
from tests.train.test_router import write_pairs


def test_a_trained_router_is_compared_and_used(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    pairs, router, memory = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "mine.router", tmp_path / "notes.mem"
    done = cli(
        "train", "router", "--model", model_folder, "--pairs", pairs, "--test", pairs, "--out", router, "--steps", 2,
        "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [row["ranker"] for row in done.json["rows"]] == ["fitted to the text", "trained"] * 2
    assert done.json["bytes"] == router.stat().st_size
    (tmp_path / "notes.txt").write_text("The boats are run by Jan. " * 40)
    assert cli("read", tmp_path / "notes.txt", memory, "--model", model_folder, "--router", router).code == 0
    assert cli("search", memory, "--text", "Who runs the boats?").code == 0  # by the router that is in the memory


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "is empty: write one JSON object"),
        ("{", "line 1 of .* not valid JSON"),
        ('{"question": "Who?", "evidence": []}', "line 1 of .* is not a question"),
        ('{"question": " ", "evidence": ["Jan."]}', "is not a question"),
        ('{"question": "Who?", "evidence": ["Jan."], "others": [1]}', "is not a question"),
    ],
)
def test_what_is_no_question_is_named(cli: Cli, tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "pairs").write_text(line)
    done = cli("train", "router", "--pairs", tmp_path / "pairs", "--out", tmp_path / "r")
    assert done.code == 2
    assert re.search(says, done.err)
