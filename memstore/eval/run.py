"""Needle tasks over lengths and depths: every sample is read into a memory, asked, and forgotten again.

With ``reuse`` the samples of one length share their filler. They are asked in the order of their first needles, the
last one first. The document is cut before the block in which the next sample's first needle begins, and read on from
there. The kept tokens are exactly the beginning of the next haystack. A block depends on nothing after it, so the
memory equals that of a whole reading. This saves half of the reading if needles lie anywhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

import memstore
from memstore import MemorySpec
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.eval.evaluation import LayerScore, Reply, evaluation_of
from memstore.eval.filler import Filler
from memstore.eval.tasks import TASKS, Phrases, Sample, check_room, plant
from memstore.memory import Memory
from memstore.readers.kinds import kind_of
from memstore.readers.reader import Reader
from memstore.resources import PeakMemory

Advance = Callable[[int], None]
BLOCK_SIZE = 64
"""Tokens of a block of a new memory."""


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """A plan of measurements. Raises ``InvalidArgument`` for impossible ones."""

    task: str
    """One of ``TASKS``."""
    lengths: Sequence[int]
    """Tokens of a haystack."""
    depths: Sequence[float] | None = None
    """Depths of the needle from 0 to 1, a row for each; random if None."""
    samples: int = 20
    """Samples of each row."""
    seed: int = 0
    """Seed of needles, places and filler."""
    reuse: bool = False
    """Whether to keep the common beginning of two haystacks of one length."""
    options: dict[str, int] = field(default_factory=dict)
    """Options of the task, such as ``digits``."""

    @property
    def places(self) -> Sequence[float | None]:
        """Return the depth of each row of a length; None: random."""
        return [None] if self.depths is None else self.depths

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidArgument(f"there is no task {self.task!r}; choose one of {', '.join(TASKS)}")
        if self.samples < 1:
            raise InvalidArgument(f"samples must be at least 1, not {self.samples}")
        if not self.lengths or min(self.lengths) < 1:
            raise InvalidArgument(f"lengths must be numbers of tokens, at least one of them; got {list(self.lengths)}")
        if self.depths is not None and not (self.depths and all(0 <= depth <= 1 for depth in self.depths)):
            raise InvalidArgument(f"depths must be from 0 (the beginning) to 1 (the end), got {list(self.depths)}")


@dataclass(frozen=True)
class Outcome:
    """The result of one sample."""

    depth: float
    expected: list[int]
    reply: Reply
    tokens_read: int
    read_seconds: float
    seconds: float

    @property
    def correct(self) -> bool:
        """Check whether the answer is the expected one, whole."""
        return self.reply.tokens == self.expected

    def to_dict(self, decode: Callable[[list[int]], str]) -> dict[str, Any]:
        """Return the expected and the given answer, and the scores."""
        return {
            "depth": round(self.depth, 4),
            "expected": decode(self.expected),
            "answer": decode(self.reply.tokens),
            "margins": [None if each.margin is None else round(each.margin, 4) for each in self.reply.found],
        }


@dataclass(frozen=True)
class CellResult:
    """The samples of one length and one depth."""

    length: int
    depth: float | None
    """None: random."""
    outcomes: tuple[Outcome, ...]
    repeats: int
    """How often the filler had to begin again within a haystack."""
    peak_bytes: int = 0
    """Peak of the process's anonymous memory, in bytes, while the samples of this length were read and asked."""

    @property
    def accuracy(self) -> float:
        """Return the share of the samples with the whole answer right."""
        return fmean(outcome.correct for outcome in self.outcomes)

    def layers(self) -> list[dict[str, Any]]:
        """Return how each layer of a landmark model ranked the needle, over all samples that had it in memory."""
        seen: dict[int, list[LayerScore]] = {}
        for outcome in self.outcomes:
            for found in outcome.reply.layers:
                seen.setdefault(found.layer, []).append(found)
        return [_layer(number, found) for number, found in sorted(seen.items())]

    def to_dict(self, decode: Callable[[list[int]], str] = str) -> dict[str, Any]:
        """Return the row as ``--json`` prints it. A second needle, found by a second group, has keys of its own."""
        read, seconds = (sum(getattr(each, name) for each in self.outcomes) for name in ("tokens_read", "read_seconds"))
        hops = max(len(outcome.reply.found) for outcome in self.outcomes)
        row: dict[str, Any] = {
            "length": self.length,
            "depth": self.depth,
            "samples": len(self.outcomes),
            "accuracy": round(self.accuracy, 4),
        }
        for hop in range(max(1, hops)):
            suffix = f"_{hop + 1}" if hop else ""
            found = [outcome.reply.found[hop] for outcome in self.outcomes if len(outcome.reply.found) > hop]
            row[f"margin{suffix}"], row[f"margin_min{suffix}"] = _mean_and_least(each.margin for each in found)
            row[f"weight{suffix}"], _ = _mean_and_least(each.weight for each in found)
        layers = self.layers()
        return row | {
            **({"layers": layers} if layers else {}),
            "repeats": self.repeats,
            "tokens_per_second": round(read / seconds) if read and seconds else None,
            "seconds": round(sum(outcome.seconds for outcome in self.outcomes), 3),
            "peak_bytes": self.peak_bytes,
            "missed": [outcome.to_dict(decode) for outcome in self.outcomes if not outcome.correct],
        }


