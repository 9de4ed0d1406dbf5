"""Random sequences of changes to the documents of a memory, compared with a dict after each.

A new back end proves with it that whole memories work on it::

    class OnMyStore(MemoryMachine):
        def new_url(self): return f"mine:{tempfile.mkdtemp()}/memory"

    TestOnMyStore = OnMyStore.TestCase
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from memstore.memory import Document, Finding, Fingerprint, Memory, MemorySpec, open_memory

BLOCK, HEADS, DIM, LAYERS = 2, 1, 8, 2
NAMES = st.sampled_from("abcd")
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=9)
"""Few different tokens, so that texts often begin alike."""


@dataclass(frozen=True)
class Expected:
    """What a document should be."""

    tokens: tuple[int, ...] = ()
    first: int = 0
    """The first block that has not left."""

    @property
    def blocks(self) -> int:
        """One more than the last block."""
        return -(-len(self.tokens) // BLOCK)

    def cut(self, blocks: int) -> Expected:
        """With blocks below ``blocks`` alone."""
        return replace(self, tokens=self.tokens[: blocks * BLOCK], first=min(self.first, blocks))


class MemoryMachine(RuleBasedStateMachine):
    """Append, fork, reuse, truncate, forget, evict (with ``capacity``), reopen. Subclasses say where."""

    capacity: int | None = None
    """Blocks per document."""

    def __init__(self) -> None:
        super().__init__()
        self.url = self.new_url()
        self.expected: dict[str, Expected] = {}
        self.memory = self._open()

    def new_url(self) -> str:
        """Url of a memory that does not exist yet, and that can be closed and opened again."""
        raise NotImplementedError

    def _open(self) -> Memory:
        return open_memory(self.url, spec=_spec(self.capacity))

    @rule(name=NAMES, tokens=TOKENS)
    def append(self, name: str, tokens: list[int]) -> None:
        """Append to a document, a new one if there is none."""
        document, old = self.memory.document(name), self.expected.get(name, Expected())
        with document.append(tokens) as batch:
            kept = old.tokens[batch.blocks.start * BLOCK :]
            blocks = _in_blocks((*kept, *tokens))
            for layer in range(LAYERS):
                batch.put(layer, landmarks=_landmarks(blocks) if layer else None, k=_states(blocks, layer))
        new = Expected((*old.tokens, *tokens), old.first)
        if self.capacity is not None:
            new = replace(new, first=max(new.first, new.blocks - self.capacity))
        self.expected[name] = new

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), name=NAMES)
    def fork(self, data: st.DataObject, name: str) -> None:
        """Fork a document, whole or a beginning of it."""
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
            self.expected[name] = Expected(tuple(tokens[:known]))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Cut a document."""
        name = data.draw(st.sampled_from(sorted(self.expected)))
        blocks = data.draw(st.integers(0, self.expected[name].blocks))
        self.memory.document(name).truncate(blocks)
        self.expected[name] = self.expected[name].cut(blocks)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Forget a document."""
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.memory.forget(name)
        del self.expected[name]

    @rule()
    def reopen(self) -> None:
        """Close the memory and open it again."""
        self.memory.close()
        self.memory = self._open()

    @invariant()
    def holds_the_same(self) -> None:
        """Tokens, states and search results of every document are those of the dict."""
        assert {document.name for document in self.memory.documents()} == set(self.expected)
        for name, expected in self.expected.items():
            _check(self.memory.document(name), expected)

    @rule()
    def verify(self) -> None:
        """Nothing is missing, and nothing is there that no document uses."""
        assert self.findings() == []

    def findings(self) -> list[Finding]:
        """What ``verify`` finds."""
        return self.memory.verify()

    def teardown(self) -> None:
        """The last look."""
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


def _check(document: Document, expected: Expected) -> None:
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
