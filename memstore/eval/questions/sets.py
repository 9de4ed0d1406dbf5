"""A benchmark of questions: paragraphs, questions, and the paragraphs that hold the evidence."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memstore.errors import InvalidArgument, NotFound

Half = Literal["chosen", "held-out", "all"]
HALVES: tuple[Half, ...] = ("chosen", "held-out", "all")
SEPARATOR = "\n\n"
"""Separator of two paragraphs of a pool."""


@dataclass(frozen=True)
class Question:
    """A question with its answers and its evidence."""

    id: str
    """Its name in the benchmark."""
    text: str
    answers: tuple[str, ...]
    """Accepted answers; any of them is right."""
    evidence: tuple[int, ...]
    """Numbers of the paragraphs that an answer needs, all of them."""
    about: str | None = None
    """Topic; questions about the same topic are in the same half. None: no other question is about it."""

    # By a hash, so that the halves do not depend on the measured part of a set, or on its order.
    @property
    def half(self) -> Half:
        """Return ``"chosen"`` (settings may be chosen on this question) or ``"held-out"`` (results are reported)."""
        return HALVES[hashlib.sha256((self.about or self.id).encode()).digest()[0] % 2]


@dataclass(frozen=True)
class QuestionSet:
    """A benchmark: its paragraphs pooled, in their order, and its questions."""

    name: str
    source: str
    """Its source and its licence."""
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]

    def of(self, half: Half, at_most: int | None = None) -> list[Question]:
        """Return the questions of a half in order, or ``at_most`` of them, drawn at random, always the same.

        Raises ``InvalidArgument`` if there are none.
        """
        if half not in HALVES:
            raise InvalidArgument(f"half must be one of {', '.join(HALVES)}, not {half!r}")
        found = [question for question in self.questions if half in ("all", question.half)]
        if not found:
            raise InvalidArgument(f"{self.name} has no questions in the half {half!r}")
        if at_most is None or at_most >= len(found):
            return found
        picked = sorted(random.Random(0).sample(range(len(found)), at_most))
        return [found[number] for number in picked]


def numbered(paragraphs: Sequence[str]) -> dict[str, int]:
    """Number the distinct paragraphs, in the order of their first appearance."""
    numbers: dict[str, int] = {}
    for paragraph in paragraphs:
        numbers.setdefault(paragraph, len(numbers))
    return numbers


def json_lines(path: Path, what: str) -> list[tuple[str, Any]]:
    """Read a file of ``what`` with one JSON object a line; return each value with a text that names its line.

    Raises ``NotFound`` without the file, and ``InvalidArgument`` if it is empty or has other content.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}. Name a JSON Lines file of {what}.") from None
    except IsADirectoryError:
        raise InvalidArgument(f"{path} is a folder. Name a JSON Lines file.") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8 text (at byte {error.start:,}). Convert it to UTF-8.") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [(f"line {number} of {path}", json.loads(line))] if line.strip() else []
        except ValueError as error:
            raise InvalidArgument(f"line {number} of {path} is not valid JSON: {error}") from None
    if not found:
        raise InvalidArgument(f"{path} is empty: write one JSON object per line, with {what}.")
    return found


def json_in(path: Path) -> Any:
    """Read a JSON file. Raises ``NotFound`` without the file, and ``InvalidArgument`` for another one."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {path}: pass the path of the downloaded benchmark") from None
    except (ValueError, IsADirectoryError) as error:
        raise InvalidArgument(f"{path} is not a JSON file: {error}") from None


def own_questions(path: Path) -> QuestionSet:
    """Load your own questions from a JSON Lines file, a question a line.

        {"question": "Who runs the boats?", "evidence": ["Boats are run by Jan."], "others": ["The ferry rests."]}

    ``evidence``: the paragraphs that an answer needs, all of them. ``others`` (optional): paragraphs that are pooled
    with those of all questions, such as look-alikes.

    Raises ``NotFound`` without the file, and ``InvalidArgument`` for a line that is no question.
    """
    entries = [_entry(value, where) for where, value in json_lines(path, "questions and their evidence")]
    numbers = numbered([paragraph for _, evidence, others in entries for paragraph in (*evidence, *others)])
    questions = (
        Question(text, text, (), tuple(sorted({numbers[paragraph] for paragraph in evidence})))
        for text, evidence, _ in entries
    )
    return QuestionSet(path.stem, str(path), tuple(numbers), tuple(questions))


def _entry(value: Any, where: str) -> tuple[str, list[str], list[str]]:
    given = value if isinstance(value, dict) else {}
    text, evidence, others = given.get("question"), given.get("evidence"), given.get("others", [])
    if not isinstance(text, str) or not text.strip() or not _texts(evidence) or not evidence or not _texts(others):
        raise InvalidArgument(
            f"{where} is not a question: expected an object with a text 'question', a list of texts 'evidence' "
            "and, optionally, a list of texts 'others'"
        )
    return text, evidence, others


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each.strip() for each in value)
