from __future__ import annotations

import math

import pytest
import torch

from memstore.index.words import WordIndex, asked_words


def reference(texts: list[list[int]], query: list[int]) -> list[float]:
    """BM25 as it is written down: k1 = 1.5, b = 0.75, and an inverse frequency that is never negative."""
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for word in query:
            having = sum(word in other for other in texts)
            rare = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            count = text.count(word)
            score += rare * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(text) / mean))
        scores.append(score)
    return scores


def index_of(texts: list[list[int]]) -> WordIndex:
    of = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(text) for text in texts]))
    return WordIndex(torch.tensor([word for text in texts for word in text]), of, len(texts))


@pytest.mark.parametrize("query", [[3], [3, 3, 9], [1, 2, 1 << 40], [77], []])
def test_scores_are_those_of_the_formula(query: list[int]) -> None:
    texts = [[1, 2, 3, 3], [3, 9], [1 << 40, 1, 1, 1, 1, 5], [], [9, 9, 2]]
    found = index_of(texts).score(torch.tensor(query, dtype=torch.int64))
    assert found.tolist() == pytest.approx(reference(texts, query), rel=1e-5)


def test_what_is_below_a_share_of_the_query_does_not_count() -> None:
    texts = [[1, 2, 3], [1, 4, 5], [6, 7, 8]]
    query, index = torch.tensor([1, 2, 77]), index_of([[1, 2, 3], [1, 4, 5], [6, 7, 8]])
    worth = sum(math.log(1 + (3 - having + 0.5) / (having + 0.5)) for having in (2, 1, 0))  # 77 is in no text
    above = [max(0.0, score - 0.3 * worth) for score in reference(texts, [1, 2, 77])]
    assert index.score(query, least=0.3).tolist() == pytest.approx(above, rel=1e-5)
    assert above[0] > 0 == above[1]


def test_an_index_of_nothing_finds_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert WordIndex(empty, empty, 0).score(torch.tensor([1])).tolist() == []
    assert WordIndex(empty, empty, 3).score(torch.tensor([1])).tolist() == [0, 0, 0]


def test_words_that_every_question_has_are_not_asked_for() -> None:
    assert asked_words("What is the area of Oman?") == ["area", "oman"]
    assert asked_words("Who is it?") == ["who", "is", "it"], "there is nothing else"
