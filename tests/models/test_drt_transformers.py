"""To transformers a DRT is a model like others: it generates, is saved, trains, and runs in half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from memstore.errors import InvalidArgument
from memstore.models.drt import DRTCache, DRTConfig, DRTForCausalLM
from memstore.readers.caches import CACHE
from tests.eval.memorizing import small_memorizing
from tests.models import hils, landmark
from tests.models.drt import KINDS, TOLERANCE, close, embed, logits, make, tokens
from tests.models.stock import realigned


def generate(model: DRTForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    out = model.generate(ids, pad_token_id=0, **{"do_sample": False, **options})
    assert isinstance(out, Tensor)
    return out


def greedy(model: DRTForCausalLM, ids: Tensor, new: int) -> Tensor:
    """The best next token, again and again, each from a whole forward pass."""
    for _ in range(new):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_is_a_loop_of_forward_passes(kind: str) -> None:
    model, ids = make(kind), tokens(33, rows=2)
    assert torch.equal(generate(model, ids, max_new_tokens=20), greedy(model, ids, 20))
    assert torch.equal(generate(model, ids, max_new_tokens=20, use_cache=False), greedy(model, ids, 20))


@pytest.mark.filterwarnings("ignore:.*right-padding was detected")  # these models leave padding out, wherever it is
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cache", "no cache"])
def test_padded_prompts_generate_what_they_would_alone(side: str, options: dict[str, Any]) -> None:
    model, texts = make("alibi, two groups"), [tokens(length)[0] for length in (40, 13, 1)]
    sides = [(40 - len(text), 0) if side == "left" else (0, 40 - len(text)) for text in texts]
    ids = torch.stack([nn.functional.pad(text, each) for text, each in zip(texts, sides, strict=True)])
    out = generate(model, ids, attention_mask=(ids != 0).long(), max_new_tokens=20, **options)
    for row, text in enumerate(texts):
        assert torch.equal(out[row, 40:], greedy(model, text[None], 20)[0, len(text) :])


@pytest.mark.parametrize("made", [make, landmark.make, hils.make, small_memorizing])
def test_keywords_that_would_change_the_result_are_refused(made: Callable[[], Any]) -> None:
    model, ids, places = made().eval(), tokens(9, rows=2), torch.arange(9).expand(2, 9)
    usual = {"output_attentions": None, "output_hidden_states": False, "return_dict": True, "inputs_embeds": None}
    with torch.no_grad():
        expected = model(ids).logits
        for same in (usual, {"position_ids": places}, {"attention_mask": torch.ones_like(ids), "position_ids": places}):
            assert torch.equal(model(ids, **same).logits, expected)
    packed = torch.cat([places[:, :4], places[:, :5]], 1)
    for name, value in {"output_attentions": True, "output_hidden_states": True, "position_ids": packed}.items():
        with pytest.raises(InvalidArgument, match=name):
            model(ids, **{name: value})


def test_a_prompt_without_a_token_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one token"):
        generate(make(), tokens(5)[:, :0], max_new_tokens=3)


def best_by_beams(model: DRTForCausalLM, ids: Tensor, beams: int, new: int) -> Tensor:
    """Beam search by whole forward passes: keep the ``beams`` texts with the highest probability."""
    held, scores = ids, torch.zeros(1)
    for _ in range(new):
        every = scores[:, None] + logits(model, held)[:, -1].log_softmax(-1)
        scores, at = every.flatten().topk(beams)
        rows, token = at // every.shape[1], at % every.shape[1]
        held = torch.cat([held[rows], token[:, None]], 1)
    return held[:1]


@pytest.mark.parametrize("kind", ["rope", "landmark uses own"])
def test_beams_are_those_of_forward_passes(kind: str) -> None:
    model, ids = make(kind), tokens(33)
    out = generate(model, ids, max_new_tokens=12, num_beams=4)
    assert torch.equal(out, best_by_beams(model, ids, 4, 12))


def test_a_generation_goes_on_from_a_cache() -> None:
    model, ids = make(), tokens(50)
    with torch.no_grad():
        cache = model(ids[:, :30], use_cache=True).past_key_values
    assert torch.equal(generate(model, ids, **{CACHE: cache}, max_new_tokens=9), greedy(model, ids, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_the_same_after_loading(kind: str, tmp_path: Path) -> None:
    model, ids = make(kind), tokens(60)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = DRTForCausalLM.from_pretrained(tmp_path)
    assert not loaded.training
    if kind == "external":
        loaded.set_retriever(embed)
    assert torch.equal(logits(realigned(loaded), ids), logits(model, ids))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_block_size_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    fitting: tuple[dict[str, Any], ...] = ({"block_size": 8}, {"config": model.config})
    for options in fitting:
        assert DRTForCausalLM.from_pretrained(tmp_path, **options).config.block_size == 8
    wrong: tuple[dict[str, Any], ...] = ({"block_size": 16}, {"config": DRTConfig(block_size=16)})
    for options in wrong:
        with pytest.raises(InvalidArgument, match=r"block_size 16 does not match .* blocks of 8"):
            DRTForCausalLM.from_pretrained(tmp_path, **options)


def test_assisted_generation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="stateful models, such as DRTForCausalLM"):
        generate(make(), tokens(20), prompt_lookup_num_tokens=3, max_new_tokens=3)


def test_a_configuration_survives_being_saved(tmp_path: Path) -> None:
    for options in KINDS.values():
        config = DRTConfig(**options)
        config.save_pretrained(tmp_path)
        loaded = DRTConfig.from_pretrained(tmp_path)
        ours, theirs = config.to_dict(), loaded.to_dict()
        for values in (ours, theirs):
            values.pop("transformers_version", None)
        assert ours == theirs
        assert all(list(v) == list(getattr(loaded, k)) if k == "upper_layers" else v == getattr(loaded, k)
                   for k, v in options.items())  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["alibi, two groups", "tied, float16 states"])
def test_gradient_checkpointing_changes_no_gradient(kind: str, reentrant: bool) -> None:
    ids, gradients, calls = tokens(80, rows=2), [], []
    for checkpointing in (False, True):
        model = make(kind, gumbel=0.0).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        model.model.upper[0][0].register_forward_pre_hook(counted)
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        calls.append(count)
    assert calls == [1, 2], "a checkpointed layer runs again on the way back"
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def train(model: DRTForCausalLM, folder: Path, **options: Any) -> list[float]:
    """Three steps of the Trainer; the losses that it logged."""
    ids = tokens(64, rows=12)
    examples = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"activation_checkpointing": True}], ids=str)
def test_the_trainer_trains_without_a_warning(tmp_path: Path, options: dict[str, bool]) -> None:
    model = make("rope")
    losses = train(model, tmp_path, learning_rate=1e-3, **options)
    assert len(losses) == 3
    assert all(0 < loss < 100 for loss in losses)


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "normalised scores", "chunked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_and_finite(kind: str, dtype: torch.dtype) -> None:
    """Of the weights, or of operations only (autocast); with the first blocks, which find nothing, and with padding."""
    ids, mask = tokens(80, rows=2), torch.ones(2, 80, dtype=torch.long)
    mask[0, :50] = 0
    model = make(kind, initializer_range=0.05)
    expected = logits(model, ids, attention_mask=mask)
    with torch.autocast("cpu", dtype):
        loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        mixed = logits(model, ids, attention_mask=mask)
    loss.backward()
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)
    half = logits(nn.Module.to(model, dtype), ids, attention_mask=mask)
    for out in (mixed, half):
        assert bool(out.isfinite().all())
        error = (out.float() - expected).abs().max() / expected.abs().max()
        assert float(error) < 0.2, "8 bits of a product of ten layers"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_streams(dtype: torch.dtype) -> None:
    model, ids = make("rope", initializer_range=0.05), tokens(80)
    nn.Module.to(model, dtype)
    with torch.no_grad():
        cache = DRTCache(model.config, 1)
        out = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(13, 1)], 1)
        assert cache.get_seq_length() == 80
    expected = logits(model, ids).float()
    assert float((out.float() - expected).abs().max() / expected.abs().max()) < 0.2


def test_deterministic_in_evaluation_and_noisy_in_training() -> None:
    model, ids = make("rope", gumbel=3.0), tokens(100)
    close(logits(model, ids), logits(model, ids))
    model.train()
    assert float((logits(model, ids) - logits(model, ids)).abs().max()) > 100 * TOLERANCE
    quiet = make("rope", gumbel=0.0).train()
    close(logits(quiet, ids), logits(quiet, ids))
