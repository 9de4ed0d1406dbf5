"""Rows of ``benchmarks.searches``, on a few paragraphs and with an encoder that counts letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.questions.encoders import Encoder
from benchmarks.searches import TOP_K, measured
from memstore.train.questions import Question, QuestionSet
from tests.eval.drts import byte_tokenizer

WHALES = ("The whale is white, and swims alone in the north.", "Ahab lost a leg.", "Queequeg owns a harpoon.")
FILLER = tuple(f"{number} ships came home that year, none of them with oil to sell." for number in range(30))


def letters(texts: Sequence[str]) -> Tensor:
    counts = torch.tensor([[text.lower().count(chr(97 + letter)) for letter in range(26)] for text in texts])
    return torch.nn.functional.normalize(counts.float(), dim=-1)


def asked(*questions: tuple[str, str, int]) -> QuestionSet:
    made = tuple(Question(text, text, (answer,), (number,)) for text, answer, number in questions)
    return QuestionSet("whales", "invented", (*WHALES, *FILLER), made)


def measure(*, paragraphs: bool) -> dict[tuple[str, int], Any]:
    model = Encoder("letters", letters, letters)
    sets = [asked(("Who lost a leg?", "Ahab", 1), ("What does Queequeg own?", "harpoon", 2))]
    rows = [*measured(sets, "all", None, byte_tokenizer(), model, paragraphs=paragraphs)]
    assert [row["ranker"] for row in rows[:: len(TOP_K)]] == ["bm25", "letters", "bm25+letters"]
    return {(row["ranker"], row["top_k"]): row for row in rows}


def test_blocks_of_the_right_paragraph_are_found_with_their_answer() -> None:
    row = measure(paragraphs=False)["bm25", 4]
    assert (row["all"], row["answer"], row["tokens"], row["questions"]) == (1, 1, 4 * 64, 2)


def test_a_paragraph_is_ranked_as_a_whole_and_its_tokens_are_counted() -> None:
    rows = measure(paragraphs=True)
    row = rows["letters", 4]
    assert (row["all"], row["answer"]) == (1, 1)
    shortest, longest = (4 * end(len(text) + 2 for text in (*WHALES, *FILLER)) for end in (min, max))
    assert shortest < row["tokens"] < longest
