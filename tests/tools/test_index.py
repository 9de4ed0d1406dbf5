"""``memstore index``: indexes are built, measured, and there for whoever opens the memory next."""

from __future__ import annotations

from pathlib import Path

import torch

import memstore
from tests.tools.conftest import BLOCK, SIZE, Cli, tiny_spec

USAGE, NOT_FOUND, REFUSED = 2, 3, 5


def memory(folder: Path, blocks: int) -> Path:
    with memstore.open(folder, spec=tiny_spec()) as opened:
        if blocks:
            states = torch.randn(blocks, 2, BLOCK, SIZE)
            with opened.document("notes").append(torch.zeros(blocks * BLOCK, dtype=torch.int64)) as batch:
                batch.put(0, k=states, v=states)
                batch.put(1, landmarks=torch.randn(blocks, 1, 1, SIZE), k=states, v=states)
    return folder


def test_an_index_is_built_measured_and_found_again(cli: Cli, tmp_path: Path) -> None:
    path = memory(tmp_path / "notes.mem", 5000)
    done = cli("index", path, "--index", "faiss:IVF16,Flat", "--json")
    assert done.code == 0, done.err
    (kept,) = done.json["indexes"]
    assert (kept["document"], kept["layer"], kept["blocks"]) == ("notes", 1, 5000)
    assert 0.5 < kept["recall"] <= 1
    assert [each.name for each in (path / "index").iterdir()]
    shown = cli("index", path)
    assert shown.code == 0, shown.err
    assert "exact" in shown.out
    assert "5,000" in shown.out


def test_what_cannot_be_built_is_told(cli: Cli, tmp_path: Path) -> None:
    empty = memory(tmp_path / "empty.mem", 0)
    assert "nothing to index" in cli("index", empty).out
    assert cli("index", empty, "--index", "tree").code == USAGE
    assert cli("index", tmp_path / "none.mem").code == NOT_FOUND
