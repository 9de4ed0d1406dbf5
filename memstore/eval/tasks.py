"""Needle tasks in tokens: hidden needles and their places, the question, and the whole answer.

The formats follow the GCA paper's data (Hu et al. 2025), and the last of them RULER (Hsieh et al. 2024):

- passkey: ``|The passkey is:12345|``, asked with ``|What is the passkey? The passkey is:`` -> ``12345|``
- two hops: ``|DEF12->34|`` and ``|DEF34->56|``, and a second chain that nobody asks for; asked with
  ``|The path from12is:`` -> ``34,56|``
- several needles: ``|One of the special magic numbers for 12345 is 67890|``, each for another name; one of them is
  asked for with ``|The value of 12345is:`` -> ``67890|``

There is one deviation: every question ends with a colon, the first token of its block. A block retrieves for the *next*
one. So the rest of the question stands in complete blocks, and the answer is written with what the last of them
retrieved. (In the paper's data the word "is" stands there.) An answer counts if it is whole: all digits, and the bar
that closes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from memstore.errors import InvalidArgument
from memstore.eval.filler import Filler, Tokens

CHUNK = 1 << 16
"""Tokens of a haystack that are made at a time."""


class Phrases:
    """Token ids of the phrases in needles. Raises ``InvalidArgument`` if a digit is several tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        digits = [self(str(digit)) for digit in range(10)]
        if any(len(ids) != 1 for ids in digits):
            raise InvalidArgument(
                "needles consist of digits, but this tokenizer has no separate token for each digit: use another "
                "tokenizer"
            )
        self.digits = [ids[0] for ids in digits]
        """The tokens of 0 to 9."""

    def __call__(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        if text not in self._known:
            self._known[text] = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._known[text]

    def numbers(self, rng: random.Random, count: int, digits: int) -> list[list[int]]:
        """Draw ``count`` different numbers of ``digits`` digits."""
        chosen = rng.sample(range(10**digits), count)
        return [[self.digits[int(digit)] for digit in f"{number:0{digits}}"] for number in chosen]


@dataclass(frozen=True)
class Riddle:
    """Needles, question and answer, before they have places."""

    needles: list[list[int]]
    question: list[int]
    """The question; its last token will be the first of a block."""
    answer: list[int]
    hops: list[int]
    """The needles to find, each with the help of the one before. The first has the depth of a sample."""


def passkey(phrases: Phrases, rng: random.Random, *, digits: int = 5) -> Riddle:
    """Make a riddle with one number."""
    (key,) = phrases.numbers(rng, 1, digits)
    needle = phrases("|The passkey is:") + key + phrases("|")
    return Riddle([needle], phrases("|What is the passkey? The passkey is:"), key + phrases("|"), [0])


def link(phrases: Phrases, a: list[int], b: list[int]) -> list[int]:
    """Make the needle that leads from ``a`` to ``b``."""
    return phrases("|DEF") + a + phrases("->") + b + phrases("|")


def path(phrases: Phrases, chain: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Make the question about a chain of two links, ``start, middle, end``, and its answer."""
    start, middle, end = chain
    return phrases("|The path from") + start + phrases("is:"), middle + phrases(",") + end + phrases("|")


def two_hop(phrases: Phrases, rng: random.Random, *, digits: int = 2, chains: int = 2) -> Riddle:
    """Make a chain of two links, and other chains as noise."""
    names = phrases.numbers(rng, 3 * chains, digits)
    each = [names[first : first + 3] for first in range(0, len(names), 3)]
    links = [link(phrases, a, b) for chain in each for a, b in pairwise(chain)]
    return Riddle(links, *path(phrases, each[0]), [0, 1])


def multi_needle(phrases: Phrases, rng: random.Random, *, needles: int = 4, digits: int = 5) -> Riddle:
    """Make numbers for several names, and ask for one of them."""
    hidden, asked = named_numbers(phrases, rng, needles, digits)
    return Riddle(hidden, *asked[0], [0])


def named_numbers(
    phrases: Phrases, rng: random.Random, needles: int, digits: int
) -> tuple[list[list[int]], list[tuple[list[int], list[int]]]]:
    """Make needles with a number for a name each, and a question and an answer for each."""
    names, values = phrases.numbers(rng, needles, digits), phrases.numbers(rng, needles, digits)
    hidden, asked = list[list[int]](), list[tuple[list[int], list[int]]]()
    for name, value in zip(names, values, strict=True):
        hidden.append(phrases("|One of the special magic numbers for ") + name + phrases(" is ") + value + phrases("|"))
        asked.append((phrases("|The value of ") + name + phrases("is:"), value + phrases("|")))
    return hidden, asked


TASKS: dict[str, Callable[..., Riddle]] = {"passkey": passkey, "two-hop": two_hop, "multi-needle": multi_needle}


@dataclass(frozen=True)
class Sample:
    """A riddle in a haystack of ``length`` tokens, and the prompt that follows it."""

    length: int
    """Tokens of the haystack, including the needles."""
    depth: float
    """Wanted place of the first needle to find: 0 at the beginning, 1 at the end."""
    start: int
    """Place in the filler at which the haystack begins."""
    needles: tuple[tuple[int, list[int]], ...]
    """Place and tokens of each needle, by place."""
    prompt: list[int]
    """Filler, then the question."""
    answer: list[int]
    hops: tuple[range, ...]
    """Places of the needles to find, in that order."""

    @property
    def first(self) -> int:
        """Place of the first needle; only filler precedes it."""
        return self.needles[0][0]

    @property
    def filler_tokens(self) -> int:
        """Return the tokens of filler in the haystack."""
        return self.length - sum(len(ids) for _, ids in self.needles)

    def haystack(self, filler: Filler, first: int = 0) -> Iterator[Tokens]:
        """Yield the haystack's tokens from place ``first`` on, in chunks."""
        place = 0
        for chunk in self._parts(filler):
            place += len(chunk)
            if place > first:
                yield chunk[max(0, len(chunk) - (place - first)) :]

    def _parts(self, filler: Filler) -> Iterator[Tokens]:
        place, taken = 0, self.start
        for at, ids in (*self.needles, (self.length, [])):
            for chunk in range(place, at, CHUNK):
                count = min(CHUNK, at - chunk)
                yield filler.take(taken, count)
                taken += count
            yield np.array(ids, np.int64)
            place = at + len(ids)


def check_room(riddle: Riddle, length: int, tokens_per_block: int) -> None:
    """Raise ``InvalidArgument`` for a length that is too short for the needles and a block of filler."""
    if length < (least := sum(map(len, riddle.needles)) + tokens_per_block):
        raise InvalidArgument(
            f"a haystack of {length:,} tokens is too short for its needles: use at least {least} tokens"
        )


def plant(
    riddle: Riddle,
    length: int,
    filler: Filler,
    tokens_per_block: int,
    rng: random.Random,
    *,
    depth: float | None = None,
    start: int | None = None,
) -> Sample:
    """Hide ``riddle`` in ``length`` tokens: the first needle to find at ``depth``, the others anywhere.

    A depth fixes the place only to a block's width, so that needles lie at any place of a block. By default ``depth``
    and ``start`` (in the filler) are random. Raises ``InvalidArgument`` for a length that is too short.
    """
    check_room(riddle, length, tokens_per_block)
    depth = rng.random() if depth is None else depth
    start = rng.randrange(len(filler)) if start is None else start
    room = length - sum(map(len, riddle.needles))
    wanted = round(depth * (room - tokens_per_block)) + rng.randrange(tokens_per_block + 1)
    places = [wanted if number == riddle.hops[0] else rng.randrange(room + 1) for number in range(len(riddle.needles))]
    planted: dict[int, tuple[int, list[int]]] = {}
    shift = 0
    for number in sorted(range(len(places)), key=places.__getitem__):
        planted[number] = (places[number] + shift, riddle.needles[number])
        shift += len(riddle.needles[number])
    return Sample(
        length=length,
        depth=depth,
        start=start,
        needles=tuple(planted.values()),
        prompt=[*_before(riddle.question, length, filler, start + room, tokens_per_block), *riddle.question],
        answer=riddle.answer,
        hops=tuple(range(planted[hop][0], planted[hop][0] + len(riddle.needles[hop])) for hop in riddle.hops),
    )


def _before(question: Sequence[int], length: int, filler: Filler, place: int, tokens_per_block: int) -> list[int]:
    """Return filler before the question, so that its last token begins a block far enough behind all needles.

    The last block of the question retrieves for the answer, and finds only earlier blocks. So it must begin after the
    haystack.
    """
    asked = len(question) - 1
    count = -(length + asked) % tokens_per_block
    if count + asked < tokens_per_block:
        count += tokens_per_block
    ids: list[int] = filler.take(place, count).tolist()
    return ids
