"""LoCoMo: questions about conversations of two people over months (Maharana et al. 2024), from its file.

A paragraph is what somebody says at a time, with the name; the first of a session has the session's date before it.
Questions that have no answer in the conversation (category 5) are left out, and those whose evidence is not named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memstore.errors import InvalidArgument
from memstore.eval.questions.sets import Question, QuestionSet, json_in

SOURCE = "LoCoMo (CC BY-NC 4.0)"
UNANSWERABLE = 5
"""The category of questions that are to be turned down."""
TURN = re.compile(r"D\d+:\d+")


def load(path: Path) -> list[QuestionSet]:
    """A set for each conversation of the file ``path`` (``locomo10.json``).

    Raises ``NotFound`` without the file, and ``InvalidArgument`` for another one.
    """
    try:
        return [_set(sample) for sample in json_in(path)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidArgument(f"{path} is not LoCoMo's file, locomo10.json ({error!r})") from None


def pooled(sets: Sequence[QuestionSet]) -> QuestionSet:
    """All conversations, one behind another, with their questions: what others said is in the way."""
    paragraphs: list[str] = []
    questions: list[Question] = []
    for each in sets:
        before = len(paragraphs)
        paragraphs += each.paragraphs
        questions += [
            replace(asked, evidence=tuple(before + turn for turn in asked.evidence)) for asked in each.questions
        ]
    return QuestionSet("locomo", SOURCE, tuple(paragraphs), tuple(questions))


def _set(sample: Mapping[str, Any]) -> QuestionSet:
    turns = dict(_turns(sample["conversation"]))
    numbers = {name: number for number, name in enumerate(turns)}
    questions = []
    for number, asked in enumerate(sample["qa"]):
        named = {turn for text in asked.get("evidence", []) for turn in TURN.findall(text)}
        if asked["category"] != UNANSWERABLE and named and named <= numbers.keys():
            evidence = tuple(sorted(numbers[turn] for turn in named))
            questions.append(
                Question(f"{sample['sample_id']}/{number}", asked["question"], (str(asked["answer"]),), evidence)
            )
    return QuestionSet(str(sample["sample_id"]), SOURCE, tuple(turns.values()), tuple(questions))


def _turns(conversation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is said in all sessions, in their order, with its name."""
    sessions = sorted(int(name.split("_")[1]) for name in conversation if re.fullmatch(r"session_\d+", name))
    for session in sessions:
        date = f"{conversation[f'session_{session}_date_time']}\n"
        for turn in conversation[f"session_{session}"]:
            shown = f" [{turn['blip_caption']}]" if turn.get("blip_caption") else ""
            yield turn["dia_id"], f"{date}{turn['speaker']}: {turn['text']}{shown}"
            date = ""
