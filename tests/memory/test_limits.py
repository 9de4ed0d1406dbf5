"""Limits, pins and times to live: what a memory keeps, and that it never forgets more than it should."""

from __future__ import annotations

import itertools
import logging
import random
import re
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import DamagedError, InvalidArgument, NotFound, ReadOnlyMemory, StoreFull
from memstore.memory import Memory, rules
from memstore.memory.rules import BELIEVED, DAY
from memstore.store import Key, Table
from tests import forks
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import (
    D,
    G,
    S,
    append,
    check_content,
    in_blocks,
    make_spec,
    random_tokens,
    run_python,
    states,
)

LONG = 30 * S  # tokens


def names(memory: Memory) -> list[str]:
    return [document.name for document in memory.documents()]


def used(memory: Memory) -> int:
    return int(memory.stats()["used_bytes"])


def fill(memory: Memory, *documents: str, tokens: int = LONG) -> None:
    for seed, name in enumerate(documents):
        append(memory.document(name), random_tokens(tokens, seed))


def room(memory: Memory) -> int:
    """A limit that leaves room for half a document: what is not sealed yet takes more than what is."""
    return used(memory) + used(memory) // (2 * len(names(memory)))


class Clock:
    """Stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        monkeypatch.setattr(rules, "utc", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_full_memory_refuses_and_keeps_what_it_has(make_memory: MakeMemory) -> None:
    memory = make_memory()
    fill(memory, "whale")
    memory.limit(used(memory) + 4096)
    with pytest.raises(
        StoreFull, match=r"the memory's limit of [\d,]+ bytes has no room .* earlier commits are intact"
    ):
        append(memory.document("ship"), random_tokens(LONG))
    check_content(memory.document("whale"), random_tokens(LONG))
    assert names(memory) == ["whale"]
    assert memory.verify() == []
    memory.limit(None)
    append(memory.document("ship"), random_tokens(LONG))
    assert names(memory) == ["whale", "ship"]


def test_the_limit_holds_after_every_append(make_memory: MakeMemory) -> None:
    memory = make_memory()
    fill(memory, "0")
    limit = 3 * used(memory)
    memory.limit(limit, "evict-oldest-document")
    for number in range(1, 9):
        for _ in range(3):
            append(memory.document(str(number)), random_tokens(LONG // 3, number))
            assert used(memory) <= limit
    assert names(memory)[-1] == "8"
    assert 1 < len(names(memory)) < 5
    assert memory.verify() == []
    assert memory.stats()["rules"]["evicted"] == 9 - len(names(memory))


def test_a_document_larger_than_the_limit_stops_and_evicts_nobody_for_nothing(make_memory: MakeMemory) -> None:
    memory = make_memory()
    fill(memory, "whale", "ship")
    memory.limit(used(memory), "evict-oldest-document")
    with pytest.raises(StoreFull):
        append(memory.document("sea"), random_tokens(10 * LONG))
    assert names(memory) == ["whale", "ship"]
    assert memory.verify() == []


def test_the_oldest_goes_first_but_never_a_pinned_one(
    make_memory: MakeMemory, caplog: pytest.LogCaptureFixture
) -> None:
    memory = make_memory()
    fill(memory, "whale", "ship", "sea")
    memory.document("whale").pin()
    memory.limit(room(memory), "evict-oldest-document")
    with caplog.at_level(logging.WARNING, "memstore"):
        append(memory.document("harpoon"), random_tokens(LONG))
    assert names(memory) == ["whale", "sea", "harpoon"]
    assert [record.message for record in caplog.records if "'ship'" in record.message and "no room" in record.message]
    memory.document("sea").pin()
    memory.document("harpoon").pin()
    with pytest.raises(StoreFull):
        append(memory.document("boat"), random_tokens(LONG))
    memory.document("sea").unpin()
    append(memory.document("boat"), random_tokens(LONG))
    assert names(memory) == ["whale", "harpoon", "boat"]
    check_content(memory.document("boat"), random_tokens(LONG))


def test_the_document_that_grows_is_spared(make_memory: MakeMemory) -> None:
    memory = make_memory()
    fill(memory, "whale", "ship")
    memory.limit(room(memory), "evict-oldest-document")
    append(memory.document("whale"), random_tokens(LONG, 9))
    assert names(memory) == ["whale"]
    assert len(memory.document("whale")) == 2 * LONG


def test_the_least_read_goes_first(make_memory: MakeMemory) -> None:
    memory = make_memory()
    fill(memory, "whale", "ship", "sea")
    memory.limit(room(memory), "evict-least-read")
    for name, blocks in (("whale", 3), ("ship", 1), ("sea", 2)):
        memory.document(name).layer(0).gather(range(blocks))
    append(memory.document("harpoon"), random_tokens(LONG))
    assert names(memory) == ["whale", "sea", "harpoon"]


def test_reads_are_remembered_with_the_next_write(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        fill(memory, "whale", "ship")
        memory.limit(used(memory) + 3 * 4096, "evict-least-read")
        memory.document("whale").layer(0).gather(range(5))
        append(memory.document("ship"), [1])
    with memstore.open(tmp_path / "m", mode="r") as memory:
        memory.document("ship").layer(0).gather(range(LONG // S))  # cannot be stored by a reader
    with memstore.open(tmp_path / "m") as memory:
        append(memory.document("sea"), random_tokens(LONG))
        assert names(memory) == ["whale", "sea"]


def test_a_limit_is_stored_and_holds_for_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with memstore.open(path, spec=make_spec(), max_bytes=200_000) as memory:
        assert memory.stats()["rules"]["max_bytes"] == 200_000
    code = """
