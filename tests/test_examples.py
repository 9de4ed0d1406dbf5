"""The programs in examples/, where what they are for is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

import memstore
from memstore.index import VectorIndex
from memstore.testing.indexes import IndexTests
from memstore.tools import models
from tests.instruct import instruct_model, instruct_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Any]:
    with memstore.attach(instruct_model(), tmp_path / "m", tokenizer=instruct_tokenizer(), block_size=16) as reader:
        for name in ("ferry", "cottage"):
            reader.read(f"The text of the {name}. " * 4, name)
        yield reader


def test_langchain_gets_the_blocks_that_a_search_finds(reader: Any) -> None:
    pytest.importorskip("langchain_core")
    retriever = run_path(str(EXAMPLES / "langchain_retriever.py"))["MemstoreRetriever"](reader=reader, k=3)
    found = retriever.invoke("The cottage?")
    wanted = reader.search("The cottage?", 3)
    assert [(each.metadata["source"], each.metadata["block"]) for each in found] == [
        (match.document, match.block) for match in wanted
    ]
    assert all(each.page_content in f"The text of the {each.metadata['source']}. " * 4 for each in found)


def test_llamaindex_gets_the_blocks_that_a_search_finds(reader: Any) -> None:
    pytest.importorskip("llama_index.core")
    retriever = run_path(str(EXAMPLES / "llamaindex_retriever.py"))["MemstoreRetriever"](reader, 3)
    found = retriever.retrieve("The cottage?")
    wanted = reader.search("The cottage?", 3)
    assert [(each.node.node_id, each.score) for each in found] == [
        (f"{match.document}:{match.block}", match.score) for match in wanted
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny random model in the place of the one that would be fetched, in an empty folder."""
    known = models.load_model
    tiny = (instruct_model(), instruct_tokenizer())
    monkeypatch.setattr(models, "load_model", lambda name, *a: tiny if name == "smollm2" else known(name, *a))
    monkeypatch.chdir(tmp_path)


def run(name: str, *arguments: Any) -> Any:
    return run_path(str(EXAMPLES / name))["main"](*arguments)


@pytest.mark.usefixtures("small")
def test_a_book_is_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("book.txt").write_text("The keeper of the lighthouse is called Ada. " * 20)
    run("book.py", "book.txt", "Who keeps it?")
    assert "880 of them read now" in capsys.readouterr().out
    run("book.py", "book.txt", "Who keeps it?")
    told = capsys.readouterr().out
    assert "880 tokens, 0 of them read now" in told
    assert "book, line 1: " in told


@pytest.mark.usefixtures("small")
def test_a_code_base_is_searched_by_file_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("src").mkdir()
    for name in ("hashing", "sending"):
        (Path("src") / f"{name}.py").write_text(f"def {name}(text):\n    return text\n" * 10)
    run("code_base.py", "src", "hashing?")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.startswith(("src/hashing.py:", "src/sending.py:")) for line in lines)


@pytest.mark.parametrize("name", ["book.py", "code_base.py"])
def test_without_arguments_it_says_how_it_is_called(name: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, f"python examples/{name} " in done.stderr, "Traceback" in done.stderr) == (2, True, False)


OWN = run_path(str(EXAMPLES / "own_index.py"))


class TestOwnIndex(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        index: VectorIndex = OWN["HalfIndex"](key_heads, key_dim, keys_per_block)
        return index


def test_an_index_of_ones_own_finds_nearly_all(capsys: pytest.CaptureFixture[str]) -> None:
    OWN["main"]()
    assert float(capsys.readouterr().out.split()[0]) > 0.9


@pytest.mark.slow
def test_four_mechanisms_store_one_text_and_the_trained_ones_find_the_passkey(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("four_mechanisms.py", 2_000)
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "bytes a token" in line}
    assert list(told) == ["stock", "DRT", "landmark", "kNN"]
    assert "7391" in told["DRT"]
    assert "73914" in told["landmark"]


@pytest.mark.slow
def test_a_tiny_drt_learns_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = run("train_drt.py", 30)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_the_notebook_runs_and_finds_the_block_of_the_passkey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "look_inside.ipynb").read_text("utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # noqa: S102 - that is the point
    names["memory"].close()
    assert "passkey is:73914" in capsys.readouterr().out
    assert (tmp_path / "look.mem").is_dir()
