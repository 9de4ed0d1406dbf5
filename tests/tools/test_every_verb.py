"""What every verb answers to wrong input, to a reader that leaves and to Ctrl-C: one line, and the right exit code.

The verbs are those that the application has, so a new one is among them.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest

import memstore
from memstore.tools.app import main
from tests.tools.conftest import Cli
from tests.tools.every import COMMANDS, FILLED, VERBS, call, is_long, memory_argument, takes_document

LOOKING = [verb for verb in VERBS if memory_argument(verb)]
WORKING = [verb for verb in VERBS if not is_long(verb)]
PROSE = "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse. " * 4

World = dict[str, str]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder with a text, a memory that a tiny model has read it into, its export, and things that are no memory."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "whale.txt").write_text(PROSE)
    options = ["--model", str(model_folder), "--dtype", "float32", "--block-size", "16"]
    assert main(["read", str(folder / "whale.txt"), str(folder / "notes.mem"), *options]) == 0
    assert main(["ask", str(folder / "notes.mem"), "Call me", "--max-tokens", "2", *tracing()]) == 0
    assert main(["export", str(folder / "notes.mem"), str(folder / "export")]) == 0
    make_key(folder / "notes.key")
    assert main(["copy", *(str(folder / name) for name in ("notes.mem", "encrypted.mem")), *key_option(folder)]) == 0
    (folder / "folder").mkdir()
    (folder / "folder" / "something").write_text("else")
    return folder


def make_key(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(path.name.encode().ljust(32))


def key_option(folder: Path) -> list[str]:
    return ["--key-file", str(folder / "notes.key")]


@pytest.fixture
def world(original: Path, tmp_path: Path, model_folder: Path) -> World:
    """A copy of it all, to be changed at will: what stands for the names in a call."""
    shutil.copytree(original, tmp_path / "w")
    (tmp_path / "new").mkdir()
    here = tmp_path / "w"
    return {
        "memory": str(here / "notes.mem"),
        "text": str(here / "whale.txt"),
        "export": str(here / "export"),
        "encrypted": str(here / "encrypted.mem"),
        "key": str(here / "notes.key"),
        "folder": str(here / "folder"),
        "missing": str(here / "missing"),
        "tmp": str(tmp_path / "new"),
        "model": str(model_folder),
    }


def check_failure(cli: Cli, words: list[str], code: int) -> str:
    """It fails with this code in one line (two where a usage hint follows), and with --json as an object."""
    done = cli(*words)
    assert (done.code, done.out) == (code, ""), done
    lines = [line for line in done.err.splitlines() if not line.startswith("Try 'memstore")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("memstore: ")
    with_json = cli(*words, "--json")
    assert (with_json.code, with_json.err) == (code, ""), with_json
    assert with_json.json.keys() - {"memory", "remedy"} == {"error", "message", "code"}
    assert cli(*words, "--csv").out == ""
    return lines[0]


# Wrong input


@pytest.mark.parametrize("verb", LOOKING)
def test_a_memory_or_document_that_cannot_be_is_named_and_nothing_changes(cli: Cli, world: World, verb: str) -> None:
    argument, folder = str(memory_argument(verb)), Path(world["memory"]).parent
    before = sorted(folder.rglob("*"))
    for thing in ("missing", "text", "folder", "export"):
        assert world[thing] in check_failure(cli, call(verb, world, **{argument: f"{{{thing}}}"}), 3)
    assert "would be lost" in check_failure(cli, call(verb, world, **{argument: "ram:"}), 2)
    assert sorted(folder.rglob("*")) == before
    if (words := takes_document(verb)) is not None:
        assert "'whale'" in check_failure(cli, [*call(verb, world, DOCUMENT="harpoon"), *words], 3)


@pytest.mark.parametrize("block", ["999", "99999999999999999999"])
def test_a_block_that_is_not_there(cli: Cli, world: World, block: str) -> None:
    for words in (["show", world["memory"], "whale", block], ["search", world["memory"], "--block", f"whale:{block}"]):
        assert "it has blocks 0 to" in check_failure(cli, words, 3)


@pytest.mark.parametrize("verb", VERBS)
def test_usage_that_is_wrong(cli: Cli, world: World, verb: str) -> None:  # which changes nothing
    assert "No such option" in check_failure(cli, [*call(verb, world), "--harpoon"], 2)
    if any(each.required for each in COMMANDS[verb].params):
        assert "Missing" in check_failure(cli, verb.split(), 2)
    if not is_long(verb):
        done = cli(*call(verb, world), "--json", "--csv")
        assert (done.code, json.loads(done.out)["error"]) == (2, "InvalidArgument")


def test_a_verb_that_is_nearly_one(cli: Cli) -> None:
    assert "Did you mean 'show'?" in check_failure(cli, ["shwo"], 2)
    assert "No such command" in check_failure(cli, ["harpoon"], 2)


# What works


@pytest.mark.parametrize("verb", WORKING)
def test_json_is_one_object_and_csv_is_a_table(cli: Cli, world: World, verb: str) -> None:
    outcomes = [cli(*call(verb, world))]
    for option in ("--json", "--csv"):
        shutil.rmtree(world["tmp"])
        Path(world["tmp"]).mkdir()
        if verb == "forget":
            assert cli("import", world["export"], world["memory"]).code == 0
        if verb == "fork":
            assert cli("forget", world["memory"], "draft").code == 0
        outcomes.append(cli(*call(verb, world), option))
    plain, as_json, as_csv = outcomes
    assert plain.code == as_json.code == as_csv.code == 0, outcomes
    assert isinstance(as_json.json, dict)
    assert plain.out
    head, *rows = csv.reader(io.StringIO(as_csv.out))
    assert as_csv.out.endswith("\r\n")
    assert len(head) >= 2
    assert all(len(row) == len(head) for row in rows)


def test_csv_has_numbers_and_texts_as_they_are(cli: Cli, world: World) -> None:
    facts = dict(csv.reader(io.StringIO(cli("stats", world["memory"], "--csv").out)))
    assert facts["name"] == "value"
    assert (facts["tokens"], facts["rules max bytes"]) == (str(len(PROSE)), "")
    with memstore.open(world["memory"]) as memory:
        memory.document("whale").fork('a "name", with\nall of it', 0)
        memory.document("whale").fork("=1+1", 2)
    rows = list(csv.DictReader(io.StringIO(cli("ls", world["memory"], "--csv").out, newline="")))
    assert [row["document"] for row in rows] == ["whale", 'a "name", with\nall of it', "=1+1"]
    assert rows[0]["tokens"] == str(len(PROSE))


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example_and_names_what_there_is_in_python(cli: Cli, verb: str) -> None:
    outputs = [cli(*verb.split(), "-h"), cli(*verb.split(), "--help"), cli("help", *verb.split())]
    assert {done.code for done in outputs} == {0}
    assert len({done.out for done in outputs}) == 1
    text = outputs[0].out
    assert "Example:" in text
    assert "--json" in text
    assert "--csv" in text
    said = re.search(r"In Python: (.+)", COMMANDS[verb].help.replace("\b", ""), re.DOTALL)
    assert said, "the last paragraph of its help says what there is in Python"
    named = re.findall(r"(?:\w+\.)+\w+", said[1])
    assert named
    for name in named:
        assert found(name) is not None, name


def found(name: str) -> object:
    """What a dotted name means, in memstore where it begins with a class."""
    parts = [*(["memstore"] if name[0].isupper() else []), *name.split(".")]
    for split in range(len(parts), 0, -1):
        module: Any = sys.modules.get(".".join(parts[:split])) or locate(".".join(parts[:split]))
        if module is not None:
            for part in parts[split:]:
                module = getattr(module, part)
            return module
    return None


def test_help_alone_and_for_groups(cli: Cli) -> None:
    assert cli("help").out == cli("--help").out == cli("-h").out
    for words in ([], ["train"], ["eval"]):
        done = cli(*words)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"Usage: {' '.join(['memstore', *words])}")
    assert cli("help", "harpoon").code == 2


# The examples


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder with everything that examples name. The stock model is a tiny one, which need not be fetched."""
    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("memstore.tools.gguf.smollm2_path", lambda *_: model_folder)
        for name in ("moby-dick", "draft", "final"):
            Path(f"{name}.txt").write_text(PROSE * 4 + name)
            assert main(["read", f"{name}.txt", "notes.mem"]) == 0
        Path("notes").mkdir()
        Path("notes/whale.md").write_text(PROSE)
        assert main(["copy", "notes.mem", "archive.mem"]) == 0
        assert main(["export", "notes.mem", "notes-export"]) == 0
        ask = ["ask", "notes.mem", "Call me", "--document", "moby-dick", "--max-tokens", "2", *tracing()]
        assert main(ask) == 0
    return folder


