"""Many short documents: chosen from as if each were asked by itself, at the cost of one product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.memory.shared import Handle
from memstore.memory.view import LayerView
from memstore.readers.stock.visible import AttachedDocument, ShortDocuments, everything, incomplete_landmarks
from tests.instruct import instruct_model, instruct_tokenizer

NOTES = {f"note {i}": f"The key of house {i} hangs behind beam {i * i}. " * (1 + i % 3) for i in range(6)}


@pytest.fixture
def reader(tmp_path: Path) -> Any:
    with memstore.attach(instruct_model(), tmp_path / "m", tokenizer=instruct_tokenizer(), block_size=16) as reader:
        for name, text in NOTES.items():
            reader.read(text, name)
        yield reader


def test_the_scores_are_those_that_each_document_gives(reader: Any) -> None:
    layer = reader.memory.spec.index_layers[0]
    queries = torch.randn(1, 5, reader.memory.spec.key_dim)
    candidates = everything([AttachedDocument(document, 0) for document in reader.memory.documents()])
    assert candidates.incomplete
    found = candidates.score(layer, [queries], ShortDocuments())
    wanted = []
    for source, blocks in candidates.parts:  # each block once, whichever documents share it
        document, size = source.document, reader.memory.spec.block_size
        view, of_all = document.layer(layer), [document.layer(layer).score(queries)[0]]
        if tokens := len(document) % size:
            last = incomplete_landmarks(view.landmarks(document.blocks[-1:])[0], tokens, size)
            of_all.append((queries @ last.mT).amax(-1, keepdim=True))
        wanted.append(torch.cat(of_all, -1)[..., blocks.start : blocks.stop])
    torch.testing.assert_close(found, torch.cat(wanted, -1), rtol=2e-2, atol=2e-2)  # products in bfloat16


def test_a_question_reads_the_landmarks_of_those_documents_alone_that_have_changed(
    reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[LayerView] = []
    plain = LayerView.landmarks

    def noted(view: LayerView, blocks: range) -> torch.Tensor:
        read.append(view)
        return plain(view, blocks)

    monkeypatch.setattr(LayerView, "landmarks", noted)
    before = reader.search("Where is the key?", 8)
    assert len(read) == len(NOTES)
    assert reader.search("Where is the key?", 8) == before
    assert len(read) == len(NOTES)
    reader.append("Dogs travel free.", "note 2")
    read.clear()
    reader.search("Where is the key?", 8)
    assert len(read) == 1


def test_a_question_asks_none_of_the_documents_again_while_nothing_is_committed(
    reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Handle] = []
    plain = Handle.current

    def noted(handle: Handle) -> Any:
        looked.append(handle)
        return plain(handle)

    monkeypatch.setattr(Handle, "current", noted)

    def looks() -> int:
        reader.ask("Where is the key?", max_tokens=1)
        reader.search("Where is the key?", 8)
        looked.clear()
        reader.ask("Where is the key?", max_tokens=1)
        reader.search("Where is the key?", 8)
        return len(looked)

    few = looks()
    for i in range(40):
        reader.read(f"Nothing hangs behind the door of house {i}.", f"more {i}")
    # What is retrieved and shown is of other documents, as many.
    assert looks() <= 2 * few
    reader.read("The key of house 99 hangs behind beam 9801.", "late")
    assert any(match.document == "late" for match in reader.search("The key of house 99 hangs behind beam 9801.", 8))
