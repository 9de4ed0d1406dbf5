from __future__ import annotations

from benchmarks.questions import lookalikes
from benchmarks.questions.lookalikes import FORMS

MANUAL = "Nothing happened that day.\n" * 2000


def test_sentences_of_a_form_differ_in_who_and_in_the_answer() -> None:
    for form in FORMS:
        assert len(form.pairs) == len(set(form.pairs.values())) == 8
        assert form.sentence.count("{}") == 2
        assert form.question.count("{}") == 1


def test_the_evidence_is_the_sentence_about_who_is_asked_for() -> None:
    found = lookalikes.load(MANUAL)
    assert len(found.questions) == 64
    for question in found.questions:
        sentence = found.paragraphs[question.evidence[0]]
        _, _, who = question.id.partition("/")
        assert who in sentence
        assert who in question.text
        assert question.answers[0] in sentence
        assert question.answers[0] not in question.text


def test_a_form_is_in_one_half() -> None:
    found = lookalikes.load(MANUAL)
    by_form = {form.name: {q.half for q in found.questions if q.id.startswith(form.name)} for form in FORMS}
    assert all(len(halves) == 1 for halves in by_form.values())
    assert set().union(*by_form.values()) == {"chosen", "held-out"}