def evaluate(
    model: Any,
    tokenizer: Any,
    plan: TaskPlan,
    filler: Filler,
    memory: Memory,
    advance: Advance = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[CellResult]:
    """Yield the rows of ``plan``, each as soon as it is measured. ``memory`` holds one haystack at a time.

    ``advance`` hears of every token read. Raises ``InvalidArgument`` for a length that is too short, before reading.
    """
    check_lengths(plan, tokenizer, block_tokens(model))
    for length in plan.lengths:
        rows = draw(plan, length, tokenizer, filler, block_tokens(model))
        name = f"eval/{plan.task}/{length}"
        samples = [each for row in rows for each in row]
        with PeakMemory() as peak:
            outcomes = _outcomes(samples, model, filler, memory, name, plan.reuse, advance)
        repeats = max(filler.repeats(sample.filler_tokens) for sample in samples)
        for depth, row in zip(plan.places, rows, strict=True):
            yield CellResult(
                length, depth, tuple(outcomes[id(sample)] for sample in row), repeats, peak.anonymous_bytes
            )


def check_lengths(plan: TaskPlan, tokenizer: Any, tokens_per_block: int) -> None:
    """Raise ``InvalidArgument`` for a haystack without room for its needles, or a tokenizer that cannot write them."""
    riddle = TASKS[plan.task](Phrases(tokenizer), random.Random(0), **plan.options)
    for length in plan.lengths:
        check_room(riddle, length, tokens_per_block)


def draw(plan: TaskPlan, length: int, tokenizer: Any, filler: Filler, tokens_per_block: int) -> list[list[Sample]]:
    """Make the samples of each row of one length; the same plan and filler give the same samples."""
    phrases = Phrases(tokenizer)
    shared = random.Random(f"{plan.seed}/{length}").randrange(len(filler)) if plan.reuse else None

    def sample(depth: float | None, number: int) -> Sample:
        rng = random.Random(f"{plan.seed}/{plan.task}/{length}/{depth}/{number}")
        riddle = TASKS[plan.task](phrases, rng, **plan.options)
        return plant(riddle, length, filler, tokens_per_block, rng, depth=depth, start=shared)

    return [[sample(depth, number) for number in range(plan.samples)] for depth in plan.places]


def _outcomes(
    samples: list[Sample], model: Any, filler: Filler, memory: Memory, name: str, reuse: bool, advance: Advance
) -> dict[int, Outcome]:
    """Return the outcome of each sample, by its ``id``."""
    outcomes: dict[int, Outcome] = {}
    order = sorted(samples, key=lambda sample: -sample.first) if reuse else samples
    _forget(memory, name)  # left by an interrupted run
    try:
        for sample in order:
            begun = time.perf_counter()
            with memstore.attach(model, memory, document=name) as reader:
                _cut(reader, sample.first if reuse else 0)
                read = reader.append(_listened(sample.haystack(filler, len(reader)), advance))
                advance(read.tokens - read.new_tokens)
                reply = ask(model, past_of(reader), sample)
            seconds = time.perf_counter() - begun
            outcomes[id(sample)] = Outcome(sample.depth, sample.answer, reply, read.new_tokens, read.seconds, seconds)
            if not reuse:
                _forget(memory, name)
    finally:
        _forget(memory, name)
    return outcomes


def _cut(reader: Any, tokens: int) -> None:
    """Cut the document to the whole blocks of its first ``tokens``."""
    keep = min(tokens, len(reader)) // block_tokens(reader.model)
    if len(reader):
        reader.document.truncate(keep)


def _forget(memory: Memory, name: str) -> None:
    if any(document.name == name for document in memory.documents()):
        memory.forget(name)


def _listened(chunks: Iterator[Any], advance: Advance) -> Iterator[Tensor]:
    for chunk in chunks:
        yield torch.from_numpy(chunk)
        advance(len(chunk))


def _layer(number: int, found: Sequence[LayerScore]) -> dict[str, Any]:
    margin, least_margin = _mean_and_least(each.margin for each in found)
    weight, least_weight = _mean_and_least(each.weight for each in found)
    return {
        "layer": number,
        "samples": len(found),
        "rank": median(each.rank for each in found),
        "rank_max": max(each.rank for each in found),
        "margin": margin,
        "margin_min": least_margin,
        "weight": weight,
        "weight_min": least_weight,
    }


def _mean_and_least(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return mean and minimum of the known values."""
    known = [value for value in values if value is not None]
    return (round(fmean(known), 4), round(min(known), 4)) if known else (None, None)


def block_tokens(model: Any) -> int:
    """Return ``model``'s block size in tokens from its training, or the one of a new memory if it has none."""
    return int(getattr(model.config, "tokens_per_block", BLOCK_SIZE))


def past_of(reader: Any) -> Any:
    """Return the cache with which a model continues the document of ``reader``; None if calls see it by themselves."""
    return None if type(reader).cache is Reader.cache else reader.cache()


def memory_spec(model: Any, tokenizer: Any) -> MemorySpec:
    """Return the spec of a memory for ``model``. Raises ``InvalidArgument`` for one without retrieval."""
    return memstore.attach(model, "ram:", tokenizer=tokenizer).spec()


def ask(model: Any, cache: Any, sample: Sample) -> Reply:
    """Answer ``sample`` after the haystack in ``cache``."""
    kind = kind_of(model)
    question = evaluation_of(kind).ask
    if question is None:
        raise UnsupportedModel(f"a {kind.name} cannot search for needles: choose a model with a memory")
    return question(model, cache, sample)
