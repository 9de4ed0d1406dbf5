"""`memstore chat`: typed into standard input."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import memstore
from tests.instruct import instruct_tokenizer
from tests.tools.conftest import Cli, Outcome


@pytest.fixture
def talk(cli: Cli, tmp_path: Path, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    def run(*lines: str, session: str = "today", more: tuple[str, ...] = ()) -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = ("--model", instruct_folder, "--session", session, "--max-tokens", 3)
        done = cli("chat", tmp_path / "m", *options, *more)
        assert done.code == 0, done.err
        return done

    return run


def test_a_chat_goes_on_tomorrow(talk: Callable[..., Outcome], tmp_path: Path) -> None:
    assert "today: 0 turns so far, 0 other documents" in talk("I am Ada.", "And you?").out
    again = talk("What was that?")
    assert "today: 4 turns so far" in again.out
    assert "> And you?" in again.out
    assert "other: 0 turns so far, 0 other documents" in talk(session="other").out
    with memstore.open(tmp_path / "m", mode="r") as memory:
        facts, _ = memory.facts()
        assert [facts[f"said/today/{i}"]["role"] for i in range(6)] == ["user", "assistant"] * 3
        assert facts["said/today/4"]["text"] == "What was that?"


def test_a_model_that_cannot_chat_is_refused_before_the_memory_is_made(cli: Cli, tmp_path: Path) -> None:
    done = cli("chat", tmp_path / "m", "--model", "hils-passkey")
    assert (done.code, (tmp_path / "m").exists()) == (2, False)
    assert "a conversation needs several" in done.err


def test_ctrl_c_keeps_an_answer_as_far_as_it_came_and_the_chat_goes_on(
    talk: Callable[..., Outcome], tmp_path: Path, instruct_folder: Path
) -> None:
    options = ("--session", "today", "--model", instruct_folder)
    child = subprocess.Popen(
        [sys.executable, "-m", "memstore", "chat", tmp_path / "m", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"Hello\n")
        assert b"today: 0 turns so far" in child.stdout.readline()
        child.stdout.read(1)  # of the answer, which has two hundred tokens
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, errors) == (0, b"")
    assert b"(stopped; the answer so far is stored)" in out
    with memstore.open(tmp_path / "m", mode="r") as memory:
        facts = memory.infos("said/today/")
        said, kept = facts["said/today/0"]["text"], facts["said/today/1"]["text"]
        assert (len(facts), said) == (2, "Hello")
        assert kept
        text = str(instruct_tokenizer().decode(memory.document("chat/today").tokens()))
    assert text.endswith(f"<|user|>Hello<|end|>\n<|assistant|>{kept}")
    assert "today: 2 turns so far" in talk("And now?").out
    assert "today: 4 turns so far" in talk().out


def test_a_chat_reads_shows_its_sources_and_forgets(talk: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "note.md").write_text("The key of the cottage hangs in the woodshed. " * 20)
    read = f"/read {tmp_path / 'note.md'}"
    told = talk("/sources", read, "Where is the key?", "/sources", "/why", "/nonsense").out
    assert "there is no answer yet" in told
    assert "read note: 920 new tokens" in told
    assert "[note, line 1, block " in told
    assert "step  token" in told
    assert "/forget NAME   forget a document" in told
    told = talk(read, "/forget note", "/forget note", "/forget", "/forget", "/end", "More").out
    assert "note.md has not changed since it was read" in told
    assert "forgot note" in told
    assert "has no document 'note'" in told
    assert "the last question and its answer are forgotten" in told
    assert "there is no question yet" in told
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert memory.documents() == []


def test_a_chat_says_when_the_memory_may_have_nothing_on_a_question(
    talk: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "note.md").write_text("The key of the cottage hangs in the woodshed. " * 20)
    read = f"/read {tmp_path / 'note.md'}"
    told = talk(read, "Where does the key of the cottage hang?", "Which mountains of Peru are the highest?").out
    assert told.count("(the memory may have nothing on this") == 1
    assert "lacks mountains, peru, highest)" in told


def test_with_json_the_conversation_is_on_standard_error(talk: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "note.md").write_text("The key of the cottage hangs in the woodshed. " * 20)
    done = talk(f"/read {tmp_path / 'note.md'}", "Where is the key?", more=("--json",))
    assert "today: 0 turns so far" in done.err
    (answer,) = done.json["answers"]
    assert answer["question"] == "Where is the key?"
    assert answer["answer"] in done.err
    assert answer["sources"][0]["document"] == "note"
    assert isinstance(answer["unsupported"], list)
    assert talk("And then?", more=("--csv",)).out.startswith("question,answer,ended,")


def test_a_command_that_is_none_is_told_and_case_does_not_matter(
    talk: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "note.md").write_text("The key of the cottage hangs in the woodshed. " * 20)
    monkeypatch.setenv("HOME", str(tmp_path))
    told = talk("/nonsense", "/SOURCES", "/read -", "Where?", "/read /none", "/Read ~/note.md", "/End now", "More").out
    assert "there is no command /nonsense\n/sources  " in told
    assert "there is no answer yet" in told
    assert f"there is no file {Path.cwd() / '-'}. Name a text file or a folder." in told
    assert "there is no file /none. Name a text file or a folder." in told
    assert "read note: 920 new tokens" in told
    assert "today: 2 turns so far" in talk().out


def test_a_chat_is_no_source_of_an_answer_unless_it_is_named(
    talk: Callable[..., Outcome], cli: Cli, tmp_path: Path, instruct_folder: Path
) -> None:
    (tmp_path / "note.md").write_text("The key of the cottage hangs in the woodshed. " * 20)
    talk(f"/read {tmp_path / 'note.md'}", "Where is the key?")
    ask = ("ask", tmp_path / "m", "Where is the key?", "--model", instruct_folder, "--max-tokens", 2, "--json")
    assert cli(*ask).json["documents"] == ["note"]
    assert cli(*ask, "--document", "chat/today").json["documents"] == ["chat/today"]


def test_others_write_into_the_memory_while_nobody_speaks(
    cli: Cli, tmp_path: Path, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["I am Ada.", "What was added?", ""]

    def typed() -> str:
        if lines[0] == "What was added?":
            with memstore.open(tmp_path / "m") as memory:  # as another process does
                memory.put_info("file/other", {"path": "x"})
        return lines.pop(0)

    monkeypatch.setattr("sys.stdin", type("Typed", (), {"isatty": lambda _: False, "readline": lambda _: typed()})())
    done = cli("chat", tmp_path / "m", "--model", instruct_folder, "--max-tokens", 3)
    assert (done.code, "memstore:" in done.out) == (0, False), done.err
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert len(memory.infos("said/chat/")) == 4


def test_a_turn_that_finds_the_memory_in_use_says_so_and_the_chat_goes_on(
    talk: Callable[..., Outcome], tmp_path: Path
) -> None:
    talk("Hello.")
    with memstore.open(tmp_path / "m"):
        told = talk("And now?").out
    assert "is being written by process" in told
    assert "mode='r'" not in told
    assert "2 turns so far" in talk().out


def test_what_an_answer_used_is_shown_after_a_restart(talk: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "note.md").write_text("The key of the cottage hangs in the woodshed. " * 20)
    talk(f"/read {tmp_path / 'note.md'}", "Where is the key?")
    told = talk("/sources", "/why").out
    assert "[note, line 1, block " in told
    assert "step  token" in told
    (trace,) = tmp_path.glob("m/traces.sqlite")
    trace.unlink()
    assert "not recorded" in talk("/sources").out
    talk("My word is heron.", "/forget")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert memory.traces.list() == []


def test_a_conversation_that_is_forgotten_while_it_goes_on_begins_anew(talk: Callable[..., Outcome]) -> None:
    talk("I am Ada.", "/forget chat/today", "And now?")
    told = talk().out
    assert "today: 2 turns so far" in told
    assert "Ada" not in told
