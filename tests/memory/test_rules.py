"""What a copy, an export or a salvage takes along of limits, pins and times to live, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.errors import ForeignMemory, InvalidArgument, StoreFull
from memstore.memory import Document, Memory, export
from memstore.memory.copy import copy_document, copy_memory
from memstore.memory.entry import KEEPING
from memstore.memory.export import export_memory, import_memory
from memstore.memory.rules import DAY, Rules
from memstore.memory.salvage import salvage
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import S, append, make_spec, random_tokens

pytestmark = pytest.mark.usefixtures("checked_here", "children_are_forks")

TEXT = random_tokens(5 * S)
LIMIT = 10_000_000
NAMES = ("whale", "ship", "sea")


def by_copy(source: Path, target: str) -> None:
    copy_memory(source, target)


def by_export(source: Path, target: str) -> None:
    folder = source.with_name(f"export-{len(list(source.parent.iterdir()))}")
    export_memory(source, folder)
    import_memory(folder, target)


WAYS: list[Callable[[Path, str], None]] = [by_copy, by_export]
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A memory with a limit, in which "whale" is pinned and "ship" has a time to live."""
    path = tmp_path / "source"
    with memstore.open(path, spec=make_spec()) as memory:
        fill(memory, *NAMES)
        memory.document("whale").pin()
        memory.document("ship").expire(DAY)
        memory.limit(LIMIT, "evict-least-read")
    return path


def fill(memory: Memory, *names: str) -> None:
    for name in names:
        append(memory.document(name), TEXT)


def rules(url: str | Path) -> Rules[str]:
    with memstore.open(url, mode="r") as memory:
        return memory.rules()


@ways
@pytest.mark.parametrize("scheme", ["", "zarr:"])
def test_a_new_memory_gets_all_of_them(way: Callable[[Path, str], None], source: Path, scheme: str) -> None:
    url = f"{scheme}{source.parent}/new"
    way(source, url)
    assert rules(url) == rules(source)
    assert rules(url).max_bytes == LIMIT
    assert rules(url).pinned == {"whale"}
    assert set(rules(url).expires) == {"ship"}
    with memstore.open(url) as memory:
        assert memory.verify() == []
        assert not memory.document("sea").pinned


@ways
def test_what_was_taken_back_stays_so(way: Callable[[Path, str], None], source: Path, tmp_path: Path) -> None:
    """Who has made an archive of it can copy again what has come since."""
    url = str(tmp_path / "archive")
    way(source, url)
    with memstore.open(url) as memory:
        memory.limit(None, "refuse")
        memory.document("ship").expire(None)
        memory.document("whale").unpin()
    with memstore.open(source) as memory:
        fill(memory, "boat")
        memory.document("boat").pin()
    way(source, url)
    assert rules(url) == Rules(pinned=frozenset({"boat"}))


@ways
def test_a_memory_that_holds_something_else_gets_no_limit(
    way: Callable[[Path, str], None], source: Path, tmp_path: Path
) -> None:
    url = str(tmp_path / "other")
    with memstore.open(url, spec=make_spec()) as memory:
        fill(memory, "harpoon", "ship")
    way(source, url)
    assert rules(url) == Rules(pinned=frozenset({"whale"}))  # "ship" was there before, and stays for ever
    way(source, url)
    assert rules(url) == Rules(pinned=frozenset({"whale"}))


@ways
def test_a_memory_keeps_its_own_limit(way: Callable[[Path, str], None], source: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "other")
    memstore.open(url, spec=make_spec(), max_bytes=2 * LIMIT).close()
    way(source, url)
    assert rules(url) == Rules(max_bytes=2 * LIMIT, pinned=frozenset({"whale"}), expires=rules(source).expires)


@ways
def test_memories_without_rules_stay_without(way: Callable[[Path, str], None], tmp_path: Path) -> None:
    with memstore.open(tmp_path / "plain", spec=make_spec()) as memory:
        fill(memory, "whale")
    way(tmp_path / "plain", str(tmp_path / "new"))
    with memstore.open(tmp_path / "new") as memory:
        assert memory._shared.store.get(KEEPING) is None


