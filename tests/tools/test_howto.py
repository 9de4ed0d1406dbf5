"""The programs in docs/howto.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "howto.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r'```python\n"""(\w+)\.py"""\n(.*?)```', PAGE, re.DOTALL))


def test_the_page_has_its_four_programs() -> None:
    assert list(PROGRAMS) == ["sources", "chat", "own", "batches"]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_a_program_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = PROGRAMS[name].replace('"smollm2"', repr(str(model_folder)))
    source = source.replace("tokenizer.eos_token", "tokenizer.convert_ids_to_tokens(0)")  # the tiny one has none
    exec(compile(source, f"{name}.py", "exec"), {})  # noqa: S102 - that is the point
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= {"sources": 4, "chat": 2, "own": 1, "batches": 2}[name]
    assert name != "own" or printed == ["torch.Size([1, 1, 1, 32])"]
