"""Four readers beside one writer: every single answer is that of a moment between the question and the answer.

The writer says in shared memory which step it has started and which it has finished. A reader notes both around a
question; the answer must be exactly that of one of the states in between.
"""

from __future__ import annotations

import mmap
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import memstore
from benchmarks.torture.processes import PATIENCE, Say, fork, run
from memstore import Memory
from memstore.errors import MemstoreError, NotFound
from tests.faults.outcome import Outcome
from tests.faults.world import (
    LAYERS,
    NAMES,
    QUERY,
    STORES,
    Held,
    S,
    State,
    World,
    best_scores,
    in_blocks,
    landmarks,
    sound,
)

READERS = 4
KINDS = ("names", "tokens", "search", "gather", "landmarks")
TOP_K = 8

Answer = list[str] | Tensor | Literal["not found"]


class Progress:
    """Steps that the writer has started and finished, and whether it has ended; shared by all forks."""

    def __init__(self) -> None:
        self._numbers = np.frombuffer(mmap.mmap(-1, 24), np.int64)

    def started(self, number: int | None = None) -> int:
        """The last step that was started; ``number`` says that it is now this one."""
        return self._at(0, number)

    def finished(self, number: int | None = None) -> int:
        """The last step that was finished; ``number`` says that it is now this one."""
        return self._at(1, number)

    def ended(self, number: int | None = None) -> int:
        """1 once the writer has ended."""
        return self._at(2, number)

    def _at(self, place: int, number: int | None) -> int:
        if number is not None:
            self._numbers[place] = number
        return int(self._numbers[place])


def read_beside_a_writer(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """The writer does ``rounds`` steps; the readers ask until it has ended."""
    world, url, outcome, progress = World(seed), STORES[store](folder / "m"), Outcome(), Progress()
    states, patience = world.history(rounds), PATIENCE + rounds  # they are at it until the last step

    def write(say: Say) -> None:
        try:
            with memstore.open(url) as memory:
                for number in range(rounds):
                    progress.started(number + 1)
                    world.do(memory, number, states[number])
                    progress.finished(number + 1)
                    say("committed")
        finally:
            progress.ended(1)

    run(lambda _: world.open(url).close())  # whoever forks has no memory open, nor a client of a bucket
    readers = [
        fork(partial(_ask, world, url, states, progress, random.Random(f"{seed} {name}")), patience)
        for name in range(READERS)
    ]
    writing = fork(write, patience).wait()
    outcome.counts["commits"] = writing.lines.count("committed")
    if writing.code:
        outcome.crashes.append(f"the writer (seed {seed}): {writing.last}")
    for reader in readers:
        ending = reader.wait()
        for count, kind in (line.split(" ", 2)[1:] for line in ending.lines if line.startswith("answers ")):
            outcome.counts[f"answers: {kind}"] += int(count)
        outcome.wrong += [line for line in ending.lines if line.startswith("wrong")]
        if ending.code:
            outcome.crashes.append(f"a reader (seed {seed}) ended with {ending.code}: {ending.last}")
    if findings := run(lambda say: say("; ".join(sound(url)))).last:
        outcome.losses.append(f"verify found: {findings}")
    return outcome


@dataclass(frozen=True)
class Question:
    """Something to ask about a document."""

    kind: str
    name: str
    layer: int
    blocks: tuple[int, ...]

    def ask(self, memory: Memory) -> Answer:
        """What the memory answers."""
        try:
            if self.kind == "names":
                return [document.name for document in memory.documents()]
            document = memory.document(self.name)
            if self.kind == "tokens":
                return document.tokens()
            if self.kind == "search":
                return document.layer(1).search(QUERY, TOP_K).scores.flatten()
            if self.kind == "landmarks":
                return document.layer(1).landmarks(range(min(self.blocks), max(self.blocks) + 1))
            gathered = document.layer(self.layer).gather(self.blocks)
            return torch.cat([gathered["k"], gathered["v"]])
        except NotFound:
            return "not found"

    def expected(self, world: World, state: State) -> Answer:
        """What the answer is in this state."""
        if self.kind == "names":
            return list(state.documents)
        held = state.documents.get(self.name)
        if held is None:
            return "not found"
        if self.kind == "tokens":
            return torch.from_numpy(held.tokens[held.live.start * S :])
        if self.kind == "search":
            return best_scores(held, TOP_K)
        blocks = in_blocks(held.tokens)
        if not set(self.blocks) <= set(held.live):
            return "not found"
        if self.kind == "landmarks":
            return landmarks(blocks[min(self.blocks) : max(self.blocks) + 1])
        states = world.states(blocks[list(self.blocks)], self.layer)
        return torch.cat([states["k"], states["v"]])


def _ask(world: World, url: str, states: list[State], progress: Progress, rng: random.Random, say: Say) -> None:
    answers = Counter[str]()
    with memstore.open(url, mode="r") as memory:
        while not progress.ended():
            first = progress.finished()
            question = _question(states[first], rng)
            try:
                answer = question.ask(memory)
            except MemstoreError as error:
                say(f"wrong: {question} at step {first}: {type(error).__name__} {error}")
                continue
            last = progress.started()
            if not any(_equal(answer, question.expected(world, state)) for state in states[first : last + 1]):
                say(f"wrong: {question} was answered as in no step from {first} to {last}: {answer}".replace("\n", " "))
            answers[f"{question.kind}{'' if answer != 'not found' else ', not found'}"] += 1
    for kind, count in answers.items():
        say(f"answers {count} {kind}")


def _question(state: State, rng: random.Random) -> Question:
    name = rng.choice(NAMES)
    live = state.documents.get(name, Held()).live
    around = range(
        max(0, live.start - (rng.random() < 0.1)), live.stop + 1
    )  # now and then one that has left, or is next
    chosen = tuple(rng.choice(around) for _ in range(rng.randint(1, 16)))
    return Question(rng.choice(KINDS), name, rng.randrange(LAYERS), chosen)


def _equal(answer: Answer, expected: Answer) -> bool:
    if isinstance(answer, Tensor) and isinstance(expected, Tensor):
        return torch.equal(answer, expected)
    return type(answer) is type(expected) and answer == expected
