"""What the README shows must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.conftest import Cli

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    smaller = example.replace('"smollm2"', repr(str(model_folder))).replace("32_768", "2_048")
    assert smaller.count(str(model_folder)) == smaller.count("2_048") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(smaller, "README.md", "exec"), {})  # noqa: S102 - that is the point
    assert "The assert statement is" in capsys.readouterr().out
    assert (tmp_path / "python.mem").is_dir()


def test_the_commands_are_there(cli: Cli) -> None:
    verbs = re.findall(r"^    memstore (\w+)", README, re.MULTILINE)
    assert len(verbs) >= 5
    for verb in verbs:
        assert cli(verb, "--help").code == 0


def test_the_make_targets_are_there() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"make (\w[\w-]*)", README):
        assert f"\n{target}: " in makefile
