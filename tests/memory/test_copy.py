"""Copies are equal, complete or a sound beginning, and forks stay forks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument
from memstore.memory import Memory, copy
from memstore.memory.state import Address
from memstore.store import Batch
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import LAYERS, S, append, check_content, make_fingerprint, make_spec, random_tokens
from tests.memory.test_forks import stored_blocks

TEXT = random_tokens(10 * S)


@pytest.fixture(autouse=True)
def small_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks each, so that a copy takes several."""
    monkeypatch.setattr(copy, "TRANSACTION_BYTES", 3 * LAYERS * 2 * 96)


@pytest.mark.parametrize("length", [0, 1, S, 7 * S + 3])
def test_a_document_goes_to_another_memory(make_memory: MakeMemory, length: int) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT[:length])
    made = one.document("text").copy_to(other, "copied")
    assert made is other.document("copied")
    check_content(made, TEXT[:length])
    assert made.digest == one.document("text").digest
    append(one.document("text"), TEXT[length:])
    check_content(one.document("text").copy_to(other, "copied"), TEXT)
    assert other.verify() == []


@pytest.mark.parametrize("key_dtype", ["bit", "bfloat16"])
def test_landmarks_are_copied_as_they_are(make_memory: MakeMemory, key_dtype: str) -> None:
    one, other = make_memory(key_dtype=key_dtype), make_memory(key_dtype=key_dtype)
    append(one.document("text"), TEXT)
    made = one.document("text").copy_to(other, "text")
    for layer in (0, 2):
        expected = one.document("text").layer(layer).landmarks(range(10))
        assert torch.equal(made.layer(layer).landmarks(range(10)), expected)


def test_a_document_that_has_lost_its_first_blocks_is_copied(make_memory: MakeMemory) -> None:
    one, other = make_memory(capacity=4), make_memory(capacity=4)
    append(one.document("text"), TEXT[:-1])
    check_content(one.document("text").copy_to(other, "text"), TEXT[:-1])
    assert other.verify() == []
    append(other.document("text"), TEXT[-1:])
    check_content(other.document("text"), TEXT)


def test_a_copy_that_died_is_sound_and_goes_on(make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT)
    whole, calls = copy._copy_blocks, []

    def dying(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(copy, "_copy_blocks", dying)
    with pytest.raises(KeyboardInterrupt):
        one.document("text").copy_to(other, "text")
    begun = len(other.document("text"))
    assert 0 < begun < len(TEXT)
    check_content(other.document("text"), TEXT[:begun])
    assert other.verify() == []
    check_content(one.document("text").copy_to(other, "text"), TEXT)


def test_what_does_not_go_together_is_refused(make_memory: MakeMemory) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT)
    append(other.document("text"), TEXT[1:9])
    with pytest.raises(InvalidArgument, match="no beginning of document 'text'"):
        one.document("text").copy_to(other, "text")
    with pytest.raises(InvalidArgument, match="another name"):
        one.document("text").copy_to(one, "text")
    with pytest.raises(ForeignMemory, match="weights"):
        one.document("text").copy_to(make_memory(fingerprint=make_fingerprint(weights="other")), "text")
    one.put_arrays("router", {"mean": torch.ones(3)})
    other.put_arrays("router", {"mean": torch.zeros(3)})
    with pytest.raises(ForeignMemory, match="other arrays under the name 'router'"):
        one.document("text").copy_to(other, "new")


def test_damage_is_not_copied(make_memory: MakeMemory) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT)
    batch = Batch()
    batch.delete(Address(1).block(1, 7))
    one._shared.store.write(batch)
    with pytest.raises(DamagedError, match="document 'text', layer 1, block 7"):
        one.document("text").copy_to(other, "text")
    check_content(other.document("text"), TEXT[: len(other.document("text"))])


def fill(memory: Memory) -> dict[str, torch.Tensor]:
    """Documents that share blocks in several ways; name -> text."""
    parent = memory.document("parent")
    append(parent, TEXT)
    append(parent.fork("fork", 6), TEXT[:6])
    memory.document("fork").fork("twig")
    parent.truncate(3)
    append(parent, TEXT[:5])
    append(memory.document("alone"), TEXT[7:])
    memory.put_arrays("router", {"mean": torch.arange(3.0), "scale": torch.ones(2, 2)})
    memory.put_info("model", {"name": "small"})
    fork = torch.cat([TEXT[: 6 * S], TEXT[:6]])
    return {"parent": torch.cat([TEXT[: 3 * S], TEXT[:5]]), "fork": fork, "twig": fork, "alone": TEXT[7:]}


def test_a_whole_memory(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec()) as memory:
        texts, blocks = fill(memory), stored_blocks(memory)
    result = memstore.copy(tmp_path / "one", tmp_path / "two")
    assert (result.documents, result.tokens) == (4, sum(map(len, texts.values())))
    again = memstore.copy(tmp_path / "one", tmp_path / "two")
    assert again.copied_tokens == 0
    with memstore.open(tmp_path / "two") as memory:
        assert [document.name for document in memory.documents()] == list(texts)
        for name, text in texts.items():
            check_content(memory.document(name), text)
        assert stored_blocks(memory) == blocks
        assert memory.get_info("model") == {"name": "small"}
        arrays = memory.get_arrays("router")
        assert arrays is not None
        assert torch.equal(arrays["mean"], torch.arange(3.0))
        assert memory.verify() == []


def test_a_memory_is_not_copied_onto_itself(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec()) as memory:
        fill(memory)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with pytest.raises(InvalidArgument, match="are the same memory"):
        memstore.copy(tmp_path / "one", tmp_path / "link")


def test_ram_to_disk(tmp_path: Path) -> None:
    with memstore.open("ram:copied", spec=make_spec()) as memory:
        texts = fill(memory)
    memstore.copy("ram:copied", tmp_path / "m")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_content(memory.document("twig"), texts["twig"])
