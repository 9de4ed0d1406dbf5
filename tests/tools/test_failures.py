"""Bad input: the exit code, and one or two lines that say what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import typer

import memstore
from memstore.errors import (
    DamagedError,
    ForeignMemory,
    InvalidArgument,
    MemoryInUse,
    MemstoreError,
    NotAMemory,
    NotFound,
    ReadOnlyMemory,
    StoreFull,
    UnsupportedModel,
    WrongKey,
)
from memstore.progress import progress_bar
from memstore.tools.verb import Interruption, exit_code, status_of, with_way_out
from tests.tools.conftest import Cli

VERBS = [
    "read",
    "ask",
    "ls",
    "show",
    "verify",
    "stats",
    "forget",
    "pin",
    "unpin",
    "expire",
    "limit",
    "compact",
    "repair",
    "demo",
]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (InvalidArgument, 2, 400),
        (NotFound, 3, 404),
        (NotAMemory, 3, 404),
        (DamagedError, 4, 500),
        (ForeignMemory, 5, 409),
        (WrongKey, 5, 409),
        (UnsupportedModel, 5, 409),
        (MemoryInUse, 5, 409),
        (ReadOnlyMemory, 5, 409),
        (StoreFull, 5, 507),
        (Interruption, 130, 500),
        (MemstoreError, 1, 500),
    ],
)
def test_every_error_has_its_exit_code_and_its_status(error: type[MemstoreError], code: int, status: int) -> None:
    assert (exit_code(error("why")), status_of(error("why"))) == (code, status)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "Usage: memstore"),
        (["sing"], 2, "No such command 'sing'"),
        (["ls"], 2, "Missing argument 'MEMORY'"),
        (["ls", "{memory}", "--loud"], 2, "--loud"),
        (["show", "{memory}", "whale", "first"], 2, "'BLOCK': it must be a whole number, not 'first'\n"),
        (["show", "{memory}", "whale", "-1"], 2, "blocks are numbered from 0"),
        (["limit", "{memory}", "--when-full", "evict"], 2, "'--when-full': 'evict' is not one of 'refuse', "),
        (["ask", "{memory}", "Why?", "--top-k", "0"], 2, "--top-k"),
        (["ask", "{memory}", " "], 2, "the question is empty"),
        (["audit", "{memory}", "Why?"], 2, "several documents. Choose one with --document: whale, ship"),
        (["ask", "{memory}", "Why?", "--document", "whale"], 2, "Name it with --model"),
        (["ask", "{memory}", "Why?", "--document", "whale", "--model", "./no"], 3, "no model directory ./no"),
        (["ask", "{memory}", "\udcff"], 2, "not valid UTF-8"),
        (["ls", "{missing}\udcff"], 2, "not valid UTF-8"),
        (["ls", "ram:"], 2, "would be lost"),
        (["read", "{text}", "ram:notes"], 2, "would be lost"),
        (["read", "{text}", "{missing}", "--document", ""], 2, "--document is empty"),
        (["read", "{text}", "{missing}", "--device", "banana"], 2, "the device 'banana'"),
        (["read", "{text}", "{missing}", "--device", "cuda:99"], 2, "the device 'cuda:99'"),
        (["read", "{text}", "{missing}", "--device", "meta"], 2, "the device 'meta'"),
        (["read", "{text}", "{missing}", "--threads", "100000"], 2, "--threads must be at most"),
        (["ls", "{missing}" * 99], 2, "{missing}"),
        (["ls", "{folder}"], 3, "is an empty folder, not a memory"),
        (["read", "{text}", "{memory}", "--dtype", "int4"], 2, "there is no dtype 'int4'"),
        (["read", "{memory}", "{text}"], 3, "it is a file. A text comes before its memory"),
        (["read", "{binary}", "{memory}"], 2, "--encoding"),
        (["read", "{empty}", "{memory}"], 2, "is empty"),
        (["read", "{folder}", "{memory}"], 2, "there is nothing to read in"),
        (["ls", ""], 2, "the path of the memory is empty"),
        (["read", "{text}", ""], 2, "the path of the memory is empty"),
        (["read", "{missing}", "{memory}"], 3, "no file"),
        (["read", "{text}", "{text}"], 3, "{text}"),
        (["read", "{text}", "{memory}", "--model", "./no"], 3, "no model directory ./no"),
        (["ls", "{missing}"], 3, "{missing}"),
        (["stats", "{text}"], 3, "{text}"),
        (["verify", "{folder}"], 3, "{folder}"),
        (["ask", "{memory}", "Why?", "--document", "harpoon"], 3, "whale"),
        (["show", "{memory}", "harpoon", "0"], 3, "whale"),
        (["show", "{memory}", "whale", "3"], 3, "document 'whale' has no block 3: it has blocks 0 to 2"),
    ],
)
def test_bad_input_is_told_in_short(
    cli: Cli, memory: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    names = {name: str(tmp_path / name) for name in ("text", "binary", "empty", "folder", "missing")}
    names["memory"] = str(memory)
    Path(names["text"]).write_text("Call me Ishmael.")
    Path(names["binary"]).write_bytes(b"\x7fELF\0\xff")
    Path(names["empty"]).write_text("\n")
    Path(names["folder"]).mkdir()

    filled = [argument.format(**names) for argument in arguments]
    done = cli(*filled)
    assert done.code == code
    assert done.out == ""
    assert says.format(**names) in done.err
    assert "Traceback" not in done.err
    assert not arguments or len(done.err.splitlines()) <= 3

    with_json = cli(*filled, "--json")
    if arguments:
        assert with_json.code == code
        assert with_json.json.keys() - {"memory", "remedy"} == {"error", "message", "code"}
        assert with_json.err == ""


def test_a_damaged_memory_is_told_by_verify(cli: Cli, memory: Path) -> None:
    with memstore.open(memory, mode="r") as opened:
        state = opened.document("whale").layer(0).gather([1])["k"][0]
    flip(memory / "data.mdb", state.numpy().tobytes())

    done = cli("verify", memory)
    assert done.code == 4
    assert re.search(r"damaged +whale +0 +1 +4 to 7 ", done.out), "kind, document, layer, block, tokens"
    findings = cli("verify", memory, "--json").json["findings"]
    assert [(each["document"], each["layer"], each["block"]) for each in findings] == [("whale", 0, 1)]

    shown = cli("show", memory, "whale", 1)
    assert shown.code == 4
    assert "whale" in shown.err
    assert cli("show", memory, "whale", 0).code == 0


def test_names_cannot_give_orders_to_the_terminal(cli: Cli, memory: Path, tmp_path: Path) -> None:
    """Neither in errors nor beside a progress bar."""
    evil = tmp_path / "[red]\x1b[31m"
    memory.rename(evil)
    cli("fork", evil, "whale", "two\nlines\x1b[31m")
    for done in (
        cli("ask", evil, "Why?"),
        cli("ls", evil / "none"),
        cli("copy", evil, tmp_path / "copy"),
        cli("diff", evil, tmp_path / "copy"),
    ):
        assert "\x1b" not in done.out + done.err
        assert len(done.err.splitlines()) == 1, done
        assert "mistake" not in done.err
    assert "ship, 'two\\nlines\\x1b[31m'" in cli("audit", evil, "Why?").err


def test_checks_that_may_take_long_show_that_they_go_on(
    cli: Cli, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    for verb in (["verify", memory], ["repair", memory], ["repair", memory, "--to", tmp_path / "saved"]):
        says = "saving the readable part" if "--to" in verb else "checking every value"
        assert says in cli(*verb).err
        if "--to" not in verb:
            assert cli(*verb, "--json").err == ""


def test_a_progress_bar_shows_names_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("[/red]whale", "[red]whale", ":whale:"):
        with progress_bar(name, 0, 3, show=True) as advance:
            advance(3)
        assert f"reading {name} " in capfd.readouterr().err


def flip(path: Path, value: bytes) -> None:
    """Change one bit of ``value`` wherever it is stored in the file."""
    content = bytearray(path.read_bytes())
    place = content.find(value)
    assert place >= 0, "the states are not stored as they are"
    while place >= 0:
        content[place] ^= 1
        place = content.find(value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("error", "code", "kind", "says"),
    [
        (ZeroDivisionError("by\nzero"), 1, "ZeroDivisionError", "ZeroDivisionError: by zero - this is a bug in"),
        (PermissionError(13, "Permission denied", "/secret"), 5, "ReadOnlyMemory", "/secret: permission denied"),
        (OSError(40, "Too many links", "/loop"), 1, "MemstoreError", "/loop: Too many links"),
        (KeyboardInterrupt(), 130, "Interruption", "interrupted; run the same command again"),
        (typer.Abort(), 130, "Interruption", "interrupted; run the same command again"),
    ],
)
def test_no_error_ends_in_a_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, kind: str, says: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(memstore, "open", fail)
    done = cli("ls", "notes.mem")
    assert (done.code, done.out, len(done.err.splitlines())) == (code, "", 1)
    assert says in done.err
    with_json = cli("ls", "notes.mem", "--json")
    assert (with_json.code, with_json.err, with_json.json["error"]) == (code, "", kind)
    assert says in with_json.json["message"]

    monkeypatch.setenv("MEMSTORE_DEBUG", "1")
    assert ("Traceback" in cli("ls", "notes.mem").err) == isinstance(error, ZeroDivisionError | OSError)


def test_programs_are_told_the_kind_of_error_its_memory_and_its_remedy(
    cli: Cli, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*words: object) -> dict[str, str]:
        answer: dict[str, str] = cli(*words, "--json").json
        return {name: value for name, value in answer.items() if name not in ("error", "message")}

    assert told("ls", memory, "--loud") == {"code": "usage"}
    assert told("ls", "ram:") == {"code": "invalid"}
    assert told("ls", memory / "none") == {"code": "not-found", "memory": str(memory / "none")}
    with memstore.open(memory):
        assert told("forget", memory, "whale") == {"code": "in-use", "memory": str(memory)}
    os.truncate(memory / "data.mdb", 100)
    assert told("ls", memory) == {"code": "damaged", "memory": str(memory), "remedy": "restore"}
    assert told("repair", memory, "--to", memory.parent / "saved") == told("ls", memory)
    for error, code in ((ZeroDivisionError, "mistake"), (KeyboardInterrupt, "interrupted")):
        monkeypatch.setattr(memstore, "open", partial(fail, error))
        assert told("ls", memory) == {"code": code}


def fail(error: type[BaseException], *_: object, **__: object) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        DamagedError("why", memory="{}"),
        DamagedError("why"),
        MemoryInUse("why", memory="{}"),
        ReadOnlyMemory("why", memory="{}"),
        StoreFull("why", memory="{}", remedy="limit"),
    ],
)
def test_the_advice_to_type_changes_nothing_that_programs_look_at(memory: Path, error: MemstoreError) -> None:
    error.memory = error.memory and str(memory)
    more = with_way_out(error, ["forget", str(memory), "whale"])
    assert isinstance(more, type(error))
    assert str(more).startswith("why\n")
    assert "memstore " in str(more)
    assert more.facts() == error.facts()


def test_the_damaged_one_of_two_memories_is_the_one_to_look_at(memory: Path) -> None:
    shutil.copytree(memory, memory.parent / "other")
    error = DamagedError("why", memory=memory.parent / "other")
    assert f"memstore verify {memory.parent / 'other'};" in str(
        with_way_out(error, ["copy", str(memory), error.memory or ""])
    )


def test_an_interruption_before_reading(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "text").write_text("Call me Ishmael.")
    monkeypatch.setattr("memstore.tools.read.load_model", interrupt)
    done = cli("read", tmp_path / "text", tmp_path / "notes.mem")
    assert done.code == 130
    assert done.err == "memstore: interrupted before anything was read; run the same command again\n"


# Every verb meets both in test_every_verb; here the process is one that a shell started.
@pytest.mark.parametrize(("arguments", "redirection"), [("ls {}", ">&-"), ("--help", ">/dev/full")])
def test_an_output_that_cannot_be_written(memory: Path, redirection: str, arguments: str) -> None:
    command = f"{sys.executable} -m memstore.tools.app {arguments.format(memory)} {redirection}"
    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("memstore: standard output cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("length", [0, 100, 4096, 8192])
def test_a_truncated_memory_is_damaged(cli: Cli, memory: Path, length: int) -> None:
    os.truncate(memory / "data.mdb", length)
    (memory.parent / "text").write_text("Call me Ishmael.")
    for verb in (["ls"], ["verify"], ["read", memory.parent / "text"]):
        done = cli(*verb, memory)
        assert done.code == 4, done
        assert length == 8192 or "was truncated" in done.err


def test_a_reader_that_leaves_has_the_code_of_a_shell(memory: Path) -> None:
    command = [sys.executable, "-m", "memstore.tools.app", "ls", str(memory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_json(cli: Cli, verb: str) -> None:
    done = cli(verb, "--help")
    assert done.code == 0
    assert f"Example:\n\n      memstore {verb}" in done.out
    assert "--json" in done.out


def test_help_names_every_verb_and_exit_code(cli: Cli) -> None:
    text = cli("--help").out
    assert all(verb in text for verb in VERBS)
    assert "4 damaged" in text


def test_the_version(cli: Cli) -> None:
    assert cli("--version").out == f"memstore {memstore.__version__}\n"
