"""Kinds of models that other packages bring by entry points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from examples.knn_lm.kind import KNN_LM
from examples.knn_lm.modeling import KNNLMConfig, KNNLMForCausalLM
from memstore.errors import InvalidArgument
from memstore.readers import kinds
from memstore.readers.kinds import STOCK, kind_in, kind_of
from memstore.testing.readers import ReaderTests
from tests.readers.models import tiny


def knn_lm(seed: int = 0) -> Any:
    """A small kNN-LM."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = KNNLMForCausalLM(KNNLMConfig(vocab_size=60, eos_token_id=None, **sizes))
    return model.train(False)


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("packages")
    facts = folder / "toys-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
    lines = [
        "[memstore.kinds]",
        "knn-lm = examples.knn_lm.kind:KNN_LM",
        "odd = tests.readers.test_kinds:knn_lm",
        "gone = no.such.package:KIND",
        "",
    ]
    (facts / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")  # for processes of the suite
    kinds._plugin.cache_clear()
    yield
    kinds._plugin.cache_clear()


class TestKNNLM(ReaderTests):
    """What every reader does, a kind from elsewhere does too."""

    kind = KNN_LM

    def model(self, seed: int = 0) -> Any:
        """See ``ReaderTests``."""
        return knn_lm(seed)


def test_a_kind_is_found_by_what_its_configuration_is_called(tmp_path: Path) -> None:
    assert kind_of(knn_lm()) is KNN_LM
    assert kind_of(tiny("llama")) is STOCK
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "knn-lm"}))
    assert kind_in(tmp_path) is KNN_LM


def test_a_kind_takes_the_options_that_it_names() -> None:
    with pytest.raises(InvalidArgument, match="sink is for stock models, not for a kNN-LM"):
        memstore.attach(knn_lm(), "ram:", sink=4)


def test_what_followed_the_text_is_likelier_with_the_memory() -> None:
    model = knn_lm()
    text = torch.randint(0, 60, (64,), generator=torch.Generator().manual_seed(5))
    question, follows = text[None, 16:26], int(text[26])  # as the block began, which was read by itself
    with torch.no_grad(), memstore.attach(model, "ram:") as reader:
        before = model(question).logits[0, -1].softmax(-1)[follows]
        reader.read(text)
        after = model(question).logits[0, -1].exp()[follows]
    assert float(after) > float(before) + 0.1


def test_an_entry_point_that_is_no_kind_is_refused() -> None:
    model = tiny("llama")
    vars(model.config)["model_type"] = "odd"
    with pytest.raises(InvalidArgument, match=r"entry point odd of memstore\.kinds must be a Kind"):
        kind_of(model)


def test_a_package_that_cannot_be_loaded_stands_in_nobody_s_way(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    vars(model.config)["model_type"] = "gone"
    with pytest.raises(InvalidArgument, match=r"entry point gone of memstore\.kinds cannot be loaded"):
        kind_of(model)
    assert {"drt", "landmark", "hils", "indexed"} <= kinds.trainable().keys()
    assert "a kind of model ('gone') from another package is ignored" in caplog.text
    assert KNN_LM in kinds.known_kinds()
