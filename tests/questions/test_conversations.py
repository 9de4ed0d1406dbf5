"""LoCoMo's and BEAM's files, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.questions.conversations import load_beam, load_locomo, pooled
from memstore.errors import InvalidArgument, NotFound

LOCOMO: list[dict[str, Any]] = [
    {
        "sample_id": "conv-1",
        "conversation": {
            "speaker_a": "Ana",
            "session_10_date_time": "noon on 2 June, 2023",
            "session_10": [{"speaker": "Ben", "dia_id": "D10:1", "text": "Look!", "blip_caption": "a red boat"}],
            "session_2_date_time": "5 pm on 1 May, 2023",
            "session_2": [
                {"speaker": "Ana", "dia_id": "D2:1", "text": "I sail on Mondays."},
                {"speaker": "Ben", "dia_id": "D2:2", "text": "I row."},
            ],
        },
        "qa": [
            {"question": "When does Ana sail?", "answer": "Mondays", "evidence": ["D2:1"], "category": 4},
            {"question": "Who has a boat?", "answer": 2, "evidence": ["D10:1; D2:1"], "category": 1},
            {"question": "Who flies?", "adversarial_answer": "Ana", "evidence": ["D2:1"], "category": 5},
            {"question": "Lost?", "answer": "yes", "evidence": ["D9:1"], "category": 1},
            {"question": "Unnamed?", "answer": "yes", "evidence": [], "category": 3},
        ],
    }
]
CHAT = [
    {"turns": [[{"id": 0, "role": "user", "content": "I row."}, {"id": 1, "role": "assistant", "content": "Good."}]]},
    {"turns": [[{"id": 4, "role": "user", "content": "I sail now."}]]},
]
PROBING = {
    "abstention": [{"question": "What do I eat?", "ideal_response": "It is not said."}],
    "knowledge_update": [
        {"question": "What do I do?", "answer": "sail", "source_chat_ids": {"old": [0], "new": [4]}},
    ],
    "information_extraction": [
        {"question": "What was said?", "answer": "Good.", "source_chat_ids": [1]},
        {"question": "What is lost?", "answer": "it", "source_chat_ids": [1, 9]},
    ],
}


def locomo_file(place: Path) -> Path:
    (place / "locomo10.json").write_text(json.dumps(LOCOMO))
    return place / "locomo10.json"


def beam_folder(place: Path) -> Path:
    (place / "7/probing_questions").mkdir(parents=True)
    (place / "7/chat.json").write_text(json.dumps(CHAT))
    (place / "7/probing_questions/probing_questions.json").write_text(json.dumps(PROBING))
    return place / "7"


def test_turns_stand_in_the_order_of_sessions_with_their_dates(tmp_path: Path) -> None:
    (found,) = load_locomo(locomo_file(tmp_path))
    assert found.paragraphs == (
        "5 pm on 1 May, 2023\nAna: I sail on Mondays.",
        "Ben: I row.",
        "noon on 2 June, 2023\nBen: Look! [a red boat]",
    )


def test_a_question_about_turns_needs_all_of_them_and_an_answer(tmp_path: Path) -> None:
    (found,) = load_locomo(locomo_file(tmp_path))
    assert [(each.id, each.answers, each.evidence) for each in found.questions] == [
        ("conv-1/0", ("Mondays",), (0,)),
        ("conv-1/1", ("2",), (0, 2)),
    ]


def test_conversations_in_one_keep_their_own_turns(tmp_path: Path) -> None:
    (found,) = load_locomo(locomo_file(tmp_path))
    both = pooled([found, found])
    assert both.paragraphs == found.paragraphs * 2
    assert [each.evidence for each in both.questions] == [(0,), (0, 2), (3,), (3, 5)]


def test_a_question_about_messages_names_them_in_lists_and_objects(tmp_path: Path) -> None:
    found = load_beam(beam_folder(tmp_path))
    assert found.paragraphs == ("user: I row.", "assistant: Good.", "user: I sail now.")
    assert [(each.id, each.answers, each.evidence) for each in found.questions] == [
        ("7/knowledge_update/0", ("sail",), (0, 2)),
        ("7/information_extraction/0", ("Good.",), (1,)),
    ]


def test_other_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('[{"sample": 1}]')
    with pytest.raises(InvalidArgument, match=r"other.json is not LoCoMo's file locomo10.json"):
        load_locomo(tmp_path / "other.json")
    with pytest.raises(NotFound, match=r"no file .*chat.json: pass the path of the downloaded benchmark"):
        load_beam(tmp_path)
