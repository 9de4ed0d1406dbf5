from __future__ import annotations

import re

import pytest

from benchmarks.questions import facts
from benchmarks.questions.facts import FACTS, WAYS
from memstore.errors import InvalidArgument

SMALL = (
    "a an after and at because by can did do does for from has have how in into is made not of on one our that the "
    "their there they this to was were what when where which who with"
)
MANUAL = "Nothing happened that day.\n" * 2000


def words(text: str) -> set[str]:
    """Words of meaning, cut to five letters: the same word in another form is the same word."""
    return {word[:5] for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in SMALL.split()}


@pytest.mark.parametrize("fact", FACTS)
def test_a_question_in_other_words_shares_no_word_of_meaning(fact: facts.Fact) -> None:
    assert not words(fact.sentence) & words(fact.other)
    assert words(fact.sentence) & words(fact.plain)
    assert fact.answer in fact.sentence
    assert fact.answer not in fact.plain + fact.other


def test_the_evidence_is_the_paragraph_of_the_fact() -> None:
    for way in WAYS:
        found = facts.load(way, MANUAL)
        assert len(found.questions) == len(FACTS)
        for question in found.questions:
            (number,) = question.evidence
            assert question.answers[0] in found.paragraphs[number]


def test_all_ways_of_a_fact_are_in_one_half() -> None:
    halves = [[question.half for question in facts.load(way, MANUAL).questions] for way in WAYS]
    assert halves[0] == halves[1] == halves[2]
    assert set(halves[0]) == {"chosen", "held-out"}


def test_an_unknown_way_is_told() -> None:
    with pytest.raises(InvalidArgument, match="way must be one of own, plain or other, not 'rude'"):
        facts.load("rude", MANUAL)
