"""``memstore index``: indexes are built, measured, and there for whoever opens the memory next."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memstore
from memstore.memory.view import watched
from memstore.tools.verb import index_bar
from tests.tools.conftest import BLOCK, SIZE, Cli, tiny_spec

FAILED, USAGE, NOT_FOUND = 1, 2, 3


def filled(folder: Path, blocks: int) -> Path:
    with memstore.open(folder, spec=tiny_spec()) as opened:
        if blocks:
            states = torch.randn(blocks, 2, BLOCK, SIZE)
            with opened.document("notes").append(torch.zeros(blocks * BLOCK, dtype=torch.int64)) as batch:
                batch.put(0, k=states, v=states)
                batch.put(1, landmarks=torch.randn(blocks, 1, 1, SIZE), k=states, v=states)
    return folder


def test_an_index_is_built_measured_and_found_again(cli: Cli, tmp_path: Path) -> None:
    path = filled(tmp_path / "notes.mem", 5000)
    done = cli("index", path, "--index", "faiss:IVF16,Flat", "--json")
    assert done.code == 0, done.err
    (kept,) = done.json["indexes"]
    assert (kept["document"], kept["layer"], kept["blocks"]) == ("notes", 1, 5000)
    assert 0.5 < kept["recall"] <= 1
    assert [each.name for each in (path / "index").iterdir()]
    assert "layer 1 faiss:IVF16,Flat" in cli("stats", path).out
    shown = cli("index", path)
    assert shown.code == 0, shown.err
    assert "exact" in shown.out
    assert "5,000" in shown.out


def test_what_cannot_be_built_is_told(cli: Cli, tmp_path: Path) -> None:
    empty = filled(tmp_path / "empty.mem", 0)
    assert "nothing to index" in cli("index", empty).out
    assert cli("index", empty, "--index", "tree").code == USAGE
    assert cli("index", tmp_path / "none.mem").code == NOT_FOUND


LACKING = [
    ("faiss:Flat", "faiss", "pip install 'torch-memstore[faiss]'"),
    ("clusters", "faiss", "pip install 'torch-memstore[faiss]'"),
    ("milvus:{tmp}/a.db", "pymilvus", "pip install 'torch-memstore[milvus]'"),
    ("milvus:{tmp}/a.db", "milvus_lite", "pip install 'torch-memstore[milvus]'"),
]


@pytest.mark.parametrize(("name", "library", "says"), LACKING)
@pytest.mark.parametrize("verb", ["index", "stats"])
def test_the_command_line_says_in_one_line_what_to_install(
    verb: str,
    name: str,
    library: str,
    says: str,
    cli: Cli,
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    done = cli(verb, memory, "--index", name.format(tmp=tmp_path))
    assert (done.code, done.out, done.err.count("\n")) == (USAGE, "", 1)
    assert says in done.err


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("tree", USAGE, "choose from auto, clusters, codes, exact, faiss, milvus"),
        ("exact:8", USAGE, "has no settings: leave out ':8'"),
        ("auto:0", USAGE, "auto:recall=0.99"),
        ("clusters:many", USAGE, "clusters:0.99"),
        ("codes:8", USAGE, "has no settings: leave out ':8'"),
        ("faiss:Tree", USAGE, "FAISS cannot make 'Tree'"),
        ("faiss:IVF0,Flat", USAGE, "must be at least 1"),
        ("faiss:HNSW1", USAGE, "at least 2 links"),
        ("faiss:IVF4_HNSW0,Flat", USAGE, "at least 2 links"),
        ("faiss:IVF99999999,Flat", USAGE, "at most 4,194,304"),
        ("faiss:HNSW32;ef_search=9999999999", USAGE, "at most 4,194,304"),
        ("faiss:PQ4", USAGE, "cannot filter or remove"),
        ("faiss:Flat;speed=2", USAGE, "'speed=2' is not an option"),
        ("milvus:somewhere", USAGE, "needs a file ending in .db"),
        ("milvus:http://127.0.0.1:9", FAILED, "no Milvus server answers at http://127.0.0.1:9"),
    ],
)
def test_the_command_line_says_what_an_index_could_be(name: str, code: int, says: str, cli: Cli, memory: Path) -> None:
    kind, _, _ = name.partition(":")
    pytest.importorskip({"faiss": "faiss", "milvus": "pymilvus", "clusters": "faiss"}.get(kind, "torch"))
    done = cli("index", memory, "--index", name)
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1), done
    assert says in done.err


def damage(folder: Path) -> None:
    for file in folder.glob("index/*.index"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)


def lose(folder: Path) -> None:
    shutil.rmtree(folder / "index")


@pytest.mark.parametrize("harm", [damage, pytest.param(lose, marks=pytest.mark.slow)])
def test_the_command_line_finds_the_same_beside_a_damaged_index(
    harm: Callable[[Path], None], cli: Cli, memory: Path
) -> None:
    assert cli("index", memory).code == 0
    before = cli("search", memory, "--block", "whale:0", "--top-k", "99", "--json")
    assert (before.code, len(before.json["matches"])) == (0, 2), "all that there is, where more is asked for"
    harm(memory)
    after = cli("search", memory, "--block", "whale:0", "--top-k", "99", "--json")
    assert (after.code, after.json) == (0, before.json)
    assert {finding["kind"] for finding in cli("verify", memory, "--json").json["findings"]} <= {"index"}
    assert cli("index", memory).code == 0
    assert cli("search", memory, "--block", "whale:0", "--top-k", "99", "--json").json == before.json
    assert cli("verify", memory).code == 0


def test_a_search_shows_a_bar_while_it_builds_an_index_and_none_where_there_is_none_to_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    told: list[tuple[int, int]] = []
    with memstore.open(filled(tmp_path / "notes.mem", 300), mode="r") as opened:
        view = opened.document("notes").layer(1)
        for building in (True, False):
            with index_bar():
                view.score(torch.randn(1, 1, SIZE))
            assert ("blocks indexed" in capsys.readouterr().err) == building
        with watched(lambda done, total: told.append((done, total))):
            view.score(torch.randn(1, 1, SIZE))
    assert told == []
    watching = watched(lambda done, total: told.append((done, total)))
    with memstore.open(tmp_path / "notes.mem", mode="r") as opened, watching:
        opened.document("notes").layer(1).score(torch.randn(1, 1, SIZE))
    assert told == sorted(told)
    assert told[-1] == (300, 300)
