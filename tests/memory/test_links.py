"""Links, pipes and folders under names of ours: nothing outside of a memory's folder is read as ours, or changed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import memstore
from memstore import paths
from memstore.errors import MemstoreError, NotAMemory, ReadOnlyMemory
from memstore.memory import Memory, index_files
from memstore.memory.export import export_memory, export_table, import_memory
from memstore.memory.urls import Mode
from memstore.store.zarr import store as zarr
from memstore.testing.indexes import small_integers
from tests.memory.helpers import KEY_DIM, G, append, check_content, make_spec, random_tokens
from tests.memory.test_traces import record

TOKENS = random_tokens(22)
SHARD_BYTES = 200  # a few blocks
OUTSIDE = (
    "file",
    "folder/package.json",
    "folder/notes.index",
    "folder/draft.partial",
    "folder/.tmp-notes",
    "folder/photos/one.jpg",
    "folder/zarr.json",
    "folder/data.mdb",
    "folder/1-0-0123abcd-0123456789abcdef.json",
    "folder/1.0.77/0/c.0.0.0",
    "folder/0/c.0.0.0",
    "folder/c.9.0.0.0",
)
OUR_FOLDERS = ("tail", "blocks", "index", "blocks/1.0.1", "blocks/1.0.1/0", "blocks/9.0.9")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, checked_here: None) -> None:
    monkeypatch.setattr("memstore.memory.view.WORTH_KEEPING", 1)
    monkeypatch.setattr(zarr, "SHARD_BYTES", SHARD_BYTES)


@pytest.fixture(scope="module", params=["", "zarr:"], ids=["lmdb", "zarr"])
def scheme(request: pytest.FixtureRequest) -> str:
    text: str = request.param
    return text


@pytest.fixture(scope="module")
def whole(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with an index and a trace."""
    folder = tmp_path_factory.mktemp("whole") / "m"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.memory.view.WORTH_KEEPING", 1)
        patch.setattr(zarr, "SHARD_BYTES", SHARD_BYTES)
        with memstore.open(f"{scheme}{folder}", spec=make_spec()) as memory:
            append(memory.document("a"), TOKENS)
            append(memory.document("b"), TOKENS)
            memory.build_indexes()
            record(memory)
    return folder


def names_of(folder: Path) -> list[str]:
    """Every name of ours in a memory: what is there, and what would be made."""
    found = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))]
    # One extent, one shard and one index stand for all of them.
    found = [name for name in found if not name.startswith("blocks/") or name in OUR_FOLDERS or "0.1/0/" in name]
    found = [name for name in found if not re.match(r"blocks/.*/c\.[1-9]|index/(2|1-2)", name)]
    tail = "tail/" if (folder / "tail").exists() else ""
    pid = os.getpid()
    parts = [f"{tail}{name}" for name in ("writer.json", f"writer.json.{pid}", ".writer.json.part", "reserve")]
    parts += [f"{tail}data.mdb.part", *(f"traces.sqlite{end}" for end in ("-wal", "-shm", "-journal"))]
    if tail:
        found += [f"blocks/{name}" for name in ("zarr.json", "1.0.1/zarr.json")]
        shard = next(name for name in found if name.startswith("blocks/1.0.1/0/c."))
        above, _, last = shard.rpartition("/")
        parts += [".zarr.json.part", "blocks/.zarr.json.part", f"{above}/.{last}.part", "blocks/9.0.9"]
    kept = next(name for name in found if name.startswith("index/") and name.endswith(".index"))
    parts += [f"{kept}.{pid}.partial", f".{kept.removeprefix('index/')}.part", "index/.tmpA1b2C3"]
    return sorted({*found, *parts})


def outside(root: Path) -> Path:
    """A folder with files of somebody else."""
    for name in OUTSIDE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"somebody else's {name}")
    return root


def listed(root: Path) -> dict[str, tuple[int, bytes]]:
    """Time of change and content of everything below a folder."""
    return {
        path.relative_to(root).as_posix(): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [root, *root.rglob("*")]
    }


