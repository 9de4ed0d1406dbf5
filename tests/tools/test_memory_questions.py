"""`benchmarks/memory_questions.py`: what was said to one server is asked of another, on today's endpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.memory_questions import main
from benchmarks.questions import chat
from tests.questions.test_chat import TURNS, wheel_file


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_said_in_a_session_is_asked_of_the_next_server(
    tmp_path: Path, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = chat.data_in(wheel_file(tmp_path))
    monkeypatch.setattr(chat, "fetched", lambda: data)
    out = tmp_path / "rows.json"
    given = ["--model", instruct_folder, "--scenario", "student", "--answers", "4"]
    monkeypatch.setattr(sys, "argv", [str(each) for each in ["memory_questions.py", *given, "--out", out]])
    main()
    told = json.loads(out.read_text())
    assert told["model"] == str(instruct_folder)
    assert told["cores"] > 0
    (row,) = told["rows"]
    # Few enough blocks for all of them to be retrieved: whatever the model is, it has the evidence.
    assert row.items() >= {"scenario": "student", "turns": len(TURNS), "asked": 2, "found": 2}.items()
    assert {"whole", "right"} < row.keys()
