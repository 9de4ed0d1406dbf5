from __future__ import annotations

import os
import shutil
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import lmdb
import pytest

import memstore
from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
)
from memstore.memory import urls
from memstore.memory.entry import HEADER
from memstore.memory.spec import read_header
from memstore.memory.urls import Mode, NewMemory, OpenStore
from memstore.store import Batch, Record
from memstore.store.ram import RamStore
from tests.memory.helpers import append, check_content, make_fingerprint, make_spec, random_tokens


def test_a_memory_is_made_then_opened_with_and_without_its_spec(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where"
    with memstore.open(path, spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(9))
    for arguments in ({}, {"spec": make_spec()}, {"mode": "r"}, {"mode": "r", "spec": make_spec()}):
        with memstore.open(str(path), **arguments) as memory:
            assert memory.spec == make_spec()
            assert memory.url == str(path)
            check_content(memory.document("a"), random_tokens(9))


def test_a_folder_is_known_from_another_one_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with urls.OpenFolder(str(tmp_path / "m")) as opened, urls.OpenFolder("ram:") as nowhere:
        opened.check()
        nowhere.check()
        (tmp_path / "m").rename(tmp_path / "away")
        with pytest.raises(NotFound, match="was removed or replaced"):
            opened.check()
        (tmp_path / "m").mkdir()
        with pytest.raises(NotFound, match="was removed or replaced"):
            opened.check()
        (tmp_path / "m").rmdir()
        (tmp_path / "away").rename(tmp_path / "m")
        opened.check()


def test_a_missing_memory_is_not_found_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "nothing"
    with pytest.raises(NotFound, match="check the path, or pass a spec to create it"):
        memstore.open(path)
    for spec in (None, make_spec()):
        with pytest.raises(NotFound, match=str(path)):
            memstore.open(path, spec=spec, mode="r")
    assert not path.exists()


def test_mode_x_only_creates(tmp_path: Path) -> None:
    memstore.open(tmp_path / "m", spec=make_spec(), mode="x").close()
    with pytest.raises(InvalidArgument, match="already"):
        memstore.open(tmp_path / "m", spec=make_spec(), mode="x")
    with pytest.raises(InvalidArgument, match="needs a spec"):
        memstore.open(tmp_path / "other", mode="x")
    with pytest.raises(InvalidArgument, match="mode must be"):
        memstore.open(tmp_path / "other", mode="w")  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [None, make_spec()])
@pytest.mark.parametrize("mode", ["a", "r"])
def test_what_is_no_memory_is_left_alone(tmp_path: Path, spec: Any, mode: Mode) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("text")
    lmdb.open(str(tmp_path / "lmdb")).close()
    for name in ("file", "folder"):
        with pytest.raises(NotAMemory):
            memstore.open(tmp_path / name, spec=spec, mode=mode)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.tex"]


def test_an_empty_folder_becomes_a_memory(tmp_path: Path) -> None:
    with memstore.open(tmp_path, spec=make_spec()) as memory:
        assert memory.documents() == []


def test_a_foreign_fingerprint_is_named_word_by_word(tmp_path: Path) -> None:
    memstore.open(tmp_path / "m", spec=make_spec()).close()
    other = make_spec(fingerprint=make_fingerprint(weights="91bc", positions="alibi"), capacity=9)
    with pytest.raises(ForeignMemory) as raised:
        memstore.open(tmp_path / "m", spec=other)
    assert str(raised.value) == (
        f"memory {tmp_path / 'm'} does not fit this model or these settings: weights: 91bc here, "
        "3fa2 in the memory; positions: alibi here, rope in the memory; capacity: 9 here, None in the memory. Its "
        "states are not used. Open it with the model and settings that it was made with, or make a new memory at "
        "another path."
    )
    memstore.open(tmp_path / "m", spec=make_spec()).close()  # the lock was released


@pytest.mark.parametrize("url", ["{}", "zarr:{}"])
def test_what_goes_wrong_while_a_memory_is_opened_is_about_its_url(tmp_path: Path, url: str) -> None:
    url = url.format(tmp_path / "m")
    data = tmp_path / "m" / ("data.mdb" if url.startswith("/") else "tail/data.mdb")

    def refused(kind: type[MemstoreError], **arguments: Any) -> None:
        with pytest.raises(kind) as raised:
            memstore.open(url, **arguments)
        assert (raised.value.code, raised.value.memory) == (kind.code, url)

    refused(NotFound, mode="r")
    memstore.open(url, spec=make_spec()).close()
    refused(ForeignMemory, spec=make_spec(capacity=9))
    with memstore.open(url):
        refused(MemoryInUse)
    os.truncate(data, 100)
    refused(DamagedError)
    shutil.rmtree(tmp_path / "m")
    (tmp_path / "m").write_text("text")
    refused(NotAMemory, spec=make_spec())
    with pytest.raises(InvalidArgument) as raised:
        memstore.open(url, mode="w")  # type: ignore[arg-type]
    assert raised.value.memory is None


def test_a_key_file_that_is_missing_is_no_memory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no key file") as raised:
        memstore.open(tmp_path / "m", spec=make_spec(), key=tmp_path / "key")
    assert raised.value.memory is None


