"""Histories: what was read before is found by hashes, shared instead of read, and checked."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument
from memstore.memory import Memory
from memstore.memory.entry import HASHES_PER_RUN, Address
from memstore.memory.spec import to_record, token_layout
from memstore.store import Batch, Key, Record, Table
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import (
    S,
    append,
    check_content,
    make_spec,
    random_tokens,
)

pytestmark = pytest.mark.usefixtures("checked_here")

TEXT = random_tokens(10 * S)


def by_hand(memory: Memory, tokens: torch.Tensor) -> str:
    digest = hashlib.blake2b(
        json.dumps([memory.spec.fingerprint.to_dict(), None], sort_keys=True).encode(), digest_size=16
    ).digest()
    for block in tokens[: len(tokens) // S * S].reshape(-1, S):
        digest = hashlib.blake2b(digest + block.int().numpy().tobytes(), digest_size=16).digest()
    return digest.hex()


def test_the_digest_follows_from_the_tokens_however_they_came(memory: Memory) -> None:
    document = memory.document("text")
    for start in range(0, 39, 3):
        append(document, TEXT[start : start + 3])
        assert document.digest == by_hand(memory, TEXT[: start + 3])
    document.truncate(4)
    assert document.digest == by_hand(memory, TEXT[: 4 * S])
    assert document.fork("fork", 2).digest == by_hand(memory, TEXT[: 2 * S])
    document.truncate(0)
    append(document, TEXT[5:30])
    assert document.digest == by_hand(memory, TEXT[5:30])
    assert memory.verify() == []


def test_many_runs_of_hashes(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        check_many_runs(memory)


def check_many_runs(memory: Memory) -> None:
    text = random_tokens((2 * HASHES_PER_RUN + 7) * S)
    append(memory.document("long"), text[: (HASHES_PER_RUN - 1) * S + 1])
    append(memory.document("long"), text[(HASHES_PER_RUN - 1) * S + 1 :])
    fork = memory.document("long").fork("fork", HASHES_PER_RUN + 3)
    append(fork, TEXT)
    assert memory.verify() == []
    assert fork.digest == by_hand(memory, torch.cat([text[: (HASHES_PER_RUN + 3) * S], TEXT]))
    assert memory.known(text)[1] == 2 * HASHES_PER_RUN + 7  # type: ignore[index]
    memory.document("long").truncate(HASHES_PER_RUN)
    memory.forget("long")
    assert memory.known(text)[1] == HASHES_PER_RUN + 3  # type: ignore[index]
    assert memory.verify() == []


def test_the_longest_known_beginning_is_found(memory: Memory) -> None:
    append(memory.document("other"), TEXT[3:])
    append(memory.document("short"), TEXT[: 3 * S + 1])
    append(memory.document("long"), torch.cat([TEXT[: 6 * S + 1], TEXT[: 2 * S]]))
    for length, expected in ((len(TEXT), 6), (6 * S - 1, 5), (2 * S, 2)):
        found = memory.known(TEXT[:length])
        assert found is not None
        assert found[1] == expected
    assert memory.known(TEXT[: S - 1]) is None
    assert memory.known(TEXT[1:]) is None


def test_what_is_found_is_what_a_comparison_with_every_document_finds(memory: Memory) -> None:
    rng = random.Random(2026)
    texts: dict[str, list[int]] = {}

    def begun() -> list[int]:
        """Few first blocks, so that many begin alike, one or none of them like all of another."""
        return [token for _ in range(rng.randrange(6)) for token in [rng.randrange(2)] * S] + [3] * rng.randrange(S)

    for step in range(120):
        name = f"d{rng.randrange(20)}"
        match rng.randrange(5):
            case 0 if name in texts:
                memory.forget(name)
                del texts[name]
            case 1 if name in texts:
                memory.document(name).truncate(1)
                texts[name] = texts[name][:S]
            case 2 if name in texts and f"f{step}" not in texts:
                memory.document(name).fork(f"f{step}")
                texts[f"f{step}"] = [*texts[name]]
            case _:
                if more := begun():
                    append(memory.document(name), torch.tensor(more))
                    texts[name] = [*texts.get(name, []), *more]
        wanted = begun()
        counts = {name: _common_blocks(text, wanted) for name, text in texts.items()}
        most, found = max(counts.values(), default=0), memory.known(torch.tensor(wanted, dtype=torch.int64))
        if not most:
            assert found is None
        else:
            assert found is not None
            assert found[1] == most
            assert counts[found[0].name] == most
    assert memory.verify() == []


def _common_blocks(one: list[int], other: list[int]) -> int:
    tokens = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return tokens // S


def test_a_new_document_reuses_what_is_known_and_goes_on(memory: Memory) -> None:
    append(memory.document("one"), TEXT[: 6 * S + 1])
    two = memory.document("two")
    assert two.reuse(TEXT) == 6 * S
    check_content(two, TEXT[: 6 * S])
    append(two, TEXT[6 * S :])
    check_content(two, TEXT)
    assert two.reuse(TEXT) == 0
    assert memory.document("three").reuse(TEXT, step=4) == 8 * S
    assert memory.document("four").reuse(random_tokens(40, seed=3)) == 0
    assert len(memory.document("four")) == 0
    assert memory.verify() == []


def test_states_that_were_read_in_another_way_are_not_reused(memory: Memory) -> None:
    append(memory.document("wide"), TEXT, reading={"window": 8})
    assert memory.document("wide").reading == {"window": 8}
    assert memory.document("plain").reuse(TEXT) == 0
    assert memory.document("narrow").reuse(TEXT, reading={"window": 4}) == 0
    fork = memory.document("same")
    assert fork.reuse(TEXT, reading={"window": 8}) == len(TEXT)
    assert fork.reading == {"window": 8}
    with pytest.raises(InvalidArgument, match=r"begun with reading=\{'window': 8\}, not \{'window': 4\}"):
        fork.append(TEXT, reading={"window": 4})
    with pytest.raises(InvalidArgument, match="JSON"):
        memory.document("bad").append(TEXT, reading={"window": object()})
    assert memory.verify() == []


def test_a_document_whose_first_blocks_have_left_is_not_reused(make_memory: MakeMemory) -> None:
    memory = make_memory(capacity=3)
    append(memory.document("one"), TEXT[: 3 * S])
    assert memory.document("two").reuse(TEXT) == 3 * S
    append(memory.document("two"), TEXT[3 * S :])
    append(memory.document("one"), TEXT[:5])
    assert memory.known(TEXT) is None
    assert memory.verify() == []


def test_a_document_begun_without_digests_goes_on_without(memory: Memory) -> None:
    """As memories were written before there were histories."""
    document = memory.document("old")
    append(document, TEXT[: 5 * S])
    _, places = document.located()
    assert places is not None
    old = {"name": "old", "tokens": 5 * S, "blocks": 5, "first": 0, "edits": 0, "state": "live"}
    batch = Batch()
    batch.put(places.entry, Record.from_json(old))
    batch.delete(Key(Table.HISTORY, document.id or 0), Key(Table.HISTORY, document.id or 0, 0, 99))
    memory._shared.store.write(batch)
    append(document, TEXT[5 * S :])
    check_content(document, TEXT)
    assert document.digest is None
    assert memory.known(TEXT) is None
    document.truncate(2)
    assert memory.verify() == []
    document.truncate(0)
    append(document, TEXT)
    assert memory.known(TEXT) == (document, 10)
    assert memory.verify() == []


def test_tokens_that_were_exchanged_are_found_by_the_history(memory: Memory) -> None:
    document = memory.document("text")
    append(document, TEXT)
    document.fork("fork", 7)
    batch = Batch()
    for block, other in ((3, TEXT[:S]), (8, TEXT[S : 2 * S])):
        record = to_record(other.int())
        assert record.layout == token_layout(S)
        batch.put(Address(document.id or 0).tokens(block), record)
    memory._shared.store.write(batch)
    findings = memory.verify()
    assert {(f.kind, f.document, f.block, f.tokens) for f in findings} == {
        ("mismatch", "text", 3, (12, 15)),
        ("mismatch", "fork", 3, (12, 15)),
        ("mismatch", "text", 8, (32, 35)),
    }
    assert "history of the document" in findings[0].message


def test_hashes_that_are_lost_are_missing_and_nothing_is_reused(memory: Memory) -> None:
    document = memory.document("text")
    append(document, TEXT)
    batch = Batch()
    batch.delete(Key(Table.HISTORY, document.id or 0))
    memory._shared.store.write(batch)
    (finding,) = memory.verify()
    assert (finding.kind, finding.document) == ("missing", "text")
    assert memory.known(TEXT) is None
    check_content(document, TEXT)


def test_a_document_is_known_where_all_that_begin_like_it_are_damaged(make_memory: MakeMemory) -> None:
    memory, long = make_memory(), random_tokens((HASHES_PER_RUN + 1) * S, 4)
    append(memory.document("damaged"), long)
    batch = Batch()
    batch.delete(Key(Table.HISTORY, memory.document("damaged").id or 0, 0, 1))
    memory._shared.store.write(batch)
    assert memory.known(TEXT) is None  # from here on it is told of documents one by one
    document = memory.document("whole")
    for stop in (2, 5):
        append(document, long[len(document) : stop * S])
        assert memory.known(long) == (document, stop)
