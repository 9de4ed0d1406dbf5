"""`read` and `ask` with a tiny random model: what is read stays, and what was used is shown."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memstore
from memstore.errors import printable
from memstore.tools.models import load_model
from tests.instruct import instruct_tokenizer
from tests.tools.conftest import Cli

TEXT = "".join(f"Line {i} of the log tells of nothing new. " for i in range(40))
MANY = 12
"""So often, it takes some seconds to read."""
PATIENCE = 180  # seconds, on a machine that does other things too


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def notes(cli: Cli, tmp_path: Path, text: Path, model_folder: Path) -> Path:
    """A memory that has read the text."""
    path = tmp_path / "log.mem"
    done = cli("read", text, path, "--model", model_folder, "--dtype", "float32", "--block-size", 16)
    assert done.code == 0, done.err
    return path


def test_read_keeps_every_token(cli: Cli, notes: Path) -> None:
    (document,) = cli("ls", notes, "--json").json["documents"]
    assert (document["document"], document["tokens"]) == ("log", len(TEXT))
    assert cli("show", notes, "log", 1, "--json").json["text"] == TEXT[16:32]


def test_a_memory_made_with_the_default_model_says_so_once(
    cli: Cli, text: Path, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.tools.read.SMOLLM2", str(model_folder))
    told = [cli("read", text, tmp_path / name, *more) for name, more in (("m", ()), ("m", ()), ("n", ("--json",)))]
    assert ["answers hardly any question: see --model" in each.err for each in told] == [True, False, False]


def test_reading_again_reads_nothing_new(cli: Cli, notes: Path, text: Path, model_folder: Path) -> None:
    again = cli("read", text, notes, "--model", model_folder, "--dtype", "float32", "--json").json
    assert again["new_tokens"] == 0
    assert again["tokens"] == len(TEXT)
    facts = {"document": "log", "tokens": len(TEXT), "new_tokens": 0, "reused_tokens": len(TEXT)}
    facts |= {"seconds": 0.0, "tokens_per_second": 0.0}
    assert (again["unchanged"], again["documents"]) == (1, [facts])
    assert again.items() >= facts.items()


def test_the_model_that_read_a_memory_need_not_be_named_again(cli: Cli, notes: Path, text: Path) -> None:
    again = cli("read", text, notes, "--dtype", "float32", "--document", "copy", "--json")
    assert again.code == 0, again.err
    assert again.json["tokens"] == len(TEXT)


def test_another_text_of_the_same_name_is_refused_with_what_the_command_has(
    cli: Cli, notes: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/log.txt").write_text("Another text, which is long enough to differ.")
    done = cli("read", tmp_path / "other/log.txt", notes, "--document", "log")
    assert done.code == 2
    assert "holds a different text (they differ from token " in done.err
    assert "--document NAME" in done.err
    assert "append()" not in done.err
    assert "tokens/s" not in done.err, "nothing was read"


def test_the_csv_of_an_answer_is_a_table_of_its_sources(cli: Cli, notes: Path) -> None:
    done = cli("ask", notes, "What is new? ", "--max-tokens", 2, "--csv")
    head, *rows = csv.reader(io.StringIO(done.out))
    asked = cli("ask", notes, "What is new? ", "--max-tokens", 2, "--json").json
    sources = asked["sources"]
    assert done.err == f"{printable(asked['answer'])}\n"
    assert head == list(sources[0])
    assert [(row[0], int(row[1])) for row in rows] == [(each["document"], each["block"]) for each in sources]


def test_a_second_text_becomes_a_second_document(cli: Cli, notes: Path, text: Path, model_folder: Path) -> None:
    cli("read", text, notes, "--model", model_folder, "--dtype", "float32", "--document", "copy")
    assert [each["document"] for each in cli("ls", notes, "--json").json["documents"]] == ["log", "copy"]


def test_ask_needs_only_the_memory_and_shows_what_it_used(cli: Cli, notes: Path) -> None:
    data = cli("ask", notes, "What is new? ", "--top-k", 3, "--max-tokens", 5, "--json").json
    assert data["documents"] == ["log"]
    assert data["tokens"] == 5
    assert data["sources"]
    assert all(used["text"] in TEXT for used in data["sources"])
    done = cli("ask", notes, "What is new? ", "--top-k", 3, "--max-tokens", 5)
    assert done.code == 0, done.err
    assert data["sources"][0]["text"].strip() in done.out


def test_ask_sees_all_documents_or_those_that_are_named(
    cli: Cli, notes: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("read", text, notes, "--document", "copy", "--dtype", "float32").code == 0
    assert cli("ask", notes, "What?", "--max-tokens", 2, "--json").json["documents"] == ["log", "copy"]
    named = cli("ask", notes, "What?", "--document", "copy", "--document", "log", "--max-tokens", 2, "--json").json
    assert named["documents"] == ["copy", "log"]
    missing = cli("ask", notes, "What?", "--document", "nobody")
    assert (missing.code, "it has 'log', 'copy'" in missing.err) == (3, True), missing.err
    monkeypatch.setattr("sys.stdin", io.StringIO("What is new?"))
    assert cli("ask", notes, "-", "--max-tokens", 2, "--json").json["question"] == "What is new?"


def test_a_question_goes_into_the_chat_template_unless_it_is_raw(
    cli: Cli, text: Path, tmp_path: Path, instruct_folder: Path
) -> None:
    path = tmp_path / "m"
    assert cli("read", text, path, "--model", instruct_folder, "--block-size", 16).code == 0
    shown = cli("ask", path, "What is new?", "--system", "Be brief.", "--max-tokens", 3, "--trace")
    assert shown.code == 0, shown.err
    assert len([line for line in shown.out.splitlines() if line.startswith("[log, line ")]) == 2
    everything = cli("ask", path, "What is new?", "--sources", "all", "--max-tokens", 3)
    assert len([line for line in everything.out.splitlines() if line.startswith("[log, line ")]) == 8
    assert cli("ask", path, "What is new?", "--raw", "--max-tokens", 3, "--trace").code == 0
    with memstore.open(path, mode="r") as memory:
        prompts = [instruct_tokenizer().decode(trace.info["prompt"]) for trace in memory.traces.list()]
    assert prompts == ["<|system|>Be brief.<|end|>\n<|user|>What is new?<|end|>\n<|assistant|>", "What is new?"]
    assert cli("ask", path, "What?", "--sources", "few").code == 2
    assert cli("ask", path, "What?", "--sources", "9" * 5000).code == 2
    assert "--raw leaves out" in cli("ask", path, "What?", "--raw", "--system", "Be brief.").err


def test_a_memory_made_in_python_is_asked_and_shown_in_the_shell(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    loaded = load_model(str(model_folder), "float32")
    with memstore.attach(loaded.model, tmp_path / "m", tokenizer=loaded.tokenizer) as reader:
        reader.read(TEXT, document="log")
    assert cli("ask", tmp_path / "m", "What?", "--max-tokens", 2).code == 0
    assert cli("show", tmp_path / "m", "log", 0, "--json").json["text"] == TEXT[:64]


def test_show_and_trace_take_the_model_of_a_memory_that_does_not_say_it(
    cli: Cli, notes: Path, model_folder: Path
) -> None:
    assert cli("ask", notes, "What?", "--max-tokens", 2, "--trace").code == 0
    with memstore.open(notes) as memory:
        memory.put_info("model", {})
    assert "name it with --model" in cli("show", notes, "log", 0).out
    assert cli("show", notes, "log", 0, "--model", model_folder, "--json").json["text"] == TEXT[:16]
    assert cli("trace", notes, "--model", model_folder, "--json").json["blocks"][0]["text"] in TEXT


def test_ask_changes_nothing(cli: Cli, notes: Path) -> None:
    before = cli("ls", notes, "--json").json
    cli("ask", notes, "What is new? ", "--max-tokens", 5)
    assert cli("ls", notes, "--json").json == before


def test_a_codec_is_chosen_once(cli: Cli, notes: Path, text: Path, model_folder: Path, tmp_path: Path) -> None:
    options = ("--model", model_folder, "--dtype", "float32", "--block-size", 16)
    assert cli("read", text, tmp_path / "small.mem", *options, "--codec", "int4").code == 0
    sizes = [cli("stats", path, "--json").json["bytes"]["blocks"] for path in (notes, tmp_path / "small.mem")]
    assert sizes[1] < sizes[0] / 4
    assert cli("read", text, tmp_path / "small.mem", *options).code == 0, "it need not be named again"
    other = cli("read", text, notes, *options, "--codec", "int8")
    assert (other.code, "has the codec none: leave --codec out" in other.err) == (2, True)
    unknown = cli("read", text, tmp_path / "new.mem", *options, "--codec", "zip")
    assert (unknown.code, "Choose one of none, int8, fp8, int4." in unknown.err) == (2, True)


def test_another_model_is_refused(cli: Cli, memory: Path, text: Path, model_folder: Path) -> None:
    done = cli("read", text, memory, "--model", model_folder, "--dtype", "float32")
    assert done.code == 5
    assert len(done.err.splitlines()) <= 12


def test_a_memory_in_use_is_refused(cli: Cli, notes: Path, text: Path, model_folder: Path) -> None:
    with memstore.open(notes):
        done = cli("read", text, notes, "--model", model_folder, "--dtype", "float32", "--document", "copy")
    assert done.code == 5


def test_an_interrupted_read_says_how_to_go_on(tmp_path: Path, model_folder: Path, cli: Cli) -> None:
    long_text = tmp_path / "long.txt"
    long_text.write_text(TEXT * MANY)
    path = tmp_path / "long.mem"
    arguments = ["read", long_text, path, "--model", model_folder, "--dtype", "float32"]
    command = [sys.executable, "-m", "memstore.tools.app", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_tokens(path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "Run the same command again to continue" in err
    assert "Traceback" not in err

    (document,) = cli("ls", path, "--json").json["documents"]
    assert f"interrupted after {document['tokens']:,} tokens" in err
    assert document["unfinished"]
    assert "unfinished" in cli("ls", path).out
    done = cli(*arguments, "--json").json
    assert done["reused_tokens"] == document["tokens"]
    assert done["tokens"] == len(TEXT) * MANY
    assert not cli("ls", path, "--json").json["documents"][0]["unfinished"]


def wait_for_tokens(path: Path | str) -> None:
    """Return when the memory holds the first tokens."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(0.05)
        try:
            with memstore.open(path, mode="r") as opened:
                if opened.documents():
                    return
        except memstore.MemstoreError:
            continue
    raise AssertionError(f"nothing was read in {PATIENCE} seconds")
