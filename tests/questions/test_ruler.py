from __future__ import annotations

import re
from collections import Counter

import pytest

from benchmarks.questions import ruler
from benchmarks.questions.ruler import TASKS, Maker, RulerSample, score
from memstore.errors import InvalidArgument
from memstore.train.questions import Question, QuestionSet

MANUAL = "Nothing happened that day, nor on the next one, as the old book says.\n" * 400
PEOPLE = QuestionSet(
    "people",
    "",
    tuple(f"Ship {number} sank in {1800 + number}, far from any coast." for number in range(40)),
    (Question("a", "When did ships 3 and 5 sink?", ("1803", "1805"), (3, 5)),),
)


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.questions.manual.topics", lambda: [MANUAL])
    for name in ("qa_1", "qa_2"):
        monkeypatch.setitem(TASKS, name, ruler._documents(lambda: PEOPLE))


@pytest.mark.parametrize("task", TASKS)
def test_a_text_has_its_length_and_what_is_wanted(task: str) -> None:
    sample = Maker(1000, words).sample(task, 0)
    assert 900 <= words(sample.text) <= 1100
    assert all(each in sample.text for each in sample.wanted)
    assert not any(each in sample.question for each in sample.wanted)
    assert score(f"It is {' and '.join(sample.wanted).upper()}.", sample) == 1
    assert score("I do not know.", sample) == 0


@pytest.mark.parametrize("task", TASKS)
def test_a_text_has_its_length_where_digits_are_tokens_and_spaces_none(task: str) -> None:
    def tokens(text: str) -> int:
        return len(re.findall(r" ?[^\W\d]+|\S|\s", text))

    assert 960 <= tokens(Maker(1000, tokens).sample(task, 0).text) <= 1100


@pytest.mark.parametrize("task", ["niah_multikey_3", "vt", "cwe", "qa_2"])
def test_a_sample_is_always_the_same_and_unlike_the_next(task: str) -> None:
    first, again, other = (Maker(500, words).sample(task, number) for number in (0, 0, 1))
    assert first == again
    assert first.text != other.text


def test_needles_are_as_many_as_the_task_says() -> None:
    maker = Maker(600, words)
    counts = {task: len(re.findall("The magic", maker.sample(task, 0).text)) for task in TASKS}
    assert [counts[f"niah_{name}"] for name in ("single_1", "single_3", "multikey_1", "multivalue", "multiquery")] == [
        1, 1, 4, 4, 4,
    ]  # fmt: skip
    assert counts["niah_multikey_2"] > 50
    assert len(maker.sample("niah_multiquery", 0).wanted) == len(maker.sample("niah_multivalue", 0).wanted) == 4


def test_a_chain_can_be_followed_from_its_beginning() -> None:
    sample = Maker(600, words).sample("vt", 0)
    values: dict[str, str] = {}
    for name, before in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.text):
        values[name] = values.get(before, before)
    (value,) = re.findall(r"\d{5}", sample.question)
    assert values == dict.fromkeys(sample.wanted, value)


def test_common_words_are_the_most_common_ones() -> None:
    sample = Maker(1000, words).sample("cwe", 0)
    counts = Counter(re.findall(r"\d+\. (\w+)", sample.text))
    assert {word for word, _ in counts.most_common(10)} == set(sample.wanted)
    assert counts.most_common(11)[-1][1] < counts.most_common(10)[-1][1]


def test_parts_count_where_all_are_wanted() -> None:
    assert score("ab and cd", RulerSample("", "", ("AB", "ef"), whole=True, tokens=1)) == 0.5
    assert score("ab and cd", RulerSample("", "", ("AB", "ef"), whole=False, tokens=1)) == 1


def test_an_unknown_task_is_told() -> None:
    with pytest.raises(InvalidArgument, match="RULER has no task 'niah': choose from niah_single_1, niah_single_2"):
        Maker(100, words).sample("niah", 0)
