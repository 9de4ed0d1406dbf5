from __future__ import annotations

import pytest

from benchmarks.questions.answers import exact, f1, normalised


def test_case_articles_and_punctuation_do_not_count() -> None:
    assert normalised("The U.S. army's  an-swer.") == ["us", "armys", "answer"]
    assert exact("A quarter, past six!", ["at noon", "quarter past six"]) == 1
    assert exact("at a quarter past six", ["quarter past six"]) == 0


@pytest.mark.parametrize(
    ("said", "accepted", "score"),
    [
        ("red motorcycle", ["a red motorcycle"], 1),
        ("it is red", ["red motorcycle"], 2 / 5),  # one word of three, one of two
        ("red red", ["red"], 2 / 3),  # a word counts as often as both have it
        ("blue", ["red", "the blue"], 1),
        ("", ["red"], 0),
        ("the", ["a"], 1),  # nothing is left of either
    ],
)
def test_f1_is_of_words(said: str, accepted: list[str], score: float) -> None:
    assert f1(said, accepted) == pytest.approx(score)
