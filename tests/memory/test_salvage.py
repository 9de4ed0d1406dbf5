"""What can be read of a memory that cannot be opened is saved into a new one, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import DamagedError, InvalidArgument
from memstore.memory.salvage import salvage
from tests.faults.lmdb_pages import PAGE
from tests.memory.helpers import S, append, make_spec, random_tokens, tokens_in_the_tree
from tests.memory.test_damage import flip
from tests.memory.test_dropping import check_without, lose
from tests.store.test_tree_damage import live_branches

pytestmark = pytest.mark.usefixtures("checked_here", "children_are_forks")

WHALE, SHIP = random_tokens(400 * S + 1), random_tokens(9, 5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of two documents, whose tree has branches."""
    path = tmp_path_factory.mktemp("salvage") / "whole"
    with tokens_in_the_tree(), memstore.open(path, spec=make_spec()) as memory:
        append(memory.document("whale"), WHALE)
        append(memory.document("ship"), SHIP)
        memory.put_arrays("router", {"w": torch.ones(3)})
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "m")
    return tmp_path / "m"


def harm(path: Path, place: int, value: bytes) -> None:
    """Write other bytes at a place of the data file."""
    with (path / "data.mdb").open("r+b") as file:
        file.seek(place)
        file.write(value)


def check_saved(target: Path, *, lost: bool) -> list[int]:
    """Everything in the new memory is right; the blocks that it lacks."""
    with memstore.open(target) as memory:
        assert memory.verify() == []
        check_without(memory.document("ship"), SHIP, [])
        assert torch.equal((memory.get_arrays("router") or {})["w"], torch.ones(3))
        whale = memory.document("whale")
        gone = [block for part in whale.dropped for block in part]
        check_without(whale, WHALE[: len(whale)], gone)
        missing = [*gone, *range(whale.n_blocks, 401)]
        assert bool(missing) == lost
        return missing


def test_a_sound_memory_is_saved_whole(path: Path, tmp_path: Path) -> None:
    saved = salvage(path, tmp_path / "new")
    assert [(each.document, each.tokens, each.tokens_lost) for each in saved] == [
        ("whale", len(WHALE), 0),
        ("ship", len(SHIP), 0),
    ]
    check_saved(tmp_path / "new", lost=False)
    with memstore.open(path) as old, memstore.open(tmp_path / "new") as new:
        assert old.document("whale").digest == new.document("whale").digest
    with pytest.raises(InvalidArgument, match="already holds a memory"):
        salvage(path, tmp_path / "new")


def test_pages_that_cannot_be_reached_cost_their_blocks_alone(path: Path, tmp_path: Path) -> None:
    """A page of the tree that leads outside of the file: it ends who follows it, or is refused by LMDB itself."""
    data = (path / "data.mdb").read_bytes()
    number, page = next(iter(live_branches(path).items()))
    count = (int.from_bytes(page[12:14], "little") - 16) // 2
    node = 16 + 2 * (count // 2)
    place = int.from_bytes(page[node : node + 2], "little")
    harm(path, number * PAGE + place, b"\xff\xff\xff\x00")
    damaged = (path / "data.mdb").read_bytes()
    assert damaged != data
    with pytest.raises(DamagedError, match=r"is damaged: .* Nothing was read from it.* memstore repair .*m --to NEW"):
        memstore.open(path)
    saved = salvage(path, tmp_path / "new")
    lost = check_saved(tmp_path / "new", lost=True)
    assert 0 < len(lost) < 400
    told = {each.document: (each.tokens, each.tokens_lost) for each in saved}
    assert told["ship"] == (len(SHIP), 0)
    assert sum(told["whale"]) == len(WHALE)
    assert "block" in saved[0].message
    assert (path / "data.mdb").read_bytes() == damaged


def test_blocks_that_were_dropped_long_ago_are_dropped_in_the_new_memory_too(path: Path, tmp_path: Path) -> None:
    with memstore.open(path) as memory:
        lose(memory, 3, 4, 200)
    saved = {each.document: (each.tokens, each.tokens_lost) for each in salvage(path, tmp_path / "new")}
    assert saved == {"whale": (len(WHALE) - 3 * S, 0), "ship": (len(SHIP), 0)}
    with memstore.open(tmp_path / "new") as memory:
        check_without(memory.document("whale"), WHALE, [3, 4, 200])
        assert memory.verify() == []


def test_a_lost_entry_costs_the_name_alone(path: Path, tmp_path: Path) -> None:
    flip(path, b'"name": "whale"', 10)
    saved = salvage(path, tmp_path / "new")
    assert {each.document: each.tokens for each in saved} == {"recovered-1": len(WHALE), "ship": len(SHIP)}


def test_a_new_name_is_not_that_of_another_document(tmp_path: Path) -> None:
    path = tmp_path / "named"
    with memstore.open(path, spec=make_spec()) as memory:
        append(memory.document("whale"), SHIP)
        append(memory.document("recovered-1"), WHALE[: 9 * S])
    flip(path, b'"name": "whale"', 10)
    saved = salvage(path, tmp_path / "new")
    assert {each.document: each.tokens for each in saved} == {"recovered-1": 9 * S, "recovered-2": len(SHIP)}
    with memstore.open(tmp_path / "new") as memory:
        check_without(memory.document("recovered-1"), WHALE[: 9 * S], [])
        check_without(memory.document("recovered-2"), SHIP, [])


def test_a_memory_without_header_is_not_guessed_at(path: Path, tmp_path: Path) -> None:
    flip(path, b'"blocks_per_run"')
    with pytest.raises(DamagedError):
        salvage(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_zarr_memory_is_saved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "z"
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 1 << 12)
    with memstore.open(f"zarr:{path}", spec=make_spec()) as memory:
        append(memory.document("whale"), WHALE)
        append(memory.document("ship"), SHIP)
        memory.put_arrays("router", {"w": torch.ones(3)})
    shards = [file for file in (path / "blocks").rglob("*") if file.is_file() and file.name != "zarr.json"]
    shard = sorted(shards)[len(shards) // 2]
    shard.write_bytes(b"")
    salvage(f"zarr:{path}", tmp_path / "new")
    assert 0 < len(check_saved(tmp_path / "new", lost=True)) < 400
