"""Kinds of models that other packages bring by entry points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument
from memstore.readers import kinds
from memstore.readers.kinds import STOCK, Kind, kind_in, kind_of
from memstore.readers.stock.reader import StockReader
from memstore.testing.readers import ReaderTests
from tests.readers.models import tiny

TOY = Kind(
    "toy",
    "toy",
    "tests.readers.test_kinds:toy",
    "tests.readers.test_kinds:ToyReader",
    "",
    options=tuple(name for name in STOCK.options if name != "sink"),
)


class ToyReader(StockReader):
    """A reader of its own, whose sink nobody chooses."""

    kind = TOY


def toy(seed: int = 0) -> Any:
    """A model whose configuration says that it is a toy."""
    model = tiny("llama", seed=seed)
    vars(model.config)["model_type"] = "toy"
    return model


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("packages")
    facts = folder / "toys-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
    lines = ["[memstore.kinds]", "toy = tests.readers.test_kinds:TOY", "odd = tests.readers.test_kinds:toy", ""]
    (facts / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")  # for processes of the suite
    kinds._plugin.cache_clear()
    yield
    kinds._plugin.cache_clear()


class TestToyReader(ReaderTests):
    """What every reader does, a kind from elsewhere does too."""

    options: ClassVar[dict[str, Any]] = {"window": 32, "segment": 32, "block_size": 16}

    def model(self, seed: int = 0) -> Any:
        """See ``ReaderTests``."""
        return toy(seed)


def test_a_kind_is_found_by_what_its_configuration_is_called(tmp_path: Path) -> None:
    assert kind_of(toy()) is TOY
    assert kind_of(tiny("llama")) is STOCK
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy"}))
    assert kind_in(tmp_path) is TOY
    with memstore.attach(toy(), "ram:", block_size=16) as reader:
        reader.read(torch.arange(1, 60))
        assert type(reader) is ToyReader


def test_a_kind_takes_the_options_that_it_names() -> None:
    with pytest.raises(InvalidArgument, match="sink is for stock models; a toy does not take it"):
        memstore.attach(toy(), "ram:", sink=4)


def test_an_entry_point_that_is_no_kind_is_refused() -> None:
    model = tiny("llama")
    vars(model.config)["model_type"] = "odd"
    with pytest.raises(InvalidArgument, match=r"entry point odd of memstore\.kinds must be a Kind"):
        kind_of(model)
