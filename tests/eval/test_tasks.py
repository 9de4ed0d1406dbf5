"""What is hidden is there, what is asked is aligned, and both are what the paper's data has."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from memstore.errors import InvalidArgument
from memstore.eval.filler import Filler
from memstore.eval.run import TaskPlan
from memstore.eval.tasks import TASKS, Phrases, Riddle, Sample, plant
from tests.eval.drts import byte_tokenizer
from tests.pairs import pairs

DATA = Path(__file__).parents[1] / "data/gca_niah.npz"
FILLER = Filler(np.arange(200, 250, dtype=np.uint16), "none of it is a letter")
PER_BLOCK = 31


@pytest.fixture(scope="module")
def phrases() -> Phrases:
    return Phrases(byte_tokenizer())


def sample_of(phrases: Phrases, task: str, length: int, depth: float | None = None, seed: int = 0) -> Sample:
    rng = random.Random(seed)
    return plant(TASKS[task](phrases, rng), length, FILLER, PER_BLOCK, rng, depth=depth)


def whole(sample: Sample, filler: Filler = FILLER) -> list[int]:
    return [int(token) for chunk in sample.haystack(filler) for token in chunk]


@pairs(task=list(TASKS), length=[300, 310, 1001, 70_000], depth=[None, 0.0, 0.3, 1.0])
def test_a_sample_has_its_length_its_needles_and_an_aligned_question(
    phrases: Phrases, task: str, length: int, depth: float | None
) -> None:
    sample = sample_of(phrases, task, length, depth)
    tokens = whole(sample)
    assert len(tokens) == length
    for place, ids in sample.needles:
        assert tokens[place : place + len(ids)] == ids
    hidden = {i for place, ids in sample.needles for i in range(place, place + len(ids))}
    rest = [token for i, token in enumerate(tokens) if i not in hidden]
    assert rest == FILLER.take(sample.start, len(rest)).tolist()
    assert len(rest) == sample.filler_tokens

    assert (length + len(sample.prompt)) % PER_BLOCK == 1
    asking_block = (length + len(sample.prompt) - 1) // PER_BLOCK - 1
    assert asking_block > (length - 1) // PER_BLOCK  # so every needle is in an earlier block
    assert len(sample.prompt) < 3 * PER_BLOCK


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_a_depth_is_kept_to_a_block_and_needles_are_not_aligned(phrases: Phrases, depth: float) -> None:
    places = [sample_of(phrases, "passkey", 5000, depth, seed).first for seed in range(60)]
    assert all(abs(place - depth * 5000) <= 2 * PER_BLOCK for place in places)
    assert len({place % PER_BLOCK for place in places}) > 20


def test_random_depths_are_everywhere(phrases: Phrases) -> None:
    fifths = {sample_of(phrases, "passkey", 5000, None, seed).first // 1000 for seed in range(60)}
    assert fifths == set(range(5))


@pytest.mark.parametrize("first", [0, 1, 999, 1000, 69_000, 70_000])
def test_a_haystack_can_be_had_from_any_place_on(phrases: Phrases, first: int) -> None:
    sample = sample_of(phrases, "two-hop", 70_000, 0.01)
    rest = [int(token) for chunk in sample.haystack(FILLER, first) for token in chunk]
    assert rest == whole(sample)[first:]


def test_the_same_seed_gives_the_same_sample(phrases: Phrases) -> None:
    assert sample_of(phrases, "two-hop", 1000) == sample_of(phrases, "two-hop", 1000)
    assert sample_of(phrases, "two-hop", 1000) != sample_of(phrases, "two-hop", 1000, seed=1)


@pytest.mark.parametrize("task", TASKS)
def test_a_haystack_without_room_is_refused(phrases: Phrases, task: str) -> None:
    riddle = TASKS[task](phrases, random.Random(0))
    least = sum(map(len, riddle.needles)) + PER_BLOCK
    assert plant(riddle, least, FILLER, PER_BLOCK, random.Random(0)).filler_tokens == PER_BLOCK
    with pytest.raises(InvalidArgument, match=f"use at least {least} tokens"):
        plant(riddle, least - 1, FILLER, PER_BLOCK, random.Random(0))


def text_of(riddle: Riddle) -> tuple[list[str], str, str]:
    tokenizer = byte_tokenizer()
    *needles, question, answer = (
        str(tokenizer.decode(ids)) for ids in (*riddle.needles, riddle.question, riddle.answer)
    )
    return needles, question, answer


def test_a_passkey_is_answered_whole_with_its_bar(phrases: Phrases) -> None:
    (needle,), question, answer = text_of(TASKS["passkey"](phrases, random.Random(5), digits=7))
    assert needle == f"|The passkey is:{answer}"
    assert question == "|What is the passkey? The passkey is:"
    assert len(answer) == 8
    assert answer[:-1].isdigit()


def test_two_hops_may_have_more_noise(phrases: Phrases) -> None:
    links, question, answer = text_of(TASKS["two-hop"](phrases, random.Random(0), chains=5))
    starts, ends = ([re.findall(r"\d+", link)[side] for link in links] for side in (0, 1))
    assert len(set(starts)) == 10
    asked = re.findall(r"\d+", question)[0]
    assert [starts[0], ends[0], ends[1]] == [asked, starts[1], *re.findall(r"\d+", answer)[1:]]
    assert all(ends[chain] == starts[chain + 1] for chain in range(0, 10, 2))


def test_two_hops_are_a_chain_among_noise(phrases: Phrases) -> None:
    for seed in range(20):
        links, question, answer = text_of(TASKS["two-hop"](phrases, random.Random(seed)))
        pairs = [link.removeprefix("|DEF").removesuffix("|").split("->") for link in links]
        (a, b), (b_again, c), (x, y), (y_again, z) = pairs
        assert (b, y) == (b_again, y_again)
        assert len({a, b, c, x, y, z}) == 6
        assert (question, answer) == (f"|The path from{a}is:", f"{b},{c}|")


def test_one_of_several_needles_is_asked_for(phrases: Phrases) -> None:
    needles, question, answer = text_of(TASKS["multi-needle"](phrases, random.Random(3), needles=9))
    name = question.removeprefix("|The value of ").removesuffix("is:")
    assert needles[0] == f"|One of the special magic numbers for {name} is {answer}"
    assert len({needle.split()[7] for needle in needles}) == 9


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="passkey, two-hop, multi-needle"):
        TaskPlan(task="haystack", lengths=[1000])


def test_a_tokenizer_must_have_digits() -> None:
    with pytest.raises(InvalidArgument, match="no separate token for each"):
        Phrases(lambda text, **_: {"input_ids": [1, 2]})


class Known(Phrases):
    """Phrases in GPT-2's tokens, with numbers that are given."""

    PIECES = {  # noqa: RUF012 - a constant
        "|The passkey is:": [91, 464, 1208, 2539, 318, 25],
        "|What is the passkey? The passkey is:": [91, 2061, 318, 262, 1208, 2539, 30, 383, 1208, 2539, 318, 25],
        "|DEF": [91, 32988],
        "->": [3784],
        "|The path from": [91, 464, 3108, 422],
        "is:": [271, 25],
        ",": [11],
        "|One of the special magic numbers for ": [91, 3198, 286, 262, 2041, 5536, 3146, 329, 220],
        " is ": [318, 220],
        "|The value of ": [91, 464, 1988, 286, 220],
        "|": [91],
    }

    def __init__(self, *numbers: list[list[int]]) -> None:
        super().__init__(lambda text, **_: {"input_ids": self.PIECES.get(text, [15])})
        self._numbers = list(numbers)

    def numbers(self, rng: random.Random, count: int, digits: int) -> list[list[int]]:
        return self._numbers.pop(0)


