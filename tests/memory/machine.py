"""Random sequences of changes to the documents of a memory, compared with a dict after each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import get_args
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from memstore.errors import StoreFull
from memstore.memory import Document, Finding, Fingerprint, Memory, MemorySpec, open_memory, rules
from memstore.memory.rules import Rules, WhenFull
from memstore.store import BlockStore

BLOCK, HEADS, DIM, LAYERS = 2, 1, 8, 2
HOUR = 3600.0
NAMES = st.sampled_from("abcd")
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=9)
"""Few different tokens, so that texts often begin alike."""


@dataclass(frozen=True)
class _ExpectedDocument:
    """What a document should be."""

    tokens: tuple[int, ...] = ()
    first: int = 0
    """The first block that has not left."""

    @property
    def blocks(self) -> int:
        return -(-len(self.tokens) // BLOCK)

    def cut(self, blocks: int) -> _ExpectedDocument:
        """With blocks below ``blocks`` alone."""
        return replace(self, tokens=self.tokens[: blocks * BLOCK], first=min(self.first, blocks))


class MemoryMachine(RuleBasedStateMachine):
    """Append, fork, reuse, truncate, forget, evict (with ``capacity``), reopen; limits, pins and times to live.

    Subclasses say where.
    """

    capacity: int | None = None
    """Blocks per document."""

    def __init__(self) -> None:
        super().__init__()
        self.url = self.new_url()
        self.expected: dict[str, _ExpectedDocument] = {}
        self.kept = Rules[str]()
        self.now = 1.8e9
        self._clock = patch.object(rules, "utc", lambda: self.now)
        self._clock.start()
        self.memory = self._open()

    def new_url(self) -> str:
        """Url of a memory that does not exist yet, and that can be closed and opened again."""
        raise NotImplementedError

    def _open(self) -> Memory:
        return open_memory(self.url, spec=_spec(self.capacity))

    @rule(name=NAMES, tokens=TOKENS)
    def append(self, name: str, tokens: list[int]) -> None:
        """Append to a document, a new one if there is none; what has expired goes, and what a limit has no room for."""
        self._append(name, tokens)

    def _append(self, name: str, tokens: list[int]) -> None:
        document, old = self.memory.document(name), self.expected.get(name, _ExpectedDocument())
        overdue, victims = self._overdue(but=name), self._victims(but=name)
        try:
            with document.append(tokens) as batch:
                kept = old.tokens[batch.blocks.start * BLOCK :]
                blocks = _in_blocks((*kept, *tokens))
                for layer in range(LAYERS):
                    batch.put(layer, landmarks=_landmarks(blocks) if layer else None, k=_states(blocks, layer))
        except StoreFull:
            self._check_full(victims)
            return
        gone = set(self.expected) - {each.name for each in self.memory.documents()}
        assert overdue <= gone <= overdue | set(victims)
        self._check_room(gone - overdue, victims)
        self._forget(gone)
        new = _ExpectedDocument((*old.tokens, *tokens), old.first)
        if self.capacity is not None:
            new = replace(new, first=max(new.first, new.blocks - self.capacity))
        self.expected[name] = new

    def _overdue(self, but: str | None = None) -> set[str]:
        """The documents that the next append to ``but`` forgets because of the time."""
        times = self.kept.expires.items()
        return {name for name, when in times if when <= self.now and name not in (*self.kept.pinned, but)}

    def _victims(self, but: str) -> list[str]:
        """Those that a limit may forget at an append to ``but``, the first made first."""
        if self.kept.max_bytes is None or self.kept.when_full == "refuse":
            return []
        return [name for name in self.expected if name not in (*self.kept.pinned, *self._overdue(but), but)]

    def _check_room(self, evicted: set[str], victims: list[str]) -> None:
        """After an append: the limit holds, and who was evicted was in turn."""
        if self.kept.max_bytes is not None:
            assert self._used() <= self.kept.max_bytes
        if self.kept.when_full == "evict-oldest-document":
            assert evicted == set(victims[: len(evicted)])

    def _check_full(self, victims: list[str]) -> None:
        """An append found no room: where the store takes all in one transaction, nobody has gone for nothing."""
        assert self.kept.max_bytes is not None
        gone = set(self.expected) - {each.name for each in self.memory.documents()}
        whole = type(self.memory._shared.store).write_within is not BlockStore.write_within
        assert gone <= (set() if whole else set(victims))
        self._forget(gone)

    def _used(self) -> int:
        return self.memory._shared.store.used_bytes()

    def _forget(self, names: Collection[str]) -> None:
        self.expected = {name: each for name, each in self.expected.items() if name not in names}
        self.kept = self.kept.only(self.expected)

    @rule(name=NAMES, tokens=TOKENS, when_full=st.sampled_from(get_args(WhenFull)), room=st.sampled_from([0, 50, 5000]))
    def limit(self, name: str, tokens: list[int], when_full: WhenFull, room: int) -> None:
        """Leave ``room`` for so many bytes more than are used now, then append."""
        self._limit(self._used() + room, when_full)
        self._append(name, tokens)

    @rule()
    def lift_the_limit(self) -> None:
        self._limit(None, "refuse")

    def _limit(self, max_bytes: int | None, when_full: WhenFull) -> None:
        self.memory.limit(max_bytes, when_full)
        self.kept = replace(self.kept, max_bytes=max_bytes, when_full=when_full)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        pinned = name not in self.kept.pinned
        document = self.memory.document(name)
        (document.pin if pinned else document.unpin)()
        self.kept = replace(self.kept, pinned=self.kept.pinned ^ {name})

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), seconds=st.none() | st.sampled_from([1.0, HOUR, 9 * HOUR]))
    def live_for(self, data: st.DataObject, seconds: float | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.memory.document(name).expire(seconds)
        times = {each: when for each, when in self.kept.expires.items() if each != name}
        self.kept = replace(self.kept, expires=times if seconds is None else {**times, name: self.now + seconds})

    @rule(hours=st.integers(1, 10))
    def wait(self, hours: int) -> None:
        self.now += hours * HOUR

    @rule()
    def expire(self) -> None:
        overdue = self._overdue()
        assert set(self.memory.expire()) == overdue
        self._forget(overdue)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), name=NAMES)
    def fork(self, data: st.DataObject, name: str) -> None:
        parent = data.draw(st.sampled_from(sorted(self.expected)))
        if name in self.expected:
            return
        blocks = data.draw(st.none() | st.integers(0, self.expected[parent].blocks))
        self.memory.document(parent).fork(name, blocks)
        old = self.expected[parent]
        self.expected[name] = old if blocks is None else old.cut(blocks)

    @rule(name=NAMES, tokens=TOKENS)
    def reuse(self, name: str, tokens: list[int]) -> None:
        """Begin a new document with what is known of a text."""
        if name in self.expected:
            return
        known = self.memory.document(name).reuse(tokens)
        begun = [each.tokens for each in self.expected.values() if not each.first]
        assert known == max((_alike(tokens, each) for each in begun), default=0)
        if known:
            self.expected[name] = _ExpectedDocument(tuple(tokens[:known]))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        blocks = data.draw(st.integers(0, self.expected[name].blocks))
        self.memory.document(name).truncate(blocks)
        self.expected[name] = self.expected[name].cut(blocks)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.memory.forget(name)
        self._forget([name])

    @rule()
    def reopen(self) -> None:
        self.memory.close()
        self.memory = self._open()

    @invariant()
    def holds_the_same(self) -> None:
        """Tokens, states and search results of every document are those of the dict, and the rules are as they were."""
        assert {document.name for document in self.memory.documents()} == set(self.expected)
        for name, expected in self.expected.items():
            _check(self.memory.document(name), expected)
        assert self.memory.rules() == self.kept

    @rule()
    def verify(self) -> None:
        """Nothing is missing, and nothing is there that no document uses."""
        assert self.findings() == []

    def findings(self) -> list[Finding]:
        return self.memory.verify()

    def teardown(self) -> None:
        self._clock.stop()
        assert self.findings() == []
        self.memory.close()


def _spec(capacity: int | None) -> MemorySpec:
    fingerprint = Fingerprint(
        architecture="test",
        weights="0",
        tokenizer=None,
        positions="none",
        layout="k",
        dtype="float32",
        block_size=BLOCK,
    )
    return MemorySpec(
        layers=LAYERS,
        fields={"k": (HEADS, BLOCK, DIM)},
        index_layers=(1,),
        key_heads=HEADS,
        key_dim=DIM,
        block_size=BLOCK,
        keys_per_block=1,
        capacity=capacity,
        fingerprint=fingerprint,
    )


def _check(document: Document, expected: _ExpectedDocument) -> None:
    live = range(expected.first, expected.blocks)
    assert (len(document), document.blocks) == (len(expected.tokens), live)
    assert document.tokens().tolist() == list(expected.tokens[live.start * BLOCK :])
    blocks = _in_blocks(expected.tokens)[live.start :]
    for layer in range(LAYERS):
        assert torch.equal(document.layer(layer).gather(live)["k"], _states(blocks, layer))
    complete = document.complete_blocks
    hits = document.layer(1).search(torch.ones(HEADS, 1, DIM), len(complete) or 1)
    assert sorted(hits.blocks[0, 0].tolist()) == (list(complete) or [-1])
    if complete:
        scores = _landmarks(blocks[: len(complete)]).sum(-1).flatten()
        assert torch.equal(hits.scores[0, 0], scores.sort(descending=True).values)


def _in_blocks(tokens: tuple[int, ...]) -> Tensor:
    """``[n, BLOCK]`` float32, padded with -1."""
    padding = (-1,) * (-len(tokens) % BLOCK)
    return torch.tensor((*tokens, *padding), dtype=torch.float32).reshape(-1, BLOCK)


def _states(blocks: Tensor, layer: int) -> Tensor:
    """Whole numbers that follow from the tokens."""
    numbers = (blocks + layer + 1) * (blocks >= 0)
    return (numbers[:, None, :, None] * torch.arange(1.0, DIM + 1)).expand(-1, HEADS, -1, -1)


def _landmarks(blocks: Tensor) -> Tensor:
    return (blocks.sum(1)[:, None, None, None] + torch.arange(DIM)).expand(-1, HEADS, -1, -1)


def _alike(tokens: list[int], other: tuple[int, ...]) -> int:
    """Tokens in the whole blocks that two texts begin with."""
    stop = min(len(tokens), len(other)) // BLOCK * BLOCK
    return next((at for at in range(0, stop, BLOCK) if tuple(tokens[at : at + BLOCK]) != other[at : at + BLOCK]), stop)
