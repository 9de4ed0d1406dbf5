"""`memstore read` of folders and several files: each is a document, and again only what changed is read."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.store import LmdbStore
from memstore.tools import read as verb
from memstore.tools.files import find
from memstore.tools.models import load_model
from memstore.tools.parsing import html_text
from memstore.tools.plan import plan_of
from memstore.tools.verb import FACT, parse_since, time_of
from tests.tools.conftest import Cli, tiny_spec

NOBODY = 65534

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
    assert done.json["passed_over"] == [{"path": str(notes / "picture.png"), "reason": "no text"}]
    assert (done.json["bad"], done.json["gone"]) == ([], [])
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
    assert read["notes/page.html"].strip() == "Dogs & bikes\n\nfree"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's rights, which go through any door."""
    if os.getuid():
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def test_a_memory_tells_where_its_files_lay(memory_path: Path, notes: Path, model_folder: Path) -> None:
    file = notes / "bakery.md"
    with memstore.open(memory_path, mode="r") as memory:
        fact = memory.get_info(f"{FACT}notes/bakery.md")
        model = memory.get_info("model")
    assert (fact["path"], fact["modified"], fact["bytes"]) == (str(file), file.stat().st_mtime_ns, file.stat().st_size)
    assert {"read", "digest"} <= set(fact)
    assert model["name"] == str(model_folder)


