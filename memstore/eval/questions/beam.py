"""BEAM: questions about one long conversation with an assistant (Tavakoli et al. 2025), from its folder.

A paragraph is a message. Questions whose evidence is not named, such as those that have no answer, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memstore.errors import InvalidArgument
from memstore.eval.questions.sets import Question, QuestionSet, json_in

SOURCE = "BEAM, a conversation of its repository"
ANSWERS = ("answer", "ideal_answer", "ideal_response", "ideal_summary", "expected_compliance")
"""What the different kinds of questions call it."""


def load(folder: Path) -> QuestionSet:
    """The conversation in ``folder``: ``chat.json`` and ``probing_questions/probing_questions.json``.

    Raises ``NotFound`` where one of them is missing, and ``InvalidArgument`` where it is something else.
    """
    chat = json_in(folder / "chat.json")
    probing = json_in(folder / "probing_questions" / "probing_questions.json")
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
        raise InvalidArgument(f"{folder} is not the folder of a conversation of BEAM ({error!r})") from None
    return QuestionSet(f"beam-{folder.name}", SOURCE, paragraphs, tuple(questions))


def _answer(asked: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(asked[name]) for name in ANSWERS if asked.get(name))[:1]


def _evidence(asked: dict[str, Any], numbers: dict[int, int]) -> tuple[int, ...]:
    """Numbers of the messages that hold the answer; none where one of them is not there."""
    named = set(_ids(asked.get("source_chat_ids", [])))
    return tuple(sorted(numbers[each] for each in named)) if named <= numbers.keys() else ()


def _ids(named: Any) -> Iterator[int]:
    """The message ids in lists and objects of them."""
    if isinstance(named, int):
        yield named
        return
    for each in named.values() if isinstance(named, dict) else named:
        yield from _ids(each)
