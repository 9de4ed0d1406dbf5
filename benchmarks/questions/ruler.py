"""RULER's thirteen tasks, generated at any length (Hsieh et al. 2024): needles, chains, counting words, documents.

Tasks, variants and the two measures follow the paper. Words, sentences and questions are our own, and Python's language
reference replaces RULER's essays. So do not compare scores with published ones. A text is read into a memory and asked
once. If it fits the model, the model alone also gets it in its prompt. Tasks that count words over the whole text
(``cwe``, ``fwe``) cannot be answered from a few blocks, and their rows say so.
"""

from __future__ import annotations

import random
import string
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count, cycle
from typing import Any, NamedTuple

import memstore
from benchmarks import kept
from benchmarks.questions import hotpotqa, squad
from benchmarks.questions.manual import paragraphs
from memstore.errors import InvalidArgument
from memstore.readers.asking import INSTRUCTION, Template, fill_template
from memstore.train.questions import SEPARATOR, QuestionSet

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CHARACTERS = 2_000_000
"""Characters of the manual, at most."""
PARAGRAPH = 200
"""Characters between two needles, at least."""
QUALITIES = (
    "amber brisk calm dusty eager frosty gentle hollow ivory jolly keen lofty misty noble oaken plain quiet rusty"
)
THINGS = (
    "anchor basket candle dolphin ember falcon garden hammer island jacket kettle ladder meadow needle orchard pillow"
)
SYLLABLES = [f"{first}{vowel}" for first in "bdfgklmnprstvz" for vowel in "aeiou"]
SEVERAL = 4
"""Needles, values or questions, in tasks with several."""
HOPS = 4
COMMON, OFTEN, SELDOM = 10, 30, 3
"""``cwe``: number of common words, and how often they and the others occur, at most."""
WAYS = ("memory", "alone", "kvpress")
SHARE = 0.5
"""Share of the states that kvpress keeps, as its documentation shows it."""
ROOM = 150
"""Tokens for a question and the template around it."""
FREQUENT, ALPHA = 3, 2.0
"""``fwe``: number of words asked for, and the exponent in the frequency of the k-th word."""


class RulerSample(NamedTuple):
    """A text, a question about it, and the required content of an answer."""

    text: str
    question: str
    wanted: tuple[str, ...]
    whole: bool
    """Whether each of ``wanted`` counts; otherwise one of them is enough."""
    tokens: int
    """Tokens of an answer, at most."""


class Maker:
    """Makes samples of one length. Tasks differ in what they hide, and in which text."""

    def __init__(self, tokens: int, size: Callable[[str], int], seed: int = 0) -> None:
        """Take ``size``, which counts the tokens of a text."""
        self.tokens, self.size, self._seed = tokens, size, seed
        self._manual: list[str] | None = None

    def sample(self, task: str, number: int) -> RulerSample:
        """Make the sample ``number`` of ``task``, always the same. Raises ``InvalidArgument`` for an unknown task."""
        if task not in TASKS:
            raise InvalidArgument(f"RULER has no task {task!r}: choose from {', '.join(TASKS)}")
        return TASKS[task](self, random.Random(f"{self._seed} {task} {number}"))

    def filled(self, pieces: Iterator[str], hidden: Sequence[str], chance: random.Random, between: str = "\n") -> str:
        """Fill a text of ``tokens`` tokens with ``pieces``, and put the sentences ``hidden`` among them."""
        left, kept = self.tokens - sum(self.size(between + each) for each in hidden), list[str]()
        while left > 0:
            kept.append(next(pieces))
            left -= self.size(between + kept[-1])  # a space belongs to the token of the word behind it
        for sentence in hidden:
            kept.insert(chance.randint(0, len(kept)), sentence)
        return between.join(kept)

    def manual(self, chance: random.Random) -> Iterator[str]:
        """Yield paragraphs of the manual, from a random place on, and again from its beginning."""
        if self._manual is None:
            self._manual = paragraphs(CHARACTERS, PARAGRAPH)
        start = chance.randrange(len(self._manual))
        return cycle(self._manual[start:] + self._manual[:start])


