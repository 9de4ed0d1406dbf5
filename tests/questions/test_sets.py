from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.questions import hotpotqa, squad, wheel
from memstore import paths
from memstore.errors import DamagedError, InvalidArgument
from memstore.wheels import MARKER

SQUAD: dict[str, Any] = {
    "data": [
        {
            "title": "Whales",
            "paragraphs": [
                {
                    "context": "Ahab lost a leg.",
                    "qas": [
                        {
                            "id": "a",
                            "question": "What did Ahab lose? ",
                            "answers": [{"text": "a leg"}, {"text": "a leg"}, {"text": "leg"}],
                            "is_impossible": False,
                        },
                        {"id": "b", "question": "Who won?", "answers": [], "is_impossible": True},
                    ],
                },
                {
                    "context": "Queequeg owns a harpoon.",
                    "qas": [
                        {"id": "c", "question": "What does Queequeg own?", "answers": [{"text": "a harpoon"}]},
                    ],
                },
            ],
        }
    ]
}
HOTPOT: list[dict[str, Any]] = [
    {
        "_id": "x",
        "question": "Which ship sank first?",
        "answer": "Essex",
        "supporting_facts": [["Essex", 0], ["Pequod", 0], ["Essex", 1]],
        "context": [
            ["Pequod", ["It sank.", " Late."]],
            ["Essex", ["It sank", " in 1820."]],
            ["Rachel", ["It sailed."]],
        ],
    },
    {
        "_id": "y",
        "question": "Did the Rachel sail?",
        "answer": "yes",
        "supporting_facts": [["Rachel", 0]],
        "context": [["Rachel", ["It sailed."]], ["Essex", ["It sank", " in 1820."]]],
    },
]


def test_squad_asks_what_has_an_answer() -> None:
    found = squad.load(SQUAD)
    assert found.paragraphs == ("Ahab lost a leg.", "Queequeg owns a harpoon.")
    assert [(each.id, each.text, each.answers, each.evidence) for each in found.questions] == [
        ("a", "What did Ahab lose?", ("a leg", "leg"), (0,)),
        ("c", "What does Queequeg own?", ("a harpoon",), (1,)),
    ]


def test_hotpotqa_pools_each_paragraph_once() -> None:
    found = hotpotqa.load(HOTPOT)
    assert found.paragraphs == ("Pequod\nIt sank. Late.", "Essex\nIt sank in 1820.", "Rachel\nIt sailed.")
    assert [each.evidence for each in found.questions] == [(0, 1), (2,)]
    assert len(hotpotqa.load(HOTPOT, count=1).questions) == 1


def test_a_question_is_always_in_the_same_half() -> None:
    found = squad.load(SQUAD)
    halves = [found.of("all"), *(found.of(half) for half in ("chosen", "held-out") if _any(found, half))]
    assert [each.id for each in halves[0]] == ["a", "c"]
    assert sorted(each.id for half in halves[1:] for each in half) == ["a", "c"]
    assert {each.id: each.half for each in found.questions} == {"a": "chosen", "c": "chosen"}


def _any(found: Any, half: str) -> bool:
    return any(each.half == half for each in found.questions)


def test_a_part_of_the_questions_is_always_the_same_part() -> None:
    found = hotpotqa.load([{**HOTPOT[0], "_id": str(number)} for number in range(50)])
    assert found.of("all", 10) == found.of("all", 10)
    assert len(found.of("all", 10)) == 10
    assert len(found.of("all", 100)) == 50


def test_a_half_that_is_empty_or_unknown_is_told() -> None:
    with pytest.raises(InvalidArgument, match="half must be one of chosen, held-out, all, not 'best'"):
        squad.load(SQUAD).of("best")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="squad has no questions in the half 'held-out'"):
        squad.load(SQUAD).of("held-out")


def test_questions_are_taken_out_of_their_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "questions-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(wheel.FILES[0], json.dumps(SQUAD))
    with pytest.raises(DamagedError, match=r"lacks the file .*hotpotqa\.json"):
        wheel.take(path, tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(wheel.FILES[1], json.dumps(HOTPOT))
        archive.writestr(wheel.TRAINING_FILES[0], json.dumps({"data": SQUAD["data"] * 4}))
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(wheel, "fetch_wheel", lambda *_, **__: path)
    assert squad.load() == squad.load(SQUAD)
    assert (tmp_path / "cache/questions" / MARKER).exists()
    monkeypatch.setattr(squad, "ARTICLES", 3)
    assert len(squad.load_training().questions) == 3 * len(squad.load(SQUAD).questions)
    monkeypatch.setattr(wheel, "fetch_wheel", None)
    assert hotpotqa.load() == hotpotqa.load(HOTPOT)
    assert squad.load_training().name == "squad-train"
