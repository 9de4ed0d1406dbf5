"""Questions of one's own: a JSON Lines file, a question a line.

    {"question": "Who runs the boats?", "evidence": ["Boats are run by Jan."], "others": ["The ferry rests."]}

``evidence``: the paragraphs that an answer needs, all of them. ``others``, which may be left out: paragraphs that are
pooled with those of all questions, such as ones that look alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memstore.errors import InvalidArgument
from memstore.eval.questions.sets import Question, QuestionSet, json_lines, numbered


def load(path: Path) -> QuestionSet:
    """The questions in the file ``path``.

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
            f"{where} is no question: an object with a text 'question' and lists of texts 'evidence' and, if there are "
            "any, 'others' was expected"
        )
    return text, evidence, others


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each.strip() for each in value)
