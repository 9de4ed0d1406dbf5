"""`ask --trace` and `trace`: which blocks each token was written with."""

from __future__ import annotations

import csv
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

import memstore
from memstore.memory import Look
from memstore.memory.traces import NAME
from memstore.tools.app import main
from memstore.tools.trace import WIDTH, excerpt
from tests.tools.conftest import Cli
from tests.tools.test_read_ask import TEXT

NEW = 5


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A memory of the text, and the trace of one answer of five tokens. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "log.txt").write_text(TEXT)
    model = ("--model", model_folder, "--dtype", "float32", "--block-size", 16)
    for arguments in (
        ("read", folder / "log.txt", folder / "log.mem", *model),
        ("ask", folder / "log.mem", "What is new? ", "--top-k", 3, "--max-tokens", NEW, "--trace"),
    ):
        with redirect_stdout(StringIO()):
            assert main([str(argument) for argument in arguments]) == 0
    return folder / "log.mem"


def test_asking_leaves_no_trace_unless_wanted(cli: Cli, asked: Path) -> None:
    before = cli("trace", asked, "--list", "--json").json["traces"]
    data = cli("ask", asked, "What is new? ", "--top-k", 3, "--max-tokens", NEW, "--json").json
    assert "trace" not in data
    assert cli("trace", asked, "--list", "--json").json["traces"] == before


def test_a_trace_shows_the_blocks_of_each_token(cli: Cli, asked: Path) -> None:
    done = cli("trace", asked, "--top", 2)
    assert done.code == 0, done.err
    facts, _, table = done.out.partition("\n\n")
    assert "question      What is new?" in facts
    assert "document      log" in facts
    head, *rows = table.splitlines()
    assert head.split() == ["step", "token", "block", "weight", "text"]
    assert len(rows) == 2 * NEW
    data = cli("trace", asked, "--json").json
    for step, first in zip(data["steps"], rows[::2], strict=True):
        assert first.split()[0] == str(step["step"])
        assert " ".join(step["blocks"][0]["text"].split()) in first


def test_json_has_everything_that_was_recorded(cli: Cli, asked: Path) -> None:
    data = cli("trace", asked, 1, "--json").json
    assert (data["trace"], data["mechanism"], data["ended"], data["top_k"]) == (1, "attach", True, 3)
    assert data["documents"] == ["log"]
    assert len(data["prompt"]) == len("What is new? ")
    assert [step["step"] for step in data["steps"]] == list(range(NEW))
    assert data["answer"] == data["steps"][-1]["said"] == "".join(step["text"] for step in data["steps"])
    with memstore.open(asked, mode="r") as memory:
        recorded = memory.traces.get(1)
        assert [step["token"] for step in data["steps"]] == recorded.tokens()
        used = [(each["document"], each["block"], each["weight"]) for each in data["blocks"]]
        assert used == recorded.used()
        for told, step in zip(data["steps"], recorded.steps(), strict=True):
            for shown, look in zip(told["looks"], step.looks, strict=True):
                assert (shown["layer"], shown["blocks"]) == (look.layer, look.blocks.tolist())
                np.testing.assert_allclose(shown["weights"], look.weights)
                assert set(shown["tiers"][0]) <= {"host", "disk"}
    for each in data["blocks"]:
        assert each["text"] == TEXT[each["block"] * 16 : (each["block"] + 1) * 16]


def test_layers_heads_and_steps_can_be_looked_at_alone(cli: Cli, asked: Path) -> None:
    with memstore.open(asked, mode="r") as memory:
        recorded = memory.traces.get(1)
        layers = recorded.info["layers"]
        expected = recorded.used(layer=layers[-1], head=1)
    data = cli("trace", asked, "--layer", layers[-1], "--head", 1, "--json").json
    assert [(each["document"], each["block"], each["weight"]) for each in data["blocks"]] == expected
    assert {look["layer"] for step in data["steps"] for look in step["looks"]} == {layers[-1]}
    (only,) = cli("trace", asked, "--step", 3, "--json").json["steps"]
    assert only == cli("trace", asked, "--json").json["steps"][3]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([7], 3, "no trace 7; it has 1"),
        (["--layer", 99], 2, "layer 99 retrieved nothing here. Layers that did: "),
        (["--head", 99], 2, "query heads 0 to 3"),
        (["--step", 99], 2, "has steps 0 to 4"),
        (["--top", 0], 2, "--top"),
        (["--remove"], 2, "pass its number"),
        ([1, "--remove", "--list"], 2, "pass its number"),
        ([9, "--remove"], 3, "no trace 9"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    cli: Cli, asked: Path, arguments: list[object], code: int, says: str
) -> None:
    done = cli("trace", asked, *arguments)
    assert (done.code, done.out) == (code, "")
    assert says in done.err


