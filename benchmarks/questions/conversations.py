"""Questions about long conversations, from the files of their benchmarks.

LoCoMo (Maharana et al. 2024): two people talk over months. A paragraph is one turn with the speaker's name. The first
of a session also begins with the session's date. Questions without an answer in the conversation (category 5) or
without named evidence are left out.

BEAM (Tavakoli et al. 2025): a user talks with an assistant. A paragraph is a message. Questions without named evidence,
such as those that have no answer, are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memstore.errors import InvalidArgument, NotFound
from memstore.train.questions import Question, QuestionSet

LOCOMO = "LoCoMo (CC BY-NC 4.0)"
UNANSWERABLE = 5
"""The category of questions that a model should decline."""
TURN = re.compile(r"D\d+:\d+")


def load_locomo(path: Path) -> list[QuestionSet]:
    """Load a set for each conversation of the file ``path`` (``locomo10.json``).

    Raises ``NotFound`` without the file, and ``InvalidArgument`` for another one.
    """
    try:
        return [_set(sample) for sample in _json_in(path)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            f"{path} is not LoCoMo's file locomo10.json ({error!r}): pass the file of the benchmark"
        ) from None


def pooled(sets: Sequence[QuestionSet]) -> QuestionSet:
    """Join all conversations, one behind another, with their questions: the other conversations are distractors."""
    paragraphs: list[str] = []
    questions: list[Question] = []
    for each in sets:
        before = len(paragraphs)
        paragraphs += each.paragraphs
        questions += [
            replace(asked, evidence=tuple(before + turn for turn in asked.evidence)) for asked in each.questions
        ]
    return QuestionSet("locomo", LOCOMO, tuple(paragraphs), tuple(questions))


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
    return QuestionSet(str(sample["sample_id"]), LOCOMO, tuple(turns.values()), tuple(questions))


def _turns(conversation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the turns of all sessions in order, each with its name."""
    sessions = sorted(int(name.split("_")[1]) for name in conversation if re.fullmatch(r"session_\d+", name))
    for session in sessions:
        date = f"{conversation[f'session_{session}_date_time']}\n"
        for turn in conversation[f"session_{session}"]:
            shown = f" [{turn['blip_caption']}]" if turn.get("blip_caption") else ""
            yield turn["dia_id"], f"{date}{turn['speaker']}: {turn['text']}{shown}"
            date = ""


BEAM = "BEAM, a conversation of its repository"
ANSWERS = ("answer", "ideal_answer", "ideal_response", "ideal_summary", "expected_compliance")
"""Fields for the answer in the different kinds of questions."""


def load_beam(folder: Path) -> QuestionSet:
    """Load the conversation in ``folder``: ``chat.json`` and ``probing_questions/probing_questions.json``.

    Raises ``NotFound`` if one of them is missing, and ``InvalidArgument`` if it has other content.
    """
    chat = _json_in(folder / "chat.json")
    probing = _json_in(folder / "probing_questions" / "probing_questions.json")
    try:
        messages = [message for batch in chat for turn in batch["turns"] for message in turn]
        numbers = {message["id"]: number for number, message in enumerate(messages)}
        paragraphs = tuple(f"{message['role']}: {message['content']}" for message in messages)
        questions = [
            Question(f"{folder.name}/{kind}/{number}", asked["question"], _answer(asked), evidence)
            for kind, several in probing.items()
            for number, asked in enumerate(several)
            if (evidence := _evidence(asked, numbers))
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"{folder} is not a conversation folder of BEAM ({error!r}): pass a folder such as chats/100K/1"
        ) from None
    return QuestionSet(f"beam-{folder.name}", BEAM, paragraphs, tuple(questions))


def _answer(asked: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(asked[name]) for name in ANSWERS if asked.get(name))[:1]


def _evidence(asked: dict[str, Any], numbers: dict[int, int]) -> tuple[int, ...]:
    """Return the numbers of the messages that hold the answer; none if one of them is missing."""
    named = set(_ids(asked.get("source_chat_ids", [])))
    return tuple(sorted(numbers[each] for each in named)) if named <= numbers.keys() else ()


def _ids(named: Any) -> Iterator[int]:
    """Yield the message ids in nested lists and objects."""
    if isinstance(named, int):
        yield named
        return
    for each in named.values() if isinstance(named, dict) else named:
        yield from _ids(each)


def _json_in(path: Path) -> Any:
    """Read a JSON file. Raises ``NotFound`` without the file, and ``InvalidArgument`` for another one."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {path}: pass the path of the downloaded benchmark") from None
    except (ValueError, IsADirectoryError) as error:
        raise InvalidArgument(f"{path} is not a JSON file: {error}") from None
