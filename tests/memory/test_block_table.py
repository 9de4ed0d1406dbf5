"""The table of blocks in Parquet: a row for each, with what can be known of it without a model."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.memory import Memory, export
from memstore.memory.export import export_table
from tests.memory.helpers import S, append, make_spec, random_tokens
from tests.memory.test_dropping import lose

parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")


@pytest.fixture
def memory() -> Memory:
    memory = memstore.open("ram:", spec=make_spec())
    append(memory.document("whale"), random_tokens(5 * S + 2))
    append(memory.document("ship"), random_tokens(S, seed=1))
    return memory


def rows(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


@pytest.mark.parametrize("at_a_time", [1, 2, 1024])
def test_each_block_is_a_row(memory: Memory, tmp_path: Path, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "ROWS", at_a_time)
    assert export_table(memory, tmp_path / "t.parquet", decode=lambda ids: f"{len(ids)} tokens") == 7
    found = rows(tmp_path / "t.parquet")
    assert [(row["document"], row["block"]) for row in found] == [*(("whale", n) for n in range(6)), ("ship", 0)]
    for row in found:
        document, block = memory.document(row["document"]), row["block"]
        assert row["token_ids"] == document.tokens(block).tolist()
        assert row["first_token"] == block * S
        assert (row["tokens"], row["complete"]) == ((2, False) if block == 5 else (S, True))
        assert row["text"] == f"{row['tokens']} tokens"
        states = torch.stack([document.layer(layer).gather([block])["k"][0] for layer in range(3)])
        assert row["k_norm"] == pytest.approx(float(states[..., : row["tokens"], :].norm(dim=-1).mean()))
        marks = torch.stack([document.layer(layer).landmarks(range(block, block + 1)) for layer in (0, 2)])
        assert row["landmark_norm"] == pytest.approx(float(marks.norm(dim=-1).mean()))


def test_numbers_that_may_be_nan_have_no_statistics(memory: Memory, tmp_path: Path) -> None:
    export_table(memory, tmp_path / "t.parquet")
    group = parquet.read_metadata(tmp_path / "t.parquet").row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    without = {each.path_in_schema for each in columns if each.statistics is None}
    assert without == {"k_norm", "v_norm", "landmark_norm", "token_ids.list.element"}
    assert {"block", "tokens"} <= {each.path_in_schema for each in columns} - without


def test_chosen_documents_alone_and_blocks_that_are_there(tmp_path: Path) -> None:
    with memstore.open("ram:", spec=make_spec(index_layers=())) as memory:
        assert export_table(memory, tmp_path / "none.parquet") == 0
        assert "landmark_norm" not in parquet.read_schema(tmp_path / "none.parquet").names
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(5 * S))
        append(memory.document("ship"), random_tokens(S))
        lose(memory, 1)
        assert export_table(memory, tmp_path / "one.parquet", documents=["whale"]) == 4
        assert [(row["block"], row["text"]) for row in rows(tmp_path / "one.parquet")] == [
            (block, None) for block in (0, 2, 3, 4)
        ]


def test_nothing_is_left_of_a_table_that_failed(memory: Memory, tmp_path: Path) -> None:
    def fail(_: list[int]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_table(memory, tmp_path / "t.parquet", decode=fail)
    with pytest.raises(NotFound, match="harpoon"):
        memstore.open("ram:", spec=make_spec()).forget("harpoon")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "t.parquet").write_text("mine")
    with pytest.raises(InvalidArgument, match="exists already"):
        export_table(memory, tmp_path / "t.parquet")


def test_a_missing_package_is_named(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return load(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NotFound, match=r"torch-memstore\[tables\]"):
        export_table(memory, tmp_path / "t.parquet")
