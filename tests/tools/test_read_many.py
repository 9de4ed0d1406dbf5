"""`memstore read --ray`: several processes read a folder, and the command ends as without them."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstore
from memstore.memory.copy import compare_memories
from tests.tools.conftest import Cli

pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_starts")


@pytest.mark.slow
def test_a_folder_read_by_two_workers_is_as_one_reads_it(cli: Cli, model_folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    for number in range(3):
        (notes / f"{number}.txt").write_text(f"Note {number}: the last ferry leaves the island at 19:4{number}.\n" * 6)
    options = ("--model", model_folder, "--block-size", 16, "--json")
    assert cli("read", notes, tmp_path / "alone", *options).code == 0
    done = cli("read", notes, tmp_path / "m", "--ray", 2, *options)
    assert done.code == 0, done.err
    with memstore.open(tmp_path / "m", mode="r") as memory, memstore.open(tmp_path / "alone", mode="r") as alone:
        assert compare_memories(memory, alone).same
    (notes / "1.txt").write_text("Note 1: there is no ferry today.\n")
    again = cli("read", notes, tmp_path / "m", "--ray", 2, *options)
    assert (again.code, again.json["unchanged"], len(again.json["documents"])) == (0, 2, 1)