with memstore.open(sys.argv[1]) as memory:
    try:
        append(memory.document("whale"), random_tokens(4000))
    except memstore.StoreFull:
        print(memory.stats()["rules"]["when_full"])
"""
    assert run_python(code, str(path)) == "refuse\n"
    with memstore.open(path, when_full="evict-oldest-document") as memory:
        rules = memory.stats()["rules"]
    assert (rules["max_bytes"], rules["when_full"]) == (200_000, "evict-oldest-document")


def test_a_memory_without_rules_is_as_it_always_was(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        fill(memory, "whale")
        memory.document("whale").layer(0).gather(range(5))
        append(memory.document("whale"), [1])
        assert {scanned.key.item for scanned in memory._shared.store.scan() if scanned.key.table == 0} == {0, 1}


@pytest.mark.parametrize(
    ("max_bytes", "when_full", "says"),
    [(0, None, "max_bytes must be"), (1.5, None, "max_bytes"), (None, "explode", "when_full must be one of refuse")],
)
def test_limits_that_cannot_be(make_memory: MakeMemory, max_bytes: int, when_full: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        make_memory().limit(max_bytes, when_full)  # type: ignore[arg-type]  # that is the test


def test_readers_cannot_change_rules(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        fill(memory, "whale")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        for change in (memory.document("whale").pin, memory.expire, memory.compact, lambda: memory.limit(1)):
            with pytest.raises(ReadOnlyMemory):
                change()
    with pytest.raises(ReadOnlyMemory):
        memstore.open(tmp_path / "m", mode="r", max_bytes=5)


def test_expired_documents_go_with_the_next_append(make_memory: MakeMemory, clock: Clock) -> None:
    memory = make_memory()
    fill(memory, "whale", "ship", "sea")
    memory.document("whale").expire(60)
    memory.document("ship").expire(3 * DAY)
    assert memory.document("whale").expires is not None
    clock.now += 61
    check_content(memory.document("whale"), random_tokens(LONG))  # until somebody writes, it is as it was
    append(memory.document("sea"), [1])
    assert names(memory) == ["ship", "sea"]
    memory.document("ship").expire(None)
    clock.now += 5 * DAY
    append(memory.document("sea"), [1])
    assert names(memory) == ["ship", "sea"]
    assert memory.document("ship").expires is None
    assert memory.stats()["rules"]["expired"] == 1
    assert memory.verify() == []


def test_pinned_documents_and_the_one_that_grows_do_not_expire(make_memory: MakeMemory, clock: Clock) -> None:
    memory = make_memory()
    fill(memory, "whale", "ship")
    memory.document("whale").expire(60)
    memory.document("ship").expire(60)
    memory.document("whale").pin()
    assert memory.document("whale").pinned
    clock.now += 61
    append(memory.document("ship"), [1])
    assert names(memory) == ["whale", "ship"]
    assert memory.expire() == ["ship"]
    memory.document("whale").unpin()
    assert memory.expire() == ["whale"]
    assert memory.expire() == []


@pytest.mark.parametrize("how", ["expired", "evicted"])
def test_blocks_that_two_documents_let_go_at_once_are_gone(make_memory: MakeMemory, clock: Clock, how: str) -> None:
    """One by its capacity, in the append that the other one is forgotten with."""
    first, second = random_tokens(60 * S), random_tokens(60 * S, 1)
    memory = make_memory(capacity=60)
    append(memory.document("whale"), first)
    memory.document("whale").fork("ship")
    if how == "expired":
        memory.document("ship").expire(60)
        clock.now += 61
    else:
        memory.limit(used(memory) * 19 // 10, "evict-oldest-document")
    append(memory.document("whale"), second)
    assert names(memory) == ["whale"]
    assert memory.verify() == []
    check_content(memory.document("whale"), torch.cat([first, second]))
    memory.forget("whale")
    fill(memory, "sea")
    assert memory.verify() == []


@pytest.mark.parametrize("byte", [3, 12])
def test_rules_under_a_damaged_key_are_not_taken_for_none(tmp_path: Path, byte: int) -> None:
    """Or what is pinned might be forgotten."""
    path = tmp_path / "m"
    with memstore.open(path, spec=make_spec()) as memory:
        fill(memory, "whale")
        memory.document("whale").pin()
    start, data = Key(Table.META, item=2).to_bytes(), bytearray((path / "data.mdb").read_bytes())
    for match in re.finditer(re.escape(start) + b"....MSTR", bytes(data), re.DOTALL):
        data[match.start() + byte] ^= 128
    (path / "data.mdb").write_bytes(data)
    with memstore.open(path) as memory:
        for look in (memory.rules, memory.stats, lambda: memory.document("whale").pinned):
            with pytest.raises(DamagedError):
                look()
        with pytest.raises(DamagedError):
            append(memory.document("ship"), [1])
        assert memory.verify() != []
        memory.repair()
        assert memory.verify() == []
        append(memory.document("ship"), [1])
        check_content(memory.document("whale"), random_tokens(LONG))


@pytest.mark.parametrize("jump", [BELIEVED + 60, -DAY])
def test_a_clock_that_jumps_deletes_nothing_until_asked(
    make_memory: MakeMemory, clock: Clock, caplog: pytest.LogCaptureFixture, jump: float
) -> None:
    memory = make_memory()
    fill(memory, "whale", "ship")
    memory.document("whale").expire(60)
    memory.document("ship").expire(30 * DAY)
    clock.now += 61
    if jump < 0:
        memory.document("ship").pin()  # changes of the rules do not forget anything
        append(memory.document("ship"), [1])
        assert names(memory) == ["ship"]
        fill(memory, "sea")
        memory.document("sea").expire(-jump + 10)
    with caplog.at_level(logging.WARNING, "memstore"):
        clock.now += jump
        append(memory.document("harpoon"), [1])
        append(memory.document("harpoon"), [1])
    if jump > 0:
        assert names(memory) == ["whale", "ship", "harpoon"]
        assert len([record for record in caplog.records if "call memory.expire()" in record.message]) == 1
        assert memory.expire() == ["whale", "ship"]
        append(memory.document("harpoon"), [1])
    else:
        assert names(memory) == ["ship", "sea", "harpoon"]


def test_times_to_live_that_cannot_be(memory: Memory) -> None:
    fill(memory, "whale", tokens=1)
    for seconds in (0, -1, float("nan"), float("inf"), 1e300, "long", True):
        with pytest.raises(InvalidArgument, match="seconds must be a positive number"):
            memory.document("whale").expire(seconds)  # type: ignore[arg-type]  # that is the test


def test_an_empty_document_cannot_be_pinned(make_memory: MakeMemory) -> None:
    with pytest.raises(NotFound, match="does not exist yet"):
        make_memory().document("whale").pin()


def test_a_document_that_another_process_forgot_can_be_made_anew(tmp_path: Path) -> None:
    """Also one that was evicted: the memory gives a new document, not the one that is gone."""
    with memstore.open(tmp_path / "m", spec=make_spec()) as writer, memstore.open(tmp_path / "m", mode="r") as reader:
        fill(writer, "whale")
        old = reader.document("whale")
        writer.forget("whale")
        append(writer.document("whale"), random_tokens(9))
        with pytest.raises(NotFound, match="was forgotten"):
            len(old)
        check_content(reader.document("whale"), random_tokens(9))


def test_forgotten_text_is_gone_from_the_file(tmp_path: Path) -> None:
    secret = torch.arange(7_000_000, 7_000_000 + LONG)
    needle = secret[:S].int().numpy().tobytes()
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        fill(memory, "whale")
        append(memory.document("secret"), secret)
        assert needle in (tmp_path / "m" / "data.mdb").read_bytes()
        memory.forget("secret")
        fill(memory, "ship", "sea")
        told: list[tuple[int, int]] = []
        done = memory.compact(lambda *progress: told.append(progress))
        data = (tmp_path / "m" / "data.mdb").read_bytes()
        assert done.after <= done.before
        assert told
        assert not any(secret[at : at + 2].int().numpy().tobytes() in data for at in range(0, LONG, 2))
        assert b'"secret"' not in data
        for name, seed in (("whale", 0), ("ship", 0), ("sea", 1)):
            check_content(memory.document(name), random_tokens(LONG, seed))
        assert memory.verify() == []


def evict_and_tell(path: Path, says: Connection) -> None:
    """Append documents without end, each of which drives one out; tell of each."""
    with memstore.open(path) as memory:
        for number in itertools.count(max(int(name) for name in names(memory)) + 1):
            append(memory.document(str(number)), random_tokens(LONG, number))
            says.send(number)


def test_evicting_dies_whole(tmp_path: Path, checked_here: None) -> None:
    """Killed at any moment of an append that evicts: each document is there whole, or not at all."""
    path = tmp_path / "m"
    with memstore.open(path, spec=make_spec()) as memory:
        fill(memory, "0")
        memory.limit(4 * used(memory), "evict-oldest-document")
    rng = random.Random(0)
    for _ in range(4):
        told = forks.killed(rng.randint(5, 9), rng.uniform(0, 0.05), evict_and_tell, path)
        with memstore.open(path) as memory:
            assert memory.verify() == []
            assert names(memory)[-1] in (str(told[-1]), str(told[-1] + 1))
            for document in memory.documents():
                check_content(document, random_tokens(LONG, int(document.name)))


def test_compact_erases_dead_blocks_beside_living_ones_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 4 * 4 * G * S * D)  # four blocks of float32
    tokens, path = random_tokens(10 * S), tmp_path / "m"
    with memstore.open(f"zarr:{path}", spec=make_spec()) as memory:
        append(memory.document("whale"), tokens)
        dead = states(in_blocks(tokens), 1)["k"][6].contiguous().numpy().tobytes()
        alive = states(in_blocks(tokens), 1)["k"][4].contiguous().numpy().tobytes()
        memory.document("whale").truncate(5)
        before = [file for file in path.rglob("*") if file.is_file() and dead in file.read_bytes()]
        assert any("blocks" in file.parts for file in before)
        done = memory.compact()
        assert done.before > 0
        assert done.after > 0
        check_content(memory.document("whale"), tokens[: 5 * S])
    holding = {
        what: [file for file in path.rglob("*") if file.is_file() and value in file.read_bytes()]
        for what, value in {"dead": dead, "alive": alive}.items()
    }
    assert holding["dead"] == []
    assert holding["alive"] != []
    with memstore.open(f"zarr:{path}") as memory:
        assert memory.verify() == []
        append(memory.document("whale"), tokens[5 * S :])
        check_content(memory.document("whale"), tokens)
        memory.compact()
        check_content(memory.document("whale"), tokens)
