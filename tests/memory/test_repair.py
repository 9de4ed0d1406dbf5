"""Repair: the longest sound prefix of each document stays, and nothing is guessed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import memstore
from memstore.errors import DamagedError, ReadOnlyMemory
from memstore.memory import repair
from memstore.memory.entry import KEEPING, NEXT_DOCUMENT
from memstore.memory.repair import Repair
from memstore.memory.salvage import salvage
from memstore.memory.verify import Finding
from memstore.store import Key, Record, Table
from tests.memory.helpers import G, S, append, check_content, make_spec, random_tokens, states, tokens_in_the_tree
from tests.memory.test_damage import BLOCKS, TOKENS, WHALE, copy, delete, flip, landmark_run, path, put, store_of
from tests.memory.test_dropping import check_without, lose

pytestmark = pytest.mark.usefixtures("checked_here", "children_are_forks")

__all__ = ["path"]  # a fixture


def add_ship(path: Path) -> None:
    with memstore.open(path) as memory:
        append(memory.document("ship"), random_tokens(9, 5))


def test_a_sound_memory_is_left_alone(path: Path) -> None:
    before = (path / "data.mdb").read_bytes()
    with memstore.open(path) as memory:
        done = memory.repair()
        assert (done.steps, done.left) == ([], [])
    assert (path / "data.mdb").read_bytes() == before


def test_indexes_that_verify_finds_sound_are_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(folder: Path) -> None:
        pytest.fail(f"{folder} is read again")

    monkeypatch.setattr(repair, "damaged", again)
    flip(path, states(BLOCKS, 1)["k"][3].contiguous().numpy().tobytes(), 9)
    with memstore.open(path) as memory:
        assert memory.repair().left == []


@pytest.mark.parametrize("offset", [9, -60])  # in the payload; in the header, behind which a run cannot be walked
def test_a_document_keeps_its_longest_sound_prefix(path: Path, offset: int) -> None:
    add_ship(path)
    flip(path, states(BLOCKS, 1)["k"][3].contiguous().numpy().tobytes(), offset)
    with memstore.open(path) as memory:
        planned = memory.repair(dry_run=True)
        assert [(step.document, step.tokens_lost) for step in planned.steps] == [("whale", len(TOKENS) - 3 * S)]
        assert planned.left
        assert len(memory.document("whale")) == len(TOKENS)
        done = memory.repair()
        assert done.steps == planned.steps
        assert "12 tokens stay, 13 are lost" in done.steps[0].message
        assert done.left == []
        check_content(memory.document("whale"), TOKENS[: 3 * S])
        check_content(memory.document("ship"), random_tokens(9, 5))
        append(memory.document("whale"), TOKENS[3 * S :])
        check_content(memory.document("whale"), TOKENS)


@pytest.mark.parametrize(
    ("harm", "kept"),
    [
        (delete(WHALE.block(1, 2), WHALE.block(1, 3)), 2),
        (delete(WHALE.tokens(6)), 6),
        (copy(WHALE.tokens(1), WHALE.tokens(6)), 6),
        (delete(landmark_run(2, 0)), 0),
        (copy(WHALE.tokens(1), landmark_run(0, 0)), 0),
        (copy(WHALE.block(1, 2), WHALE.block(1, 9)), None),
        (copy(WHALE.block(1, 2), WHALE.block(7, 2)), None),
        (copy(landmark_run(0, 0), landmark_run(1, 0)), None),
        (copy(WHALE.block(1, 2), WHALE.block(1, 2)._replace(document=5)), None),
        (delete(NEXT_DOCUMENT), None),
        (copy(WHALE.tokens(1), NEXT_DOCUMENT), None),
        (put(KEEPING, Record.from_json({"max_bytes": "many"})), None),
    ],
)
def test_what_does_not_fit_together_is_put_right(harm: object, kept: int | None) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
        append(memory.document("ship"), random_tokens(9, 5))
        harm(store_of(memory))  # type: ignore[operator]  # made above
        assert memory.verify()
        done = memory.repair()
        assert done.left == []
        assert done.steps
        check_content(memory.document("whale"), TOKENS if kept is None else TOKENS[: kept * S])
        check_content(memory.document("ship"), random_tokens(9, 5))
        append(memory.document("sea"), random_tokens(9, 6))
        assert memory.verify() == []
        assert [document.name for document in memory.documents()] == ["whale", "ship", "sea"]


def test_a_document_that_lost_its_entry_loses_its_name_only(path: Path) -> None:
    add_ship(path)
    flip(path, b'"name": "whale"', 10)
    with memstore.open(path) as memory:
        with pytest.raises(DamagedError):
            memory.documents()
        done = memory.repair()
        assert done.left == []
        assert [step.document for step in done.steps] == ["recovered-1"]
        check_content(memory.document("recovered-1"), TOKENS)
        check_content(memory.document("ship"), random_tokens(9, 5))


def test_a_document_that_lost_blocks_and_then_its_entry_keeps_the_others(path: Path, tmp_path: Path) -> None:
    with memstore.open(path) as memory:
        lose(memory, 1)
        memory.compact()  # else a page that is free has the entry too
    flip(path, b'"name": "whale"', 10)
    (saved,) = salvage(path, tmp_path / "new")
    assert (saved.tokens, saved.tokens_lost) == (len(TOKENS) - S, 0)
    with memstore.open(path) as memory, memstore.open(tmp_path / "new") as new:
        assert memory.repair().left == []
        check_without(memory.document("recovered-1"), TOKENS, [1])
        check_without(new.document("recovered-1"), TOKENS, [1])


def test_a_damaged_place_far_behind_the_others_makes_no_long_document(tmp_path: Path) -> None:
    path = tmp_path / "n"
    with tokens_in_the_tree(), memstore.open(path, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    flip(path, b'"name": "whale"', 10)
    last = len(TOKENS) // S
    flip(path, b"\x11\x00" + WHALE.tokens(last).to_bytes(), 2 + 9)  # a bit of the block in the key
    with memstore.open(path) as memory:
        assert memory.repair().left == []
        check_content(memory.document("recovered-1"), TOKENS[: last * S])


def test_an_entry_under_a_damaged_key_is_not_a_document_that_is_not_there(path: Path) -> None:
    """A bit of the item in the key of an entry, in LMDB's own page: a look for the document finds nothing."""
    add_ship(path)
    flip(path, b"\x11\x00" + WHALE.entry.to_bytes(), 2 + 12)
    with memstore.open(path, mode="r") as memory:
        with pytest.raises(DamagedError, match=r"table documents, document 1, .* is damaged: wrong address"):
            memory.document("whale")
        assert any("document" in finding.message.lower() for finding in memory.verify())
    with memstore.open(path) as memory:
        assert memory.repair().left == []
        check_content(memory.document("recovered-1"), TOKENS)
        check_content(memory.document("ship"), random_tokens(9, 5))


