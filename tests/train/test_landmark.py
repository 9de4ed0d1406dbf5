"""Landmark models are trained by the same runs as DRTs, with a warm start that an interruption does not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from memstore.errors import DamagedError, InvalidArgument, TrainingDiverged, UnsupportedModel
from memstore.eval.needles import prose_text
from memstore.models.drt.training import DRT
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from memstore.models.landmark.training import (
    LANDMARK,
    LANDMARK_RECIPES,
    TEXT_RECIPES,
    LandmarkRecipe,
    LandmarkTextTrainer,
    Ramp,
)
from memstore.train import Optimisation, Runtime, corpora, train_on_texts, train_recipe
from memstore.train.corpora import train_tokenizer
from memstore.train.needles import NeedleRows
from memstore.train.training import starting
from tests.train.helpers import RUNTIME, losses, same_weights, stopped_at, use_little_text, without_digests
from tests.train.test_recipes import BLOCK, answers, check

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def small(**changes: Any) -> LandmarkRecipe:
    """Sixteen small steps, in which landmarks begin to count at once and count in full after eight."""
    defaults: dict[str, Any] = {
        "model": SIZES,
        "tokens": 256,
        "checked": 4,
        "warm_until": 100.0,
        "ramp_steps": 8,
        "optimisation": Optimisation(steps=16, seed=1),
    }
    return replace(LANDMARK_RECIPES["landmark-cpu"], **{**defaults, **changes})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([prose_text()[:60_000]], 512)


def test_the_ramp_waits_for_answers_and_then_goes_to_its_end() -> None:
    ramp = Ramp(small(warm_until=0.3, ramp_steps=10))
    for _ in range(20):
        ramp.pace(2.0)
    assert ramp.value == 0
    while not ramp.value:
        ramp.pace(0.1)
    assert ramp.answer is not None
    assert 0.25 < ramp.answer < 0.3
    for _ in range(20):
        ramp.pace(2.0)  # what has begun goes on
    assert ramp.value == 1


def test_questions_end_anywhere_in_a_block(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = list(corpora.encoded([prose_text()[:60_000]], tokenizer))
    rows = NeedleRows(LANDMARK_RECIPES["landmark-cpu"], tokenizer, texts, BLOCK, 100, 0)
    places = set()
    for number in (5, 50, 99):
        batch = rows[number]
        assert batch["input_ids"].numel() <= LANDMARK_RECIPES["landmark-cpu"].tokens
        for ids, answer in zip(batch["input_ids"].tolist(), batch["answer"].tolist(), strict=True):
            (run,) = answers(answer)
            places.add(run.start % BLOCK)
            check(str(tokenizer.decode(ids[: run.start])), str(tokenizer.decode(ids[run.start : run.stop])))
    assert len(places) > 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("landmark") / "plain"
    with pytest.MonkeyPatch.context() as patch:
        use_little_text(patch)
        report = train_recipe(small(), folder, runtime=RUNTIME)
    assert report["steps"] == 16
    assert 0 <= report["accuracy"] <= 1
    assert report["next_command"] == f"memstore eval passkey --model {folder}"
    return folder


def test_a_recipe_goes_on_after_an_interruption_to_the_same_model(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_little_text(monkeypatch)

    def again() -> dict[str, Any]:
        return train_recipe(small(), tmp_path / "run", runtime=RUNTIME)

    checkpoint = stopped_at(8, again, tmp_path / "run")
    without_digests(checkpoint)
    ramp = (checkpoint / "ramp.json").read_text()
    (checkpoint / "ramp.json").write_text('{"value": "x", "answer": null}')
    with pytest.raises(DamagedError, match=r"ramp\.json is damaged \(value must be a number"):
        again()
    (checkpoint / "ramp.json").unlink()
    with pytest.raises(DamagedError, match="remove it, and the run resumes from the one before"):
        again()
    (checkpoint / "ramp.json").write_text(ramp)
    report = again()
    assert report["resumed_from_step"] == 5
    assert same_weights(trained, tmp_path / "run")
    assert losses(trained)[-1] == losses(tmp_path / "run")[-1]


def test_a_model_to_start_from_needs_no_warm_start(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_little_text(monkeypatch)
    recipe = small(warm_until=0.0, optimisation=Optimisation(steps=1))
    report = train_recipe(recipe, tmp_path / "more", init=trained, runtime=replace(RUNTIME, log_every=1))
    assert report["steps"] == 1
    assert '"ramp": 1.0' in (tmp_path / "more/log.jsonl").read_text()


@pytest.mark.parametrize("attention", ["landmark", "full", "xl"])
def test_texts_train_landmark_models_and_their_baselines(text: Path, tmp_path: Path, attention: str) -> None:
    config = LandmarkConfig.preset("tiny", **SIZES, attention=attention, window=32)
    report = train_on_texts(
        [text], tmp_path / "run", config=config, family=LANDMARK, context=93, valid=0.1,
        optimisation=Optimisation(steps=12, batch=2, seed=3), runtime=RUNTIME,
    )  # fmt: skip
    assert report["valid_perplexity"] < 512
    model = LandmarkForCausalLM.from_pretrained(tmp_path / "run")
    assert (model.config.attention, model.ramp) == (attention, 1)
    first, *_, last = (loss for _, loss in losses(tmp_path / "run"))
    assert last < first


def test_on_texts_the_ramp_depends_on_the_step_alone(text: Path, tmp_path: Path) -> None:
    seen: list[float] = []
    ordinary = LandmarkTextTrainer.compute_loss

    def watching(self: LandmarkTextTrainer, *arguments: Any, **named: Any) -> Any:
        seen.append(self.trained.ramp)
        return ordinary(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LandmarkTextTrainer, "compute_loss", watching)
        config = LandmarkConfig.preset("tiny", **SIZES)
        options: dict[str, Any] = {"config": config, "family": LANDMARK, "context": 62, "runtime": RUNTIME}
        train_on_texts([text], tmp_path / "run", **options, optimisation=Optimisation(steps=40, batch=1))
    assert seen[:5] == [0] * 5
    assert seen[7] == pytest.approx(0.5)
    assert seen[10:] == [1] * 30


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_little_text(monkeypatch)
    ordinary = LandmarkForCausalLM.forward

    def spoiled(self: LandmarkForCausalLM, *arguments: Any, **named: Any) -> Any:
        output: Any = ordinary(self, *arguments, **named)
        output.logits = output.logits * (float("nan") if (tmp_path / "run/checkpoints/checkpoint-5").exists() else 1)
        return output

    monkeypatch.setattr(LandmarkForCausalLM, "forward", spoiled)
    with pytest.raises(TrainingDiverged, match=r"nan at step 6; training stopped\. The last good checkpoint is .*-5"):
        train_recipe(small(), tmp_path / "run", runtime=RUNTIME)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_stock_model_is_fine_tuned_with_landmarks(text: Path, stock: Path, tmp_path: Path) -> None:
    changes = {"block_size": 16}
    start = starting(None, stock, family=LANDMARK, changes=changes)
    ids = torch.arange(15)[None]
    expected = AutoModelForCausalLM.from_pretrained(stock)(ids).logits
    model = start.model(train_tokenizer(["a"], 512), 0)
    torch.testing.assert_close(model.eval()(ids).logits, expected, atol=1e-5, rtol=0)
    report = train_on_texts(
        [text], tmp_path / "run", init=stock, family=LANDMARK, changes=changes, context=62,
        optimisation=Optimisation(steps=4, batch=1), runtime=Runtime(device="cpu"),
    )  # fmt: skip
    assert report["steps"] == 4
    assert LandmarkForCausalLM.from_pretrained(tmp_path / "run").config.block_size == 16


def test_a_model_that_cannot_get_landmarks_is_refused(stock: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((stock / "config.json").read_text())
    with pytest.raises(DamagedError, match="cannot be loaded"):
        starting(None, tmp_path, family=LANDMARK)
    with pytest.raises(InvalidArgument, match="not a DRT"):
        starting(None, stock, family=DRT)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises((UnsupportedModel, DamagedError)):
        starting(None, tmp_path, family=LANDMARK)


def test_recipes_on_texts_are_those_of_the_paper() -> None:
    paper = TEXT_RECIPES["landmark-pg19"]
    config = paper.config()
    assert (config.num_hidden_layers, config.hidden_size, config.tokens_per_block) == (12, 1024, 50)
    optimisation = paper.optimisation
    assert optimisation.learning_rate * optimisation.final_rate == pytest.approx(4e-4)
    assert (paper.context, optimisation.batch * optimisation.accumulate, optimisation.warmup) == (512, 128, 4800)
    assert TEXT_RECIPES["landmark-finetune"].config() is None
    assert TEXT_RECIPES["landmark-prose-cpu"].config(attention="full").attention == "full"
