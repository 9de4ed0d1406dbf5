"""What two documents have in common is one candidate: a copy must not have twice the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import memstore
from memstore.memory import Memory
from tests.readers.models import tiny

SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}


def text(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 60, (tokens,), generator=torch.Generator().manual_seed(seed))


def found(model: Any, memory: Memory, names: list[str], question: Tensor) -> list[tuple[str, int]]:
    with memstore.attach(model, memory, document=names, **SIZES) as reader:
        return [(match.document, match.block) for match in reader.search(question, 100)]


@pytest.mark.parametrize("tokens", [160, 151, 9])
def test_a_fork_adds_no_candidate(tokens: int) -> None:
    model, question = tiny("llama"), text(8, 1)
    with memstore.open("ram:", spec=memstore.attach(model, "ram:", **SIZES).spec()) as memory:
        with memstore.attach(model, memory, document="note", **SIZES) as reader:
            reader.read(text(tokens))
        alone = found(model, memory, ["note"], question)
        memory.document("note").fork("copy")
        assert found(model, memory, ["note", "copy"], question) == alone
        with memstore.attach(model, memory, document="copy", **SIZES) as reader:
            reader.append(text(40, 2))
        blocks = found(model, memory, ["note", "copy"], question)
        assert len(blocks) == len(set(blocks))
        whole = tokens // 16
        assert {block for name, block in blocks if name == "copy"} == set(range(whole, -(-(tokens + 40) // 16)))
        assert {block for name, block in blocks if name == "note"} == set(range(-(-tokens // 16)))


def test_short_texts_that_differ_stay() -> None:
    model = tiny("llama")
    with memstore.open("ram:", spec=memstore.attach(model, "ram:", **SIZES).spec()) as memory:
        for number in range(3):
            with memstore.attach(model, memory, document=f"note {number}", **SIZES) as reader:
                reader.read(text(9, number))
        names = [f"note {number}" for number in range(3)]
        assert {name for name, _ in found(model, memory, names, text(8, 9))} == {*names}


def test_a_copy_changes_no_answer() -> None:
    model, question = tiny("llama"), text(8, 1)[None]
    with memstore.open("ram:", spec=memstore.attach(model, "ram:", **SIZES).spec()) as memory, torch.no_grad():
        for name, seed in (("one", 0), ("two", 3)):
            with memstore.attach(model, memory, document=name, **SIZES) as reader:
                reader.read(text(90, seed))
        with memstore.attach(model, memory, document=["one", "two"], **SIZES) as reader:
            before = model(question).logits
        memory.document("one").fork("copy")
        with memstore.attach(model, memory, document=["one", "copy", "two"], **SIZES) as reader:
            torch.testing.assert_close(model(question).logits, before, rtol=0, atol=1e-5)