def test_an_interrupted_copy_takes_them_along_when_it_ends(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr("memstore.memory.copy._check_digests", interrupted_after(2))
        with pytest.raises(KeyboardInterrupt):
            copy_memory(source, url)
    assert rules(url) == Rules[str]()
    copy_memory(source, url)
    assert rules(url) == rules(source)


def interrupted_after(calls: int) -> Callable[..., Any]:
    left = iter(range(calls))

    def call(*_: object) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return call


def test_an_interrupted_import_takes_them_along_when_it_ends(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "new")
    export_memory(source, tmp_path / "export")
    stop, fork = interrupted_after(2), Document.fork
    with monkeypatch.context() as patch:
        patch.setattr(Document, "fork", lambda *arguments: stop() or fork(*arguments))
        with pytest.raises(KeyboardInterrupt):
            import_memory(tmp_path / "export", url)
    assert rules(url) == Rules[str]()
    import_memory(tmp_path / "export", url)
    assert rules(url) == rules(source)


@ways
def test_documents_that_were_done_before_an_interruption_keep_them(
    way: Callable[[Path, str], None], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "other")
    with memstore.open(url, spec=make_spec()) as memory:
        fill(memory, "harpoon")
    with monkeypatch.context() as patch:
        patch.setattr("memstore.memory.copy._check_digests", interrupted_after(2))
        stop, append_file = interrupted_after(2), export._append
        patch.setattr(export, "_append", lambda *arguments: stop() or append_file(*arguments))
        with pytest.raises(KeyboardInterrupt):
            way(source, url)
    way(source, url)
    assert rules(url) == Rules(pinned=frozenset({"whale"}), expires=rules(source).expires)


@ways
def test_what_a_limit_evicts_is_not_said_to_be_there(way: Callable[[Path, str], None], tmp_path: Path) -> None:
    url = str(tmp_path / "small")
    with memstore.open(tmp_path / "source", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(20 * S, seed=1))
        append(memory.document("ship"), random_tokens(20 * S, seed=2))
        memory.document("whale").fork("fork")
        memory.put_info("file/whale", {"path": "whale.txt"})
        memory.put_info("file/ship", {"path": "ship.txt"})
        most = memory.stats()["used_bytes"] * 2 // 3
    memstore.open(url, spec=make_spec(), max_bytes=most, when_full="evict-oldest-document").close()
    with pytest.raises(
        StoreFull, match=r"has forgotten \d of \d documents of .* again, because its limit had no room for them: "
    ):
        way(tmp_path / "source", url)
    with memstore.open(url) as memory:
        there = {document.name for document in memory.documents()}
        assert "whale" not in there
        assert set(memory.infos("file/")) == {f"file/{name}" for name in there - {"fork"}}
        memory.limit(None)
    way(tmp_path / "source", url)
    with memstore.open(url) as memory:
        assert {document.name for document in memory.documents()} == {"whale", "ship", "fork"}
        assert set(memory.infos("file/")) == {"file/ship", "file/whale"}


def test_an_export_of_some_documents_has_their_rules_and_no_limit(source: Path, tmp_path: Path) -> None:
    export_memory(source, tmp_path / "export", documents=["whale", "sea"])
    import_memory(tmp_path / "export", tmp_path / "new")
    assert rules(tmp_path / "new") == Rules(pinned=frozenset({"whale"}))


def test_an_export_without_rules_says_nothing_of_them(tmp_path: Path) -> None:
    """So it is as exports always were, and any version can read it."""
    with memstore.open(tmp_path / "plain", spec=make_spec()) as memory:
        fill(memory, "whale")
        export_memory(memory, tmp_path / "export")
    assert "rules" not in json.loads((tmp_path / "export" / "manifest.json").read_text())


@pytest.mark.parametrize("change", [{"when_full": "explode"}, {"colour": "white"}])
def test_rules_of_a_newer_version_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ForeignMemory, match="a newer memstore"):
        Rules.from_dict({**Rules().to_dict(), **change})


def test_a_limit_that_cannot_be_is_refused(make_memory: MakeMemory) -> None:
    memory = make_memory()
    with pytest.raises(InvalidArgument, match="max_bytes"):
        memory.take_rules(Rules(max_bytes=-1), (), ())


def test_forks_and_copies_of_one_document_are_free(make_memory: MakeMemory) -> None:
    one, other = make_memory(), make_memory()
    fill(one, "whale")
    one.document("whale").pin()
    one.document("whale").expire(DAY)
    made = [one.document("whale").fork("fork"), copy_document(one.document("whale"), other, "copy")]
    assert [(document.pinned, document.expires) for document in made] == [(False, None)] * 2
    assert one.rules().pinned == {"whale"}


def test_what_is_saved_of_a_damaged_memory_keeps_them(source: Path, tmp_path: Path) -> None:
    salvage(source, tmp_path / "saved")
    assert rules(tmp_path / "saved") == rules(source)
