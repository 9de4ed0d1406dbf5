"""The commands of docs/seeing.md run, in the order of the page, and docs/pictures.md shows what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from memstore.tools.audit import Picture
from tests.tools.conftest import Cli

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join(f"Line {i} of the log tells of nothing new. " for i in range(60))


def commands(page: str) -> list[list[str]]:
    found = re.findall(r"^    memstore (.+)$", (DOCS / page).read_text(), re.MULTILINE)
    return [shlex.split(each) for each in found]


def test_the_commands_of_the_page_run_one_after_the_other(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("moby-dick.txt").write_text(TEXT)
    read = ("read", "moby-dick.txt", "notes.mem", "--model", model_folder, "--dtype", "float32", "--block-size", 16)
    assert cli(*read).code == 0
    shown = commands("seeing.md")
    assert [words[0] for words in shown[:2]] == ["ls", "show"]
    for words in shown:
        # The page is a server, which has tests of its own.
        done = cli(words[0], "--help") if words[0] == "view" else cli(*words)
        assert done.code == 0, f"{' '.join(words)}: {done.err}"
        assert done.out
    assert Path("heat.png").stat().st_size
    assert Path("audit.png").stat().st_size


def test_every_picture_is_shown_with_its_command() -> None:
    page = (DOCS / "pictures.md").read_text()
    assert {words[1] for words in commands("pictures.md")} == {*get_args(Picture)}
    for kind in get_args(Picture):
        assert f"](pictures/{kind}.png)" in page
        assert 0 < (DOCS / "pictures" / f"{kind}.png").stat().st_size < 80_000
