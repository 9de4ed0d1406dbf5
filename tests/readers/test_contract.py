"""Every kind of model keeps the promises of a reader."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, ClassVar

import torch

from memstore import Retrieval
from memstore.models.memorizing import add_knn_memory, knn_memory_of
from memstore.readers.kinds import KINDS, OPTIONS
from memstore.testing.readers import ReaderTests, hooks
from tests.eval.memorizing import small_memorizing
from tests.models import drt, hils, landmark
from tests.readers.models import tiny

SIZES = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}


class TestStock(ReaderTests):
    options: ClassVar[dict[str, Any]] = SIZES

    def model(self, seed: int = 0) -> Any:
        return tiny("llama", seed=seed)


class TestStockByLayer(ReaderTests):
    options: ClassVar[dict[str, Any]] = {**SIZES, "retrieval": Retrieval(share="group", top_k=3)}
    unit = 32  # all tokens of a segment choose together

    def model(self, seed: int = 0) -> Any:
        return tiny("qwen3", seed=seed)


class TestStockHybrid(ReaderTests):
    ragged = False
    options: ClassVar[dict[str, Any]] = SIZES

    def model(self, seed: int = 0) -> Any:
        return tiny("lfm2", seed=seed)


class TestDRT(ReaderTests):
    def model(self, seed: int = 0) -> Any:
        return drt.make("rope", seed=seed)


class TestLandmark(ReaderTests):
    def model(self, seed: int = 0) -> Any:
        return landmark.make(segment_blocks=2, retrieval_top_k=3, seed=seed)


class TestHils(ReaderTests):
    def model(self, seed: int = 0) -> Any:
        return hils.make("qwen", seed)


class TestHilsWithWindows(ReaderTests):
    def model(self, seed: int = 0) -> Any:
        return hils.make("olmo", seed)


class TestMemorizing(ReaderTests):
    options: ClassVar[dict[str, Any]] = {"block_size": 8}

    def model(self, seed: int = 0) -> Any:
        return small_memorizing(seed)


class TestStockWithTokens(ReaderTests):
    options: ClassVar[dict[str, Any]] = {"block_size": 8}

    def model(self, seed: int = 0) -> Any:
        model: Any = tiny("llama", seed=seed)
        memory = add_knn_memory(model, layer=2, top_k=4)
        model.config.knn_memory["window"] = 32
        torch.nn.init.constant_(memory.gate, 0.7)
        return model

    def test_the_model_is_as_before_also_after_an_error(self) -> None:
        model = self.model()
        question = self.text(model, 1)[None, :9]
        with torch.no_grad():
            model(question)
            remembered = knn_memory_of(model).remembered()
        with contextlib.suppress(KeyError), self.attach(model, "ram:") as reader:
            reader.read(self.text(model))
            self.asked(reader)
            raise KeyError("whatever")
        after = knn_memory_of(model).remembered()
        assert after["added"].tolist() == remembered["added"].tolist() == [8]
        assert torch.equal(after["keys"], remembered["keys"])
        assert hooks(model) == hooks(self.model())


def test_the_documentation_prints_the_table_of_options() -> None:
    said = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    assert ["option", *(kind.name for kind in KINDS)] in printed
    table = [[f"`{name}`", *("yes" if kind.takes(name) else "" for kind in KINDS)] for name in OPTIONS]
    assert [row for row in table if row not in printed] == []
    assert len([row for row in printed if row[0].startswith("`") and len(row) == len(KINDS) + 1]) == len(table)
