"""What is told of two memories is what was done to one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memstore
from memstore.memory import Document, Memory, copy
from memstore.memory.copy import compare_documents, compare_memories, copy_document
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import (
    LAYERS,
    S,
    append,
    in_blocks,
    landmarks,
    make_fingerprint,
    make_spec,
    random_tokens,
    states,
)
from tests.memory.test_dropping import lose

TEXT = random_tokens(9 * S + 2)


def changed(tokens: torch.Tensor, at: int) -> torch.Tensor:
    other = tokens.clone()
    other[at] = (other[at] + 1) % 1000
    return other


def test_a_memory_is_the_same_as_its_copy(make_memory: MakeMemory) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("whale"), TEXT)
    append(one.document("whale").fork("draft", 3), TEXT[:5])
    assert not compare_memories(one, other).same
    for document in one.documents():
        copy_document(document, other, document.name)
    heard: list[int] = []
    found = compare_memories(one, other, heard.append)
    assert found.same
    assert [(each.name_a, each.common_tokens, each.states) for each in found.documents] == [
        ("whale", len(TEXT), "same"),
        ("draft", 3 * S + 5, "same"),
    ]
    assert sum(heard) == len(TEXT) + 3 * S + 5


@pytest.mark.parametrize("at", [0, S - 1, S, 4 * S + 1, 9 * S + 1])
@pytest.mark.parametrize("at_once", [1, 2 * S + 1, 1 << 18])
def test_the_first_other_token_is_found(at: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "AT_ONCE", at_once)
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("a"), TEXT)
        append(memory.document("b"), changed(TEXT, at))
        found = compare_documents(memory.document("a"), memory.document("b"))
    assert (found.common_tokens, found.common_blocks, found.compared_blocks) == (at, at // S, at // S)
    assert found.states == ("same" if at // S else "none in common")
    assert not found.same


def test_one_text_may_be_the_beginning_of_the_other() -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("a"), TEXT)
        append(memory.document("b"), TEXT[: 4 * S + 1])
        append(memory.document("none"), [])
        found = compare_documents(memory.document("a"), memory.document("b"))
        assert (found.tokens_a, found.tokens_b, found.common_tokens) == (len(TEXT), 4 * S + 1, 4 * S + 1)
        assert (found.compared_blocks, found.same) == (4, False)
        nothing = compare_documents(memory.document("none"), memory.document("none"))
        assert (nothing.common_tokens, nothing.states, nothing.same) == (0, "none in common", True)


def append_odd(document: Document, tokens: torch.Tensor, block: int, layer: int) -> None:
    """As ``append``, with one bit that differs in the states of one block."""
    blocks = in_blocks(tokens)
    with document.append(tokens) as batch:
        for number in range(LAYERS):
            fields = states(blocks, number)
            if number == layer:
                fields["v"] = fields["v"].clone()
                fields["v"][block].view(torch.int32)[-1, -1, -1] ^= 1
            batch.put(number, landmarks=landmarks(blocks, number) if number != 1 else None, **fields)


@pytest.mark.parametrize(("block", "layer"), [(0, 0), (3, 2), (8, 1)])
def test_one_bit_of_the_states_is_found(make_memory: MakeMemory, block: int, layer: int) -> None:
    memory = make_memory()
    append(memory.document("a"), TEXT)
    append_odd(memory.document("b"), TEXT, block, layer)
    found = compare_documents(memory.document("a"), memory.document("b"))
    assert (found.states, found.first_different, found.same) == ("different", (block, layer), False)
    assert found.common_tokens == len(TEXT)


def test_memories_of_other_layouts_are_compared_by_their_texts(tmp_path: Path) -> None:
    other = make_spec(block_size=2 * S, fields={"v": (2, 2 * S, 3)}, fingerprint=make_fingerprint(weights="9"))
    with memstore.open("ram:", spec=make_spec()) as a, memstore.open(tmp_path / "b", spec=other) as b:
        append(a.document("text"), TEXT)
        append(a.document("mine"), TEXT)
        with b.document("text").append(changed(TEXT, 20)) as batch:
            n = len(batch.blocks)
            for layer in range(LAYERS):
                marks = torch.zeros(n, 2, 2, 8) if layer != 1 else None
                batch.put(layer, landmarks=marks, v=torch.zeros(n, 2, 2 * S, 3))
        found = compare_memories(a, b)
    assert [name for name, _, _ in found.spec] == ["fingerprint weights", "fields", "block_size"]
    assert (found.only_a, found.only_b) == (("mine",), ())
    (text,) = found.documents
    assert (text.common_tokens, text.common_blocks, text.states, text.compared_blocks) == (20, 5, "not comparable", 0)


def test_what_is_not_there_is_not_compared() -> None:
    with memstore.open("ram:", spec=make_spec(capacity=6)) as memory:
        append(memory.document("a"), TEXT[: 6 * S])
        lose(memory, 1)
        append(memory.document("b"), torch.cat([TEXT[: 6 * S], TEXT[: 2 * S]]))
        found = compare_documents(memory.document("a"), memory.document("b"))
    assert (found.common_tokens, found.compared_blocks, found.states) == (6 * S, 4, "same")


def test_a_last_block_that_is_not_full_is_compared_between_texts_that_end_together(make_memory: MakeMemory) -> None:
    memory = make_memory()
    short = TEXT[: S - 1]
    append(memory.document("a"), short)
    append(memory.document("b"), short)
    append_odd(memory.document("odd"), short, 0, 2)
    a, b, odd = memory.documents()
    found = compare_documents(a, b)
    assert (found.common_blocks, found.compared_blocks, found.states, found.same) == (0, 1, "same", True)
    found = compare_documents(a, odd)
    assert (found.states, found.first_different, found.same) == ("different", (0, 2), False)


def test_forks_share_states(memory: Memory) -> None:
    append(memory.document("a"), TEXT)
    memory.document("a").fork("b")
    assert compare_documents(memory.document("a"), memory.document("b")).same
