"""Kinds of models that other packages bring by entry points."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import memstore
from examples.knn_lm.kind import KNN_LM
from examples.knn_lm.modeling import KNNLMConfig, KNNLMForCausalLM
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.readers import kinds
from memstore.readers.attachment import check_options
from memstore.readers.kinds import DRT, STOCK, kind_in, kind_of
from memstore.readers.observer import Recording
from memstore.testing.readers import ReaderTests
from memstore.tools.models import load_model
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


def test_a_refusal_names_the_kinds_that_take_an_option_in_the_plural() -> None:
    with pytest.raises(InvalidArgument, match="index_dtype is for models with their own index, not for a DRT"):
        check_options(DRT, {"index_dtype": "int8"})
    with pytest.raises(InvalidArgument, match="stock models with a kNN layer and models with their own index, not"):
        check_options(DRT, {"block_size": 16})


def test_what_followed_the_text_is_likelier_with_the_memory() -> None:
    model = knn_lm()
    text = torch.randint(0, 60, (64,), generator=torch.Generator().manual_seed(5))
    question, follows = text[None, 16:26], int(text[26])  # as the block began, which was read by itself
    with torch.no_grad(), memstore.attach(model, "ram:") as reader:
        before = model(question).logits[0, -1].softmax(-1)[follows]
        reader.read(text)
        after = model(question).logits[0, -1].exp()[follows]
    assert float(after) > float(before) + 0.1


def test_the_suite_finds_a_reader_that_tells_no_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "choice", lambda *_: None)
    with pytest.raises(AssertionError, match="no observer was told of a choice"):
        TestKNNLM().test_what_is_retrieved_can_be_recorded()


def test_the_suite_says_that_a_kind_is_not_installed() -> None:
    suite = TestKNNLM()
    vars(suite)["model"] = lambda: tiny("llama")
    with pytest.raises(AssertionError, match="install the package whose entry point names this kind"):
        suite.test_the_reader_is_that_of_its_kind()


def test_a_model_whose_kind_is_not_installed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    class Elsewhere(BloomForCausalLM):
        """A model of another package, whose attention is its own."""

    config = BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(UnsupportedModel, match=r"entry point of memstore\.kinds"):
        memstore.attach(Elsewhere(config), "ram:").open()
    with pytest.raises(UnsupportedModel, match=r"GPT-2\.$"):  # one of transformers cannot be helped by a package
        memstore.attach(BloomForCausalLM(config), "ram:").open()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "elsewhere"}))
    with pytest.raises(UnsupportedModel, match=r"entry point of memstore\.kinds"):
        load_model(str(tmp_path))


def blocks_of_code() -> list[str]:
    """The two blocks of Python of docs/own_mechanism.md."""
    page = Path(__file__).parents[2] / "docs" / "own_mechanism.md"
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def test_the_tests_of_the_page_are_passed() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(blocks_of_code()[0], names)  # noqa: S102 - it is ours
    suite = names["TestMine"]()
    suite.test_the_reader_is_that_of_its_kind()
    suite.test_rows_of_a_batch_are_answered_as_each_alone()  # sensitive to odd sizes of heads
    suite.test_what_is_retrieved_can_be_recorded()


def test_the_model_of_the_page_reads_answers_and_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(blocks_of_code()[1], {})  # noqa: S102 - it is ours
    loaded = load_model("mine")
    with memstore.attach(loaded.model, "mine.mem", tokenizer=loaded.tokenizer) as reader:
        reader.read("The last ferry leaves at 17:10. " * 20, document="notes")
    with memstore.attach(loaded.model, "mine.mem", document="notes", tokenizer=loaded.tokenizer) as reader:
        assert reader.ask("Where?", max_tokens=20, trace=True).sources()
        (trace,) = reader.memory.traces.list()
        assert trace.info["mechanism"] == "knn-lm"
        assert trace.used()


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