def test_a_folder_that_may_not_be_entered_is_named_and_the_others_are_read(
    cli: Cli, memory_path: Path, notes: Path, model_folder: Path
) -> None:
    (notes / "bakery.md").write_text("The bakery is in the market hall.\n")
    cli("read", notes, memory_path, "--model", model_folder, "--prune", "--json")  # loads what nobody may not load
    (notes / "bakery.md").write_text("The bakery has moved to the harbour.\n")
    for path in (notes, *notes.rglob("*"), memory_path, *memory_path.rglob("*")):
        if not os.getuid():
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for path in (*notes.parents[:4], model_folder, *model_folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
    (notes / "trips").chmod(0)

    model = ("--model", model_folder)
    with as_nobody():
        done = cli("read", notes, memory_path, *model, "--prune", "--json")
        assert (done.code, "bad" in done.json) == (1, True), done
        assert [each["path"] for each in done.json["bad"]] == [str(notes / "trips")]
        assert done.json["gone"] == []
        assert [each["document"] for each in done.json["documents"]] == ["notes/bakery.md"]
        assert cli("read", notes, memory_path, *model).out.count("is a folder that you may not") == 1
    (notes / "trips").chmod(0o755)
    assert "notes/trips/ferry.txt" in texts(memory_path)


def test_a_file_takes_as_many_reads_of_the_memory_whatever_else_there_is(
    cli: Cli, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reads = tmp_path / "many", 0
    folder.mkdir()

    def counting(of: Any, rows: Callable[[Any, Any], int]) -> Any:
        def count(store: Any, *arguments: Any) -> Any:
            nonlocal reads
            found = of(store, *arguments)
            found = list(found) if of is LmdbStore.walk else found
            reads += rows(found, arguments)
            return found

        return count

    for name, rows in (("get", lambda *_: 1), ("keys", lambda found, _: len(found)), ("walk", lambda *_: 1)):
        monkeypatch.setattr(LmdbStore, name, counting(getattr(LmdbStore, name), rows))
    for name in ("read", "gather"):
        monkeypatch.setattr(LmdbStore, name, counting(getattr(LmdbStore, name), lambda _, given: len(given[0])))

    def spent(files: int) -> int:
        """Reads of a run that finds so many files, of which those that are new are read."""
        nonlocal reads
        for number in range(len(list(folder.iterdir())), files):
            (folder / f"{number}.txt").write_text(f"Note {number} of many that say nothing.")
        reads = 0
        done = cli("read", folder, tmp_path / "m", "--model", model_folder, "--block-size", 16, "--json")
        assert done.json["new_tokens"] > 0
        return reads

    spent(5)
    ten_of_few = -spent(6) + spent(16)
    spent(55)
    ten_of_many = -spent(56) + spent(66)
    assert ten_of_many <= ten_of_few


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


@pytest.mark.parametrize("lines", [300, pytest.param(2_500, marks=pytest.mark.slow)])
def test_a_word_that_changed_in_the_last_tenth_of_a_long_file_costs_a_tenth_at_most(
    cli: Cli, memory_path: Path, notes: Path, lines: int
) -> None:
    text = "".join(f"Line {number} says that nothing has happened.\n" for number in range(lines))
    (notes / "long.txt").write_text(text)
    (first,) = cli("read", notes, memory_path, "--json").json["documents"]
    changed = lines * 11 // 12
    (notes / "long.txt").write_text(text.replace(f"Line {changed} says", f"Line {changed} denies"))
    (again,) = cli("read", notes, memory_path, "--json").json["documents"]
    assert first["new_tokens"] > 40 * lines
    assert 0 < again["new_tokens"] <= again["tokens"] / 10
    assert again["new_tokens"] + again["reused_tokens"] == again["tokens"]


def test_a_file_that_is_gone_is_told_and_forgotten_if_wished(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes / "bakery.md").unlink()
    told = cli("read", notes, memory_path)
    assert "gone: notes/bakery.md (memstore read --prune forgets it)" in told.out
    assert "notes/bakery.md" in texts(memory_path)
    assert cli("read", notes, memory_path, "--prune", "--json").json["gone"] == ["notes/bakery.md"]
    assert "notes/bakery.md" not in texts(memory_path)
    assert cli("read", notes, memory_path, "--json").json["gone"] == []


def test_a_folder_that_has_no_files_any_more_is_not_pruned(cli: Cli, memory_path: Path, notes: Path) -> None:
    there = texts(memory_path)
    notes.rename(notes.with_name("away"))
    notes.mkdir()
    done = cli("read", notes, memory_path, "--prune")
    assert (done.code, "has no files any more, so --prune would forget" in done.err) == (3, True), done
    assert texts(memory_path) == there
    assert "gone: notes/bakery.md" in cli("read", notes, memory_path).out


def test_a_watch_prunes_what_is_gone_in_two_looks(
    memory_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bakery.md", "script.py", "page.html"):
        (notes / name).unlink()
    (notes / "page.html").touch()

    def write_again(_: float) -> None:
        (notes / "bakery.md").write_text(NOTES["bakery.md"])
        (notes / "page.html").write_text(NOTES["page.html"])

    monkeypatch.setattr(time, "sleep", write_again)
    monkeypatch.setattr(verb, "load_model", no_model)
    options = verb.Options(text=[str(notes)], memory=str(memory_path), prune=True, watch=True)
    plan = verb.Reading(options).once()
    assert plan.gone == ["notes/script.py"]
    assert sorted(texts(memory_path)) == ["notes/bakery.md", "notes/page.html", "notes/trips/ferry.txt"]


def test_a_file_that_changes_while_others_are_read_is_read_again(
    cli: Cli, memory_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = verb._begun

    def change(*arguments: Any) -> Any:
        (notes / "b.md").write_text("The second text, which is longer.")
        (notes / "c.md").unlink(missing_ok=True)
        return begun(*arguments)

    for name in ("a.md", "b.md", "c.md"):
        (notes / name).write_text(f"The first text of {name}.")
    with monkeypatch.context() as patched:
        patched.setattr(verb, "_begun", change)
        done = cli("read", notes, memory_path, "--json")
    assert (done.code, len(done.json["documents"])) == (0, 3), done.err
    again = cli("read", notes, memory_path, "--json").json
    assert [each["document"] for each in again["documents"]] == ["notes/b.md"]
    assert again["gone"] == ["notes/c.md"]
    assert texts(memory_path)["notes/b.md"] == "The second text, which is longer."


def test_a_bad_file_is_named_and_the_others_are_read(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes / "broken.md").write_bytes(b"\xfd\xfe\xff")
    (notes / "broken.epub").write_bytes(b"no book")
    (notes / "new.md").write_text("A new note.")
    done = cli("read", notes, memory_path)
    assert done.code == 1
    assert "not read: " in done.out
    assert "broken.md is not utf-8 text" in done.out
    assert "exclude it" in done.out
    assert "--encoding" not in done.out, "that would be for all files"
    assert f"1 passed over: {notes / 'picture.png'} (no text)" in done.out
    assert "broken.epub is not a readable EPUB file" in done.out
    assert texts(memory_path)["notes/new.md"].strip() == "A new note."


def test_a_folder_that_is_read_in_a_chat_is_read_but_for_what_cannot_be(
    memory_path: Path, notes: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (notes / "empty.md").touch()
    (notes / "broken.md").write_bytes(b"\xfd\xfe\xff")
    loaded = load_model(str(model_folder), "auto")
    with memstore.attach(loaded.model, memory_path, tokenizer=loaded.tokenizer) as reader:
        with pytest.raises(memstore.InvalidArgument, match=r"not read: .*broken\.md"):
            verb.read_into(reader, str(notes))
        (notes / "new.md").write_text("A new note.")
        assert [each["document"] for each in verb.read_into(reader, str(notes))] == ["notes/new.md"]
        assert "broken.md is not utf-8 text" in capsys.readouterr().out
        with pytest.raises(memstore.InvalidArgument, match="is empty"):
            verb.read_into(reader, str(notes / "empty.md"))


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


def test_a_folder_of_empty_files_names_them(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "empty.md").touch()
    done = cli("read", tmp_path / "notes", tmp_path / "m", "--model", model_folder)
    assert (done.code, (tmp_path / "m").exists()) == (2, False)
    assert f"passed over {tmp_path / 'notes' / 'empty.md'} (empty)" in done.err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc")
def test_a_place_that_takes_no_memory_is_read_only(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words to read.")
    done = cli("read", tmp_path / "a.txt", "/proc/notes.mem", "--model", model_folder)
    assert (done.code, "cannot be created: you may not write to /proc" in done.err) == (5, True)


def test_a_pipe_is_not_called_empty(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = cli("read", tmp_path / "pipe", tmp_path / "m", "--model", model_folder)
    assert (done.code, (tmp_path / "m").exists()) == (2, False)
    assert "is not a file. Pipe its text into the command, and name - for it" in done.err


def test_an_empty_file_of_a_folder_is_passed_over_and_one_that_is_no_text_is_named(tmp_path: Path) -> None:
    for name, content in (("empty.md", b" \n"), ("broken.md", b"\xfd\xfe\xff"), ("whole.md", b"Words.\n")):
        (tmp_path / name).write_bytes(content)
    plan = plan_of(list(find([str(tmp_path)])), {}, None, encoding="utf-8", alone=False)
    assert plan.passed_over == [{"path": str(tmp_path / "empty.md"), "reason": "empty"}]
    assert [Path(each["path"]).name for each in plan.bad] == ["broken.md"]
    assert [each.content for each in plan.read] == ["Words.\n"]


def test_what_does_not_fit_is_not_begun(
    cli: Cli, notes: Path, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free, total = 1000, 10**9

    monkeypatch.setattr("shutil.disk_usage", lambda _: Disk)
    read = ("read", notes, tmp_path / "m", "--model", model_folder, "--dtype", "bfloat16")
    done = cli(*read)
    assert (done.code, "room for 1.0 KB" in done.err) == (5, True), done.err
    assert "codec" not in done.err, "none of them would fit"
    assert "forget" not in done.err, "there is nothing to forget"
    assert not (tmp_path / "m").exists()
    needed = re.search(r"need about (\d+) KB", done.err)
    assert needed is not None
    Disk.free = int(needed[1]) * 1000 // 2  # int8 takes a bit more
    done = cli(*read)
    assert "--codec (int4 " in done.err, done.err
    assert cli(*read, "--codec", "int4").code == 0, "what was advised works"


def test_a_file_that_is_emptied_is_gone(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes / "bakery.md").write_text("\n")
    done = cli("read", notes, memory_path, "--prune", "--json").json
    assert done["gone"] == ["notes/bakery.md"]
    assert {"path": str(notes / "bakery.md"), "reason": "empty"} in done["passed_over"]
    assert "notes/bakery.md" not in texts(memory_path)


def test_a_folder_that_was_moved_is_not_there_twice(cli: Cli, memory_path: Path, notes: Path, tmp_path: Path) -> None:
    before = texts(memory_path)
    (tmp_path / "away").mkdir()
    notes.rename(tmp_path / "away/notes")
    done = cli("read", tmp_path / "away/notes", memory_path, "--prune", "--json").json
    assert sorted(done["gone"]) == sorted(before)
    assert sorted(texts(memory_path).values()) == sorted(before.values())


def test_a_file_that_was_renamed_under_the_document_it_is_read_into_stays(
    cli: Cli, memory_path: Path, notes: Path
) -> None:
    assert cli("read", notes / "bakery.md", memory_path, "--document", "bread").code == 0
    (notes / "bakery.md").rename(notes / "bread.md")
    assert cli("read", notes / "bread.md", memory_path, "--document", "bread", "--prune").code == 0
    assert texts(memory_path)["bread"] == NOTES["bakery.md"]


def test_of_files_of_one_text_each_that_is_moved_keeps_what_was_noted_of_it(
    cli: Cli, memory_path: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("p", "q")]
    for folder in folders:
        (folder / "in").mkdir(parents=True)
        (folder / f"{folder.name}.md").write_text("To do: nothing yet, but soon.\n")
        assert cli("read", folder, memory_path, "--meta", f"project={folder.name}").code == 0
        (folder / f"{folder.name}.md").rename(folder / f"in/{folder.name}.md")
    done = cli("read", *folders, memory_path, "--prune", "--json").json
    assert sorted(done["gone"]) == ["p/p.md", "q/q.md"]
    with memstore.open(memory_path, mode="r") as memory:
        for name in ("p", "q"):
            assert memory.get_info(f"file/{name}/in/{name}.md")["meta"] == {"project": name}


def test_a_document_that_was_cut_is_read_again(cli: Cli, memory_path: Path, notes: Path) -> None:
    with memstore.open(memory_path) as memory:
        memory.document("notes/bakery.md").truncate(1)
        memory.document("notes/script.py").truncate(0)
        fact = memory.get_info(f"{FACT}notes/script.py")
        memory.put_info(f"{FACT}notes/script.py", {key: fact[key] for key in fact if key != "tokens"})
    done = cli("read", notes, memory_path, "--json").json
    assert [each["document"] for each in done["documents"]] == ["notes/bakery.md", "notes/script.py"]
    assert texts(memory_path)["notes/script.py"] == NOTES["script.py"]
    assert cli("read", notes, memory_path, "--json").json["unchanged"] == 4


def test_files_that_a_limit_cannot_hold_evict_nobody(
    cli: Cli, memory_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memstore.open(memory_path) as memory:
        most = memory.stats()["used_bytes"] + 5000
        memory.limit(most, "evict-oldest-document")
    (notes / "long.txt").write_text("A long text. " * 200)
    done = cli("read", notes, memory_path)
    assert (done.code, "room for " in done.err, "--max-bytes MORE" in done.err) == (5, True, True), done.err
    assert "notes/long.txt" not in texts(memory_path)
    monkeypatch.setattr(verb, "check_room", lambda *_, **__: None)  # where the estimate is wrong
    assert cli("read", notes, memory_path).code == 5
    assert {f"notes/{name}" for name in NOTES if name != "trips/old.log"} <= set(texts(memory_path))
    (notes.parent / "short.txt").write_text("A short text. " * 12)
    done = cli("read", notes.parent / "short.txt", memory_path, "--json")
    assert "notes/bakery.md" in done.json["evicted"]
    assert "notes/script.py" in texts(memory_path)


def test_a_pin_goes_with_a_file_that_was_renamed_and_keeps_one_that_is_gone(
    cli: Cli, memory_path: Path, notes: Path
) -> None:
    for name in ("bakery.md", "script.py"):
        assert cli("pin", memory_path, f"notes/{name}").code == 0
    assert cli("expire", memory_path, "notes/script.py", "--after", "30d").code == 0
    (notes / "bakery.md").unlink()
    (notes / "script.py").rename(notes / "tool.py")
    done = cli("read", notes, memory_path, "--prune")
    assert "gone: notes/bakery.md (pinned: only memstore forget deletes it)" in done.out
    assert "gone: notes/script.py, forgotten" in done.out
    with memstore.open(memory_path, mode="r") as memory:
        assert memory.rules().pinned == {"notes/bakery.md", "notes/tool.py"}
        assert set(memory.rules().expires) == {"notes/tool.py"}
        assert "moved" not in memory.get_info(f"{FACT}notes/tool.py")
    assert cli("read", notes, memory_path, "--prune", "--json").json["pinned"] == ["notes/bakery.md"]


def test_files_that_are_all_compared_keep_their_names_and_are_pruned(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes.parent / "other/notes").mkdir(parents=True)
    (notes.parent / "other/notes/bakery.md").write_text("Another bakery.")
    assert cli("read", notes.parent / "other/notes", memory_path).code == 0
    (notes / "script.py").unlink()
    both = (notes, notes.parent / "other/notes")
    done = cli("read", *both, memory_path, "--top-k", 8, "--prune", "--json").json
    assert (done["gone"], done["new_tokens"], done["bad"]) == (["notes/script.py"], 0, [])
    assert sorted(texts(memory_path)) == [
        "notes/bakery.md", "notes/page.html", "notes/trips/ferry.txt", "other/notes/bakery.md"
    ]  # fmt: skip
    assert cli("read", *both, memory_path, "--dtype", "auto", "--json").json["unchanged"] == 4


def test_a_wrong_encoding_is_corrected(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes / "word.txt").write_bytes("Fähre".encode())
    for encoding, text in (("latin-1", "FÃ¤hre"), ("utf-8", "Fähre")):
        assert cli("read", notes / "word.txt", memory_path, "--encoding", encoding, "--document", "w").code == 0
        assert texts(memory_path)["w"] == text
    assert cli("read", notes / "word.txt", memory_path, "--encoding", "utf-8", "--json").json["unchanged"] == 1


def test_an_unchanged_file_is_reported_like_a_folder(
    cli: Cli, memory_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (notes / "bakery.md", notes):
        done = cli("read", source, memory_path)
        assert done.out.splitlines()[0].startswith(f"0 files read, {1 if source != notes else 4} unchanged")
        assert cli("read", source, memory_path, "--csv").out.splitlines() == [
            "document,tokens,new_tokens,reused_tokens"
        ]
        assert {"unchanged", "gone", "bad", "passed_over"} <= set(cli("read", source, memory_path, "--json").json)
    refused = cli("read", "-", "-", memory_path)
    assert (refused.code, "- is given twice" in refused.err) == (2, True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" ")))
    assert "1 passed over: - (empty)" in cli("read", notes / "bakery.md", "-", memory_path).out


@pytest.mark.parametrize("where", ["load_model", "_read_one"])
def test_ctrl_c_ends_a_watch_also_while_a_change_is_read(
    cli: Cli, memory_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def change(_: float) -> None:
        (notes / "new.md").write_text("A note.")
        monkeypatch.setattr(verb, where, interrupt)

    if where == "load_model":
        monkeypatch.setattr(verb, where, interrupt)
    monkeypatch.setattr(time, "sleep", change)
    done = cli("read", notes, memory_path, "--watch")
    assert (done.code, "0 files read, 4 unchanged" in done.out) == (0, True), done


def test_a_folder_called_chat_is_no_conversation(cli: Cli, memory_path: Path, notes: Path) -> None:
    (notes / "chat").mkdir()
    (notes / "chat/log.md").write_text("The captain of the ferry is called Olga.\n")
    (document,) = cli("read", notes / "chat", memory_path, "--json").json["documents"]
    assert document["document"] == "notes/chat/log.md"
    refused = cli("read", notes / "bakery.md", memory_path, "--document", "chat/log")
    assert refused.code == 2
    assert "'chat/log' is the name of a chat: choose another name with --document" in refused.err


def test_a_file_whose_name_no_document_can_have_stops_no_other(cli: Cli, memory_path: Path, notes: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(notes) + b"/caf\xe9.md")).write_text("Open until nine.")
    except OSError:
        pytest.skip("this file system wants names in UTF-8")
    Path(os.fsdecode(os.fsencode(notes) + b"/caf\xe9.png")).write_bytes(b"\0")
    long = notes.joinpath(*["n" * 200] * 3)
    long.mkdir(parents=True)
    (long / "deep.md").write_text("Far down.")
    (notes / "new.md").write_text("The baker is called Ann.")
    for options in ((), ("--json",)):
        done = cli("read", notes, memory_path, *options)
        assert done.code == 1
    assert len(done.json["bad"]) == 2
    assert len(done.json["passed_over"]) == 2
    assert all("the name of a document must be a text of 1 to 511 bytes" in each["error"] for each in done.json["bad"])
    assert "notes/new.md" in texts(memory_path)


def test_a_file_that_was_renamed_costs_what_is_new_of_it_and_keeps_what_was_noted(
    cli: Cli, memory_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = NOTES["trips/ferry.txt"]
    asked: list[int] = []
    monkeypatch.setattr(
        verb, "check_room", lambda _, __, ___, sizes, *____, **_____: asked.extend(all_ - old for all_, old in sizes)
    )
    assert cli("read", notes / "trips/ferry.txt", memory_path, "--meta", "year=1912").code == 0
    (notes / "trips/ferry.txt").rename(notes / "trips/boat.txt")
    done = cli("read", notes, memory_path, "--prune", "--json")
    (document,) = done.json["documents"]
    assert asked == [document["new_tokens"]] == [len(text) % 16]
    assert done.json["gone"] == ["notes/trips/ferry.txt"]
    assert texts(memory_path)["notes/trips/boat.txt"] == text
    with memstore.open(memory_path, mode="r") as memory:
        assert memory.get_info("file/notes/trips/boat.txt")["meta"] == {"year": "1912"}


def test_of_two_folders_of_one_name_the_second_has_the_name_of_the_folder_around_it(
    cli: Cli, tmp_path: Path, model_folder: Path
) -> None:
    for name in ("a/notes/x.md", "b/notes/x.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"The text of {name}.")
    read = cli("read", tmp_path / "a/notes", tmp_path / "b/notes", tmp_path / "m", "--model", model_folder)
    assert read.code == 0, read.err
    listed = {each["document"]: each for each in cli("ls", tmp_path / "m", "--json").json["documents"]}
    assert {name: each["path"] for name, each in listed.items()} == {
        "notes/x.md": str(tmp_path / "a/notes/x.md"),
        "b/notes/x.md": str(tmp_path / "b/notes/x.md"),
    }
    assert all(each["digest"] and each["read"] for each in listed.values())


def test_a_key_file_that_is_no_good_is_told_before_a_model_is_loaded(
    cli: Cli, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "load_model", no_model)
    (tmp_path / "note.txt").write_text("A note.")
    (tmp_path / "short").write_bytes(b"short")
    (tmp_path / "open").write_bytes(bytes(32))
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").chmod(0o644)
    read = ("read", tmp_path / "note.txt", tmp_path / "m", "--model", model_folder, "--key-file")
    for name, code in (("missing", 3), ("short", 2), ("open", 2)):
        done = cli(*read, tmp_path / name)
        assert (done.code, "key file" in done.err) == (code, True), done.err


def test_forgetting_says_what_comes_back_and_what_is_left_to_do(
    cli: Cli, notes: Path, memory_path: Path, tmp_path: Path, model_folder: Path
) -> None:
    told = cli("forget", memory_path, "notes/bakery.md").out
    assert f"Its file {notes / 'bakery.md'} still exists: the next memstore read" in told
    assert "memstore compact" in told
    (notes / "page.html").unlink()
    assert "still exists" not in cli("forget", memory_path, "notes/page.html").out
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    key = ("--key-file", tmp_path / "key")
    assert cli("read", notes / "script.py", tmp_path / "e", "--model", model_folder, *key).code == 0
    told = cli("forget", tmp_path / "e", "script", *key).out
    assert ("compact" in told, "Its key is destroyed" in told) == (False, True), told


def test_it_is_told_beforehand_what_reading_costs(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "long.txt").write_text("A long text. " * 400)
    done = cli("read", tmp_path / "long.txt", tmp_path / "m", "--model", model_folder, "--dtype", "float32")
    assert "5,200 tokens to read: about 2.0 MB in " in done.err
    assert "less than a minute" in done.err


def test_what_reading_costs_is_said_without_reading(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "long.txt").write_text("A long text. " * 400)
    read = ("read", tmp_path / "long.txt", tmp_path / "m", "--model", model_folder, "--dtype", "float32")
    told = cli(*read, "--cost", "--json").json
    assert (told["tokens"], told["disk_bytes"] // 10**5, told["index_bytes"]) == (5200, 20, 0)
    assert not (tmp_path / "m").exists()
    assert "disk_bytes   2," in cli(*read, "--cost").out
    assert cli(*read).code == 0
    assert cli(*read, "--cost", "--json").json["tokens"] == 0
    (tmp_path / "long.txt").write_text("A long text. " * 500)
    assert cli(*read, "--cost", "--json").json["tokens"] == 1300
    assert cli(*read, "--json").json["new_tokens"] == 1300
    assert cli(*read, "--cost", "--watch").code == 2


def test_the_cost_of_a_model_with_its_own_index_needs_no_weights(cli: Cli, tmp_path: Path) -> None:
    """Its scan grows with the square of the text. (Seconds are measured, so the factor is checked loosely.)"""
    described = shutil.copytree(Path(memstore.__file__).parent / "models/shipped/indexed-passkey", tmp_path / "model")
    (described / "model.safetensors").unlink()
    costs = []
    for size in (80_000, 2_000_000):
        (tmp_path / "long.txt").write_text("A text. " * (size // 8))
        read = (
            "read",
            tmp_path / "long.txt",
            tmp_path / "m",
            "--model",
            described,
            "--cost",
            "--json",
            "--dtype",
            "bfloat16",
        )
        costs.append(cli(*read).json)
    few, many = costs
    assert many["disk_bytes"] > 24 * few["disk_bytes"]
    assert many["index_bytes"] == many["tokens"] * 48 * 2  # bfloat16
    assert many["seconds"] > 50 * few["seconds"] > 0
    assert not (tmp_path / "m").exists()


def test_many_short_files_tell_how_far_the_whole_is(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "notes").mkdir()
    for name in "ab":
        (tmp_path / "notes" / f"{name}.txt").write_text(name * 2100)
    done = cli("read", tmp_path / "notes", tmp_path / "notes.mem", "--model", model_folder)
    assert "reading 2 files 4,200 of 4,200 tokens" in done.err, done


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
    with pytest.raises(memstore.InvalidArgument, match="no text, only images"):
        found.text()


@pytest.mark.parametrize(
    "fact", [{"modified": 10**30}, {"read": "now"}, {"read": "0001-01-01T00:00:00+23:59"}, {"read": 5}]
)
def test_a_time_that_is_none_is_not_known(fact: dict[str, Any]) -> None:
    assert time_of(fact) is None


def test_a_time_that_is_known_can_be_compared() -> None:
    early, late = time_of({"modified": -9 * 10**18}), time_of({"read": "2026-03-01"})
    assert early < parse_since("2026-02-01") < late  # type: ignore[operator]


@pytest.mark.parametrize("since", ["99999999w", "9" * 5000 + "d", "0001-01-01T00:00+23:59", "x" * 5000])
def test_a_time_that_never_was_is_refused_in_one_line(since: str) -> None:
    with pytest.raises(memstore.InvalidArgument, match="--since must be an age") as caught:
        parse_since(since)
    assert len(str(caught.value)) < 200


def files_in(folder: Path) -> dict[str, int | str | None]:
    """The length of the text of each file, or why it is not read."""
    found: dict[str, int | str | None] = {}
    for each in find([str(folder)]):
        try:
            text = each.text()
        except memstore.InvalidArgument as error:
            found[each.name] = str(error)
        else:
            found[each.name] = None if text is None else len(text)
    return found


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "hole"])
def test_what_is_to_be_ignored_is_read_from_a_small_file_only(tmp_path: Path, kind: str) -> None:
    place = tmp_path / ".gitignore"
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "link":
            place.symlink_to("/dev/zero")
        case "folder":
            place.mkdir()
        case _:
            place.touch()
            os.truncate(place, 1 << 40)
    with pytest.raises(memstore.InvalidArgument, match=r"/\.gitignore (is a link, or not a file|has more than 2,000)"):
        list(find([str(tmp_path)]))


@pytest.mark.parametrize(
    ("lines", "passed_over"),
    [
        ("*.log\n!keep.log", ["a.log", "x/a.log"]),
        ("/a.log", ["a.log"]),
        ("x/", ["x/a.log", "x/keep.log", "x/y/b"]),
        ("x/*", ["x/a.log", "x/keep.log", "x/y/b"]),
        ("**/y", ["x/y/b"]),
        ("x/**/b", ["x/y/b"]),
        ("x/**", ["x/a.log", "x/keep.log", "x/y/b"]),
        ("?.[!c-z]*", ["a.log"][:0]),
        ("[a-c]\n# c\n\\#", ["#", "c", "x/y/b"]),
        ("*a" * 40 + "b\n" + "**/" * 200 + "q", []),
        ("[\n[z-a]\n!", []),
    ],
)
def test_patterns_mean_what_they_mean_to_git(tmp_path: Path, lines: str, passed_over: list[str]) -> None:
    names = ["#", "a.log", "c", "keep.log", "x/a.log", "x/keep.log", "x/y/b", "a" * 250]
    for name in names:
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_text("text")
    (tmp_path / "f" / ".gitignore").write_text(lines)
    assert sorted(set(names) - {name.removeprefix("f/") for name in files_in(tmp_path / "f")}) == passed_over


def test_the_innermost_patterns_that_name_a_file_decide(tmp_path: Path) -> None:
    for name in ("a.log", "x/a.log", "x/b.log"):
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_text("text")
    (tmp_path / "f/.gitignore").write_text("*.log\n")
    (tmp_path / "f/x/.gitignore").write_text("!a.log\n")
    assert list(files_in(tmp_path / "f")) == ["f/x/a.log"]


def test_a_crafted_folder_takes_neither_long_nor_much(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    (folder / "/".join("d" * 180)).mkdir(parents=True)
    for name in ("a.txt", "a.md", "a.c", "a.html"):
        (folder / name).write_text("words " * 1000)
        os.truncate(folder / name, 1 << 40)
    for number, unit in enumerate(("<a ", "</", "<!--", "<a b='", "<?", "<![", "<![CDATA[", "&#" + "9" * 5000)):
        (folder / f"{number}.html").write_text(unit * (2**20 // len(unit)))
    with zipfile.ZipFile(folder / "many.epub", "w", zipfile.ZIP_DEFLATED) as book:
        book.writestr("META-INF/container.xml", '<rootfile full-path="b"/>')
        book.writestr("b", '<package><item id="i" href="c"/>' + '<itemref idref="i"/>' * 1000 + "</package>")
        book.writestr("c", "<p>word" * 10_000)
    large = zipfile.ZipFile(folder / "large.epub", "w", zipfile.ZIP_DEFLATED)
    with large, large.open("META-INF/container.xml", "w") as part:
        for _ in range(420):
            part.write(bytes(1 << 20))
    (folder / "a.eml").write_text("From: " + "(" * 300_000 + "\nSubject: " + "=?utf-8?q?" * 30_000 + "\n\nwords\n")
    node = {"message": {"author": {"role": "user"}, "content": {"parts": ["word"]}}, "parent": "n"}
    chat = {"mapping": {"n": node}, "current_node": [], "create_time": 1e300, "title": {}}
    (folder / "chat.json").write_text(json.dumps([chat]))
    (folder / "many.json").write_text("[" + "{}," * (8 << 20) + "{}]")
    (folder / "flip.epub").write_bytes((folder / "many.epub").read_bytes().replace(b"\x50", b"\x51", 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {name.removeprefix("f/"): told for name, told in files_in(folder).items()}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    assert found["many.epub"] == 10_000 * len("word\n\n") - 1
    assert "needs more than 400 MiB" in str(found["large.epub"])
    assert isinstance(found["a.eml"], int) or "a.eml" in str(found["a.eml"])
    assert found["chat.json"] == len("# Conversation\n\nuser: word\n")
    assert found["many.json"] == (folder / "many.json").stat().st_size
    assert "is not a readable EPUB file" in str(found["flip.epub"])
    assert all(
        "MiB: to read it anyway, name the file itself" in str(found[name])
        for name in ("a.txt", "a.md", "a.c", "a.html")
    )
    assert all(isinstance(told := found[f"{number}.html"], int) or "has no words" in str(told) for number in range(8))


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
            memory.document(name).begin(1, None)
        memory.put_facts(facts, {}, "a test")
    monkeypatch.setattr(verb, "load_model", no_model)
    begun = time.process_time()
    done = cli("read", folder, tmp_path / "m", "--json")
    assert done.json["unchanged"] == 10_000, done.err
    assert time.process_time() - begun < 5


MESSAGE = """\
From: Ada <ada@example.org>
Subject: =?utf-8?q?The_f=C3=A4hre?=
Date: Sat, 21 Nov 2026 10:00:00 +0000
Content-Type: multipart/alternative; boundary=x

--x
Content-Type: text/plain; charset=utf-8
Content-Transfer-Encoding: quoted-printable

Dogs travel =C3=BCberall free.
--x
Content-Type: text/html

<p>No.</p>
--x--
"""
READ_MESSAGE = """\
From: Ada <ada@example.org>
Date: Sat, 21 Nov 2026 10:00:00 +0000
Subject: The f\u00e4hre

Dogs travel \u00fcberall free.
"""


def test_mail_is_read_with_who_when_and_what(tmp_path: Path) -> None:
    (tmp_path / "one.eml").write_text(MESSAGE)
    (tmp_path / "page.eml").write_text("Subject: A page\nContent-Type: text/html\n\n<p>Bikes &amp; dogs</p>")
    begin = "From ada Sat Nov 21 10:00:00 2026\n"
    (tmp_path / "box.mbox").write_text(f"{begin}{MESSAGE}\n{begin}Subject: Two\n\nNo.\n")
    box, one, page = (each.text() for each in find([str(tmp_path)]))
    assert one == READ_MESSAGE
    assert page == "Subject: A page\n\nBikes & dogs\n"
    assert box == f"{READ_MESSAGE}\nSubject: Two\n\nNo.\n"


def test_of_an_exported_chat_what_was_said_last_is_read(tmp_path: Path) -> None:
    def node(parent: str | None, role: str, text: str) -> dict[str, Any]:
        return {"parent": parent, "message": {"author": {"role": role}, "content": {"parts": [text]}}}

    mapping = {
        "root": {"parent": None, "message": None},
        "q": node("root", "user", "When?"),
        "a": node("q", "assistant", "At noon."),
        "other": node("q", "assistant", "Taken back."),
    }
    chat = {"title": "Ferry", "create_time": 1_790_000_000.5, "mapping": mapping, "current_node": "a"}
    (tmp_path / "conversations.json").write_text(json.dumps([chat]))
    (tmp_path / "data.json").write_text('{"a": 1}')
    exported, data = (each.text() for each in find([str(tmp_path)]))
    assert exported == "# Ferry (2026-09-21)\n\nuser: When?\n\nassistant: At noon.\n"
    assert data == '{"a": 1}'


def test_documents_are_asked_by_name_time_and_what_was_noted(
    cli: Cli, tmp_path: Path, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, memory = tmp_path / "notes", tmp_path / "m"
    folder.mkdir()
    for name in ("old.md", "new.md", "ship.txt"):
        (folder / name).write_text(f"The text of {name}. " * 4)
    os.utime(folder / "old.md", (1_000_000_000, 1_000_000_000))
    options = ("--model", instruct_folder, "--block-size", 16)
    assert cli("read", folder / "ship.txt", memory, *options, "--meta", "project=boat").code == 0
    assert cli("read", folder, memory, *options, "--meta", "place=island", "--meta", "project=walk").code == 0

    def asked(*given: object) -> Any:
        done = cli("ask", memory, "What?", "--max-tokens", 1, "--json", *given)
        return done.json["documents"] if done.code == 0 else (done.code, done.json["message"])

    assert asked("--match", "notes/*.md") == ["notes/new.md", "notes/old.md"]
    assert asked("--match", "old.md") == ["notes/old.md"]
    assert asked("--match", "notes/*.md", "--since", "7d") == ["notes/new.md"]
    assert asked("--since", "2001-01-01") == asked("--meta", "place=island") == ["ship", "notes/new.md", "notes/old.md"]
    monkeypatch.setattr(verb, "load_model", no_model)  # what is noted of a file that is as it was needs none
    assert cli("read", folder / "ship.txt", memory, "--meta", "project=boat", "--meta", "place=").code == 0
    monkeypatch.undo()
    assert asked("--meta", "project=boat") == ["ship"]
    assert [line.split()[-2:] for line in cli("ls", memory).out.splitlines()[2:]] == [
        ["place=island,", "project=walk"]
    ] * 2
    assert cli("ls", memory, "--json").json["documents"][-1]["changed"] == "2001-09-09T01:46:40+00:00"
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "EAST-3")
        time.tzset()
        assert "2001-09-09 04:46" in cli("ls", memory).out
    time.tzset()
    assert len(asked("--meta", "place=island")) == 2
    with memstore.open(memory) as opened:
        opened.document("ship").fork("chat/ship")
    code, message = asked("--match", "chat/*")
    assert "ask it with --document chat/ship" in message
    assert asked("--document", "chat/ship") == ["chat/ship"]
    code, message = asked("--match", "*.pdf")
    assert (code, "none of 3 documents fits" in message) == (3, True)
    assert asked("--document", "ship", "--match", "*.pdf")[1].startswith("the document does not fit --match; ")
    assert asked("--meta", "place")[0] == asked("--since", "soon")[0] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_watch_reads_what_changes_and_waits_for_what_is_in_use_or_away(notes: Path, memory_path: Path) -> None:
    there = set(texts(memory_path))
    command = [sys.executable, "-m", "memstore", "read", str(notes), str(memory_path), "--watch", "--prune"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "4 files unchanged; watching " in process.stderr.readline()
        assert "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()  # the first change waits for no model
        with memstore.open(memory_path):
            (notes / "new.md").write_text("A note.")
            said = process.stderr.readline()
        assert "is being written by process" in said
        assert "mode='r'" not in said
        assert "read notes/new.md: 7 new tokens" in process.stdout.readline()
        notes.rename(notes.with_name("away"))
        while "does not exist; trying again" not in (line := process.stderr.readline()):
            assert line.startswith("reading notes/new.md")
        notes.with_name("away").rename(notes)
        (notes / "new.md").write_text("A note that has grown.")
        assert "read notes/new.md: " in process.stdout.readline()
        (notes / "bakery.md").unlink()
        assert "gone: notes/bakery.md, forgotten" in process.stdout.readline()  # and nothing that was away
        process.send_signal(signal.SIGINT)
        assert "2 files read" in process.stdout.read()
    assert process.returncode == 0
    read = texts(memory_path)
    assert set(read) == {*there, "notes/new.md"} - {"notes/bakery.md"}
    assert read["notes/new.md"] == "A note that has grown."


def test_what_needs_no_tensors_starts_without_pytorch(memory_path: Path, notes: Path) -> None:
    """It takes seconds to load. One process tries all, and says of each what is loaded then."""
    given = {"pin": ["notes/bakery.md"], "forget": ["notes/bakery.md"], "limit": ["--max-bytes", "1GB"]}
    others = ("ls", "stats", "verify", "pin", "limit", "forget", "compact")
    calls = [[name, str(memory_path), *given.get(name, [])] for name in others]
    calls.insert(0, ["read", str(notes), str(memory_path)])
    code = (
        "import json, sys; from memstore.tools.app import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    code = main(words)\n"
        "    print('loaded', words[0], code, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert told == [f"loaded {words[0]} 0 []" for words in calls], done.stderr
