"""Indexes that are kept beside the store: used where they fit, and built anew from the store wherever they do not."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import memstore
from memstore.errors import ReadOnlyMemory
from memstore.index import ExactIndex, VectorIndex
from memstore.memory import Memory
from memstore.memory.verify import damaged_indexes
from memstore.testing.indexes import brute_force, small_integers
from tests.memory.helpers import KEY_DIM, G, S, append, in_blocks, landmarks, make_spec, random_tokens

pytestmark = pytest.mark.usefixtures("children_are_forks")

TOKENS = random_tokens(400)
KINDS = ["exact", "faiss:Flat"]


@pytest.fixture(autouse=True)
def every_index_is_worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.memory.view.WORTH_KEEPING", 1)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks were added to indexes from the store, addition by addition."""
    added: list[int] = []
    add = ExactIndex.add

    def counted(self: ExactIndex, ids: torch.Tensor, keys: torch.Tensor) -> None:
        added.append(len(ids))
        add(self, ids, keys)

    monkeypatch.setattr(ExactIndex, "add", counted)
    return added


def make(url: str, index: str = "exact", *, tokens: torch.Tensor = TOKENS) -> None:
    with memstore.open(url, spec=make_spec(), index=index) as memory:
        append(memory.document("a"), tokens)
        memory.build_indexes()


def check_search(memory: Memory, tokens: torch.Tensor = TOKENS, first: int = 0) -> None:
    """Searching finds what brute force over the landmarks of ``tokens`` finds."""
    queries = small_integers(2 * G, 3, KEY_DIM, seed=1)
    for layer in (0, 2):
        keys = landmarks(in_blocks(tokens[: len(tokens) // S * S]), layer)
        blocks = torch.arange(first, first + len(keys) - first)
        found = memory.document("a").layer(layer).search(queries, 5)
        expected = brute_force(blocks, keys[first:], queries, 5)
        assert torch.equal(found.scores, expected.scores)
        assert torch.equal(found.blocks, expected.ids)


@pytest.mark.parametrize("scheme", ["", "zarr:"])
@pytest.mark.parametrize("index", KINDS)
def test_the_next_process_finds_them_and_builds_nothing(
    tmp_path: Path, built: list[int], index: str, scheme: str
) -> None:
    url = f"{scheme}{tmp_path / 'm'}"
    make(url, index)
    built.clear()
    with memstore.open(url, mode="r", index=index) as memory:
        check_search(memory)
    assert built == []


def test_closing_keeps_what_was_searched(tmp_path: Path, built: list[int]) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), TOKENS)
        check_search(memory)
    built.clear()
    with memstore.open(tmp_path / "m") as memory:
        check_search(memory)
    assert built == []


@pytest.mark.parametrize("change", ["add", "remove", "load"])
def test_after_an_interrupted_change_an_index_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(capacity=60)) as memory:
        append(memory.document("a"), TOKENS[:200])
        memory.build_indexes()
    with memstore.open(tmp_path / "m") as memory, monkeypatch.context() as patched:
        if change != "load":
            check_search(memory, TOKENS[:200])
        append(memory.document("a"), TOKENS[200:])
        real = getattr(ExactIndex, change)

        def interrupted(*arguments: object) -> None:
            patched.undo()
            real(*arguments)
            raise KeyboardInterrupt

        patched.setattr(ExactIndex, change, interrupted)
        with pytest.raises(KeyboardInterrupt):
            check_search(memory, first=40)
        check_search(memory, first=40)


def test_what_was_appended_since_is_added_from_the_store(tmp_path: Path, built: list[int]) -> None:
    url = str(tmp_path / "m")
    make(url, tokens=TOKENS[:200])
    with memstore.open(url) as memory:
        append(memory.document("a"), TOKENS[200:])
    built.clear()
    with memstore.open(url, mode="r") as memory:
        check_search(memory)
    assert built == [50, 50]


def test_blocks_that_left_since_are_not_found(tmp_path: Path, built: list[int]) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(capacity=60)) as memory:
        append(memory.document("a"), TOKENS[:200])
        memory.build_indexes()
        append(memory.document("a"), TOKENS[200:])
        check_search(memory, first=40)
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_search(memory, first=40)


def other_landmarks(folder: Path) -> None:
    """Another memory of the same model and size, read with other keys, comes to lie under the old indexes."""
    shutil.move(folder / "index", folder.parent / "index")
    shutil.rmtree(folder)
    with memstore.open(folder, spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(400, seed=5))
    shutil.move(folder.parent / "index", folder / "index")


def truncated(folder: Path) -> None:
    shutil.copytree(folder / "index", folder.parent / "kept")
    with memstore.open(folder) as memory:
        memory.document("a").truncate(10)
        append(memory.document("a"), random_tokens(360, seed=6))
    shutil.rmtree(folder / "index")
    shutil.move(folder.parent / "kept", folder / "index")


def flip_a_bit(folder: Path) -> None:
    for file in (folder / "index").glob("*.index"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)


