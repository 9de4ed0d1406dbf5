"""The index of a small model learns attention's distribution alone, and then both learn with what it chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.models.deepseek_v32", reason="this transformers has no DeepSeek-V3.2")

from transformers import AutoModelForCausalLM, DeepseekV32ForCausalLM

from memstore.models.indexed.training import (
    LARGEST_JUMP,
    MOST_JUMPS,
    RECIPES,
    IndexedRecipe,
    TokenIndexConfig,
    WatchedIndex,
    jumping,
)
from memstore.train import Optimisation, train_recipe
from tests.train.helpers import RUNTIME, same_weights, stopped_at, use_little_text


def small(**changes: Any) -> IndexedRecipe:
    """Sixteen small steps, the last ten with chosen tokens alone."""
    defaults: dict[str, Any] = {
        "model": {"hidden_size": 32, "intermediate_size": 48, "index_topk": 8},
        "tokens": 256,
        "checked": 4,
        "optimisation": Optimisation(steps=16, seed=1),
    }
    return replace(RECIPES["indexed-cpu"], **{**defaults, **changes})


def model_and_ids() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = DeepseekV32ForCausalLM(TokenIndexConfig.preset("tiny", index_topk=8)).eval()
    model.set_attn_implementation("eager")
    return model, torch.randint(0, 512, (2, 50))


@pytest.mark.parametrize("choosing", [False, True])
def test_a_watched_index_chooses_what_the_model_itself_chooses(choosing: bool) -> None:
    model, ids = model_and_ids()
    truth = model(input_ids=ids).logits
    watched = [WatchedIndex(layer.self_attn.indexer) for layer in model.model.layers]
    for index in watched:
        index.all = not choosing
    logits = model(input_ids=ids).logits
    assert torch.allclose(logits, truth, atol=1e-5) == choosing
    for index in watched:
        index.release()
    assert torch.equal(model(input_ids=ids).logits, truth)


@pytest.mark.parametrize("choosing", [False, True])
def test_the_index_learns_from_attention_and_attention_not_from_it(choosing: bool) -> None:
    model, ids = model_and_ids()
    watched = [WatchedIndex(layer.self_attn.indexer) for layer in model.model.layers]
    for index in watched:
        index.all = not choosing
    out = model(input_ids=ids, output_attentions=True)
    losses = [index.divergence(each) for index, each in zip(watched, out.attentions, strict=True)]
    assert all(float(loss.detach()) > 0 for loss in losses)
    torch.stack(losses).sum().backward()
    learning = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert learning == {name for name, _ in model.named_parameters() if ".indexer." in name}


def test_the_divergence_is_zero_where_the_scores_are_attention() -> None:
    model, ids = model_and_ids()
    index = WatchedIndex(model.model.layers[0].self_attn.indexer)
    attention = model(input_ids=ids, output_attentions=True).attentions[0].double()
    index._scores = attention.mean(1).clamp(min=1e-30).log()
    assert float(index.divergence(attention).detach()) == pytest.approx(0, abs=1e-6)
    index._scores = index._scores.roll(1, -1)
    assert float(index.divergence(attention).detach()) > 0.1


def test_positions_jump_beside_needles_alone() -> None:
    free = torch.ones(40, 300, dtype=torch.bool)
    free[:, 100:120] = free[:, 280:] = False
    positions = jumping(free, np.random.default_rng(0))
    steps = positions.diff(dim=1)
    assert bool((steps >= 1).all())
    assert bool((steps[~free[:, 1:]] == 1).all())
    assert int((steps > 1).sum(1).min()) >= 1
    assert int((steps > 1).sum(1).max()) <= MOST_JUMPS
    assert 2000 < int(positions.max()) <= MOST_JUMPS * LARGEST_JUMP + 1300
    assert torch.equal(positions, jumping(free, np.random.default_rng(0)))


def test_a_model_is_trained_resumed_and_loaded_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_little_text(monkeypatch)
    report = train_recipe(small(), tmp_path / "whole", runtime=RUNTIME)
    assert report["steps"] == 16
    assert 0 <= report["accuracy"] <= 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert type(model).__name__ == "DeepseekV32ForCausalLM"
    assert model.config.index_topk == model.model.layers[0].self_attn.indexer.index_topk == 128

    def again() -> dict[str, Any]:
        return train_recipe(small(), tmp_path / "cut", runtime=RUNTIME)

    stopped_at(13, again, tmp_path / "cut")
    assert again()["resumed_from_step"] == 10
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
