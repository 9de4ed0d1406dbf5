"""HiLS models are trained by the same runs as others: on needles, on texts, and from stock models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from memstore.errors import DifferentRun, UnsupportedModel
from memstore.eval.needles import prose_text
from memstore.models.hils import HilsConfig, HilsForCausalLM
from memstore.models.hils.training import HILS as TRAINING
from memstore.models.hils.training import RECIPES, HilsRecipe
from memstore.readers.kinds import HILS, kind_in
from memstore.train import Optimisation, train_on_texts, train_recipe
from memstore.train.corpora import train_tokenizer
from tests.train.helpers import RUNTIME, use_little_text

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_swa_layers": 1}


def small(**changes: Any) -> HilsRecipe:
    defaults: dict[str, Any] = {
        "model": {**RECIPES["hils-passkey-cpu"].model, **SIZES},
        "tokens": 256,
        "checked": 4,
        "optimisation": Optimisation(steps=12, seed=1),
    }
    return replace(RECIPES["hils-passkey-cpu"], **{**defaults, **changes})


def test_a_recipe_trains_a_model_that_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_little_text(monkeypatch)
    report = train_recipe(small(), tmp_path / "out", runtime=RUNTIME)
    assert report["steps"] == 12
    assert report["next_command"] == f"memstore eval passkey --model {tmp_path / 'out'}"
    assert kind_in(tmp_path / "out") is HILS
    model = HilsForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.hils_layers == (1,)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    again = train_recipe(small(), tmp_path / "again", init=tmp_path / "out", runtime=RUNTIME)
    assert again["loss"] < report["loss"]


def test_needles_may_be_hidden_in_other_texts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Rain fell on the roofs of the town, and nobody went out. " * 600)
    train_recipe(small(), tmp_path / "out", texts=[tmp_path / "text.txt"], runtime=RUNTIME)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer(" nobody went")["input_ids"]) == 2, "the text's own words are tokens"
    with pytest.raises(DifferentRun, match="its texts"):
        train_recipe(small(), tmp_path / "out", runtime=RUNTIME)


@pytest.mark.parametrize("start", ["nothing", "a stock model"])
def test_texts_train_hils_models(start: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(prose_text()[:30_000])
    options: dict[str, Any] = {"config": HilsConfig.preset("tiny", **SIZES)}
    if start == "a stock model":
        tokenizer = train_tokenizer([prose_text()[:30_000]], 512)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / "stock")
        tokenizer.save_pretrained(tmp_path / "stock")
        options = {"init": tmp_path / "stock", "changes": {"chunk_size": 32, "sliding_window": 64}}
    report = train_on_texts(
        [tmp_path / "text.txt"], tmp_path / "out", family=TRAINING, context=200, valid=0.1,
        optimisation=Optimisation(steps=6, learning_rate=1e-3), runtime=RUNTIME, **options,
    )  # fmt: skip
    assert report["valid_perplexity"] > 1
    made = HilsForCausalLM.from_pretrained(tmp_path / "out")
    assert made.config.chunk_size == 32
    assert (made.config.stock is not None) == (start == "a stock model")


def test_a_stock_model_that_cannot_become_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(prose_text()[:3_000])
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        attention_bias=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "stock")
    train_tokenizer([prose_text()[:30_000]], 512).save_pretrained(tmp_path / "stock")
    with pytest.raises(UnsupportedModel, match="biases"):
        train_on_texts(
            [tmp_path / "text.txt"], tmp_path / "out", family=TRAINING, init=tmp_path / "stock", runtime=RUNTIME
        )
