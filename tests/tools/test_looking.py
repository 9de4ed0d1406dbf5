"""`ls`, `show`, `verify`, `stats`: what they say of a memory that is whole."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

import memstore
from memstore.errors import NotFound
from memstore.tools import models
from memstore.tools.listing import decode
from memstore.tools.models import remember
from tests.tools.conftest import BLOCK, Cli


def test_ls_lists_the_documents(cli: Cli, memory: Path) -> None:
    done = cli("ls", memory)
    assert done.code == 0
    assert [line.split() for line in done.out.splitlines()] == [
        ["document", "tokens", "blocks", "full"],
        ["whale", "10", "3", "2"],
        ["ship", "4", "1", "1"],
    ]


PLAIN: dict[str, object] = {"unfinished": False, "pinned": False, "expires": None, "changed": None, "meta": {}}
PLAIN |= {"path": None, "digest": None, "read": None}


def test_ls_json(cli: Cli, memory: Path) -> None:
    assert cli("ls", memory, "--json").json["documents"] == [
        {"document": "whale", "tokens": 10, "blocks": 3, "full": 2, **PLAIN},
        {"document": "ship", "tokens": 4, "blocks": 1, "full": 1, **PLAIN},
    ]


def test_ls_lists_the_rest_if_another_process_forgets_a_document(
    cli: Cli, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, listings = memstore.Memory.documents, list[list[str]]()

    def late(opened: memstore.Memory) -> list[memstore.Document]:
        found = listed(opened)
        listings.append([each.name for each in found])
        if len(listings) == 2:  # the first is for the facts of files
            with memstore.open(memory) as writer:
                writer.forget("whale")
        return found

    monkeypatch.setattr(memstore.Memory, "documents", late)
    assert [each["document"] for each in cli("ls", memory, "--json").json["documents"]] == ["ship"]
    assert listings == 2 * [["whale", "ship"]]


def test_ls_shows_pins_and_expiry_where_there_are_any(cli: Cli, memory: Path) -> None:
    assert cli("pin", memory, "ship").code == 0
    assert cli("ls", memory).out.splitlines()[0].split() == ["document", "tokens", "blocks", "full", "pinned"]
    assert cli("expire", memory, "whale", "--after", "30d").code == 0
    lines = [line.split() for line in cli("ls", memory).out.splitlines()]
    assert lines[0] == ["document", "tokens", "blocks", "full", "pinned", "expires"]
    expires = cli("ls", memory, "--json").json["documents"][0]["expires"]
    assert expires.endswith("+00:00")
    assert lines[1:] == [
        ["whale", "10", "3", "2", "no", *f"{datetime.fromisoformat(expires).astimezone():%Y-%m-%d %H:%M}".split()],
        ["ship", "4", "1", "1", "yes", "-"],
    ]


def test_show_tells_tokens_and_norms(cli: Cli, memory: Path) -> None:
    shown = cli("show", memory, "whale", 1, "--json").json
    assert shown["token_ids"] == [4, 5, 6, 7]
    assert shown["first_token"] == BLOCK
    assert shown["full"]
    assert shown["text"] is None
    assert [sorted(layer["norms"]) for layer in shown["layers"]] == [["k", "v"], ["k", "landmarks", "v"]]
    norm = shown["layers"][0]["norms"]["k"]
    assert norm["vectors"] == 8
    assert 0 < norm["min"] < norm["mean"] < norm["max"]


def test_show_leaves_the_padding_of_the_last_block_out(cli: Cli, memory: Path) -> None:
    shown = cli("show", memory, "whale", 2, "--json").json
    assert shown["tokens"] == 2
    assert not shown["full"]
    assert shown["layers"][0]["norms"]["k"]["vectors"] == 4
    assert shown["layers"][0]["norms"]["k"]["min"] > 0


def test_show_tells_the_text_where_the_model_is_known(cli: Cli, memory: Path, model_folder: Path) -> None:
    with memstore.open(memory) as opened:
        opened.put_info("model", {"name": str(model_folder), "dtype": "float32"})
    text = cli("show", memory, "whale", 0, "--json").json["text"]
    assert len(text) == BLOCK
    assert text in cli("show", memory, "whale", 0).out


def test_show_says_why_there_is_no_text(cli: Cli, memory: Path) -> None:
    assert "no text: the memory does not name the model" in cli("show", memory, "whale", 0).out
    with memstore.open(memory) as opened:
        opened.put_info("model", {"name": "/moved/away", "dtype": "float32"})
    done = cli("show", memory, "whale", 0)
    assert done.code == 0
    assert "no text: the memory asks for the model '/moved/away'" in done.out
    cli("trust", "/moved/away")
    assert "no text: there is no model directory /moved/away" in cli("show", memory, "whale", 0).out


def test_a_model_that_is_gone_is_looked_for_once(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def gone(name: str) -> str:
        asked.append(name)
        raise NotFound(f"no model {name}")

    monkeypatch.setattr(models, "resolve_model", gone)
    remember("/gone/for/good")
    with memstore.open(memory) as opened:
        opened.put_info("model", {"name": "/gone/for/good"})
        told = {decode(opened, [token]) for token in range(100)}
    assert [text for text, _ in told] == [None]
    assert asked == ["/gone/for/good"]


def test_verify_finds_a_whole_memory_clean(cli: Cli, memory: Path) -> None:
    done = cli("verify", memory)
    assert (done.code, done.out) == (0, "clean: 2 documents, 14 tokens\n")
    assert cli("verify", memory, "--json").json["clean"]


def test_stats_are_numbers_and_lines(cli: Cli, memory: Path) -> None:
    numbers = cli("stats", memory, "--json").json
    assert (numbers["memory"], numbers["documents"], numbers["tokens"]) == (str(memory), 2, 14)
    done = cli("stats", memory)
    assert done.code == 0
    assert "tokens" in done.out


@pytest.mark.parametrize("verb", [["ls"], ["show", "whale", "0"], ["stats"], ["verify"]])
def test_looking_changes_nothing(cli: Cli, memory: Path, verb: list[str]) -> None:
    before = (memory / "data.mdb").read_bytes()
    assert cli(verb[0], memory, *verb[1:]).code == 0
    assert (memory / "data.mdb").read_bytes() == before


def test_a_memory_that_is_being_written_can_be_looked_at(cli: Cli, memory: Path) -> None:
    with memstore.open(memory):
        assert cli("ls", memory).code == 0


def test_stats_tells_index_bytes_only_in_json(cli: Cli, memory: Path) -> None:
    assert "index bytes" not in cli("stats", memory).out
    assert cli("stats", memory, "--json").json["index_bytes"] == 0