def test_a_lost_number_of_the_next_document_is_not_one(path: Path) -> None:
    with memstore.open(path) as memory:
        delete(NEXT_DOCUMENT)(store_of(memory))
        with pytest.raises(DamagedError, match=r"has lost the number of its next document; run repair"):
            append(memory.document("ship"), random_tokens(9, 5))
        assert memory.repair().left == []
        append(memory.document("ship"), random_tokens(9, 5))
        assert memory.verify() == []


def test_a_document_of_which_nothing_is_left_goes(path: Path) -> None:
    flip(path, b'"name": "whale"', 10)
    with memstore.open(path) as memory:
        delete(WHALE.tokens(0), WHALE.tokens(9))(store_of(memory))
        done = memory.repair()
        assert done.left == []
        assert memory.documents() == []


def test_what_cannot_be_put_right_is_named_and_left(path: Path) -> None:
    with memstore.open(path) as memory:
        put(Key(Table.META, item=20), Record.from_json({"kind": "arrays"}))(store_of(memory))
        done = memory.repair()
        assert done.steps == []
        assert [finding.kind for finding in done.left] == ["mismatch"]


def test_a_tree_that_cannot_be_walked_is_refused(path: Path) -> None:
    with memstore.open(path) as memory:
        crash = [Finding(kind="crash", message="ended by SIGBUS")]
        with pytest.raises(
            DamagedError, match=r"cannot be repaired in place: .* Save the readable part: memstore repair "
        ):
            Repair(memory._shared, memory.document, lambda: crash).run(dry_run=False)


def test_readers_cannot_repair(path: Path) -> None:
    with memstore.open(path, mode="r") as memory, pytest.raises(ReadOnlyMemory):
        memory.repair()


@pytest.mark.parametrize(("place", "bit"), [(1, 0), (12, 2), (14, 5)])  # number, number of pages
def test_a_large_value_that_names_pages_of_others_is_never_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, bit: int
) -> None:
    """LMDB believes the first page of a value, whose records are sound, and frees what it names."""
    monkeypatch.setattr("tests.memory.helpers.D", 64)
    path = tmp_path / "m"
    with memstore.open(path, spec=make_spec(fields={"k": (G, S, 64), "v": (G, S, 64)})) as memory:
        append(memory.document("whale"), TOKENS[:-1])
        append(memory.document("ship"), TOKENS)
    data = bytearray((path / "data.mdb").read_bytes())
    heads = {start: struct.unpack_from("<QHHI", data, start) for start in range(2 * 4096, len(data), 4096)}
    start = min(start for start, (own, _, flags, _) in heads.items() if (own, flags) == (start // 4096, 4))
    data[start + place] ^= 1 << bit
    (path / "data.mdb").write_bytes(data)
    with memstore.open(path) as memory:
        assert "names another page or another length" in memory.verify()[0].message
        for act in (memory.repair, lambda: memory.forget("whale"), lambda: memory.document("whale").truncate(0)):
            with pytest.raises(DamagedError, match=r"memstore repair .* --to NEW"):
                act()
        check_content(memory.document("ship"), TOKENS)
        append(memory.document("log"), TOKENS)  # frees no large value
        data = bytearray((path / "data.mdb").read_bytes())
        data[start + place] ^= 1 << bit
        with (path / "data.mdb").open("r+b") as file:
            file.write(data)
        memory.forget("whale")
        assert memory.verify() == []
        check_content(memory.document("ship"), TOKENS)
