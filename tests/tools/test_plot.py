"""``memstore plot``: each kind of picture from the command line, and what is told of wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import memstore
from memstore.tools.models import load_tokenizer
from tests.eval.test_pictures import look_at, record, write
from tests.tools.conftest import Cli, tiny_spec
from tests.tools.test_audit import attached, drt, landmark

__all__ = ["attached", "drt", "landmark"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A memory with a document of 20 blocks, and two traces."""
    path = tmp_path_factory.mktemp("traced") / "traced.mem"
    with memstore.open(path, spec=tiny_spec()) as opened:
        write(opened, 20)
        opened.put_info("model", {"name": str(model_folder), "dtype": "float32"})
        record(opened, 20, 3)
        record(opened, 20, 5)
    return path


@pytest.mark.parametrize("kind", ["heat", "tiers", "margins"])
def test_pictures_of_the_last_trace_or_a_numbered_one(cli: Cli, traced: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "a.svg"
    done = cli("plot", kind, traced, "--out", out)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{kind} of trace 2: ")
    assert "Trace 2: tiny (attach)" in out.read_text()
    numbers = cli("plot", kind, traced, "--out", out, "--trace", 1, "--json").json
    assert numbers == {"kind": kind, "trace": 1, "out": str(out), "bytes": out.stat().st_size}
    assert "Trace 1: tiny (attach)" in out.read_text()


def test_tokens_are_written_below_the_heat_map(cli: Cli, memory: Path, tmp_path: Path, model_folder: Path) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    with memstore.open(memory) as opened, opened.traces.record(mechanism="attach") as recorder:
        opened.put_info("model", {"name": str(model_folder)})
        for letter in "Ahab":
            recorder.begin()
            recorder.look(look_at(0, [3, 4], "whale", 1))
            recorder.token(tokenizer.encode(letter)[0])
    assert cli("plot", "heat", memory, "--out", tmp_path / "a.svg").code == 0
    svg = (tmp_path / "a.svg").read_text()
    assert all(f">{letter}</text>" in svg for letter in "Ahab")
    assert "generated token" in svg


@pytest.mark.parametrize("arguments", [["similarity"], ["margins", "--document", "whale", "--top-k", "3"]])
def test_pictures_of_a_document(cli: Cli, traced: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = cli("plot", arguments[0], traced, "--out", tmp_path / "a.png", *arguments[1:])
    assert done.code == 0, done.err
    assert done.out.startswith(f"{arguments[0]} of document whale: ")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 500


@pytest.mark.parametrize("kind", ["attached", "landmark", "drt"])
def test_the_picture_of_an_audit(cli: Cli, request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    path = request.getfixturevalue(kind)
    done = cli("plot", "audit", path, "--question", "What is new in line 7?", "--out", tmp_path / "a.svg")
    assert done.code == 0, done.err
    assert "captured mass" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["heap", "--out", "a.png"], 2, "'heap' is not one of"),
        (["heat", "--out", "a.jpg"], 2, "must end in .png or .svg"),
        (["heat", "--out", "none/a.png"], 3, "the folder none does not exist"),
        (["heat"], 2, "--out"),
        (["heat", "--out", "a.png", "--trace", "9"], 3, "no trace 9"),
        (["heat", "--out", "a.png", "--layer", "9"], 2, "layer 9 retrieved nothing"),
        (["heat", "--out", "a.png", "--head", "2"], 2, "no head 2"),
        (["similarity", "--out", "a.png", "--document", "none"], 3, "none"),
        (["similarity", "--out", "a.png", "--layer", "0"], 2, "layer 0 has no landmarks"),
        (["margins", "--out", "a.png", "--document", "whale", "--top-k", "40"], 2, "smaller top_k"),
        (["audit", "--out", "a.png"], 2, "--question"),
    ],
)
def test_wrong_input_is_told_and_nothing_is_written(
    cli: Cli, traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("plot", arguments[0], traced, *arguments[1:])
    assert done.code == code
    assert says in done.err
    assert not (tmp_path / "a.png").exists()


def test_a_memory_without_traces_says_how_to_record_one(cli: Cli, memory: Path, tmp_path: Path) -> None:
    done = cli("plot", "heat", memory, "--out", tmp_path / "a.png")
    assert (done.code, "memstore ask" in done.err) == (3, True)


def test_plotting_changes_nothing_of_the_store(cli: Cli, traced: Path, tmp_path: Path) -> None:
    before = (traced / "data.mdb").read_bytes()
    assert cli("plot", "heat", traced, "--out", tmp_path / "a.png").code == 0
    assert (traced / "data.mdb").read_bytes() == before
