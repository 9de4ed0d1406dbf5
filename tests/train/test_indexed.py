"""The index of a small model learns attention's distribution alone, and then both learn with what it chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.models.dots3_note", reason="this transformers has no dots3")

from transformers import AutoModelForCausalLM
from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteForCausalLM
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from memstore.models.indexed.training import (
    LARGEST_JUMP,
    MOST_JUMPS,
    RECIPES,
    BlockIndexConfig,
    IndexedRecipe,
    TokenIndexConfig,
    WatchedBlocks,
    WatchedIndex,
    WatchedTokens,
    jumping,
)
from memstore.train import Optimisation, train_recipe
from tests.train.helpers import RUNTIME, same_weights, stopped_at, use_little_text

both = pytest.mark.parametrize("blockwise", [False, True], ids=["tokens", "blocks"])
FEW: dict[str, dict[str, Any]] = {
    "indexed-cpu": {"index_topk": 8},
    "indexed-blocks-cpu": {"index_block_size": 8, "index_topk_blocks": 3, "index_local_blocks": 1},
}


def small(name: str) -> IndexedRecipe:
    """Sixteen small steps, the last ten with what was chosen alone."""
    size = {"intermediate_size": 48} if name == "indexed-cpu" else {"dense_intermediate_size": 48}
    few = {option: value for option, value in FEW[name].items() if option != "index_local_blocks"}
    changes: dict[str, Any] = {
        "model": {"hidden_size": 32, **size, **few},
        "tokens": 256,
        "checked": 4,
        "optimisation": Optimisation(steps=16, seed=1),
    }
    return replace(RECIPES[name], **changes)


def watched(blockwise: bool, *, choosing: bool) -> tuple[Any, list[WatchedIndex], Tensor]:
    """A model with random weights whose indexes are watched, and tokens."""
    torch.manual_seed(0)
    model: Any
    if blockwise:
        model = MiniMaxM3VLForCausalLM(BlockIndexConfig.preset("tiny", **FEW["indexed-blocks-cpu"]))
    else:
        model = Dots3NoteForCausalLM(TokenIndexConfig.preset("tiny", **FEW["indexed-cpu"]))
    model.train(False)
    model.set_attn_implementation("eager")
    kind = WatchedBlocks if blockwise else WatchedTokens
    layers = model.model.layers if blockwise else model.model.layers[-1:]  # the others of dots3 have windows
    indexes: list[WatchedIndex] = [kind(layer.self_attn.indexer) for layer in layers]
    for index in indexes:
        index.all = not choosing
    return model, indexes, torch.randint(0, 512, (2, 50))


def logits(model: Any, ids: Tensor, **more: Any) -> Any:
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)


@both
@pytest.mark.parametrize("choosing", [False, True])
def test_a_watched_index_chooses_what_the_model_itself_chooses(blockwise: bool, choosing: bool) -> None:
    model, indexes, ids = watched(blockwise, choosing=choosing)
    found = logits(model, ids).logits
    for index in indexes:
        index.release()
    assert torch.allclose(logits(model, ids).logits, found, atol=1e-5) == choosing


def test_local_blocks_take_no_place_from_chosen_ones() -> None:
    model, indexes, ids = watched(True, choosing=True)
    found = logits(model, ids).logits
    for index in indexes:
        index._indexer.local_blocks, index._indexer.topk_blocks = 2, 4
    assert torch.equal(logits(model, ids).logits, found)


@both
@pytest.mark.parametrize("choosing", [False, True])
def test_the_index_learns_from_attention_and_attention_not_from_it(blockwise: bool, choosing: bool) -> None:
    model, indexes, ids = watched(blockwise, choosing=choosing)
    out = logits(model, ids, output_attentions=True)
    losses = [index.divergence(each) for index, each in zip(indexes, out.attentions[-len(indexes) :], strict=True)]
    assert all(float(loss.detach()) > 0 for loss in losses)
    torch.stack(losses).sum().backward()
    learning = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert learning == {name for name, _ in model.named_parameters() if ".indexer." in name}


def test_the_divergence_is_zero_where_the_scores_are_attention() -> None:
    model, (index,), ids = watched(False, choosing=False)
    attention = logits(model, ids, output_attentions=True).attentions[-1].double()
    index._scores = attention.mean(1).clamp(min=1e-30).log()
    assert float(index.divergence(attention).detach()) == pytest.approx(0, abs=1e-6)
    index._scores = index._scores.roll(1, -1)
    assert float(index.divergence(attention).detach()) > 0.1


def test_the_divergence_of_blocks_leaves_out_a_query_s_own_one() -> None:
    model, (index, *_), ids = watched(True, choosing=False)
    attention = logits(model, ids, output_attentions=True).attentions[0].double()
    heads = torch.nn.functional.pad(attention.unflatten(1, (2, 2)).mean(2).transpose(1, 2), (0, 6))
    mass = heads.unflatten(-1, (-1, 8)).sum(-1)
    index._scores = mass.clamp(min=1e-30).log()
    assert float(index.divergence(attention).detach()) == pytest.approx(0, abs=1e-6)
    own = torch.arange(50)[:, None, None] // 8 == torch.arange(7)
    index._scores = torch.where(own, 100.0, index._scores)
    assert float(index.divergence(attention).detach()) == pytest.approx(0, abs=1e-6)
    index._scores = index._scores.roll(1, -1)
    assert float(index.divergence(attention).detach()) > 0.1


@both
def test_a_long_text_has_to_be_passed_over(blockwise: bool) -> None:
    model, (index, *_), ids = watched(blockwise, choosing=False)

    def seen(**long: Any) -> tuple[Tensor, Tensor]:
        for name, value in long.items():
            setattr(index, name, value)
        out = logits(model, ids, output_attentions=True)
        return index._kl(index._chosen * 0.1 if blockwise else out.attentions[-1].mean(1)), index._crowd

    alone, _ = seen()
    beside, crowd = seen(watched=torch.tensor([40, 97]), free=torch.arange(10, 30), crowd=1000.0)
    more, _ = seen(crowd=10_000.0, bank=index.latest)
    change = (beside - alone).detach().reshape(100, -1)
    assert change.any(1).nonzero().flatten().tolist() == [40, 97]
    (gradient,) = torch.autograd.grad(beside.sum(), crowd)
    assert bool((gradient > 0).all())  # the larger its scores, the larger the divergence
    assert bool((more - beside).flatten(0, 1)[[40, 97]].sum() > 0)
    assert len(index.latest) == 40


def test_positions_jump_beside_needles_alone() -> None:
    free = torch.ones(40, 300, dtype=torch.bool)
    free[:, 100:120] = free[:, 280:] = False
    positions = jumping(free, np.random.default_rng(0))
    steps = positions.diff(dim=1)
    assert bool((steps >= 1).all())
    assert bool((steps[~free[:, 1:]] == 1).all())
    assert int((steps > 1).sum(1).min()) >= 1
    assert int((steps > 1).sum(1).max()) <= MOST_JUMPS
    assert 100_000 < int(positions.max()) <= (MOST_JUMPS + 1) * LARGEST_JUMP + 300
    assert torch.equal(positions, jumping(free, np.random.default_rng(0)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_is_trained_resumed_and_loaded_by_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_little_text(monkeypatch)
    recipe = small(name)
    report = train_recipe(recipe, tmp_path / "whole", runtime=RUNTIME)
    assert report["steps"] == 16
    assert 0 <= report["accuracy"] <= 1
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    index = model.model.layers[-1].self_attn.indexer
    assert (index.topk_blocks if recipe.blockwise else index.index_topk) == (3 if recipe.blockwise else 8)
    assert not recipe.blockwise or (index.local_blocks, model.config.index_local_blocks) == (2, 2)

    def again() -> dict[str, Any]:
        return train_recipe(recipe, tmp_path / "cut", runtime=RUNTIME)

    stopped_at(13, again, tmp_path / "cut")
    assert again()["resumed_from_step"] == 10
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    lighter = replace(RUNTIME, gradient_checkpointing=True)
    train_recipe(recipe, tmp_path / "lighter", runtime=lighter)
    assert same_weights(tmp_path / "whole", tmp_path / "lighter")
    more = replace(recipe, optimisation=Optimisation(steps=1))
    assert train_recipe(more, tmp_path / "more", init=tmp_path / "whole", runtime=RUNTIME)["steps"] == 1
