"""What an operation costs does not grow with what it has nothing to do with: counted in reads, not in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import memstore
from memstore.errors import NotFound
from memstore.memory import Memory
from memstore.memory.exporting import export_memory
from memstore.memory.importing import import_memory
from tests.memory.helpers import S, append, check_content, make_spec, random_tokens

TEXT = random_tokens(2 * S + 1)


class Reads:
    """How many values were read, and how many keys were listed."""

    count = 0


@contextmanager
def counted(memory: Memory) -> Iterator[Reads]:
    store, reads = memory._shared.store, Reads()
    get, keys = store.get, store.keys

    def count(read: Callable[..., object], n: Callable[[object], int]) -> Callable[..., object]:
        def counting(*arguments: object) -> object:
            found = read(*arguments)
            reads.count += n(found)
            return found

        return counting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "get", count(get, lambda _: 1))
        patch.setattr(store, "keys", count(keys, len))  # type: ignore[arg-type]  # a list
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
