"""Rows to learn retrieval from, made up during training: needles in text, a question, and the answer.

The tasks use the words of ``memstore.eval.tasks``. Every row ends with a question whose last token is the first of a
block. So the blocks before it hold the rest of the question and retrieve for the answer (``align``).

Numbers vary in length, because this makes a small model copy instead of remember. The text around the needles comes
from several corpora. Some rows hold near misses (other things with numbers after a colon) or random tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from memstore.errors import InvalidArgument
from memstore.eval.tasks import TASKS, Phrases, Riddle, link, named_numbers, path
from memstore.train.corpora import Tokens
from memstore.train.recipes import Recipe

NEAR = ("code", "number", "address", "count", "key", "password", "value", "version", "chapter", "verse", "size", "line")
KINDS = (*NEAR, "passport", "pass", "port", "time", "date")


class _VariedPhrases(Phrases):
    """Phrases with numbers of ``shortest`` to ``longest`` digits, whatever a task requests."""

    distinct = False
    """Whether no number has the same digit twice."""
    few = 0.0
    """Share of the numbers that consist of only three to five different digits."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shortest: int, longest: int) -> None:
        super().__init__(tokenizer)
        self.bounds = shortest, longest

    def numbers(self, rng: random.Random, count: int, digits: int = 0) -> list[list[int]]:  # noqa: ARG002
        found: list[list[int]] = []
        while len(found) < count:
            pool = rng.sample(self.digits, rng.randint(3, 5)) if rng.random() < self.few else self.digits
            length = rng.randint(*self.bounds)
            number = rng.sample(pool, min(length, len(pool))) if self.distinct else rng.choices(pool, k=length)
            if number not in found:
                found.append(number)
        return found


