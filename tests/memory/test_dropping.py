"""Damaged blocks that a repair drops: they are gone, everything else is as it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.memory import Document, Memory
from memstore.memory.copy import compare_memories, copy_document
from memstore.memory.entry import Address
from memstore.store import Table
from memstore.store.records import Batch, Key
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import KEY_DIM, G, S, append, in_blocks, make_spec, random_tokens, states
from tests.memory.test_damage import BLOCKS, TOKENS, WHALE, delete, flip, landmark_run, path, store_of

pytestmark = pytest.mark.usefixtures("checked_here")

__all__ = ["path"]  # a fixture


def check_without(document: Document, tokens: torch.Tensor, gone: Sequence[int]) -> None:
    """The document holds ``tokens``, but for the blocks that are ``gone``, in every layer."""
    blocks = in_blocks(tokens)
    there = [block for block in document.blocks if block not in gone]
    expected = blocks.clone()
    expected[list(gone)] = -1
    assert len(document) == len(tokens)
    assert document.tokens().tolist() == expected.flatten()[: len(tokens)].tolist()
    assert [block for part in document.dropped for block in part] == list(gone)
    for layer in range(3):
        view = document.layer(layer)
        for name, right in states(blocks[there], layer).items():
            assert torch.equal(view.gather(there)[name].float(), right)
        if layer != 1:
            found = view.search(torch.ones(G, 1, KEY_DIM), len(blocks)).blocks[0, 0].tolist()
            assert sorted(found)[-len(there) :] != []
            assert set(found) - {-1} == set(there) & set(document.complete_blocks)
            scores, ids = view.score(torch.ones(G, 1, KEY_DIM))
            assert (scores.shape[-1], set(ids.tolist())) == (len(ids), set(found) - {-1})
        for block in gone:
            message = rf"document '{document.name}': block {block} was damaged, and a repair removed it"
            with pytest.raises(NotFound, match=message):
                view.gather([*there, block])
            with pytest.raises(NotFound, match=message):
                document.tokens(block)
            view.prefetch([block])
            if layer != 1:
                with pytest.raises(NotFound, match=message):
                    view.landmarks(range(block, block + 1))


def lose(memory: Memory, *blocks: int) -> None:
    """Let the states of blocks of the first document vanish, and drop them."""
    for block in blocks:
        delete(Address(1).block(1, block))(store_of(memory))
    assert memory.repair(drop_blocks=True).left == []


@pytest.mark.parametrize("offset", [9, -60])  # in the payload; in the header, behind which a run cannot be walked
def test_a_document_loses_its_damaged_blocks_alone(path: Path, offset: int) -> None:
    with memstore.open(path) as memory:
        append(memory.document("ship"), random_tokens(9, 5))
    flip(path, states(BLOCKS, 1)["k"][2].contiguous().numpy().tobytes(), offset)
    with memstore.open(path) as memory:
        lost = sorted({finding.block for finding in memory.verify() if finding.block is not None})
        planned = memory.repair(dry_run=True, drop_blocks=True)
        assert planned.left
        assert memory.document("whale").dropped == []
        done = memory.repair(drop_blocks=True)
        assert done.steps == planned.steps
        assert (done.left, done.steps[-1].document) == ([], "whale")
        if offset == 9:
            assert done.steps[-1].message == (
                "document 'whale' continues without 1 damaged blocks: 4 tokens are lost, 21 stay"
            )
            assert lost == [2]
            check_without(memory.document("whale"), TOKENS, [2])
        assert memory.verify() == []
        check_without(memory.document("ship"), random_tokens(9, 5), [])
        with pytest.raises(NotFound):
            memory.document("whale").layer(1).gather([2])
    with memstore.open(path, mode="r") as memory, pytest.raises(NotFound):
        memory.document("whale").layer(1).gather([2])


def test_a_search_that_was_open_finds_a_dropped_block_no_more(make_memory: MakeMemory) -> None:
    memory = make_memory()
    append(memory.document("whale"), TOKENS)
    check_without(memory.document("whale"), TOKENS, [])
    lose(memory, 1, 3)
    check_without(memory.document("whale"), TOKENS, [1, 3])


def test_a_block_that_one_of_two_memories_has_lost_is_a_difference(tmp_path: Path) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    with memstore.open(whole, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    assert memstore.copy(whole, lost).tokens == len(TOKENS)
    with memstore.open(lost) as memory:
        lose(memory, 2)
    with memstore.open(whole, mode="r") as ours, memstore.open(lost, mode="r") as theirs:
        for pair in ((ours, theirs), (theirs, ours)):
            (found,) = compare_memories(*pair).documents
            assert (found.same, found.states, found.lost_blocks) == (False, "same", 1)
            assert (found.compared_blocks, found.common_blocks) == (6, 6)  # the last block is not full
        assert compare_memories(theirs, theirs).same
    for source, target in ((whole, lost), (lost, whole)):
        with pytest.raises(InvalidArgument, match="a copy cannot fill gaps"):
            memstore.copy(source, target)
    copied = memstore.copy(lost, tmp_path / "third")
    assert (copied.tokens, copied.copied_tokens) == (len(TOKENS) - S, len(TOKENS) - S)
    assert memstore.copy(lost, tmp_path / "third").copied_tokens == 0


def test_appends_forks_and_truncations_go_on_behind(make_memory: MakeMemory) -> None:
    memory, more = make_memory(), random_tokens(3 * S, 8)
    whale = memory.document("whale")
    append(whale, TOKENS)
    lose(memory, 1, 3)
    append(whale, more)
    longer = torch.cat([TOKENS, more])
    check_without(whale, longer, [1, 3])
    fork, short = whale.fork("fork"), whale.fork("short", 2)
    check_without(fork, longer, [1, 3])
    append(short, more)
    check_without(short, torch.cat([TOKENS[: 2 * S], more]), [1])
    whale.truncate(4)
    check_without(whale, longer[: 4 * S], [1, 3])
    append(whale, more)
    check_without(whale, torch.cat([TOKENS[: 4 * S], more]), [1, 3])
    whale.truncate(2)
    append(whale, more)
    check_without(whale, torch.cat([TOKENS[: 2 * S], more]), [1])
    check_without(fork, longer, [1, 3])
    assert memory.verify() == []
    memory.forget("whale")
    check_without(fork, longer, [1, 3])
    assert memory.verify() == []


def test_blocks_at_the_end_are_cut_off(make_memory: MakeMemory) -> None:
    memory = make_memory()
    append(memory.document("whale"), TOKENS)
    lose(memory, 2, 5, 6)
    check_without(memory.document("whale"), TOKENS[: 5 * S], [2])
    append(memory.document("whale"), TOKENS[5 * S :])
    check_without(memory.document("whale"), TOKENS, [2])
    assert memory.verify() == []


def test_who_shares_a_block_loses_it_too_and_nobody_else(make_memory: MakeMemory) -> None:
    memory, more = make_memory(), random_tokens(9, 8)
    append(memory.document("whale"), TOKENS)
    fork = memory.document("whale").fork("fork", 3)
    append(fork, more)
    early = memory.document("whale").fork("early", 1)
    append(early, more)
    digest = early.digest
    lose(memory, 1, 4)
    check_without(memory.document("whale"), TOKENS, [1, 4])
    check_without(fork, torch.cat([TOKENS[: 3 * S], more]), [1])
    check_without(early, torch.cat([TOKENS[:S], more]), [])
    assert (early.digest, fork.digest) == (digest, None)
    assert memory.verify() == []


def test_damaged_landmarks_take_the_blocks_that_lie_with_them(make_memory: MakeMemory) -> None:
    memory = make_memory()
    append(memory.document("whale"), TOKENS)
    memory.document("whale").fork("fork", 3)
    delete(landmark_run(2, 0))(store_of(memory))
    steps = memory.repair(drop_blocks=True)
    assert steps.left == []
    assert [len(memory.document(name)) for name in ("whale", "fork")] == [0, 0]
    append(memory.document("whale"), TOKENS)
    check_without(memory.document("whale"), TOKENS, [])
    assert memory.verify() == []


def test_damaged_hashes_cost_no_block(make_memory: MakeMemory) -> None:
    memory = make_memory()
    append(memory.document("whale"), TOKENS)
    store_of(memory).write(Batch(deletes=[(Key(Table.HISTORY, 1), Key(Table.HISTORY, 1, 0, 9))]))
    steps = memory.repair(drop_blocks=True)
    assert steps.left == []
    assert [step.message for step in steps.steps] == [
        "document 'whale' continues without the hashes of its history: its text is not reused"
    ]
    check_without(memory.document("whale"), TOKENS, [])
    assert memory.known(TOKENS) is None


def test_a_text_is_not_reused_from_a_document_that_lacks_some_of_it(make_memory: MakeMemory) -> None:
    memory = make_memory()
    append(memory.document("whale"), TOKENS)
    assert memory.known(TOKENS) is not None
    lose(memory, 4)
    assert memory.known(TOKENS) is None
    assert memory.document("again").reuse(TOKENS) == 0
    assert memory.document("whale").digest is None


def test_blocks_leave_for_capacity_whether_they_are_there_or_not(make_memory: MakeMemory) -> None:
    memory = make_memory(capacity=7)
    whale = memory.document("whale")
    append(whale, TOKENS)
    lose(memory, 1, 3)
    for step in range(1, 5):
        append(whale, random_tokens(S, 20 + step))
        assert whale.blocks == range(step, step + 7)
        for layer in (0, 2):
            found = whale.layer(layer).search(torch.ones(G, 1, KEY_DIM), 9).blocks[0, 0].tolist()
            assert set(found) - {-1} == set(whale.complete_blocks) - {1, 3}
        assert memory.verify() == []
        assert memory.stats()["blocks"] == 7 - len({1, 3} & set(whale.blocks))


def test_a_copy_lacks_the_same_blocks(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory()
    append(memory.document("whale"), TOKENS)
    lose(memory, 0, 3, 4)
    with memstore.open(tmp_path / "copy", spec=make_spec()) as other:
        copy_document(memory.document("whale"), other, "whale")
        check_without(other.document("whale"), TOKENS, [0, 3, 4])
        assert other.verify() == []
        append(memory.document("whale"), random_tokens(S, 8))
        copy_document(memory.document("whale"), other, "whale")
        check_without(other.document("whale"), torch.cat([TOKENS, random_tokens(S, 8)]), [0, 3, 4])


def test_a_search_that_was_open_does_not_find_what_a_copy_passes_over(make_memory: MakeMemory) -> None:
    source, target = make_memory(), make_memory()
    tokens = random_tokens(8 * S, 9)
    append(source.document("whale"), tokens[: 3 * S])
    copied = copy_document(source.document("whale"), target, "whale")
    check_without(copied, tokens[: 3 * S], [])
    append(source.document("whale"), tokens[3 * S :])
    lose(source, 4)
    copy_document(source.document("whale"), target, "whale")
    check_without(copied, tokens, [4])


def test_a_plain_entry_says_nothing_of_dropped_blocks(memory: Memory) -> None:
    append(memory.document("whale"), TOKENS)
    records = store_of(memory).get(WHALE.entry)
    assert records is not None
    assert "dropped" not in records[0].to_json()