def cut_short(folder: Path) -> None:
    for file in (folder / "index").glob("*.index"):
        os.truncate(file, file.stat().st_size // 2)


def lose_the_index(folder: Path) -> None:
    for file in (folder / "index").glob("*.index"):
        file.unlink()


def lie_about_the_range(folder: Path) -> None:
    for file in (folder / "index").glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"stop": 99}))


def write_nonsense(folder: Path) -> None:
    for file in (folder / "index").glob("*.json"):
        file.write_text("[1, 2")


DAMAGE: list[Callable[[Path], None]] = [flip_a_bit, cut_short, lose_the_index, lie_about_the_range, write_nonsense]


@pytest.mark.parametrize("harm", DAMAGE)
@pytest.mark.parametrize("index", KINDS)
def test_a_damaged_index_is_built_anew(
    tmp_path: Path, built: list[int], harm: Callable[[Path], None], index: str
) -> None:
    make(str(tmp_path / "m"), index)
    harm(tmp_path / "m")
    built.clear()
    with memstore.open(tmp_path / "m", index=index) as memory:
        check_search(memory)
        memory.build_indexes()
    assert built == [100, 100]
    with memstore.open(tmp_path / "m", mode="r", index=index) as memory:
        check_search(memory)
    assert built == [100, 100]


@pytest.mark.parametrize("harm", DAMAGE)
@pytest.mark.parametrize("index", KINDS)
def test_damage_to_an_index_is_named(tmp_path: Path, harm: Callable[[Path], None], index: str) -> None:
    make(str(tmp_path / "m"), index)
    assert damaged_indexes(str(tmp_path / "m")) == []
    harm(tmp_path / "m")
    assert [finding.kind for finding in damaged_indexes(str(tmp_path / "m"))] == ["index", "index"]


def test_repair_removes_a_damaged_index(tmp_path: Path) -> None:
    url = f"zarr:{tmp_path / 'm'}"
    make(url)
    flip_a_bit(tmp_path / "m")
    with memstore.open(url) as memory:
        done = memory.repair()
        assert [step.tokens_lost for step in done.steps] == [0, 0]
        assert done.left == []
        check_search(memory)


def test_whoever_may_read_the_memory_may_read_its_index(tmp_path: Path) -> None:
    make(str(tmp_path / "m"))
    rights = {path.stat().st_mode & 0o777 for path in (tmp_path / "m" / "index").iterdir()}
    assert rights == {(tmp_path / "m" / "data.mdb").stat().st_mode & 0o777}


def test_the_index_of_another_memory_is_not_used(tmp_path: Path) -> None:
    make(str(tmp_path / "m"))
    other_landmarks(tmp_path / "m")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_search(memory, random_tokens(400, seed=5))


@pytest.mark.parametrize("index", [*KINDS, "clusters"])
def test_the_index_of_a_text_that_differs_in_one_block_is_not_used(tmp_path: Path, index: str) -> None:
    """Not of one whose landmarks are looked at before a file is used: the history of the document says it."""
    other = TOKENS.clone()
    other[30 * S : 31 * S] = random_tokens(S, seed=9)
    make(str(tmp_path / "other"), index, tokens=other)
    make(str(tmp_path / "m"), index)
    shutil.rmtree(tmp_path / "m" / "index")
    shutil.copytree(tmp_path / "other" / "index", tmp_path / "m" / "index")
    with memstore.open(tmp_path / "m", mode="r", index=index) as memory:
        check_search(memory)


def test_the_index_of_a_document_that_was_truncated_since_is_not_used(tmp_path: Path) -> None:
    make(str(tmp_path / "m"))
    truncated(tmp_path / "m")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_search(memory, torch.cat([TOKENS[:40], random_tokens(360, seed=6)]))


def test_forgetting_and_compacting_remove_what_knew_of_it(tmp_path: Path) -> None:
    make(str(tmp_path / "m"))
    with memstore.open(tmp_path / "m") as memory:
        append(memory.document("b"), TOKENS)
        memory.build_indexes()
        assert len(list((tmp_path / "m" / "index").glob("*.index"))) == 4
        memory.forget("a")
        assert len(list((tmp_path / "m" / "index").glob("*.index"))) == 2
        memory.document("b").truncate(3)
        memory.compact()
        assert list((tmp_path / "m" / "index").iterdir()) == []


