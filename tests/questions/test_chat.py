"""The memory questions of bfcl-eval, as the memory is asked them: which turn of a user holds what a question needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from benchmarks.questions import chat

TURNS = (
    "My dog is called Archie, and he\u2019s a golden retriever who is nine years old.",
    "On Tuesdays I bake rye bread with caraway, for the whole street.",
    "That was all for today, thank you.",
)
SOURCES = {
    "memory_1": "My dog is called Archie, and he's a golden retriever...",
    "memory_2": TURNS[1],
    "memory_3": "Somebody else said this, at another time.",
}


def wheel_file(place: Path) -> Path:
    """Like that of bfcl-eval; one scenario has something to say."""
    tables: dict[str, list[dict[str, Any]]] = {
        f"memory_prereq_conversation/memory_{scenario}": [] for scenario in chat.SCENARIOS
    } | {
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
    with ZipFile(place / "bfcl.whl", "w") as wheel:
        for name, rows in tables.items():
            wheel.writestr(f"bfcl_eval/data/{name}.json", "\n".join(json.dumps(row) for row in rows))
    return place / "bfcl.whl"


def test_the_evidence_of_a_question_is_the_turn_that_has_its_source(tmp_path: Path) -> None:
    sets = {each.name: each for each in chat.load(chat.data_in(wheel_file(tmp_path)))}
    assert tuple(sets) == chat.SCENARIOS
    assert sets["student"].paragraphs == TURNS
    # The third one's source nobody has said.
    assert [(each.id, each.answers, each.evidence) for each in sets["student"].questions] == [
        ("memory_1", ("Archie",), (0,)),
        ("memory_2", ("Archie",), (1,)),
    ]


def test_a_text_has_a_source_where_a_long_piece_of_it_stands_in_it_word_for_word() -> None:
    source = "... my roommate and best friend from freshman year, Tony, has moved to Lisbon..."
    assert chat.has_source(source, "So my roommate  and best friend\nfrom freshman year, Tony, called.")
    assert not chat.has_source(source, "my roommate and best friend of many years")
    assert not chat.has_source(source, "...")
