"""``memstore audit``: what should have been retrieved, for a memory of each kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.models.drt import DRTReader
from memstore.models.landmark import LandmarkReader
from memstore.models.memorizing import MemorizingReader
from memstore.tools.app import main
from memstore.tools.models import remember
from tests.eval.drts import byte_tokenizer, save_drt, small_drt
from tests.eval.landmarks import save_landmark, small_landmark
from tests.eval.memorizing import save_memorizing, small_memorizing
from tests.tools.conftest import Cli

TEXT = "".join(f"Line {i} of the log tells of \x1b[31mnothing new. " for i in range(40))


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("attached")
    (folder / "log.txt").write_text(TEXT)
    path = folder / "log.mem"
    read = ["read", folder / "log.txt", path, "--model", model_folder, "--dtype", "float32", "--block-size", 16]
    assert main([str(each) for each in read]) == 0
    return path


@pytest.fixture(scope="module")
def drt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own(tmp_path_factory.mktemp("drt"), save_drt, small_drt, DRTReader)


@pytest.fixture(scope="module")
def landmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own(tmp_path_factory.mktemp("landmark"), save_landmark, small_landmark, LandmarkReader)


@pytest.fixture(scope="module")
def knn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own(tmp_path_factory.mktemp("knn"), save_memorizing, small_memorizing, MemorizingReader)


def own(folder: Path, save: Callable[..., Path], make: Callable[..., Any], reader_class: Any) -> Path:
    """A memory whose model is a folder."""
    weights, path = save(folder / "model"), folder / "log.mem"
    tokenizer = byte_tokenizer()
    with reader_class(make(), path, "log", tokenizer=tokenizer) as reader:
        reader.read(tokenizer(TEXT)["input_ids"][:400])
        reader.memory.put_info("model", {"name": remember(str(weights)), "dtype": "float32"})
    return path


@pytest.mark.parametrize(("kind", "heads"), [("attached", 4), ("landmark", 2), ("drt", 1), ("knn", 2)])
def test_an_audit_of_each_kind_of_model(cli: Cli, request: pytest.FixtureRequest, kind: str, heads: int) -> None:
    path = request.getfixturevalue(kind)
    data = cli("audit", path, "What is new in line 7?", "--json").json
    assert data["mechanism"] == {"attached": "attach"}.get(kind, kind)
    assert data["documents"] == ["log"]
    assert 0 < data["captured"] < 1
    assert 0 < data["recall"] <= 1
    assert data["index_recall"] == 1
    assert all(len(layer["captured"]) == heads for layer in data["layers"])
    assert (data["memory"] is None) == (kind == "drt")
    assert data["missed"][0]["text"] in TEXT
    done = cli("audit", path, "What is new in line 7?")
    assert done.code == 0, done.err
    assert f"captured mass        {100 * data['captured']:.1f}%" in done.out
    head, first = done.out.split("\n\n")[1].splitlines()[:2]
    told = dict(
        zip(head.replace("least head", "least").replace("on blocks", "blocks").split(), first.split(), strict=True)
    )
    assert all(told[name].endswith("%") for name in ("captured", "least", "recall")), "shares have one form"
    assert "\x1b" not in done.out


@pytest.mark.parametrize("kind", ["attached", "landmark", "drt", "knn"])
def test_with_enough_blocks_nothing_is_missed(cli: Cli, request: pytest.FixtureRequest, kind: str) -> None:
    done = cli("audit", request.getfixturevalue(kind), "What is new in line 7?", "--top-k", 500)
    assert done.code == 0, done.err
    assert "captured mass        100.0%" in done.out
    assert "No important block was missed." in done.out


def test_a_memory_of_single_tokens_is_audited_by_tokens(cli: Cli, knn: Path) -> None:
    data = cli("audit", knn, "What?", "--max-tokens", 3, "--top-k", 5, "--json").json
    assert (data["stored_tokens"], data["blocks"], data["top_k"], data["steps"]) == (400, 7, 5, 3)
    assert data["recall"] == 1
    assert data["chance"] == 5 / 400
    done = cli("audit", knn, "What?", "--max-tokens", 3)
    assert "7; a head retrieves 2 of their 400 tokens at a time" in done.out


def test_an_audit_changes_nothing(cli: Cli, attached: Path) -> None:
    before = (attached / "data.mdb").read_bytes()
    assert cli("audit", attached, "What?", "--max-tokens", 1).code == 0
    assert (attached / "data.mdb").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([" "], 2, "the question is empty"),
        (["What?", "--document", "none"], 3, "no document 'none'"),
        (["What?", "--top-k", "0"], 2, "top-k"),
        (["What?", "--model", "/gone/away"], 3, "no model directory"),
        (["What?", "--index", "faster"], 2, "faster"),
    ],
)
def test_wrong_input_is_told_in_a_line(cli: Cli, attached: Path, arguments: list[str], code: int, says: str) -> None:
    done = cli("audit", attached, *arguments)
    assert done.code == code
    assert says in done.err


def test_no_memory_and_a_foreign_model_are_told(cli: Cli, attached: Path, tmp_path: Path) -> None:
    assert cli("audit", tmp_path / "none.mem", "What?").code == 3
    assert cli("audit", attached, "What?", "--model", save_drt(tmp_path / "drt")).code == 5
    assert cli("audit", attached, "What?", "--model", save_memorizing(tmp_path / "knn")).code == 5


def test_a_memory_without_a_model_says_so(cli: Cli, memory: Path) -> None:
    done = cli("audit", memory, "What?", "--document", "whale")
    assert (done.code, "--model" in done.err) == (2, True)
    with memstore.open(memory, mode="r") as opened:
        assert opened.get_info("model") is None


@pytest.mark.parametrize("kind", ["attached", "landmark", "knn"])
def test_an_audit_can_be_recorded(kind: str, cli: Cli, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    done = cli("audit", path, "What is new?", "--max-tokens", 3, "--trace", "--json")
    assert done.code == 0, done.err
    assert 0 < done.json["memory"] <= 1, "the share of attention on blocks"
    told = cli("trace", path, done.json["trace"], "--json").json
    assert (told["question"], told["answer"], len(told["steps"])) == ("What is new?", done.json["answer"], 3)
    assert all(step["looks"] for step in told["steps"])
    missed = [list(each.values())[:5] for each in done.json["missed_tokens"]]
    assert [each[:4] for each in told["missed"]] == [each[:4] for each in missed]
    assert [each[4] for each in told["missed"]] == pytest.approx([each[4] for each in missed], abs=1e-6)
    assert bool(missed) == (kind == "knn")
    shown = cli("audit", path, "What is new?", "--max-tokens", 3, "--trace")
    assert f"See trace {done.json['trace'] + 1} with: memstore view {path}" in shown.out
    assert ("[missed: " in shown.out) == (kind != "knn"), "tokens stand for their blocks"
