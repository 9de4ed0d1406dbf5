"""SIGKILL a model that reads a text into a memory: what it committed stays, and the next run ends as if undisturbed.

Two kinds of reading: a stock model with a memory attached, whose commits come from a thread beside the next segment,
and a DRT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.torture.processes import Say, run
from memstore import Memory, Retrieval
from memstore.errors import NotFound
from memstore.models.drt import DRTReader
from tests.faults.killer import Killer, told
from tests.faults.outcome import Outcome
from tests.faults.world import STORES, digest, sound
from tests.models.drt import make
from tests.models.drt import tokens as drt_tokens
from tests.readers.models import tiny
from tests.readers.models import tokens as llama_tokens

ROUNDS = 25  # on one memory


class Reading(ABC):
    """A model that reads a text."""

    name: str

    @abstractmethod
    @contextmanager
    def open(self, url: str) -> Iterator[Memory]:
        """The memory, with the model on it."""

    @abstractmethod
    def read(self) -> None:
        """Read the text, from where it stopped."""


class StockReader(Reading):
    """A stock model."""

    name = "attached"

    def __init__(self) -> None:
        self._model = tiny("llama")

    @contextmanager
    def open(self, url: str) -> Iterator[Memory]:
        """See ``Reading``."""
        options: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
        retrieval = Retrieval(top_k=3)
        with memstore.attach(self._model, url, document="text", retrieval=retrieval, **options) as self._attached:
            yield self._attached.memories[0]

    def read(self) -> None:
        """See ``Reading``."""
        self._attached.read(llama_tokens(800))


class Drt(Reading):
    """A DRT."""

    name = "drt"

    def __init__(self) -> None:
        self._model = make("alibi, two groups")

    @contextmanager
    def open(self, url: str) -> Iterator[Memory]:
        """See ``Reading``."""
        with DRTReader(self._model, url, document="text", segment_blocks=8) as self._reader:
            yield self._reader.memory

    def read(self) -> None:
        """See ``Reading``."""
        self._reader.read(drt_tokens(1_200)[0])


def kill_readings(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Kill ``rounds`` times, half of them each kind."""
    outcome, killer = Outcome(), Killer(seed)
    for reading in (StockReader(), Drt()):
        whole = STORES[store](folder / f"{reading.name}-whole")
        undisturbed = run(partial(_read_whole, reading, whole))
        assert undisturbed.code == 0, undisturbed.lines
        for start in range(0, rounds // 2, ROUNDS):
            killed = _Killed(reading, STORES[store](folder / f"{reading.name}-{start}"), whole, outcome)
            for _ in range(min(ROUNDS, rounds // 2 - start)):
                killed.round(killer)
            killed.compare()
    return outcome


class _Killed:
    """One memory that a model reads into, and the tokens that were found in it."""

    def __init__(self, reading: Reading, url: str, whole: str, outcome: Outcome) -> None:
        self._reading, self._url, self._whole, self._outcome = reading, url, whole, outcome
        self._held = 0

    def round(self, killer: Killer) -> None:
        """Kill once, and look at what is left."""
        way, ending = killer.kill(lambda say, last: _read(self._reading, self._url, say, last), self._outcome.counts)
        if ending.code > 0:
            self._outcome.crashes.append(f"{self._url}, killed by {way}, could not go on: {ending.last}")
        told = max([self._held, *(int(line) for line in ending.lines if line.isdigit())])
        looking = run(lambda say: say(self._look(told)))
        if not looking.last.isdigit():
            broken = self._outcome.losses if looking.code == 0 else self._outcome.crashes
            broken.append(f"{self._url}, killed by {way} after {told} tokens: {looking.last}")
            return
        self._outcome.counts["tokens checked"] += int(looking.last)
        self._held = int(looking.last)

    def _look(self, told: int) -> str:
        """In a process of its own: how many tokens are there, or what is wrong with what is there."""
        try:
            with memstore.open(self._url, mode="r") as found, memstore.open(self._whole, mode="r") as whole:
                held = same_beginning(found, whole)
        except NotFound as error:
            return f"lost: {error}" if told else "0"
        if held < told:
            return f"lost: {told} tokens were committed, {held} are there"
        findings = sound(self._url)
        return f"verify found: {findings}" if findings else str(held)

    def compare(self) -> None:
        """The next run resumes, and ends with the bytes of an undisturbed memory."""

        def finish(say: Say) -> None:
            _read(self._reading, self._url, lambda _: None, None)
            say("same" if digest(self._url) == digest(self._whole) else "not the same bytes")

        ending = run(finish)
        self._outcome.counts["memories compared"] += 1
        if ending.last != "same":
            self._outcome.losses.append(f"{self._url} does not end like an undisturbed one: {ending.last}")


def _read(reading: Reading, url: str, say: Say, last: int | None) -> None:
    def say_length(line: str) -> None:
        say(line)
        if line == ")":
            say(str(sum(map(len, memory.documents()))))

    with reading.open(url) as memory, told(memory, say_length, last, only_commits=True):
        reading.read()


def _read_whole(reading: Reading, url: str, say: Say) -> None:
    _read(reading, url, say, None)


def same_beginning(found: Memory, whole: Memory) -> int:
    """Tokens of a document that must be a beginning of the whole one, with the same states."""
    if not found.documents():
        return 0
    ours, theirs = found.document("text"), whole.document("text")
    assert torch.equal(ours.tokens(), theirs.tokens()[: len(ours)]), "other tokens"
    blocks = list(ours.complete_blocks)
    for layer in range(found.spec.layers):
        for name, states in ours.layer(layer).gather(blocks).items():
            assert torch.equal(states, theirs.layer(layer).gather(blocks)[name]), f"other {name} in layer {layer}"
    return len(ours)
