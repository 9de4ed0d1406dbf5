"""Forks share blocks with their parents, and nothing that one does is seen by another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument, NotFound, ReadOnlyMemory
from memstore.memory import Document, Memory
from memstore.memory.entry import Address
from memstore.store import Batch, Key, Table
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import LAYERS, S, append, check_content, make_spec, random_tokens

TEXT = random_tokens(10 * S)


def written(memory: Memory, text: torch.Tensor = TEXT, name: str = "parent") -> Document:
    document = memory.document(name)
    append(document, text)
    return document


def stored_blocks(memory: Memory) -> int:
    """States of one layer that lie in the store, of whichever document."""
    last = Key(Table.BLOCKS, 2**32 - 2, 2**32 - 1, 2**32 - 1)
    return len(memory._shared.store.keys(Key(Table.BLOCKS), last)) // LAYERS


@pytest.mark.parametrize("length", [1, S - 1, S, 3 * S, 3 * S + 2])
def test_a_fork_has_the_same_content_and_shares_whole_blocks(memory: Memory, length: int) -> None:
    parent = written(memory, TEXT[:length])
    before = stored_blocks(memory)
    fork = parent.fork("fork")
    assert fork is memory.document("fork")
    check_content(fork, TEXT[:length])
    assert stored_blocks(memory) - before == (1 if length % S else 0)
    assert memory.verify() == []


@pytest.mark.parametrize("length", [S, 3 * S + 2])
def test_parent_and_fork_go_on_independently(memory: Memory, length: int) -> None:
    parent = written(memory, TEXT[:length])
    fork = parent.fork("fork")
    append(fork, TEXT[20:31])
    append(parent, TEXT[5:12])
    append(fork, TEXT[31:33])
    check_content(parent, torch.cat([TEXT[:length], TEXT[5:12]]))
    check_content(fork, torch.cat([TEXT[:length], TEXT[20:33]]))
    assert memory.verify() == []


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_a_fork_of_a_prefix(memory: Memory, blocks: int) -> None:
    parent = written(memory, TEXT[: 3 * S + 1])
    fork = parent.fork("fork", blocks)
    check_content(fork, TEXT[: blocks * S])
    append(fork, TEXT[20:25])
    check_content(fork, torch.cat([TEXT[: blocks * S], TEXT[20:25]]))
    check_content(parent, TEXT[: 3 * S + 1])
    assert memory.verify() == []


def test_forgetting_a_parent_keeps_what_its_forks_use_and_erases_the_rest(memory: Memory) -> None:
    parent = written(memory)
    fork = parent.fork("fork", 4)
    memory.forget("parent")
    check_content(fork, TEXT[: 4 * S])
    assert stored_blocks(memory) == 4
    assert memory.verify() == []
    append(fork, TEXT[:6])
    memory.forget("fork")
    assert stored_blocks(memory) == 0
    assert memory.documents() == []
    assert [key.table for key in memory._shared.store.keys(Key(Table.HISTORY), Key(Table.HISTORY, 99))] == []
    assert memory.verify() == []


def test_forgetting_a_fork_leaves_its_parent_alone(memory: Memory) -> None:
    parent = written(memory, TEXT[:30])
    append(parent.fork("fork", 3), TEXT[:9])
    memory.forget("fork")
    check_content(parent, TEXT[:30])
    assert memory.verify() == []
    append(parent, TEXT[30:])
    check_content(parent, TEXT)


def test_a_parent_that_is_truncated_writes_elsewhere_what_a_fork_uses(memory: Memory) -> None:
    parent = written(memory)
    fork = parent.fork("fork", 6)
    parent.truncate(2)
    assert stored_blocks(memory) == 6
    check_content(parent, TEXT[: 2 * S])
    append(parent, TEXT[20:])
    check_content(parent, torch.cat([TEXT[: 2 * S], TEXT[20:]]))
    check_content(fork, TEXT[: 6 * S])
    assert memory.verify() == []
    memory.forget("fork")
    assert stored_blocks(memory) == parent.n_blocks
    check_content(parent, torch.cat([TEXT[: 2 * S], TEXT[20:]]))
    assert memory.verify() == []


def test_a_fork_can_be_truncated_into_the_blocks_of_its_parent(memory: Memory) -> None:
    parent = written(memory)
    fork = parent.fork("fork", 6)
    append(fork, TEXT[:9])
    fork.truncate(3)
    append(fork, TEXT[7:16])
    check_content(fork, torch.cat([TEXT[: 3 * S], TEXT[7:16]]))
    check_content(parent, TEXT)
    assert memory.verify() == []


def test_forks_of_forks(memory: Memory) -> None:
    texts = [TEXT[:9]]
    document = written(memory, texts[0], "0")
    for number in range(1, 8):
        document = document.fork(str(number))
        more = random_tokens(5, seed=number)
        append(document, more)
        texts.append(torch.cat([texts[-1], more]))
    for number in (3, 0, 5):
        memory.forget(str(number))
    for number in (1, 2, 4, 6, 7):
        check_content(memory.document(str(number)), texts[number])
    assert memory.verify() == []


def test_blocks_that_leave_one_document_stay_for_its_fork(make_memory: MakeMemory) -> None:
    memory = make_memory(capacity=4)
    parent = written(memory, TEXT[: 4 * S])
    fork = parent.fork("fork")
    for start in range(4 * S, 10 * S, 6):
        append(parent, TEXT[start : start + 6])
        check_content(fork, TEXT[: 4 * S])
    check_content(parent, TEXT)
    assert memory.verify() == []
    append(fork, random_tokens(30, seed=1))
    check_content(fork, torch.cat([TEXT[: 4 * S], random_tokens(30, seed=1)]))
    assert stored_blocks(memory) == 8
    assert memory.verify() == []


def test_an_append_larger_than_the_capacity_leaves_a_fork_whole(make_memory: MakeMemory) -> None:
    memory = make_memory(capacity=2)
    parent = written(memory, TEXT[: 2 * S + 1])
    fork = parent.fork("fork")
    append(parent, TEXT[2 * S + 1 :])
    check_content(parent, TEXT)
    check_content(fork, TEXT[: 2 * S + 1])
    assert memory.verify() == []


def test_a_fork_survives_a_new_process(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(written(memory).fork("fork", 5), TEXT[:3])
        memory.forget("parent")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_content(memory.document("fork"), torch.cat([TEXT[: 5 * S], TEXT[:3]]))
        with pytest.raises(ReadOnlyMemory):
            memory.document("fork").fork("another")


def test_bad_forks_are_refused(memory: Memory) -> None:
    parent = written(memory)
    parent.fork("fork")
    with pytest.raises(InvalidArgument, match="a document 'fork' exists already"):
        parent.fork("fork")
    with pytest.raises(InvalidArgument, match="n_blocks must be a whole number from 0 to 10, not 11"):
        parent.fork("other", 11)
    with pytest.raises(InvalidArgument, match="1 to 511 bytes"):
        parent.fork("")
    with pytest.raises(InvalidArgument, match="1 to 511 bytes") as caught:
        parent.fork("x" * 10_000)
    assert len(str(caught.value)) < 200
    memory.forget("parent")
    with pytest.raises(NotFound, match="forgotten"):
        parent.fork("other")
    with pytest.raises(NotFound, match="does not exist yet"):
        memory.document("mistyped").fork("other")
    with pytest.raises(NotFound, match="does not exist yet"):
        memory.document("mistyped").fork("other", 0)
    assert [document.name for document in memory.documents()] == ["fork"]


def test_shared_blocks_count_once_in_bytes(memory: Memory) -> None:
    parent = written(memory)
    alone = memory.stats()
    parent.fork("fork", 7)
    both = memory.stats()
    assert both["bytes"] == alone["bytes"]
    assert (both["tokens"], both["blocks"]) == (17 * S, 17)


def test_plain_entries_have_no_new_fields_but_the_digest(memory: Memory) -> None:
    parent = written(memory)
    records = memory._shared.store.get(Address(parent.id or 0).entry)
    assert records is not None
    assert set(json.loads(records[0].payload.tobytes())) == {
        "blocks", "digest", "edits", "first", "name", "state", "tokens"
    }  # fmt: skip


def test_damage_in_a_shared_block_is_told_for_every_document_that_uses_it(memory: Memory) -> None:
    parent = written(memory)
    parent.fork("near", 2)
    parent.fork("far", 8)
    store = memory._shared.store
    batch = Batch()
    batch.delete(Address(parent.id or 0).block(1, 5))
    store.write(batch)
    findings = memory.verify()
    assert sorted((f.kind, f.document, f.layer, f.block, f.tokens) for f in findings) == [
        ("missing", "far", 1, 5, (20, 23)),
        ("missing", "parent", 1, 5, (20, 23)),
    ]


def test_a_document_all_of_whose_blocks_have_left_can_be_forked(make_memory: MakeMemory) -> None:
    memory = make_memory(capacity=3)
    parent = written(memory, TEXT[: 5 * S + 1])
    parent.truncate(3)
    assert list(parent.blocks) == []
    for name, blocks in (("whole", None), ("less", 2), ("nothing", 0)):
        append(parent.fork(name, blocks), TEXT[:5])
    for name, start in (("whole", 3), ("less", 2), ("nothing", 0)):
        check_content(memory.document(name), torch.cat([TEXT[: start * S], TEXT[:5]]))
    assert memory.verify() == []


def test_what_a_document_wrote_at_a_new_home_stays_when_a_fork_of_it_is_cut(make_memory: MakeMemory) -> None:
    """Cut to nothing while another uses its blocks, it goes on at a home of which its entry alone tells."""
    memory, text = make_memory(), random_tokens(10 * S)
    document = memory.document("one")
    append(document, text)
    document.fork("two")
    document.truncate(0)
    append(document, text)
    document.fork("three").truncate(2)
    check_content(document, text)
    check_content(memory.document("two"), text)
    memory.forget("three")
    check_content(document, text)
    assert memory.verify() == []