def published(task: str) -> list[list[int]]:
    """Rows of the paper's data: a question in blocks of 64, so that its last token is the first of a block."""
    rows: list[list[int]] = np.load(DATA)[f"{task}_chunk_ids"].tolist()
    return rows


def after(row: list[int], phrase: list[int]) -> list[int]:
    """Where ``phrase`` ends in ``row``, each time."""
    n = len(phrase)
    return [i + n for i in range(len(row)) if row[i : i + n] == phrase]


def agree(row: list[int], riddle: Riddle) -> None:
    for needle in riddle.needles:
        assert len(after(row, needle)) == 1
    question = riddle.question[:-1]  # the paper's has no colon
    (end,) = after(row, question)
    assert (end - 1) % 64 == 0
    answer = riddle.answer[:-1]  # nor a bar
    assert row[end : end + len(answer)] == answer
    assert set(row[end + len(answer) :]) == {-100}


def test_passkeys_are_those_of_the_paper() -> None:
    for row in published("single"):
        (at,) = after(row, Known.PIECES["|The passkey is:"])
        agree(row, TASKS["passkey"](Known([row[at : at + 10]]), random.Random(0)))


def test_two_hops_are_those_of_the_paper() -> None:
    for row in published("multihop"):
        links = {tuple(row[at : at + 5]): row[at + 6 : at + 11] for at in after(row, [91, 32988])}
        (asked,) = after(row, Known.PIECES["|The path from"])
        start = row[asked : asked + 5]
        chain = [start, links[tuple(start)], links[tuple(links[tuple(start)])]]
        (noise,) = [list(a) for a in links if list(a) not in chain and list(a) not in links.values()]
        chain += [noise, links[tuple(noise)], links[tuple(links[tuple(noise)])]]
        agree(row, TASKS["two-hop"](Known(chain), random.Random(0)))


def test_several_needles_are_those_of_the_paper() -> None:
    for row in published("multi"):
        starts = after(row, Known.PIECES["|One of the special magic numbers for "])
        (asked,) = after(row, Known.PIECES["|The value of "])
        pairs = [(row[at : at + 5], row[at + 7 : at + 12]) for at in starts]
        pairs.sort(key=lambda pair: pair[0] != row[asked : asked + 5])
        names, values = ([pair[i] for pair in pairs] for i in range(2))
        agree(row, TASKS["multi-needle"](Known(names, values), random.Random(0), needles=len(names)))