def _needles(
    *, hay: str = "manual", keys: int = 1, values: int = 1, asked: int = 1, codes: str = ""
) -> Callable[[Maker, random.Random], RulerSample]:
    """Make a task: ``keys`` needles with ``values`` each, ``asked`` of them asked for; ``codes``: the uuid parts."""

    def make(maker: Maker, chance: random.Random) -> RulerSample:
        names = _names(chance, "key" in codes)
        kind = "code" if "value" in codes else "number"
        facts = {next(names): [_value(chance, kind) for _ in range(values)] for _ in range(keys)}
        wanted = list(facts)[:asked]
        others = (_needle(kind, name, _value(chance, kind)) for name in names)
        pieces = {"noise": cycle([NOISE]), "needles": others}.get(hay) or maker.manual(chance)
        hidden = [_needle(kind, name, value) for name, several in facts.items() for value in several]
        what = f"are the magic {kind}s" if asked * values > 1 else f"is the magic {kind}"
        return RulerSample(
            maker.filled(pieces, hidden, chance),
            f"What {what} of {' and '.join(wanted)} in the text?",
            tuple(value for name in wanted for value in facts[name]),
            whole=True,
            tokens=128,
        )

    return make


def _needle(kind: str, name: str, value: str) -> str:
    return f"The magic {kind} of {name} is {value}."


def _names(chance: random.Random, codes: bool) -> Iterator[str]:
    """Yield names of needles, each once: codes, or pairs of words, with a number once all pairs are used."""
    if codes:
        while True:
            yield _code(chance)
    pairs = [f"{quality}-{thing}" for quality in QUALITIES.split() for thing in THINGS.split()]
    for again in count(1):
        chance.shuffle(pairs)
        yield from (pair if again == 1 else f"{pair}-{again}" for pair in pairs)


def _value(chance: random.Random, kind: str) -> str:
    return _code(chance) if kind == "code" else str(chance.randrange(10**6, 10**7))


def _code(chance: random.Random) -> str:
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def _chain(maker: Maker, chance: random.Random) -> RulerSample:
    """Make variable tracking: one variable gets a number, each of the others the value of the one before."""
    names = ["".join(chance.sample(string.ascii_uppercase, 5)) for _ in range(HOPS + 1)]
    value = str(chance.randrange(10**4, 10**5))
    links = [
        f"VAR {name} = {before}" for name, before in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)
    ]
    pieces = maker.filled(cycle([NOISE]), links, chance).split("\n")
    places = [number for number, piece in enumerate(pieces) if piece in links]
    for place, link in zip(places, links, strict=True):  # in the order of the chain
        pieces[place] = link
    question = f"Which variables have the value {value}, directly or through others? Name all {len(names)}."
    return RulerSample("\n".join(pieces), question, tuple(names), whole=True, tokens=30)


def _common(maker: Maker, chance: random.Random) -> RulerSample:
    """Make common words in a numbered list: ten occur often, all others seldom."""
    words = _words(chance)

    def cost(more: list[str], first: int) -> int:
        return sum(maker.size(f"\n{number}. {word}") for number, word in enumerate(more, first))

    common = [next(words) for _ in range(COMMON)]
    several = maker.tokens // (2 * cost(common, 100))  # times in half of a short text, whose lines have three digits
    listed = common * max(SELDOM + 1, min(OFTEN, several))
    left = maker.tokens - cost(listed, 1)
    while left > 0:
        seldom = [next(words)] * SELDOM
        left -= cost(seldom, len(listed) + 1)
        listed += seldom
    chance.shuffle(listed)
    text = "\n".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
    return RulerSample(
        text, f"What are the {COMMON} most common words of the list?", tuple(common), whole=True, tokens=120
    )


def _frequent(maker: Maker, chance: random.Random) -> RulerSample:
    """Make frequent words in a coded text: the frequency of the k-th one falls as a power of k."""
    words = _words(chance)
    known = [next(words) for _ in range(500)]
    weights = [(rank + 1) ** -ALPHA for rank in range(len(known))]
    drawn = (chance.choices(known, weights)[0] for _ in count())
    text = maker.filled(drawn, [], chance, " ")
    wanted = [word for word, _ in Counter(text.split()).most_common(FREQUENT)]
    question = f"What are the {FREQUENT} most frequent words of the coded text?"
    return RulerSample(text, question, tuple(wanted), whole=True, tokens=50)


def _words(chance: random.Random) -> Iterator[str]:
    """Yield words of no language, each once."""
    seen = set[str]()
    while True:
        word = "".join(chance.choices(SYLLABLES, k=3))
        if word not in seen:
            seen.add(word)
            yield word