def test_only_one_writer_but_readers_beside_it(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as writer:
        with pytest.raises(MemoryInUse):
            memstore.open(tmp_path / "m")
        with memstore.open(tmp_path / "m", mode="r") as reader:
            append(writer.document("a"), random_tokens(9))
            check_content(reader.document("a"), random_tokens(9))
            append(writer.document("a"), random_tokens(9, 1)[:3])
            assert len(reader.document("a")) == 12
            writer.forget("a")
            with pytest.raises(NotFound, match="forgotten"):
                len(reader.documents()[0] if reader.documents() else reader._documents["a"])


def test_a_closed_memory_says_so(tmp_path: Path) -> None:
    for url in ("ram:", tmp_path / "m"):
        memory = memstore.open(url, spec=make_spec())
        memory.close()
        memory.close()
        with pytest.raises(InvalidArgument, match="closed"):
            memory.documents()


def test_ram_memories_are_fresh_and_named_ones_are_shared() -> None:
    with memstore.open("ram:", spec=make_spec()) as first, memstore.open("ram:", spec=make_spec()) as second:
        append(first.document("a"), [1])
        assert second.documents() == []
    with pytest.raises(NotFound, match="ram:books"):
        memstore.open("ram:books", mode="r")
    with memstore.open("ram:books", spec=make_spec()) as first, memstore.open("ram:books") as second:
        document = second.document("a")
        append(first.document("a"), random_tokens(9))
        check_content(document, random_tokens(9))
        append(document, random_tokens(5, 1))
        append(first.document("b"), random_tokens(5, 1))
        assert [document.name for document in second.documents()] == ["a", "b"]
    with memstore.open("ram:books", mode="r") as again:
        assert len(again.document("a")) == 14
    with pytest.raises(InvalidArgument, match="exists already"):
        memstore.open("ram:books", spec=make_spec(), mode="x")
    with pytest.raises(ForeignMemory, match="layers: 5 here, 3 in the memory"):
        memstore.open("ram:books", spec=make_spec(layers=5))


def test_an_unknown_scheme_lists_what_is_supported() -> None:
    with pytest.raises(
        InvalidArgument, match=r"cannot open 'faiss:x': supported are a path .*, zarr:PATH, zarr.*, ram:, "
    ):
        memstore.open("faiss:x", spec=make_spec())


def test_other_packages_bring_stores_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_mine(url: str, mode: Mode, blank: NewMemory | None) -> OpenStore:
        assert (url, mode) == ("mine:here", "a")
        assert blank is not None
        store = RamStore()
        store.write(blank.batch)
        return OpenStore(store)

    class Entry(EntryPoint):
        def load(self) -> Any:
            return open_mine

    entries = EntryPoints([Entry(name="mine", value="x:y", group=urls.ENTRY_POINTS)])
    monkeypatch.setattr(urls, "entry_points", lambda group: entries.select(group=group))
    with memstore.open("mine:here", spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(9))
        check_content(memory.document("a"), random_tokens(9))
        assert memory.verify() == []
    with pytest.raises(InvalidArgument, match="mine:"):
        memstore.open("other:here")


@pytest.mark.parametrize(
    ("brought", "says"),
    [
        (lambda *_: RamStore(), "returned a RamStore instead of an OpenStore"),
        (lambda *_: None, "returned a NoneType instead of an OpenStore"),
        (
            ImportError("no module named 'kept'"),
            r"x:y, which another package .* cannot be loaded \(no module named 'kept",
        ),
    ],
)
def test_a_store_of_another_package_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, brought: object, says: str
) -> None:
    class Entry(EntryPoint):
        def load(self) -> Any:
            if isinstance(brought, ImportError):
                raise brought
            return brought

    entries = EntryPoints([Entry(name="mine", value="x:y", group=urls.ENTRY_POINTS)])
    monkeypatch.setattr(urls, "entry_points", lambda group: entries.select(group=group))
    with pytest.raises(InvalidArgument, match=says):
        memstore.open("mine:here", spec=make_spec())


def test_an_unknown_index_is_an_error_at_once() -> None:
    with pytest.raises(InvalidArgument, match="choose from auto, "):
        memstore.open("ram:", spec=make_spec(), index="hnsw")


def test_headers_of_other_versions_are_refused() -> None:
    store = RamStore()
    with pytest.raises(NotAMemory, match="no header"):
        read_header(store, "it")
    header = {"format": 2, "library": "9.9", "spec": make_spec().to_dict(), "blocks_per_run": 4}
    for changes, message in (
        ({}, "memory it has format 2, made by memstore 9.9; .* Upgrade"),
        ({"format": 1, "spec": make_spec().to_dict() | {"dtype": "float8"}}, "cannot use: dtype"),
    ):
        store.write(Batch(puts=[(HEADER, (Record.from_json(header | changes),))]))
        with pytest.raises(ForeignMemory, match=message):
            read_header(store, "it")


@pytest.mark.parametrize("mode", ["r", "x"])
def test_a_store_of_another_package_is_closed_where_it_is_refused(mode: Mode) -> None:
    store = RamStore()
    if mode == "x":
        store.write(Batch())
    with pytest.raises((NotFound, InvalidArgument)):
        urls.opened(store, "theirs:it", mode, None)
    with pytest.raises(InvalidArgument, match="closed"):
        store.version()
