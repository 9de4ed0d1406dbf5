"""A stock model is given its memory late: only gates learn, and an interruption changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from benchmarks.knn_tables import by_memory_size
from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.eval.needles import prose_text
from memstore.models.memorizing import add_knn_memory, load_knn_memory
from memstore.models.memorizing.evaluation import StockScorer
from memstore.models.memorizing.training import StockTrainer, train_stock_memory
from memstore.train import Optimisation
from tests.eval.drts import byte_tokenizer
from tests.models.stock import small_llama
from tests.train.helpers import RUNTIME, losses, same_weights, stopped_at, without_digests

SHORT = Optimisation(steps=16, batch=2, accumulate=2, learning_rate=0.05, seed=3)
OWN = "model.layers.1.self_attn.knn_memory."


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    byte_tokenizer().save_pretrained(folder)
    small_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    text = prose_text()
    for number, (start, length) in enumerate([(0, 900), (2_000, 2_500), (6_000, 400)]):
        (folder / f"{number}.txt").write_text(text[start : start + length])
    return folder


def train(stock: Path, texts: Path, out: Path, **changes: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"layer": 1, "memory_size": 100, "window": 24, "top_k": 4, "optimisation": SHORT}
    runtime = replace(RUNTIME, log_every=1)
    return train_stock_memory([texts], out, init=stock, runtime=runtime, **{**defaults, **changes})


@pytest.fixture(scope="module")
def trained(stock: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    report = train(stock, texts, folder)
    assert (report["steps"], report["trained_parameters"], report["memory_size"]) == (16, 8, 100)
    return folder


def test_only_gates_and_scales_are_trained(stock: Path, trained: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (stock, trained))
    assert after.keys() - before.keys() == {OWN + "gate", OWN + "scale"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert bool((after[OWN + "gate"] != 0).all())


def test_a_saved_model_is_loaded_with_its_memory(trained: Path) -> None:
    model, memory = load_knn_memory(trained)
    assert torch.equal(memory.gate, load_file(trained / "model.safetensors")[OWN + "gate"])
    assert model.config.knn_memory == {"layer": 1, "memory_size": 100, "top_k": 4, "window": 24}
    assert memory.memory is None
    assert not model.training


def test_without_its_memory_it_is_the_stock_model(stock: Path, trained: Path) -> None:
    model, _ = load_knn_memory(trained)
    plain: Any = LlamaForCausalLM.from_pretrained(stock)
    tokens = torch.randint(256, (90,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = [
            F.cross_entropy(plain(tokens[None, start : start + 24][:, : 89 - start]).logits[0],
                            tokens[start + 1 : start + 25], reduction="none")
            for start in range(0, 89, 24)
        ]  # fmt: skip
    # The weights are equal, but lie elsewhere in their file: some processors sum in another order.
    torch.testing.assert_close(StockScorer(model).losses(tokens, 0), torch.cat(expected), atol=1e-5, rtol=0)
    first, second = list(by_memory_size(model, [tokens], [0, 48], positions=(24,)))
    assert first["change"] is None
    assert second["change"] is not None
    assert second["change"] != 0
    assert first["by_position"]["0-24"] == second["by_position"]["0-24"]  # a first segment has nothing to find


def test_an_interrupted_training_goes_on_with_the_memory_to_the_same_result(
    stock: Path, trained: Path, texts: Path, tmp_path: Path
) -> None:
    checkpoint = stopped_at(13, lambda: train(stock, texts, tmp_path / "run"), tmp_path / "run")
    held = load_file(checkpoint / "memory-0.safetensors")
    assert held["keys"].shape == (2, 2, 100, 8)
    assert int(held["added"].sum()) > 0
    report = train(stock, texts, tmp_path / "run")
    assert report["resumed_from_step"] == 10
    assert same_weights(tmp_path / "run", trained)
    assert losses(tmp_path / "run") == losses(trained)


def test_a_checkpoint_without_its_memory_is_refused(stock: Path, texts: Path, tmp_path: Path) -> None:
    checkpoint = stopped_at(7, lambda: train(stock, texts, tmp_path / "run"), tmp_path / "run")
    without_digests(checkpoint)
    (checkpoint / "memory-0.safetensors").unlink()
    with pytest.raises(DamagedError, match="Remove the folder"):
        train(stock, texts, tmp_path / "run")


def test_a_row_remembers_its_own_document_alone(
    stock: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    ordinary = StockTrainer.compute_loss

    def watching(self: StockTrainer, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        given = inputs["begins"].tolist()
        loss = ordinary(self, model, inputs, *rest, **named)
        assert self.memory.memory is not None
        for row, begins in enumerate(given):
            step = len(checked)
            before = 0 if begins else len(self.train_dataset.before(row, step))  # type: ignore[union-attr]
            assert self.memory.memory.added[row] == before - math.ceil(before / 24)  # without each segment's first
        checked.append(sum(given))
        return loss

    monkeypatch.setattr(StockTrainer, "compute_loss", watching)
    train(stock, texts, tmp_path / "run", optimisation=replace(SHORT, steps=90, accumulate=1))
    assert checked[0] == 2
    assert sum(checked[1:]) >= 2


def test_what_cannot_be_loaded_or_trained_is_refused(stock: Path, trained: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no memory: add one"):
        load_knn_memory(stock)
    with pytest.raises(NotFound, match="no model in"):
        load_knn_memory(tmp_path)
    with pytest.raises(InvalidArgument, match="window must be at least 1"):
        train(stock, texts, tmp_path / "run", memory_size=0)
    with pytest.raises(InvalidArgument, match="memory: start from the stock model"):
        train(trained, texts, tmp_path / "again")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((trained / "config.json").read_bytes())
    save_file(load_file(stock / "model.safetensors"), broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedError, match="memory, but not its parameters"):
        load_knn_memory(broken)


def test_the_memory_of_another_size_is_refused(stock: Path) -> None:
    states = []
    for size in (20, 30):
        model: Any = LlamaForCausalLM.from_pretrained(stock)
        memory = add_knn_memory(model, layer=-1, memory_size=size)
        model(torch.arange(9)[None])
        states.append(memory.remembered())
    assert states[0]["added"].tolist() == [8]
    memory.remember(states[1])
    assert memory.memory is not None
    assert memory.memory.added == [8]
    with pytest.raises(InvalidArgument, match="expected a memory of 30 tokens"):
        memory.remember(states[0])