def _documents(load: Callable[[], QuestionSet]) -> Callable[[Maker, random.Random], RulerSample]:
    """Make a task from people's questions, whose paragraphs are hidden among others of the same set."""
    kept: list[QuestionSet] = []

    def make(maker: Maker, chance: random.Random) -> RulerSample:
        if not kept:
            kept.append(load())
        (asked,) = kept
        question = chance.choice(asked.questions)
        others = [number for number in range(len(asked.paragraphs)) if number not in question.evidence]
        chance.shuffle(others)
        text = maker.filled(
            (asked.paragraphs[number] for number in cycle(others)),
            [asked.paragraphs[number] for number in question.evidence],
            chance,
            "\n\n",
        )
        return RulerSample(text, question.text, question.answers, whole=False, tokens=32)

    return make


TASKS: dict[str, Callable[[Maker, random.Random], RulerSample]] = {
    "niah_single_1": _needles(hay="noise"),
    "niah_single_2": _needles(),
    "niah_single_3": _needles(codes="value"),
    "niah_multikey_1": _needles(keys=SEVERAL),
    "niah_multikey_2": _needles(hay="needles"),
    "niah_multikey_3": _needles(hay="needles", codes="key value"),
    "niah_multivalue": _needles(values=SEVERAL),
    "niah_multiquery": _needles(keys=SEVERAL, asked=SEVERAL),
    "vt": _chain,
    "cwe": _common,
    "fwe": _frequent,
    "qa_1": _documents(squad.load),
    "qa_2": _documents(hotpotqa.load),
}


def score(answer: str, sample: RulerSample) -> float:
    """Return the share of the wanted texts in ``answer``, in upper or lower case; or whether any of them is in it."""
    found = [each.lower() in answer.lower() for each in sample.wanted]
    return sum(found) / len(found) if sample.whole else float(any(found))


def measure(
    model: Any,
    tokenizer: Any,
    maker: Maker,
    tasks: Sequence[str],
    samples: int,
    ways: Collection[str] = WAYS[:2],
    **attached: Any,
) -> Iterator[dict[str, Any]]:
    """Return a row for each of ``tasks``: the mean score of ``samples`` texts in each of ``ways``.

    ``score`` is that of a memory for each text; ``alone`` that of the model with text and question in its prompt;
    ``kvpress`` that of the model with the question behind ``SHARE`` of the text's states. The last two are None if text
    and question do not fit the model's positions. ``attached``: options of ``memstore.attach``.
    """
    fits = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    frame = Template.of(tokenizer, INSTRUCTION) or Template.plain(INSTRUCTION)
    ends = frame.ends(tokenizer)

    def say(way: str, sample: RulerSample) -> tuple[str, float]:
        """Return the answer, and its seconds once the text has been read."""
        if way == "kvpress":
            questions = (f"{sample.text}{SEPARATOR}{each}" for each in (sample.question, "Who?", "2"))
            prompts = [fill_template(tokenizer, frame, each, frame.opening).tokens for each in questions]
            begin = kept.beginning(*prompts)
            cache, begun = kept.states(model, begin, SHARE), time.perf_counter()
            made = kept.answer(model, begin, cache, prompts[0], ends, sample.tokens)
            return str(tokenizer.decode(made, skip_special_tokens=True)), time.perf_counter() - begun
        question = f"{sample.text}{SEPARATOR}{sample.question}" if way == "alone" else sample.question
        with memstore.attach(model, "ram:", tokenizer=tokenizer, **attached) as reader:
            if way == "memory":
                reader.read(sample.text, document="text")
            begun = time.perf_counter()
            return reader.ask(question, max_tokens=sample.tokens).text, time.perf_counter() - begun

    for task in tasks:
        scores, spent, read = {way: list[float]() for way in ways}, 0.0, 0
        for number in range(samples):
            sample = maker.sample(task, number)
            read += (size := maker.size(sample.text))
            for way in ways:
                if way == "memory" or size + ROOM + sample.tokens <= fits:
                    said, seconds = say(way, sample)
                    scores[way].append(score(said, sample))
                    spent += seconds if way == "memory" else 0
        means = {way: round(sum(each) / samples, 4) for way, each in scores.items() if len(each) == samples}
        yield {
            "task": task,
            "length": maker.tokens,
            "tokens": round(read / samples),
            "samples": samples,
            "score": means.get("memory"),
            "alone": means.get("alone"),
            "kvpress": means.get("kvpress"),
            "ms_to_answer": round(1e3 * spent / samples) if "memory" in ways else None,
        }