@pytest.mark.parametrize("index", KINDS)
def test_an_index_is_kept_while_another_thread_appends_and_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    """It begins when the index is complete, and again when the first bytes of the file are there."""
    monkeypatch.setattr("memstore.memory.spec.RUN_BYTES", 256)  # landmarks of one block, so that they leave at once
    with memstore.open(tmp_path / "m", spec=make_spec(capacity=60), index=index) as memory:
        append(memory.document("a"), TOKENS[:200])
        append(memory.document("b"), TOKENS)
        layer = memory.document("a").layer(0).index
        assert layer is not None
        jobs: list[threading.Thread] = []

        def meanwhile(work: Callable[[], None]) -> None:
            jobs.append(threading.Thread(target=work))
            jobs[-1].start()
            jobs[-1].join(0.5)  # it cannot end where it has to wait for the file

        kind = type(memory._shared.new_index())
        finish, save_file = kind.finish, safetensors.torch.save_file

        def finishing(self: VectorIndex) -> None:
            finish(self)
            if not jobs:
                meanwhile(lambda: append(memory.document("a"), TOKENS[200:]))

        def saving(*arguments: Any, **options: Any) -> None:
            save_file(*arguments, **options)
            if len(jobs) == 1:
                meanwhile(lambda: memory.forget("b"))

        monkeypatch.setattr(kind, "finish", finishing)
        monkeypatch.setattr("safetensors.torch.save_file", saving)
        layer.build()
        for job in jobs:
            job.join()
        assert [document.name for document in memory.documents()] == ["a"]
        assert len(jobs) == 2
        assert len(list((tmp_path / "m" / "index").glob("*.json"))) == 1
        check_search(memory, first=40)
    with memstore.open(tmp_path / "m", mode="r", index=index) as memory:
        check_search(memory, first=40)


def test_an_index_whose_blocks_have_left_is_closed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.memory.spec.RUN_BYTES", 256)
    with memstore.open(tmp_path / "m", spec=make_spec(capacity=60)) as memory:
        append(memory.document("a"), TOKENS[:200])
        check_search(memory, TOKENS[:200])
        append(memory.document("a"), TOKENS[200:])
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert len(memory.stats()["indexes"]) == 2
        check_search(memory, first=40)


def test_a_reader_keeps_nothing(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), TOKENS)
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_search(memory)
        with pytest.raises(ReadOnlyMemory):
            memory.build_indexes()
    assert not (tmp_path / "m" / "index").exists()


def test_no_room_for_an_index_closes_the_memory_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: ExactIndex, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ExactIndex, "save", full)
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), TOKENS)
        check_search(memory)
    assert "No space left" in caplog.text
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_search(memory)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("index", ["exact", "faiss:Flat", "clusters", "codes"])
def test_without_room_for_an_index_a_memory_is_closed_all_the_same(tmp_path: Path, index: str) -> None:
    memory = memstore.open(tmp_path / "m", spec=make_spec(), index=index)
    append(memory.document("a"), TOKENS)
    check_search(memory)
    with full_disk():
        with pytest.raises(OSError, match=r"cannot be written .File too large.*Free some space"):
            memory.build_indexes()
        memory.close()
    assert list((tmp_path / "m" / "index").iterdir()) == []
    with memstore.open(tmp_path / "m", index=index) as memory:  # nobody holds it
        check_search(memory)


def test_what_a_killed_process_left_unfinished_goes_with_the_document(tmp_path: Path) -> None:
    make(str(tmp_path / "m"))
    stem = "1-0-0123abcd-0123456789abcdef"
    for name in (".tmpa1B2c3", f"{stem}.index.77.partial", f"{stem}.partial", f".{stem}.json.part"):
        (tmp_path / "m" / "index" / name).write_text("landmarks")
    with memstore.open(tmp_path / "m") as memory:
        memory.forget("a")
    assert list((tmp_path / "m" / "index").iterdir()) == []


def test_stats_tell_of_every_kept_index_whatever_the_memory_is_opened_with(tmp_path: Path) -> None:
    make(str(tmp_path / "m"), "codes")
    with memstore.open(tmp_path / "m", index="auto") as memory:
        memory.build_indexes()
        told = [(each["index"], each["layer"]) for each in memory.stats()["indexes"]]
    assert sorted(told) == [("auto", 0), ("auto", 2), ("codes", 0), ("codes", 2)]


def test_stats_do_without_an_index_that_goes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(str(tmp_path / "m"))
    with (
        memstore.open(tmp_path / "m") as writer,
        memstore.open(tmp_path / "m", mode="r") as reader,
        monkeypatch.context() as patched,
    ):
        lstat = Path.lstat

        def late(self: Path) -> os.stat_result:
            if self.suffix == ".index":
                patched.undo()
                writer.forget("a")
            return lstat(self)

        patched.setattr(Path, "lstat", late)
        assert reader.stats()["indexes"] == []
        assert writer.documents() == []


def test_stats_tell_the_index_and_its_recall_also_where_nobody_has_searched(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), index="faiss:Flat") as memory:
        append(memory.document("a"), TOKENS)
        memory.document("a").layer(0).search(small_integers(G, 3, KEY_DIM), 3)
        memory.build_indexes()
    with memstore.open(tmp_path / "m", mode="r", index="faiss:Flat") as memory:
        told = {each["layer"]: each for each in memory.stats()["indexes"]}
    assert told.keys() == {0, 2}
    assert told[0]["kind"] == "faiss"
    assert told[0]["recall"] == told[2]["recall"] == 1.0
    assert (told[0]["recall_queries"], told[2]["recall_queries"]) == ("logged", "keys")
    assert told[0]["blocks"] == 100
    assert told[0]["file_bytes"] > 0