class _Distractions:
    """Distractions that make a text harder to search."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._phrases = _VariedPhrases(tokenizer, 3, 12)
        self._vocabulary = len(tokenizer)

    def nonsense(self, rng: Generator, count: int) -> Tokens:
        """Return random tokens: from the whole vocabulary, or from a few with many digits and signs among them."""
        if rng.random() < 0.4:
            return rng.integers(2, self._vocabulary, count, dtype=np.int32)
        few = rng.integers(2, self._vocabulary, rng.choice([3, 10, 40]), dtype=np.int32).tolist()
        few += self._phrases("0123456789") * int(rng.integers(3))
        few += self._phrases(":|") * int(rng.integers(3))
        return rng.choice(np.array(few, np.int32), count)

    def near_miss(self, rng: random.Random) -> list[int]:
        """Return text that looks like a needle, or like the question for one, but is neither."""
        phrases, kind, chance = self._phrases, rng.choice(KINDS), rng.random()
        (number,) = phrases.numbers(rng, 1)
        if chance < 0.4:
            return phrases(f"|The {kind} is:") + number + phrases("|")
        if chance < 0.6:
            return phrases(rng.choice(("", " the", " a")) + f" {kind}:") + number
        if chance < 0.7:
            return phrases(f"|What is the {kind}? The {kind} is")
        if chance < 0.8:
            return phrases(":") + number + phrases("|")
        if chance < 0.9:
            return phrases("The passkey is" + rng.choice((" lost", " not here", " unknown")))
        return phrases(" passkey")


Asked = tuple[list[int], list[int]]
"""A question and its answer."""


class _Exercise(NamedTuple):
    """A riddle, and further questions about its needles."""

    riddle: Riddle
    follow_ups: list[Asked]


def plain(task: str) -> Callable[[Phrases, random.Random], _Exercise]:
    """Return a task in the form in which models are measured."""
    return lambda phrases, rng: _Exercise(TASKS[task](phrases, rng), [])


def one_hop(phrases: Phrases, rng: random.Random, chains: int) -> _Exercise:
    """Ask for each link of ``chains`` of two links: the first half of the way to two hops."""
    needles, steps, _ = _links(phrases, rng, chains)
    numbers = rng.sample(range(len(steps)), len(steps))
    (question, answer), *rest = (steps[number] for number in numbers)
    return _Exercise(Riddle(needles, question, answer, numbers[:1]), _after(rest))


def two_hops(phrases: Phrases, rng: random.Random, chains: int) -> _Exercise:
    """Ask for each of ``chains`` of two links, then for the links."""
    needles, steps, paths = _links(phrases, rng, chains)
    first, *others = rng.sample(range(chains), chains)
    question, answer = paths[first]
    rest = [paths[chain] for chain in others] + rng.sample(steps, len(steps))
    return _Exercise(Riddle(needles, question, answer, [2 * first, 2 * first + 1]), _after(rest))


def by_name(phrases: Phrases, rng: random.Random, needles: int) -> _Exercise:
    """Ask for each of several named numbers."""
    hidden, asked = named_numbers(phrases, rng, needles, 0)
    first, *others = rng.sample(range(needles), needles)
    return _Exercise(Riddle(hidden, *asked[first], [first]), _after([asked[other] for other in others]))


def _links(phrases: Phrases, rng: random.Random, chains: int) -> tuple[list[list[int]], list[Asked], list[Asked]]:
    """Return the links of ``chains`` of two, the questions about each link, and those about each chain."""
    names = phrases.numbers(rng, 3 * chains, 2)
    needles, steps, paths = list[list[int]](), list[Asked](), list[Asked]()
    for chain in range(chains):
        start, middle, end = names[3 * chain : 3 * chain + 3]
        for a, b in ((start, middle), (middle, end)):
            needles.append(link(phrases, a, b))
            steps.append((phrases("|The step from") + a + phrases("is:"), b + phrases("|")))
        paths.append(path(phrases, (start, middle, end)))
    return needles, steps, paths


def _after(asked: Sequence[Asked]) -> list[Asked]:
    """Return the questions without their first token, a bar: the answer before them ends with it."""
    return [(question[1:], answer) for question, answer in asked]


EXERCISES: dict[str, Callable[[Phrases, random.Random], _Exercise]] = {
    "passkey": plain("passkey"),
    "multi-needle": partial(by_name, needles=4),
    "easy multi-needle": partial(by_name, needles=2),
    "easy one-hop": partial(one_hop, chains=1),
    "easy two-hop": partial(two_hops, chains=1),
    "one-hop": partial(one_hop, chains=2),
    "two-hop": partial(two_hops, chains=2),
}


class _Row(NamedTuple):
    """``T`` tokens; which of them are the answer, and which may distract other rows."""

    ids: Tokens
    answer: NDArray[np.bool_]
    free: NDArray[np.bool_]


class NeedleRows(Dataset[Any]):
    """Item ``i`` is the batch of step ``i``: a function of the recipe, the seed and ``i`` alone."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Tokens],
        tokens_per_block: int,
        count: int,
        seed: int,
    ) -> None:
        """``texts``: the texts around the needles. ``count``: batches. Raises ``InvalidArgument`` for a short text."""
        most = max(*recipe.blocks, *(recipe.closing_blocks if recipe.closing else ()))
        longest = (most + recipe.answers) * tokens_per_block
        if (shortest := min(map(len, texts))) <= longest:
            raise InvalidArgument(
                f"a text has {shortest:,} tokens, but rows of {recipe.name} have up to {longest:,}: train on more text"
            )
        self._recipe = recipe
        self._phrases = _VariedPhrases(tokenizer, 0, 0)
        self._distractions = _Distractions(tokenizer)
        self._texts = texts
        self._tokens_per_block = tokens_per_block
        self._count = count
        self._seed = seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return ``input_ids``, ``answer`` and ``free`` as in ``_Row``, ``[B, T]`` each."""
        rng, recipe = np.random.default_rng([self._seed, number]), self._recipe
        plain = random.Random(int(rng.integers(1 << 62)))
        whole = number / self._count
        progress = recipe.before_closing(whole)
        closing = whole >= 1 - recipe.closing
        blocks = plain.randint(*(recipe.closing_blocks if closing else recipe.ramped(recipe.blocks, progress)))
        exercises = [self._exercise(plain, progress) for _ in range(self._rows(blocks))]
        blocks = max([blocks, *(self._least_blocks(exercise.riddle) for exercise in exercises)])
        hard = progress >= recipe.hard_from
        rows = [self._row(rng, plain, exercise, blocks, hard) for exercise in exercises[: self._rows(blocks)]]
        ids, answer, free = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return {"input_ids": ids.long(), "answer": answer, "free": free}

    def _rows(self, blocks: int) -> int:
        """Return how many rows of ``blocks`` blocks, plus those of the answers, fit into a step."""
        return max(1, self._recipe.tokens // ((blocks + self._recipe.answers) * self._tokens_per_block))

    def _least_blocks(self, riddle: Riddle) -> int:
        """Return the number of blocks that needles and question need."""
        return -(-(sum(map(len, riddle.needles)) + len(riddle.question) - 1) // self._tokens_per_block)

    def _exercise(self, plain: random.Random, progress: float) -> _Exercise:
        shares = self._recipe.tasks_at(progress)
        (task,) = plain.choices(list(shares), list(shares.values()))
        self._phrases.bounds = self._recipe.ramped(self._recipe.digits[task], progress)
        self._phrases.distinct = progress < self._recipe.distinct_until
        self._phrases.few = self._recipe.few_digits if progress >= self._recipe.few_from else 0.0
        return EXERCISES[task](self._phrases, plain)

    def _row(self, rng: Generator, plain: random.Random, exercise: _Exercise, blocks: int, hard: bool) -> _Row:
        riddle, size, answers = exercise.riddle, self._tokens_per_block, self._recipe.answers
        start, length = blocks * size + 1, (blocks + answers) * size
        room = start - len(riddle.question) - sum(map(len, riddle.needles))
        if not self._recipe.aligned:
            earlier = plain.randint(0, min(room, size - 1))
            start, room = start - earlier, room - earlier
        answer, free = np.zeros(length, bool), np.ones(length, bool)
        free[start - 1 :] = False
        parts: list[Any] = []
        at, before = 0, 0
        text = self._text(rng, plain, room, hard)
        places = sorted(plain.randint(0, room) for _ in riddle.needles)
        for place, needle in zip(places, plain.sample(riddle.needles, len(places)), strict=True):
            at += place - before
            free[at : at + len(needle)] = False
            at += len(needle)
            parts += [text[before:place], needle]
            before = place
        parts += [text[before:], riddle.question]
        at = start
        for question, wanted in self._asked(exercise, length - start):
            if question and answers > 1:  # its last token begins the next block
                gap = -(at + len(question) - 1) % size
                parts.append(self._text(rng, plain, gap, hard))
                at += gap
            parts += [question, wanted]
            at += len(question) + len(wanted)
            answer[at - len(wanted) : at] = True
        if at > length:
            raise InvalidArgument(f"the answers of {self._recipe.name} do not fit into a block of {size} tokens")
        parts.append(self._text(rng, plain, length - at, hard))
        return _Row(np.concatenate(parts, dtype=np.int32, casting="unsafe"), answer, free)

    def _asked(self, exercise: _Exercise, room: int) -> list[Asked]:
        """Return the answer of a row and more questions: one for each further block, or what fits into ``room``."""
        asked = [(list[int](), exercise.riddle.answer)]
        more = exercise.follow_ups if self._recipe.follow_ups else []
        if self._recipe.answers > 1:
            return asked + more[: self._recipe.answers - 1]
        room -= len(exercise.riddle.answer)
        for question, answer in more:
            if len(question) + len(answer) <= room:
                asked.append((question, answer))
                room -= len(question) + len(answer)
        return asked

    def _text(self, rng: Generator, plain: random.Random, count: int, hard: bool) -> Tokens:
        if hard and plain.random() < self._recipe.nonsense:
            return self._distractions.nonsense(rng, count)
        corpus = plain.choice(self._texts)
        places = [plain.randrange(len(corpus) - count) for _ in range(self._recipe.places if hard else 1)]
        texts = (corpus[start : start + count] for start in places)
        text: Tokens = max(texts, key=lambda text: np.isin(text, self._phrases.digits).sum()).copy()
        if hard and plain.random() < self._recipe.near_misses:
            for _ in range(plain.randint(1, 2)):
                miss = self._distractions.near_miss(plain)
                if len(miss) < count:
                    at = plain.randrange(count - len(miss))
                    text[at : at + len(miss)] = miss
        return text
