"""What an operation costs does not grow with what it has nothing to do with: counted in reads, not in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import NotFound
from memstore.memory import Memory
from memstore.memory.entry import Address
from memstore.memory.export import export_memory, import_memory
from memstore.store import Batch, LmdbStore
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import S, append, check_content, make_spec, random_tokens

TEXT = random_tokens(2 * S + 1)
LONG = random_tokens(60 * S)


class Reads:
    """How many values were read, and how many keys were listed."""

    count = 0


@contextmanager
def counted(memory: Memory) -> Iterator[Reads]:
    store, reads = memory._shared.store, Reads()
    get, keys, walk, read, gather = store.get, store.keys, store.walk, store.read, store.gather

    def count(read: Callable[..., object], n: Callable[[object], int]) -> Callable[..., object]:
        def counting(*arguments: object) -> object:
            found = read(*arguments)
            reads.count += n(found)
            return found

        return counting

    def rows(of: Callable[..., object]) -> Callable[..., object]:
        def counting(wanted: list[object], *arguments: object) -> object:
            reads.count += len(wanted)
            return of(wanted, *arguments)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "get", count(get, lambda _: 1))
        patch.setattr(store, "keys", count(keys, len))  # type: ignore[arg-type]  # a list
        patch.setattr(store, "walk", count(lambda *ends: list(walk(*ends)), len))  # type: ignore[arg-type]
        patch.setattr(store, "read", rows(read))
        patch.setattr(store, "gather", rows(gather))
        yield reads


def filled(memory: Memory, documents: int) -> None:
    for number in range(len(memory.documents()), documents):
        append(memory.document(str(number)), TEXT)


def test_an_append_to_a_new_document_reads_as_little_whatever_there_is(memory: Memory) -> None:
    reads = []
    for documents in (2, 40):
        filled(memory, documents)
        with counted(memory) as counts:
            append(memory.document(f"new, after {documents}"), TEXT)
        reads.append(counts.count)
    assert reads[1] <= reads[0]


@pytest.mark.parametrize("alike", [0, 3], ids=["of their own", "with the same beginning"])
def test_a_text_is_looked_for_and_kept_with_as_few_reads_whatever_there_is(memory: Memory, alike: int) -> None:
    """As ``memstore read`` does for each file of a folder."""

    def keep(number: int) -> None:
        text = torch.cat([LONG[: alike * S], random_tokens(2 * S, seed=number + 1)])
        document = memory.document(f"note {number}")
        assert document.reuse(text) == (alike * S if number else 0)
        append(document, text[len(document) :])
        memory.put_info(f"file/{number}", number)

    reads, number = [], 0
    for documents in (8, 64):
        while number < documents:
            keep(number)
            number += 1
        with counted(memory) as counts:
            for _ in range(4):
                keep(number)
                number += 1
        reads.append(counts.count)
    # Where many begin alike, the place among them is found by halves: three looks more for eight times as many.
    assert reads[1] <= reads[0] + (4 * 3 * 4 if alike else 0)


def test_what_is_known_of_documents_holds_after_any_commit(memory: Memory) -> None:
    """Of this memory, of another one on the same store, and one that nobody told of."""
    append(memory.document("a"), TEXT)
    state = memory.document("a")._handle.current()
    assert memory.known(TEXT) == (memory.document("a"), 2)
    batch = Batch()
    batch.put(Address(memory.document("a").id or 0).entry, replace(state, digest=None, edits=7).to_record())
    memory._shared.store.write(batch)
    assert memory.known(TEXT) is None
    assert memory.document("a").located()[0].edits == 7
    memory.put_info("fact", 1)
    memory.document("a").truncate(0)
    append(memory.document("a"), LONG[: 3 * S])
    assert memory.known(LONG) == (memory.document("a"), 3)
    memory.forget("a")
    assert memory.known(LONG) is None
    assert memory.documents() == []


def test_names_are_right_beside_a_writer_in_another_memory(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as writer:
        filled(writer, 3)
        with memstore.open(tmp_path / "m", mode="r") as reader:
            assert len(reader.document("1")) == len(TEXT)
            append(writer.document("3"), TEXT)
            check_content(reader.document("3"), TEXT)
            writer.forget("1")
            with pytest.raises(NotFound, match="'1'"):
                reader.document("1")
            append(writer.document("1"), TEXT[:S])
            check_content(reader.document("1"), TEXT[:S])
            assert [document.name for document in reader.documents()] == ["0", "2", "3", "1"]


def test_facts_are_put_and_imported_with_a_read_for_each(tmp_path: Path) -> None:
    number = 50
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        with counted(memory) as counts:
            for fact in range(number):
                memory.put_info(f"fact {fact}", fact)
        assert counts.count <= 4 * number
        export_memory(memory, tmp_path / "export")
    with memstore.open(tmp_path / "n", spec=make_spec()) as memory:
        version = memory._shared.store.version()
        with counted(memory) as counts:
            memory.put_facts({f"fact {fact}": fact for fact in range(number)}, {}, "export")
        assert (counts.count, memory._shared.store.version()) == (0, version + 1)
    import_memory(tmp_path / "export", tmp_path / "n")
    with memstore.open(tmp_path / "n", mode="r") as memory:
        assert memory.facts()[0] == {f"fact {fact}": fact for fact in range(number)}


def chain(memory: Memory, links: int) -> None:
    """Documents "0", "1", ..., each a fork of the one before with a block more."""
    append(memory.document("0"), LONG[:S])
    for number in range(1, links):
        append(memory.document(str(number - 1)).fork(str(number)), LONG[number * S : (number + 1) * S])


def nbytes(memory: Memory) -> int:
    values = (memory._shared.store.get(scanned.key) for scanned in memory._shared.store.scan())
    return sum(record.payload.nbytes for records in values for record in records or ())


def test_a_link_of_a_chain_of_forks_reads_and_stores_as_much_as_the_one_before(make_memory: MakeMemory) -> None:
    found = []
    for links in (10, 40):
        memory = make_memory()
        chain(memory, links)
        with counted(memory) as counts:
            before = nbytes(memory)
            counts.count = 0
            last = memory.document(str(links - 1)).fork("last")
            append(last, LONG[links * S : (links + 1) * S])
            reads = counts.count
        found.append((reads, nbytes(memory) - before))
    assert found[1][0] <= found[0][0]
    assert found[1][1] <= found[0][1] + 16  # digits of numbers


def test_the_end_of_a_chain_of_forks_is_read_once_in_a_new_process(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        chain(memory, 30)
    with memstore.open(tmp_path / "m", mode="r") as memory:
        document = memory.document("29")
        with counted(memory) as counts:
            check_content(document, LONG[: 30 * S])
            first = counts.count
            check_content(memory.document("28"), LONG[: 29 * S])
        assert counts.count - first < first


def test_forgetting_a_document_reads_those_that_can_share_its_blocks_alone(memory: Memory) -> None:
    reads = []
    for documents in (2, 40):
        filled(memory, documents)
        append(memory.document("parent"), TEXT)
        memory.document("parent").fork("fork")
        with counted(memory) as counts:
            memory.forget("parent")
        memory.forget("fork")
        reads.append(counts.count)
    assert reads[1] <= reads[0]
    assert memory.verify() == []


def test_many_documents_are_evicted_with_a_few_reads_for_each(make_memory: MakeMemory) -> None:
    reads = []
    for links in (20, 60):
        memory = make_memory()
        chain(memory, links)
        memory.limit(memory.stats()["used_bytes"] // 2, "evict-oldest-document")
        with counted(memory) as counts:
            append(memory.document("new"), LONG[:S])
        reads.append(counts.count)
        assert len(memory.documents()) < links * 3 // 4
        for document in memory.documents()[-5:]:
            check_content(document, LONG[:S] if document.name == "new" else LONG[: (int(document.name) + 1) * S])
        assert memory.verify() == []
    assert reads[1] < 4 * reads[0]


def test_forks_of_an_earlier_version_list_whose_blocks_they_share(memory: Memory) -> None:
    append(memory.document("parent"), LONG[: 10 * S])
    fork = memory.document("parent").fork("fork", 6)
    state, number = fork._handle.current(), fork.id or 0
    batch = Batch()
    batch.delete(Address(number).branch)
    earlier = replace(state, branch=None, spans=((memory.document("parent").id or 0, 0, 6),))
    batch.put(Address(number).entry, earlier.to_record())
    memory._shared.store.write(batch)
    memory._shared.catalog.clear()
    assert memory.verify() == []
    append(fork, LONG[20:31])
    texts = {"fork": torch.cat([LONG[: 6 * S], LONG[20:31]])}
    for name, blocks in (("late", 8), ("early", 4)):
        append(fork.fork(name, blocks), LONG[:5])
        texts[name] = torch.cat([texts["fork"][: blocks * S], LONG[:5]])
    append(memory.document("late").fork("later"), LONG[7:14])
    texts["later"] = torch.cat([texts["late"], LONG[7:14]])
    memory.document("late").truncate(7)
    texts["late"] = texts["late"][: 7 * S]
    memory.forget("parent")
    for forgotten in ("", "fork", "late"):
        if forgotten:
            memory.forget(forgotten)
            del texts[forgotten]
        for name, text in texts.items():
            check_content(memory.document(name), text)
        assert memory.verify() == []


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_home_is_a_branch_of_is_found_again_in_the_entry_of_its_document(memory: Memory, kept: bool) -> None:
    chain(memory, 6)
    middle = memory.document("3").id or 0
    if not kept:
        memory.forget("3")
    batch = Batch()
    batch.delete(Address(middle).branch)
    memory._shared.store.write(batch)
    memory._shared.catalog.clear()
    assert memory.verify() != []
    repaired = memory.repair(drop_blocks=True)
    assert repaired.left == []
    for number in range(6):
        if kept:
            check_content(memory.document(str(number)), LONG[: (number + 1) * S])
    if not kept:  # nothing tells any more where the first blocks of what came after lie
        assert memory.document("5").dropped == [range(4)]  # also what lies with rows of theirs
        assert memory.document("5").tokens(4).tolist() == LONG[4 * S : 5 * S].tolist()


def test_opening_looks_at_one_page_of_the_tree_for_hundreds_of_small_blocks(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("long"), random_tokens(6_000 * S))
        store = memory._shared.store
        assert isinstance(store, LmdbStore)
        pages = store._env.stat()
    assert pages["leaf_pages"] + pages["branch_pages"] <= 6_000 // 200


def test_what_is_remembered_of_values_that_were_verified_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.store.lmdb.values._MOST_KNOWN", 600)
    with memstore.open(tmp_path / "m", spec=make_spec(), host_bytes=0) as memory:
        append(memory.document("long"), random_tokens(2_000 * S))
        for first in range(0, 2_000, 50):
            memory.document("long").layer(0).gather(range(first, first + 50))
        store = memory._shared.store
        assert isinstance(store, LmdbStore)
        assert 0 < sum(map(len, store.values._runs.values())) <= 600
        assert 0 < sum(map(len, store.values._known.values())) <= 600 + 50
