"""`benchmarks/memory_questions.py`: what was said to one server is asked of another, on today's endpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from benchmarks.memory_questions import DATA, main

TURNS = [
    "My dog is called Archie, and he is a golden retriever who is nine years old.",
    "On Tuesdays I bake rye bread with caraway, for the whole street.",
    "That was all for today, thank you.",
]
SOURCES = {"memory_1": TURNS[0], "memory_2": TURNS[1], "memory_3": "Somebody else said this, at another time."}


def write_wheel(path: Path) -> None:
    """Like that of bfcl-eval, with one scenario."""
    tables: dict[str, list[dict[str, Any]]] = {
        "memory_prereq_conversation/memory_student": [
            {"question": [[{"role": "user", "content": each}]]} for each in TURNS
        ],
        "BFCL_v4_memory": [
            {"id": name, "scenario": "student", "question": [[{"role": "user", "content": "What is it called?"}]]}
            for name in SOURCES
        ],
        "possible_answer/BFCL_v4_memory": [
            {"id": name, "ground_truth": ["Archie"], "source": source} for name, source in SOURCES.items()
        ],
    }
    with ZipFile(path, "w") as wheel:
        for name, rows in tables.items():
            wheel.writestr(f"{DATA}/{name}.json", "\n".join(json.dumps(row) for row in rows))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_said_in_a_session_is_asked_of_the_next_server(
    tmp_path: Path, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "mini.whl")
    out = tmp_path / "rows.json"
    given = ["--wheel", tmp_path / "mini.whl", "--model", instruct_folder, "--scenario", "student", "--answers", "4"]
    monkeypatch.setattr(sys, "argv", [str(each) for each in ["memory_questions.py", *given, "--out", out]])
    main()
    told = json.loads(out.read_text())
    assert told["model"] == str(instruct_folder)
    assert told["cores"] > 0
    (row,) = told["rows"]
    # Few enough blocks for all of them to be retrieved: whatever the model is, it has the evidence.
    assert row.items() >= {"scenario": "student", "turns": 3, "asked": 2, "found": 2, "left_out": 1}.items()
    assert {"whole", "right"} < row.keys()