@pytest.fixture
def library(shelf: Path, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which a command runs."""
    shutil.copytree(shelf, tmp_path / "library")
    monkeypatch.chdir(tmp_path / "library")
    monkeypatch.setattr("memstore.tools.gguf.smollm2_path", lambda *_: model_folder)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # nobody talks
    return tmp_path / "library"


def tracing() -> list[str]:
    """The option that lets an answer be recorded, where there is one: examples may look at what was."""
    return ["--trace"] if any("--trace" in each.opts for each in COMMANDS["ask"].params) else []


def examples(verb: str) -> list[str]:
    text = COMMANDS[verb].help.replace("\b\n", "")
    (block,) = re.findall(r"Example:\n\n((?: +.+\n?)+)", text)
    return [line.strip() for line in block.splitlines()]


MADE_BEFORE = {"notes-export": "export"}
"""What an example makes that is there already: another name for it."""


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_runs(cli: Cli, library: Path, verb: str) -> None:
    for line in examples(verb):
        if verb == "completion":
            assert line == 'eval "$(memstore completion bash)"'  # see the test of completion
            continue
        name, *words = shlex.split(line)
        assert name == "memstore"
        assert words[: len(verb.split())] == verb.split()
        if is_long(verb):
            command: Any = COMMANDS[verb]
            with command.make_context(verb, words[len(verb.split()) :]):  # everything but doing it
                continue
        if verb == "export":
            words = [MADE_BEFORE.get(word, word) for word in words]
        if verb == "repair" and "--to" in words:
            shutil.rmtree(library / "saved.mem", ignore_errors=True)
        if verb == "rekey":
            for key in ("notes.key", "new.key"):
                make_key(Path(key))
            assert cli("copy", "notes.mem", "encrypted.mem", *key_option(Path())).code == 0
            words = ["encrypted.mem" if word == "notes.mem" else word for word in words]
        done = cli(*words)
        assert done.code == 0, (line, done)
        assert done.out


# A reader that leaves, an output that cannot be written


def ending(words: list[str], prepare: Callable[[], None]) -> tuple[int, str]:
    """The exit code of a command in a process of its own, after ``prepare``, and what it said on standard error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        try:
            os.dup2(writing, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            prepare()
            code = main(words)
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as errors:
        said = errors.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def onto(file: int) -> None:
    os.dup2(file, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)


def nobody_reads() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    onto(writing)


def full_device() -> None:
    onto(os.open("/dev/full", os.O_WRONLY))


def closed() -> None:
    os.close(1)
    sys.stdout = None  # as Python has it then


@pytest.mark.parametrize("verb", [*WORKING, "demo"])  # of those that take long the help stands for all
def test_an_output_that_nobody_reads_or_that_is_full_or_closed(world: World, verb: str) -> None:
    code, said = ending(call(verb, world), nobody_reads)
    assert code in (141, 3), (code, said)  # 3: a verb that finds nothing to write about
    assert "Traceback" not in said
    assert "Exception" not in said
    for prepare in (full_device, closed):
        code, said = ending([*call(verb, world), "--json"], prepare)
        if code == 3:
            continue
        assert code == 1, said
        assert said.splitlines()[-1].startswith("memstore: standard output cannot be written: ")
        assert "Traceback" not in said


# Terminals

START = "from memstore.__main__ import main; import sys; print('begun', flush=True); sys.exit(main())"


def on_terminal(
    words: list[str], *, columns: int = 80, interrupt: float | None = None, **environment: str
) -> tuple[int, str]:
    """The exit code of a command on a terminal, and what it showed; Ctrl-C comes after ``interrupt`` seconds."""
    program = [sys.executable, "-c", START, *words]
    variables = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **environment}
    child, terminal = pty.fork()
    if not child:
        os.execve(sys.executable, program, variables)  # noqa: S606 - a shell is what is left out
    shown, interrupted = b"", False
    begun: float | None = None
    while True:
        if begun is None and b"begun" in shown:
            begun = time.monotonic()
        if interrupt is not None and not interrupted and begun is not None and time.monotonic() > begun + interrupt:
            os.write(terminal, b"\x03")
            interrupted = True
        if select.select([terminal], [], [], 0.005)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            shown += piece
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, shown.decode().replace("\r\n", "\n").partition("begun\n")[2]


@pytest.mark.parametrize(
    ("verb", "times"),
    [
        ("ls", 1),
        ("read", 1),
        *(pytest.param(verb, 2, marks=pytest.mark.slow) for verb in ("verify", "export")),
    ],
)
def test_ctrl_c_at_any_moment(world: World, verb: str, times: int) -> None:
    rng = random.Random(verb)
    for _ in range(times):
        shutil.rmtree(world["tmp"], ignore_errors=True)
        Path(world["tmp"]).mkdir()
        code, shown = on_terminal(call(verb, world), interrupt=rng.uniform(0, 1.5))
        assert code in (0, 130, -signal.SIGINT), shown  # 0: it was done before
        assert "Traceback" not in shown
        assert "Exception ignored" not in shown
        if code == 130:
            said = [line for line in shown.splitlines() if "memstore: " in line]
            assert len(said) == 1, shown
            assert "interrupted" in said[0]


HALF_LOADED = """
import signal, sys, time
from memstore import __main__ as command

command.FRAGILE = ("fragile",)
command.listen()
try:
    import fragile
    time.sleep(10)  # until the Ctrl-C that was put off comes
except KeyboardInterrupt:
    print("whole" if sys.modules["fragile"].whole else "half", command.pressed())
"""


def test_ctrl_c_waits_for_what_must_not_be_half_loaded(tmp_path: Path) -> None:
    # It loads for longer than Ctrl-C is put off at a time.
    slow = "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.2)\nwhole = True\n"
    (tmp_path / "fragile.py").write_text(slow)
    path = os.pathsep.join([str(tmp_path), str(Path(memstore.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", HALF_LOADED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "whole True\n", done.stderr


THROWN_AWAY = """
import signal, time, weakref
from memstore.__main__ import listen

class Thing: pass

listen()
thing = Thing()
watching = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    time.sleep(10)  # until it comes again
except KeyboardInterrupt:
    print("it came")
"""


def test_ctrl_c_comes_again_where_python_throws_exceptions_away() -> None:
    done = subprocess.run([sys.executable, "-c", THROWN_AWAY], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("it came\n", "")


@pytest.mark.parametrize("error", [AttributeError("half of numpy"), memstore.NotFound("this needs numpy")])
def test_what_an_interrupted_import_comes_out_as(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(memstore, "open", fail)
    assert main(["ls", "notes.mem"]) in (1, 3)
    capsys.readouterr()
    assert main(["ls", "notes.mem"], pressed=lambda: True) == 130
    assert capsys.readouterr().err == "memstore: interrupted; run the same command again\n"


TWICE = """
import os, signal, sys
import memstore
from memstore.__main__ import run
from memstore.tools.verb import Interruption

class Again:
    def write(self, words):
        sys.__stderr__.write(words)
        sys.__stderr__.flush()
        os.kill(os.getpid(), signal.SIGINT)

def stop(*_, **__):
    sys.stderr = Again()
    raise FIRST

memstore.open = stop
sys.argv = ["memstore", "ls", "notes.mem"]
sys.exit(run())
"""


@pytest.mark.parametrize("first", ["KeyboardInterrupt", "Interruption('interrupted after 3 tokens')"])
def test_a_second_ctrl_c_adds_no_second_message(first: str) -> None:
    program = TWICE.replace("FIRST", first)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("memstore: interrupted") == 1
    assert "Traceback" not in done.stderr


def test_tables_fit_a_narrow_terminal(world: World) -> None:
    with memstore.open(world["memory"]) as memory:
        memory.document("whale").fork("a document with a very long name, much longer than the terminal is wide", 3)
    code, shown = on_terminal(["ls", world["memory"]], columns=40)
    assert code == 0
    table = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines() if line[:1] in "┏┃┡│└"]
    assert len(table) > 6
    assert max(map(len, table)) <= 40


def test_colour_can_be_turned_off(world: World) -> None:
    code, shown = on_terminal(["ls", world["memory"]], NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[(?:\d+;)*[34]\d", shown)


def test_python_runs_the_package(world: World) -> None:
    done = subprocess.run([sys.executable, "-m", "memstore", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"memstore {memstore.__version__}\n")


# Completion


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("memstore verif", "verify"), ("memstore eval pass", "passkey"), ("memstore show --js", "--json")],
)
def test_bash_completes(tmp_path: Path, typed: str, offered: str) -> None:
    command = tmp_path / "memstore"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m memstore "$@"\n')
    command.chmod(0o755)
    words = typed.split()
    script = (
        'eval "$(memstore completion bash)"; complete -p memstore >/dev/null || exit 9; '
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_memstore_completion memstore; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [offered]


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -o default"), ("zsh", "compdef"), ("fish", "complete --command")]
)
def test_each_shell_has_its_script(cli: Cli, shell: str, word: str) -> None:
    assert word in cli("completion", shell).out
    assert cli("completion", shell, "--json").json["shell"] == shell


def test_a_shell_that_nobody_knows(cli: Cli) -> None:
    assert "not one of 'bash', 'zsh', 'fish'" in check_failure(cli, ["completion", "tcsh"], 2)


def test_the_table_of_arguments_has_no_name_that_no_verb_has() -> None:
    known = {each.metavar for command in COMMANDS.values() for each in command.params if each.metavar}
    assert set(FILLED) - known <= {"KIND", "[NUMBER]"}  # of verbs that a build may lack