def exchange(path: Path, kind: str, elsewhere: Path) -> None:
    """Put something else in the place of a name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere / kind)


def verbs(url: str, other: str, new: Path) -> list[Callable[[], object]]:
    """All that can be done with the memory at ``url``; ``other`` is a whole one."""

    def opened(mode: Mode, work: Callable[[Memory], object]) -> Callable[[], object]:
        def do() -> None:
            with memstore.open(url, mode=mode, spec=None if mode == "r" else make_spec()) as memory:
                work(memory)

        return do

    def read(memory: Memory) -> None:
        for document in memory.documents():
            check_content(document, TOKENS)

    def search(memory: Memory) -> None:
        for layer in (0, 2):
            memory.document("a").layer(layer).search(small_integers(2 * G, 3, KEY_DIM, seed=1), 5)

    def grow(memory: Memory) -> None:
        memory.document("a").truncate(4)
        memory.document("b").truncate(1)
        append(memory.document("c"), TOKENS)

    return [
        opened("r", read),
        opened("r", search),
        opened("r", lambda memory: (memory.stats(), memory.verify())),
        opened("r", lambda memory: [list(trace.steps()) for trace in memory.traces.list()]),
        opened("r", record),
        lambda: export_memory(url, new / "export"),
        lambda: memstore.copy(url, new / "copy"),
        opened("r", lambda memory: export_table(memory, new / "table.parquet")),
        opened("a", lambda memory: None),
        opened("a", search),
        opened("a", grow),
        opened("a", lambda memory: memory.build_indexes()),
        opened("a", lambda memory: memory.forget("b")),
        opened("a", record),
        opened("a", lambda memory: memory.traces.remove(1)),
        opened("a", lambda memory: memory.repair()),
        opened("a", lambda memory: memory.compact()),
        lambda: memstore.copy(other, url),
        opened("x", grow),
    ]


def do_all(url: str, other: str, new: Path) -> None:
    for verb in verbs(url, other, new):
        with suppress(MemstoreError):
            verb()


def test_nothing_behind_a_name_of_ours_is_changed(whole: Path, scheme: str, tmp_path: Path) -> None:
    elsewhere = outside(tmp_path / "outside")
    before = listed(elsewhere)
    names = names_of(whole)
    if scheme:  # what is beside the store is the same beside each: the memory in LMDB tries it
        names = [name for name in names if not name.startswith(("index/", ".traces", "traces", "."))]
    for name in names:
        for kind in ("folder",) if name in OUR_FOLDERS else ("file", "pipe", *["nothing"] * (name in paths.FILES)):
            place = tmp_path / "m"
            shutil.copytree(whole, place)
            exchange(place / name, kind, elsewhere)
            (tmp_path / "new").mkdir()
            do_all(f"{scheme}{place}", f"{scheme}{whole}", tmp_path / "new")
            assert listed(elsewhere) == before, f"{name}: {kind}"
            shutil.rmtree(place)
            shutil.rmtree(tmp_path / "new")


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_link_is_refused_by_its_name(whole: Path, scheme: str, tmp_path: Path, mode: Mode) -> None:
    elsewhere = outside(tmp_path / "outside")
    tail = ("tail/data.mdb", "tail/lock.mdb", "tail/reserve", "tail/writer.json") if scheme else ()
    for name in (*paths.FILES, *tail, *paths.FOLDERS):
        place = tmp_path / "m"
        shutil.copytree(whole, place)
        exchange(place / name, "folder" if name in paths.FOLDERS else "file", elsewhere)
        if scheme or name != "tail":
            with pytest.raises(NotAMemory, match=f"{name} is a symbolic link"):
                memstore.open(f"{scheme}{place}", mode=mode)
        shutil.rmtree(place)


def test_the_folder_of_a_memory_may_be_a_link(whole: Path, scheme: str, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "m")
    (tmp_path / "link").symlink_to("m")
    with memstore.open(f"{scheme}{tmp_path / 'link'}", mode="a") as memory:
        check_content(memory.document("a"), TOKENS)
        append(memory.document("c"), TOKENS)
        record(memory)
        memory.forget("b")
        memory.compact()
    with memstore.open(f"{scheme}{tmp_path / 'm'}", mode="r") as memory:
        check_content(memory.document("c"), TOKENS)
        assert memory.verify() == []


def test_files_of_the_user_in_our_folders_stay(whole: Path, scheme: str, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "m")
    own = ["index/package.json", "index/a.index", "index/b.partial", "index/.tmp-notes", "index/photos/a.index"]
    if scheme:
        own += ["blocks/notes", "blocks/photos/c.0", "blocks/1.0.1/notes", "blocks/1.0.1/0/notes", "blocks/9.9.9/notes"]
    for name in own:
        (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_text("mine")
    do_all(f"{scheme}{tmp_path / 'm'}", f"{scheme}{whole}", tmp_path)
    with memstore.open(f"{scheme}{tmp_path / 'm'}", mode="a") as memory:
        for document in memory.documents():
            memory.forget(document.name)
    left = {path.relative_to(tmp_path / "m").as_posix() for path in (tmp_path / "m").rglob("*") if path.is_file()}
    assert set(own) <= left
    assert not [name for name in left - set(own) if name.startswith(("index/", "blocks/1"))]


def test_an_export_is_written_and_read_without_links(whole: Path, scheme: str, tmp_path: Path) -> None:
    url, elsewhere = f"{scheme}{whole}", outside(tmp_path / "outside")
    (elsewhere / "folder" / "export.lock").touch()  # so that it looks like an export under way
    before = listed(elsewhere)
    (tmp_path / "one.incomplete").symlink_to(elsewhere / "folder")
    with pytest.raises(NotAMemory, match="is a symbolic link"):
        export_memory(url, tmp_path / "one")
    (tmp_path / "two.incomplete").mkdir()
    for name in ("export.lock", "manifest.json", "document-0001-000001.safetensors"):
        (tmp_path / "two.incomplete" / name).symlink_to(elsewhere / "file")
    with pytest.raises(NotAMemory, match="is a symbolic link"):
        export_memory(url, tmp_path / "two")
    (tmp_path / "two.incomplete" / "export.lock").unlink()
    (tmp_path / "two.incomplete" / "export.lock").touch()
    export_memory(url, tmp_path / "two")
    with memstore.open(url, mode="r") as memory:
        (tmp_path / "table.parquet.incomplete").symlink_to(elsewhere / "file")
        export_table(memory, tmp_path / "table.parquet")
    assert listed(elsewhere) == before
    file = next((tmp_path / "two").glob("document-*"))
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    with pytest.raises(NotAMemory, match="is a symbolic link"):
        import_memory(tmp_path / "two", tmp_path / "m")


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "reserve", "writer.lock"])
def test_a_file_with_a_second_name_is_not_written(whole: Path, scheme: str, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole, tmp_path / "m")
    (file,) = (tmp_path / "m").rglob(name)
    other = tmp_path / "other"
    os.link(file, other)
    before = other.read_bytes()
    with pytest.raises(ReadOnlyMemory, match=re.escape(f"{file} has several names")):
        memstore.open(f"{scheme}{tmp_path / 'm'}")
    with memstore.open(f"{scheme}{tmp_path / 'm'}", mode="r") as memory:
        check_content(memory.document("a"), TOKENS)
        assert memory.verify() == []
    assert other.read_bytes() == before
    other.unlink()
    memstore.open(f"{scheme}{tmp_path / 'm'}").close()


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_the_name_under_which_a_file_was_made_is_no_second_one(
    whole: Path, scheme: str, tmp_path: Path, name: str
) -> None:
    shutil.copytree(whole, tmp_path / "m")
    (file,) = (tmp_path / "m").rglob(name)
    os.link(file, file.with_name(f"{name}.0123abcd"))  # as it is left where its maker was killed
    memstore.open(f"{scheme}{tmp_path / 'm'}").close()
    os.link(file, tmp_path / "other")
    with pytest.raises(ReadOnlyMemory, match="several names"):
        memstore.open(f"{scheme}{tmp_path / 'm'}")


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_traces_with_a_second_name_are_not_written(whole: Path, scheme: str, tmp_path: Path, end: str) -> None:
    shutil.copytree(whole, tmp_path / "m")
    (tmp_path / "m" / f"traces.sqlite{end}").touch()
    os.link(tmp_path / "m" / f"traces.sqlite{end}", tmp_path / "other")
    before = (tmp_path / "other").read_bytes()
    with (
        memstore.open(f"{scheme}{tmp_path / 'm'}") as memory,
        pytest.raises(ReadOnlyMemory, match="several names"),
    ):
        record(memory)
    assert (tmp_path / "other").read_bytes() == before


def test_folders_deeper_than_ours_are_not_walked(tmp_path: Path) -> None:
    place = "blocks/1.0.1/0"
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "c.0.0.0").touch()
    (tmp_path / place / "deep/deep/deep").mkdir(parents=True)
    for bottom_up in (False, True):
        found = {name: files for name, _, files, _ in paths.walk(tmp_path, "blocks", bottom_up=bottom_up)}
        assert found == {"blocks": [], "blocks/1.0.1": [], place: ["c.0.0.0"], f"{place}/deep": []}


def test_a_folder_in_place_of_an_index_stays(tmp_path: Path) -> None:
    (tmp_path / "1-0.index").mkdir()
    (tmp_path / "1-0.json").touch()
    index_files.remove(tmp_path / "1-0.json")
    assert [file.name for file in tmp_path.iterdir()] == ["1-0.index"]
