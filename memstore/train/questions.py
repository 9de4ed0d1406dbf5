"""Questions whose evidence is known: the paragraphs that they are asked about, and which of them an answer needs.

A set trains a router, and its other half tells how often the few blocks found contain the evidence.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.eval.pairs import json_lines
from memstore.readers.kinds import encode

Half = Literal["chosen", "held-out", "all"]
HALVES: tuple[Half, ...] = ("chosen", "held-out", "all")
SEPARATOR = "\n\n"
"""Separator of two paragraphs of a pool."""


@dataclass(frozen=True)
class Question:
    """A question with its answers and its evidence."""

    id: str
    """Its name in the set."""
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
    """Paragraphs pooled, in their order, and the questions about them."""

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
    return {paragraph: number for number, paragraph in enumerate(dict.fromkeys(paragraphs))}


def own_questions(path: Path) -> QuestionSet:
    """Load your own questions from a JSON Lines file, a question a line.

        {"question": "Who runs the boats?", "evidence": ["Boats are run by Jan."], "others": ["The ferry rests."]}

    ``evidence``: the paragraphs that an answer needs, all of them. ``others`` (optional): paragraphs that are pooled
    before them, such as look-alikes. ``id`` (optional): questions with the same one are in the same half.

    Raises ``NotFound`` without the file, and ``InvalidArgument`` for a line that is no question.
    """
    entries = [_entry(value, where) for where, value in json_lines(path, "questions and their evidence")]
    numbers = numbered([paragraph for *_, evidence, others in entries for paragraph in (*others, *evidence)])
    questions = (
        Question(name, text, (), tuple(sorted({numbers[paragraph] for paragraph in evidence})))
        for name, text, evidence, _ in entries
    )
    return QuestionSet(path.stem, str(path), tuple(numbers), tuple(questions))


def _entry(value: Any, where: str) -> tuple[str, str, list[str], list[str]]:
    given: dict[str, Any] = value if isinstance(value, dict) else {}
    text, evidence, others = given.get("question", ""), given.get("evidence"), given.get("others", [])
    name = given.get("id", text)
    if not _texts([text, name]) or not _texts(evidence) or not evidence or not _texts(others):
        raise InvalidArgument(
            f"{where} is not a question: expected an object with a text 'question' and a list of texts 'evidence'. "
            "It may also have a list of texts 'others' and a text 'id'."
        )
    return name, text, evidence, others


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each.strip() for each in value)


@dataclass(frozen=True)
class Pool:
    """The paragraphs of a set as one text."""

    tokens: Tensor
    """``[n]`` int64."""
    starts: tuple[int, ...]
    """The first token of each paragraph, and the number of tokens."""

    @classmethod
    def of(cls, paragraphs: Sequence[str], tokenizer: Any) -> Pool:
        """Encode each paragraph by itself, so that its tokens do not depend on its neighbours."""
        parts = [encode(tokenizer, paragraph + SEPARATOR) for paragraph in paragraphs]
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part))
        return cls(torch.tensor([token for part in parts for token in part]), tuple(starts))

    def blocks(self, paragraph: int, block_size: int) -> range:
        """Return the blocks that hold a token of a paragraph. The last block of the pool may be partial."""
        first, last = self.starts[paragraph], self.starts[paragraph + 1] - 1
        return range(first // block_size, last // block_size + 1)

    def texts(self, block_size: int, tokenizer: Any) -> list[str]:
        """Return the text of each block."""
        return [str(tokenizer.decode(block)) for block in self.tokens.split(block_size)]


def recall(
    rank: Callable[[str, int], list[int]],
    questions: Sequence[Question],
    pool: Pool,
    *,
    block_size: int,
    top_k: Sequence[int] = (8,),
) -> Iterator[dict[str, Any]]:
    """Return rows for a ranking, one for each number of blocks in ``top_k``.

    ``rank(question, depth)`` returns the best ``depth`` blocks, best first. A block counts for every paragraph that it
    has a token of. ``all``: share of the questions whose whole evidence is among the best blocks. ``any``: share of
    those with at least a part of it. ``ms``: milliseconds a question takes, 0 if rankings were kept.
    """
    begun = time.perf_counter()
    found = [rank(question.text, max(top_k)) for question in questions]
    spent = time.perf_counter() - begun
    for few in top_k:
        parts = [
            [not set(ranked[:few]).isdisjoint(pool.blocks(paragraph, block_size)) for paragraph in question.evidence]
            for question, ranked in zip(questions, found, strict=True)
        ]
        yield {
            "top_k": few,
            "questions": len(questions),
            "all": round(fmean(all(each) for each in parts), 4),
            "any": round(fmean(any(each) for each in parts), 4),
            "ms": round(1e3 * spent / len(questions), 2),
        }
