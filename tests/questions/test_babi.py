from __future__ import annotations

import random

from benchmarks.questions import babi
from benchmarks.questions.babi import FACTS, Story

BOOK = "Nothing happened that day, nor on the next one.\n" * 1500


def test_a_person_is_where_the_last_move_went() -> None:
    story = Story.of(200, random.Random(1))
    for who, question, answer, (event,) in story.asked("one"):
        moves = [told for told in story.told if told.startswith(f"{who} went")]
        assert moves[-1] == story.told[event] == f"{who} went to the {answer}."
        assert who in question


def test_a_thing_is_where_its_holder_is_and_was_where_the_holder_was() -> None:
    story = Story.of(200, random.Random(1))
    two, three = list(story.asked("two")), list(story.asked("three"))
    assert {thing for thing, *_ in three} <= {thing for thing, *_ in two}
    for thing, _, answer, evidence in two:
        told = [story.told[event] for event in evidence]
        (who,) = (each.split()[0] for each in told if each.endswith(f"picked up the {thing}."))
        assert f"{who} went to the {answer}." in told
    for thing, question, before, evidence in three:
        taken = next(event for event in evidence if story.told[event].endswith(f"picked up the {thing}."))
        moves = [story.told[event] for event in evidence if event != taken]
        who = story.told[taken].split()[0]
        last = [told for told in story.told if told.startswith(f"{who} went")][-2:]
        assert moves == last
        assert last[0] == f"{who} went to the {before}."
        assert last[1].removeprefix(f"{who} went to the ").rstrip(".") in question


def test_facts_stand_in_the_book_in_their_order() -> None:
    for facts in FACTS:
        found = babi.load(facts, BOOK)
        assert {question.half for question in found.questions} == {"chosen", "held-out"}
        for question in found.questions:
            assert len(question.evidence) == FACTS.index(facts) + 1
            assert list(question.evidence) == sorted(question.evidence)
            assert any(question.answers[0] in found.paragraphs[number] for number in question.evidence)