def test_a_memory_without_traces_says_how_to_record_one(cli: Cli, memory: Path) -> None:
    done = cli("trace", memory)
    assert done.code == 3
    assert f"memstore ask {memory} QUESTION --trace" in done.err
    done = cli("trace", memory, "--list")
    assert done.code == 0
    assert "no traces yet" in done.out
    assert cli("trace", memory, "--list", "--json").json["traces"] == []
    assert not (memory / NAME).exists()


def write(path: Path, **changes: object) -> None:
    """A trace of one step by hand."""
    values = {
        "layer": 0,
        "row": 0,
        "documents": ["whale"],
        "document": np.zeros((1, 2), np.int16),
        "blocks": np.array([[1, 0]]),
        "scores": np.full((1, 2), np.nan, np.float32),
        "weights": np.array([[0.5, np.nan]], np.float32),
        "tiers": np.full((1, 2), -1, np.int8),
    }
    with (
        memstore.open(path) as opened,
        opened.traces.record(mechanism="attach", documents=["\x1bship"], question="\x1b[31mred?") as recorder,
    ):
        recorder.begin()
        recorder.look(Look(**(values | changes)))  # type: ignore[arg-type]
        recorder.token(3)


def test_traces_are_listed_and_removed(cli: Cli, memory: Path) -> None:
    write(memory)
    write(memory)
    lines = cli("trace", memory, "--list").out.splitlines()
    assert lines[0].split() == ["trace", "started", "mechanism", "steps", "ended", "documents", "question"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    assert cli("trace", memory, 2, "--remove").out == "trace 2 was removed\n"
    assert [each["trace"] for each in cli("trace", memory, "--list", "--json").json["traces"]] == [1]


def test_a_trace_without_text_scores_or_document_is_shown_as_it_is(cli: Cli, memory: Path) -> None:
    write(memory)
    assert cli("forget", memory, "whale").code == 0
    done = cli("trace", memory)
    assert done.code == 0, done.err
    assert "no text: the memory does not name the model" in done.out
    assert done.out.splitlines()[-2].split() == ["0", "3", "1", "0.5000", "-"]
    (step,) = cli("trace", memory, "--json").json["steps"]
    assert step["looks"][0]["scores"] == [[None, None]]
    assert step["looks"][0]["tiers"] == [[None, None]]
    assert [each["text"] for each in step["blocks"]] == [None, None]


def test_what_a_terminal_would_obey_is_spelled_out(cli: Cli, memory: Path) -> None:
    write(memory, documents=["\x1b[2Jwhale"])
    assert "\x1b" not in cli("trace", memory).out
    assert "\\x1b[31mred?" in cli("trace", memory).out
    assert "\x1b" not in cli("trace", memory, "--list").out


def test_damaged_traces_say_which_file_to_delete(cli: Cli, memory: Path) -> None:
    (memory / NAME).write_bytes(b"x" * 4096)
    done = cli("trace", memory)
    assert done.code == 4
    assert f"delete {memory / NAME}" in done.err
    assert "memstore repair" not in done.err
    assert cli("verify", memory).code == 0
    assert cli("ls", memory).code == 0


def test_as_csv_every_row_is_whole(cli: Cli, asked: Path) -> None:
    head, *rows = csv.reader(StringIO(cli("trace", asked, "--top", 2, "--csv").out))
    assert head == ["step", "token", "block", "weight", "text"]
    expected = [
        [step["step"], step["text"], each["block"], each["weight"], each["text"]]
        for step in cli("trace", asked, "--json").json["steps"]
        for each in step["blocks"][:2]
    ]
    assert rows == [list(map(str, row)) for row in expected]
    started = cli("trace", asked, "--list", "--json").json["traces"][0]["started"]
    assert started in cli("trace", asked, "--list", "--csv").out
    assert f"{started[:10]} {started[11:19]} UTC" in cli("trace", asked, "--list").out


def test_blocks_that_have_left_are_explained(cli: Cli, asked: Path, tmp_path: Path) -> None:
    copy = tmp_path / "log.mem"
    copytree(asked, copy)
    assert "longer in the memory" not in cli("trace", copy).out
    assert cli("forget", copy, "log").code == 0
    done = cli("trace", copy)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].startswith("(- in place of a text: the block")


def test_an_excerpt_is_where_what_was_said_stands() -> None:
    text = "It was a dark night. " * 5 + "The pass key is 48151623. " + "The rain fell in torrents. " * 5
    shown = excerpt(text, "I think that it is 4815")
    assert "key is 48151623" in shown
    assert shown.startswith("…")
    assert shown.endswith("…")
    assert len(shown) == WIDTH + 2
    assert excerpt(text, "") == text[:WIDTH] + "…"
    assert excerpt("short\n text", "xyz") == "short text"
    assert excerpt("", "xyz") == ""
