"""`memstore read` of folders and several files: each is a document, and again only what changed is read."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.tools import read as verb
from memstore.tools.files import find, html_text
from tests.tools.conftest import Cli, tiny_spec

NOTES = {
    "bakery.md": "# Bakery\n\nThe walnut bread sells out before nine.\n" * 4,
    "trips/ferry.txt": "The last ferry leaves the island at 19:40.\n" * 6,
    "trips/old.log": "nothing\n",
    "page.html": "<html><head><title>T</title><style>p{}</style></head><body><p>Dogs &amp; bikes</p>free</body></html>",
    "script.py": "print('hello')\n" * 8,
}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    for name, text in NOTES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("hidden")
    (folder / "link.md").symlink_to("/etc/hostname")
    return folder


@pytest.fixture
def memory_path(cli: Cli, notes: Path, tmp_path: Path, model_folder: Path) -> Path:
    path = tmp_path / "m"
    done = cli("read", notes, path, "--model", model_folder, "--block-size", 16, "--json")
    assert done.code == 0, done.err
    assert (done.json["passed_over"], done.json["bad"], done.json["gone"]) == (1, [], [])
    return path


def texts(path: Path) -> dict[str, str]:
    with memstore.open(path, mode="r") as memory:
        ids = {document.name: document.tokens().tolist() for document in memory.documents()}
    from tests.instruct import instruct_tokenizer

    return {name: str(instruct_tokenizer().decode(each)) for name, each in ids.items()}


def no_model(*_: object, **__: object) -> None:
    raise AssertionError("a model was loaded")


def test_each_file_of_a_folder_is_a_document_by_its_path(memory_path: Path) -> None:
    read = texts(memory_path)
    assert sorted(read) == ["notes/bakery.md", "notes/page.html", "notes/script.py", "notes/trips/ferry.txt"]
    assert read["notes/bakery.md"] == NOTES["bakery.md"]
    assert read["notes/page.html"].strip() == "Dogs & bikes\nfree"


def test_what_is_as_it_was_is_not_read_and_no_model_is_loaded(
    cli: Cli, memory_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "load_model", no_model)
    os.utime(notes / "bakery.md")
    again = cli("read", notes, memory_path, "--json")
    assert (again.code, again.json["unchanged"], again.json["documents"]) == (0, 4, []), again.err
    assert "4 unchanged" in cli("read", notes, memory_path).out


def test_of_a_file_that_changed_the_blocks_before_the_change_stay(cli: Cli, memory_path: Path, notes: Path) -> None:
    before = NOTES["trips/ferry.txt"]
    changed = before[:100] + before[100:].replace("19:40", "17:10")
    (notes / "trips/ferry.txt").write_text(changed)
    data = cli("read", notes, memory_path, "--json").json
    (document,) = data["documents"]
    assert (document["document"], data["unchanged"]) == ("notes/trips/ferry.txt", 3)
    assert document["reused_tokens"] >= 96
    assert texts(memory_path)["notes/trips/ferry.txt"].strip() == changed.strip()


def test_a_file_that_is_gone_is_told_and_forgotten_if_wished(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes / "bakery.md").unlink()
    told = cli("read", notes, memory_path)
    assert "gone: notes/bakery.md (memstore read --prune forgets it)" in told.out
    assert "notes/bakery.md" in texts(memory_path)
    assert cli("read", notes, memory_path, "--prune", "--json").json["gone"] == ["notes/bakery.md"]
    assert "notes/bakery.md" not in texts(memory_path)
    assert cli("read", notes, memory_path, "--json").json["gone"] == []


def test_a_bad_file_is_named_and_the_others_are_read(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes / "broken.md").write_bytes(b"\xff\xfe\xfd")
    (notes / "broken.epub").write_bytes(b"no book")
    (notes / "new.md").write_text("A new note.")
    done = cli("read", notes, memory_path)
    assert done.code == 1
    assert "not read: " in done.out
    assert "broken.md is not utf-8 text" in done.out
    assert "broken.epub is no EPUB file" in done.out
    assert texts(memory_path)["notes/new.md"].strip() == "A new note."


def test_files_of_one_stem_are_two_documents(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    for name in ("d1/README.md", "d2/README.md", "d1/README.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"The text of {name}.")
    files = [tmp_path / "d1/README.md", tmp_path / "d1/README.txt", tmp_path / "d2/README.md"]
    for _ in range(2):
        done = cli("read", *files, tmp_path / "m", "--model", model_folder)
        assert done.code == 0, done.err
        assert set(texts(tmp_path / "m")) == {"README", "README.txt", "README.md"}


def test_a_single_file_that_changed_is_read_again(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    file, path = tmp_path / "note.txt", tmp_path / "m"
    file.write_text("The key hangs in the shed. " * 5)
    assert cli("read", file, path, "--model", model_folder, "--block-size", 16).code == 0
    file.write_text("The key hangs in the shed. " * 4 + "It is gone.")
    again = cli("read", file, path, "--json").json
    assert (again["document"], again["reused_tokens"]) == ("note", 96)
    assert texts(path)["note"] == file.read_text()


def test_what_does_not_fit_is_not_begun(
    cli: Cli, notes: Path, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Disk)
    done = cli("read", notes, tmp_path / "m", "--model", model_folder)
    assert (done.code, "room for 1.0 KB" in done.err) == (5, True), done.err
    assert "--codec (int8 " in done.err
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert memory.documents() == []


def test_it_is_told_beforehand_what_reading_costs(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "long.txt").write_text("A long text. " * 400)
    done = cli("read", tmp_path / "long.txt", tmp_path / "m", "--model", model_folder, "--dtype", "float32")
    assert "5,200 tokens to read: about 2.0 MB in " in done.err
    assert "less than a minute" in done.err


def test_the_words_of_a_page_are_what_people_see() -> None:
    page = "<h1>Title</h1><script>x()</script><p>One <b>bold</b> word</p><ul><li>a<li>b</ul><pre>  code\n x</pre>"
    assert html_text(page) == "Title\n\nOne bold word\n\na\nb\n  code\n x\n"


def test_the_chapters_of_a_book_come_in_their_order(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "book.epub", "w") as book:
        book.writestr("META-INF/container.xml", '<container><rootfile full-path="x/b.opf"/></container>')
        items = '<item id="a" href="a%201.html"/><item id="b" href="b.html"/>'
        book.writestr("x/b.opf", f'<package>{items}<spine><itemref idref="b"/><itemref idref="a"/></spine></package>')
        book.writestr("x/a 1.html", "<p>second</p>")
        book.writestr("x/b.html", "<p>first</p>")
    (found,) = find([str(tmp_path / "book.epub")])
    assert (found.text() or "").split() == ["first", "second"]


def test_the_pages_of_a_pdf_file_are_read(tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    writer: Any = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "blank.pdf")
    (found,) = find([str(tmp_path / "blank.pdf")])
    with pytest.raises(memstore.InvalidArgument, match="no text, only pictures"):
        found.text()


@pytest.mark.slow
def test_ten_thousand_unchanged_files_take_seconds(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, facts = tmp_path / "many", {}
    folder.mkdir()
    with memstore.open(tmp_path / "m", spec=tiny_spec()) as memory:
        for i in range(10_000):
            file = folder / f"{i:05}.txt"
            file.write_text("x")
            stat, name = file.stat(), f"many/{file.name}"
            facts[f"file/{name}"] = {
                "path": str(file), "bytes": 1, "modified": stat.st_mtime_ns, "digest": "", "whole": True
            }  # fmt: skip
            memory.document(name).begin(0, None)
        memory.put_facts(facts, {}, "a test")
    monkeypatch.setattr(verb, "load_model", no_model)
    begun = time.process_time()
    done = cli("read", folder, tmp_path / "m", "--json")
    assert done.json["unchanged"] == 10_000, done.err
    assert time.process_time() - begun < 20, "5 s"
