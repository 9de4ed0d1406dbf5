"""Needles in haystacks: sentences hidden in long texts, and the questions that ask for them.

The filler haystack comes from the landmark paper (Mohtashami & Jaggi 2023, appendix B: grass, sky and sun), with
several labelled pass keys instead of one. The prose haystack is Python's own language reference, which every Python
carries.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memstore.errors import InvalidArgument, NotFound

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
FILLER_START = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there. "
)
NAMES = (
    "Margaret", "Tobias", "Eleanor", "Frederick", "Beatrice", "Leopold", "Harriet", "Dominic", "Rosalind", "Gilbert",
)  # fmt: skip
FOODS = ("cinnamon", "honey", "garlic", "ginger", "mustard", "saffron", "pepper", "vanilla", "mint", "butter")
ANIMALS = ("tiger", "penguin", "elephant", "rabbit", "dolphin", "camel", "owl", "wolf", "turtle", "horse")
PLACES = ("Lisbon", "Vienna", "Cairo", "Dublin", "Prague", "Havana", "Oslo", "Athens", "Warsaw", "Lima")


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, the beginning of the answer as a question, and the answer."""

    kind: str
    sentence: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """Return the question that follows the document."""
        return f"\n\nQuestion: {self.question}\nAnswer: {self.sentence.split(self.answer)[0].rstrip()}"

    def found_in(self, text: str) -> bool:
        """Check whether the generated ``text`` begins with the whole answer."""
        pattern = rf"(?:(?:a|an|the) )?{re.escape(self.answer)}\b"
        return re.match(pattern, text.strip(), re.IGNORECASE) is not None


Kind = tuple[str, str, str, Sequence[str] | int]
"""Name, sentence and question of a kind of needle, and its answers: words, or the digits of a number."""
KINDS: tuple[Kind, ...] = (
    (
        "name",
        "The name of the lighthouse keeper at Port Salter is {}.",
        "What is the name of the lighthouse keeper?",
        NAMES,
    ),
    ("ingredient", "The secret ingredient in grandmother Olga's soup is {}.", "What is the secret ingredient?", FOODS),
    (
        "animal",
        "The animal that guards the old library of Brenholm is a {}.",
        "Which animal guards the old library?",
        ANIMALS,
    ),
    ("place", "The treasure of Captain Moraine is buried near {}.", "Where is the treasure buried?", PLACES),
    ("number", "The number of the locker with the blue door is {}.", "What is the number of the locker?", 4),
)


def passkeys(count: int, rng: random.Random) -> list[Needle]:
    """Make pass keys of five digits, each of another person, so that one text can hide several."""
    found = []
    for name in rng.sample(NAMES, count):
        key = f"{rng.randrange(10_000, 100_000)}"
        sentence = f"The pass key of {name} is {key}. Remember it. {key} is the pass key of {name}."
        found.append(Needle("passkey", sentence, f"What is the pass key of {name}?", key))
    return found


def prose_needles(kinds: Iterable[Kind], rng: random.Random) -> list[Needle]:
    """Make one needle of each of ``kinds``, with a random answer."""
    found = []
    for kind, sentence, question, known in kinds:
        answer = f"{rng.randrange(10 ** (known - 1), 10**known)}" if isinstance(known, int) else rng.choice(known)
        found.append(Needle(kind, sentence.format(answer), question, answer))
    return found


def filler_text(characters: int) -> str:
    """Return the landmark paper's filler, at least ``characters`` long."""
    return FILLER_START + FILLER * (characters // len(FILLER) + 1)


def topics() -> list[str]:
    """Return Python's language reference, topic by topic. Raises ``NotFound`` if this Python has none."""
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:  # some distributions of Python leave it out
        raise NotFound(
            "this Python has no pydoc_data (its language reference); use another text, or another Python"
        ) from None
    return [str(texts[name]) for name in sorted(texts)]


def prose_text(rng: random.Random | None = None) -> str:
    """Return Python's language reference; ``rng`` shuffles the order of its topics."""
    texts = topics()
    if rng is not None:
        rng.shuffle(texts)
    return "\n\n".join(texts)


@dataclass(frozen=True)
class Haystack:
    """Token ids of a text with needles."""

    tokens: list[int]
    needles: list[Needle]
    positions: list[int]
    """First token of each needle."""


def hide(text: str, needles: Sequence[Needle], tokenizer: Any, tokens: int, rng: random.Random) -> Haystack:
    """Hide ``needles`` in the first ``tokens`` tokens of ``text``, each at a random sentence end in its own part."""
    characters = round(len(text) * min(1.0, 1.1 * tokens / max(1, _estimate(text, tokenizer))))
    hay: list[int] = tokenizer(text[:characters], add_special_tokens=False)["input_ids"]
    hidden: list[list[int]] = [tokenizer(f" {n.sentence} ", add_special_tokens=False)["input_ids"] for n in needles]
    length = tokens - sum(map(len, hidden))
    if not needles or length < len(needles):
        raise InvalidArgument(
            f"{len(needles)} needles do not fit into {tokens} tokens, because each needs text around it: use "
            "fewer needles or more tokens"
        )
    if len(hay) < length:
        raise InvalidArgument(f"the text has {len(hay)} tokens, but {length} are needed: use a longer text")
    ends = [i + 1 for i, token in enumerate(hay[:length]) if tokenizer.decode([token]).rstrip().endswith(".")]
    share = length / len(needles)
    result: list[int] = []
    positions, previous = [], 0
    for i, ids in enumerate(hidden):
        wanted = int((i + rng.uniform(0.1, 0.9)) * share)
        at = _sentence_end(ends, previous, wanted, length)
        result += hay[previous:at]
        positions.append(len(result))
        result += ids
        previous = at
    return Haystack(result + hay[previous:length], list(needles), positions)


def _sentence_end(ends: Sequence[int], first: int, wanted: int, last: int) -> int:
    """Return the next of ``ends`` from ``wanted`` on, else the last one before it, else ``wanted`` itself."""
    after = bisect_left(ends, wanted)
    if after < len(ends) and ends[after] <= last:
        return ends[after]
    return ends[after - 1] if after and ends[after - 1] > first else wanted


def _estimate(text: str, tokenizer: Any) -> int:
    """Estimate the tokens of ``text`` from its beginning."""
    sample = text[:20_000]
    return round(len(tokenizer(sample, add_special_tokens=False)["input_ids"]) * len(text) / max(1, len(sample)))
