"""`memstore read --ray`: several processes read a folder, and the command ends as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import memstore
from memstore.memory import Document, Memory
from memstore.memory.copy import compare_memories
from memstore.readers import many
from memstore.tools.verb import INTERRUPTED
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
    tokens = [each["tokens"] for each in done.json["documents"]]
    assert [each["new_tokens"] for each in done.json["documents"]] == tokens, "they were read by this command"
    with memstore.open(tmp_path / "m", mode="r") as memory, memstore.open(tmp_path / "alone", mode="r") as alone:
        assert compare_memories(memory, alone).same
    (notes / "1.txt").write_text("Note 1: there is no ferry today.\n")
    again = cli("read", notes, tmp_path / "m", "--ray", 2, *options)
    assert (again.code, again.json["unchanged"], len(again.json["documents"])) == (0, 2, 1)


@pytest.mark.slow
def test_what_was_interrupted_while_it_was_copied_goes_on(
    cli: Cli, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    for number in range(2):
        (notes / f"{number}.txt").write_text(f"Note {number}: the last ferry leaves the island at 19:4{number}.\n" * 6)
    command = ("read", notes, tmp_path / "m", "--ray", 1, "--model", model_folder, "--block-size", 16, "--json")

    def interrupted(source: Document, memory: Memory, name: str, _: Callable[[int], None]) -> None:
        """After two blocks."""
        with memory.document(name).append(source.tokens(range(2)), reading=source.reading) as batch:
            for layer in range(memory.spec.layers):
                view = source.layer(layer)
                marks = view.landmarks(range(2)) if layer in memory.spec.index_layers else None
                batch.put(layer, landmarks=marks, **view.gather(range(2)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(many, "copy_document", interrupted)
        assert cli(*command).code == INTERRUPTED
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert [len(each) for each in memory.documents()] == [32]
    assert list((tmp_path / "m.parts").iterdir()), "the first document, whole"
    done = cli(*command)
    assert done.code == 0, done.err
    first, second = done.json["documents"]
    assert (first["reused_tokens"], second["reused_tokens"]) == (32, 0)
    assert not (tmp_path / "m.parts").exists()
