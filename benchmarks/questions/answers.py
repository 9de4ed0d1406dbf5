"""Answers: does a model answer like people (SQuAD's measures, Rajpurkar et al. 2016)?

The same model answers with the memory, and with the text that a user would put into its prompt instead. That is the
best blocks of a ranking in order of time, the paragraphs that hold the answer, or nothing.
"""

from __future__ import annotations

import re
import string
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from memstore.readers.reader import Reader
from memstore.train.questions import SEPARATOR, Question

MOST = 32
"""Tokens of an answer, at most."""
ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> list[str]:
    """Return the words of an answer to compare: in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def exact(text: str, accepted: Sequence[str]) -> float:
    """Return 1 if ``text`` is one of the ``accepted`` answers, else 0."""
    return float(any(normalised(text) == normalised(each) for each in accepted))


def f1(text: str, accepted: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of ``text``'s words, against the nearest accepted answer."""
    return max(_f1(normalised(text), normalised(each)) for each in accepted)


def _f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    return 2 * (Counter(said) & Counter(wanted)).total() / (len(said) + len(wanted))


def answers(
    reader: Reader,
    questions: Sequence[Question],
    texts: Sequence[Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Score the answers of ``reader``'s model: ``em`` and ``f1``, means over the questions, and ``ms`` a question.

    ``texts``: the prompt's text before each question; with an empty memory the scores show the value of text alone.
    ``has`` is the share of the answers that contain an accepted one, because a small model answers in a whole sentence.
    """
    said, begun = list[str](), time.perf_counter()
    for number, question in enumerate(questions):
        before = texts[number] if texts is not None else ()
        said.append(reader.ask(SEPARATOR.join((*before, question.text)), max_tokens=MOST).text)
    spent = time.perf_counter() - begun
    pairs = [(text, question.answers) for text, question in zip(said, questions, strict=True)]
    return {
        "answered": len(questions),
        "em": round(fmean(exact(*pair) for pair in pairs), 4),
        "f1": round(fmean(f1(*pair) for pair in pairs), 4),
        "has": round(fmean(has(*pair) for pair in pairs), 4),
        "ms_to_answer": round(1e3 * spent / len(questions)),
    }


def has(text: str, accepted: Sequence[str]) -> float:
    """Return 1 if an accepted answer is in ``text``, word by word, else 0."""
    said = f" {' '.join(normalised(text))} "
    return float(any(f" {' '.join(normalised(each))} " in said for each in accepted))
