"""One memory from its first token to its statistics, through the command line alone; and what is refused on the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tools.conftest import Cli, Outcome

UNKEPT: dict[str, object] = {"unfinished": False, "pinned": False, "expires": None, "changed": ANY, "meta": {}}
UNKEPT |= {"path": ANY, "digest": ANY, "read": ANY}
LOG = "".join(f"Day {i}: the keeper of the lighthouse saw {i * 7} ships and wrote them down. " for i in range(30))
EXACT = ("--dtype", "float32")
BLOCK = 64


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    return path


@pytest.fixture
def other_model(tmp_path: Path, model_folder: Path) -> Path:
    """The same model with other weights."""
    folder = tmp_path / "other"
    shutil.copytree(model_folder, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(folder)
    return folder


def good(done: Outcome) -> Outcome:
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return done


def refused(done: Outcome, code: int, says: str) -> None:
    assert done.code == code, done.err
    assert done.out == ""
    assert says in done.err
    assert len(done.err.splitlines()) <= 3
    assert "Traceback" not in done.err


@pytest.mark.parametrize("json", [True, False], ids=["json", "text"])
def test_a_memory_is_read_asked_listed_shown_verified_and_counted(
    cli: Cli, log: Path, tmp_path: Path, model_folder: Path, json: bool
) -> None:
    notes, n, blocks = tmp_path / "notes.mem", len(LOG), -(-len(LOG) // BLOCK)

    def run(verb: str, *arguments: object) -> Outcome:
        return good(cli(verb, *arguments, *(["--json"] if json else [])))

    done = run("read", log, notes, "--model", model_folder, *EXACT)
    if json:
        assert done.json["document"] == "log"
        assert done.json["tokens"] == done.json["new_tokens"] == n
        assert done.json["reused_tokens"] == 0
        assert done.json["tokens_per_second"] > 0
    else:
        assert facts(done)["document"] == "log"
        assert facts(done)["tokens"] == f"{n:,}"

    done = run("ask", notes, "How many ships? ", "--top-k", 2, "--max-tokens", 6)
    if json:
        assert done.json["question"] == "How many ships? "
        assert done.json["tokens"] == 6
        assert done.json["answer"]
        assert [used["document"] for used in done.json["sources"]] == ["log", "log"]
        for used in done.json["sources"]:
            assert used["text"] == LOG[used["block"] * BLOCK : (used["block"] + 1) * BLOCK]
        scores = [used["attention"] for used in done.json["sources"]]
        assert scores == sorted(scores, reverse=True)
    else:
        assert done.out.count("[log, line ") == 2
        shown = done.out.partition(" of attention]\n")[2].partition("\n\n[")[0]
        assert shown.strip() in " ".join(LOG.split())

    done = run("ls", notes)
    if json:
        assert done.json["documents"] == [
            {"document": "log", "tokens": n, "blocks": blocks, "full": n // BLOCK, **UNKEPT},
        ]
    else:
        assert done.out.splitlines()[-1].split()[:4] == ["log", f"{n:,}", str(blocks), str(n // BLOCK)]

    done = run("show", notes, "log", 3)
    text = LOG[3 * BLOCK : 4 * BLOCK]
    if json:
        assert done.json["text"] == text
        assert done.json["first_token"] == 3 * BLOCK
        assert done.json["tokens"] == len(done.json["token_ids"]) == BLOCK
        assert [layer["layer"] for layer in done.json["layers"]] == [0, 1, 2]
        assert all(layer["norms"]["k"]["min"] > 0 for layer in done.json["layers"])
    else:
        assert text in done.out
        assert "landmarks" in done.out

    done = run("verify", notes)
    if json:
        assert done.json == {"memory": str(notes), "clean": True, "tokens": n, "findings": [], "dropped": {}}
    else:
        assert done.out == f"clean: 1 document, {n:,} tokens\n"

    done = run("stats", notes)
    if json:
        assert (done.json["documents"], done.json["tokens"], done.json["blocks"]) == (1, n, blocks)
        states = blocks * BLOCK * 3 * 2 * (2 * 8) * 4  # tokens, layers, keys and values, heads, bytes
        assert done.json["bytes"]["blocks"] == states
        assert done.json["disk_bytes"] > states
    else:
        assert facts(done)["tokens"] == f"{n:,}"
        assert facts(done)["blocks"] == str(blocks)


def facts(done: Outcome) -> dict[str, str]:
    """Names and values that were printed below each other."""
    pairs = (line.rsplit(maxsplit=1) for line in done.out.splitlines())
    return {name.strip(): value for name, value in pairs}


def test_asking_twice_gives_the_same_answer(cli: Cli, log: Path, tmp_path: Path, model_folder: Path) -> None:
    good(cli("read", log, tmp_path / "m", "--model", model_folder, *EXACT))
    answers = [cli("ask", tmp_path / "m", "Day 7: ", "--max-tokens", 8, "--json").json for _ in range(2)]
    for answer in answers:
        del answer["seconds"]
    assert answers[0] == answers[1]


def test_a_text_that_has_grown_is_read_from_where_it_ended(
    cli: Cli, log: Path, tmp_path: Path, model_folder: Path
) -> None:
    arguments = ("read", log, tmp_path / "m", "--model", model_folder, *EXACT, "--json")
    assert good(cli(*arguments)).json["new_tokens"] == len(LOG)
    log.write_text(LOG + "And then came the fog.")
    grown = good(cli(*arguments)).json
    assert (grown["reused_tokens"], grown["new_tokens"]) == (len(LOG), 22)
    assert good(cli("verify", tmp_path / "m", "--json")).json["tokens"] == len(LOG) + 22


def test_a_text_of_one_token_is_a_memory_like_any_other(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    text, notes = tmp_path / "one.txt", tmp_path / "m"
    text.write_text("a")
    assert good(cli("read", text, notes, "--model", model_folder, *EXACT, "--json")).json["tokens"] == 1
    assert good(cli("ask", notes, "b", "--max-tokens", 3, "--json")).json["sources"] == []
    assert good(cli("ls", notes, "--json")).json["documents"] == [
        {"document": "one", "tokens": 1, "blocks": 1, "full": 0, **UNKEPT}
    ]
    assert good(cli("show", notes, "one", 0, "--json")).json["text"] == "a"
    assert good(cli("verify", notes, "--json")).json["clean"]
    assert good(cli("stats", notes, "--json")).json["tokens"] == 1


@pytest.mark.parametrize(
    ("content", "arguments", "code", "says"),
    [
        (b"", [], 2, "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", [], 2, "binary"),
        (None, [], 3, "no file"),
        (LOG.encode(), ["--block-size", "60"], 2, "--block-size must divide 64 and 256"),
        (LOG.encode(), ["--block-size", "0"], 2, "--block-size"),
        (LOG.encode(), ["--top-k", "0"], 2, "--top-k"),
    ],
    ids=["empty", "binary", "missing", "block size that does not divide", "block size 0", "top-k 0"],
)
def test_what_cannot_be_read_leaves_nothing_behind(
    cli: Cli, tmp_path: Path, model_folder: Path, content: bytes | None, arguments: list[str], code: int, says: str
) -> None:
    text, notes = tmp_path / "text", tmp_path / "m"
    if content is not None:
        text.write_bytes(content)
    command = ("read", text, notes, "--model", model_folder, *EXACT, *arguments)
    refused(cli(*command), code, says)
    with_json = cli(*command, "--json")
    assert with_json.code == code
    assert says in with_json.json["message"]
    assert not notes.exists()


def test_another_model_and_bad_options_leave_a_memory_as_it_is(
    cli: Cli, log: Path, tmp_path: Path, model_folder: Path, other_model: Path
) -> None:
    notes = tmp_path / "m"
    good(cli("read", log, notes, "--model", model_folder, *EXACT))
    before = (notes / "data.mdb").read_bytes()
    names = f"was read by {model_folder}, not by {other_model}"
    refused(cli("read", log, notes, "--model", other_model, *EXACT), 5, names)
    refused(cli("ask", notes, "Who?", "--model", other_model), 5, names)
    refused(cli("ask", notes, "Who?", "--dtype", "bfloat16"), 5, "dtype: ")
    refused(cli("ask", notes, "Who?", "--top-k", 0), 2, "--top-k")
    refused(cli("read", log, notes, "--model", model_folder, *EXACT, "--top-k", 0), 2, "--top-k")
    refused(cli("ask", notes, "Who?", "--document", "nobody"), 3, "it has 'log'")
    assert (notes / "data.mdb").read_bytes() == before


def test_a_block_size_that_the_memory_does_not_have_is_refused(
    cli: Cli, log: Path, tmp_path: Path, model_folder: Path
) -> None:
    notes = tmp_path / "m"
    good(cli("read", log, notes, "--model", model_folder, *EXACT, "--block-size", 16))
    done = cli("read", log, notes, "--model", model_folder, *EXACT, "--block-size", 32, "--document", "copy")
    assert done.code in (2, 5)
    assert "block" in done.err
    assert [each["document"] for each in cli("ls", notes, "--json").json["documents"]] == ["log"]
