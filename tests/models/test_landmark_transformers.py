"""To transformers a landmark model is a model like others: it is saved, trains, and runs in half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from tests.models.landmark import KINDS, close, logits, make, tokens
from tests.models.stock import realigned


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_the_same_after_loading(kind: str, tmp_path: Path) -> None:
    model, ids = make(kind), tokens(60)
    model.ramp = 0.5
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LandmarkForCausalLM)
    assert not loaded.training
    assert loaded.ramp == 1, "the ramp belongs to a training"
    model.ramp = 1.0
    assert torch.equal(logits(realigned(loaded), ids), logits(model, ids))
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings


def test_a_configuration_survives_being_saved(tmp_path: Path) -> None:
    for options in (*KINDS.values(), {"local_layers": (0, 2), "position_jump": 5, "stock": {"model_type": "llama"}}):
        config = LandmarkConfig(**options)
        config.save_pretrained(tmp_path)
        ours, theirs = config.to_dict(), LandmarkConfig.from_pretrained(tmp_path).to_dict()
        for values in (ours, theirs):
            values.pop("transformers_version", None)
        assert ours == theirs


def test_layers_of_a_gpt2_start_smaller_the_more_there_are() -> None:
    model = LandmarkForCausalLM(LandmarkConfig(architecture="gpt2", num_hidden_layers=8))
    for layer in model.model.layers:
        assert 0.8 < float(layer.self_attn.o_proj.weight.detach().std()) / (0.02 / 4) < 1.2
        assert 0.8 < float(layer.mlp.up_proj.weight.detach().std()) / 0.02 < 1.2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "context miss", "xl"])
def test_gradient_checkpointing_changes_no_gradient(kind: str, reentrant: bool) -> None:
    ids, gradients, calls = tokens(60, rows=2), [], []
    for checkpointing in (False, True):
        model = make(kind).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        model.model.layers[0].register_forward_pre_hook(counted)
        torch.manual_seed(0)
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        calls.append(count)
    assert calls == [1, 2], "a checkpointed layer runs again on the way back"
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_reaches_every_parameter_and_falls(kind: str) -> None:
    model, ids = make(kind, initializer_range=0.05).train(), tokens(60, rows=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        assert [name for name, x in model.named_parameters() if x.grad is None or not bool(x.grad.any())] == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


class Ramp(TrainerCallback):
    """A warm start in three steps."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        options["model"].ramp = min(1.0, state.global_step / 2)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"activation_checkpointing": True}], ids=str)
def test_the_trainer_trains_without_a_warning(tmp_path: Path, options: dict[str, bool]) -> None:
    model, ids = make("llama"), tokens(40, rows=12)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,  # type: ignore[arg-type]  # each of them is a boolean
    )
    examples = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Ramp()])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert all(0 < loss < 100 for loss in losses)
    assert model.ramp == 1
    assert trainer.evaluate(cast("Dataset[Any]", examples))["eval_loss"] > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "context miss", "xl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_and_finite(kind: str, dtype: torch.dtype) -> None:
    """Of the weights, or of operations only (autocast); with a text that is mostly padding."""
    ids, mask = tokens(60, rows=2), torch.ones(2, 60, dtype=torch.long)
    mask[0, :50] = 0
    model = make(kind, initializer_range=0.05)
    expected = logits(model, ids, attention_mask=mask)
    with torch.autocast("cpu", dtype):
        mixed = logits(model, ids, attention_mask=mask)
        loss = model.train()(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)
    model.train(False)
    half = logits(nn.Module.to(model, dtype), ids, attention_mask=mask)
    for out in (mixed, half):
        assert bool(out.isfinite().all())
        error = (out.float() - expected).abs().max() / expected.abs().max()
        assert float(error) < 0.1


def test_generation_without_a_cache_sees_the_whole_text_at_true_positions() -> None:
    model, ids = make("gpt2"), tokens(33, rows=2)
    out = model.generate(ids, max_new_tokens=10, use_cache=False, do_sample=False, pad_token_id=0)
    assert isinstance(out, Tensor)
    for _ in range(10):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(out, ids)
    close(logits(model, out)[:, :5], logits(model, out[:, :5]))
