"""A HiLS model is the published one: its layers, its positions, its checkpoints; and the same however it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.hils import HilsCache, HilsConfig, HilsForCausalLM, OlmoHilsConfig, QwenHilsConfig
from memstore.models.hils.modeling import HilsProjections, HilsStream
from memstore.models.packing import Packing
from tests.models.hils import KINDS, SIZES, close, in_pieces, make, tokens
from tests.oracles import oracle, tensors


def config_of_oracle(given: dict[str, np.ndarray]) -> OlmoHilsConfig:
    return OlmoHilsConfig(**json.loads(str(given["config_json"])))


def weights_of(given: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name[2:]: torch.from_numpy(array) for name, array in given.items() if name.startswith("w.")}


def published(given: dict[str, np.ndarray]) -> HilsForCausalLM:
    model = HilsForCausalLM(config_of_oracle(given))
    model.load_state_dict(weights_of(given))
    model.train(False)
    return model


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_near_and_trains_without_a_warning(kind: str, dtype: torch.dtype) -> None:
    model, ids = make(kind, initializer_range=0.05, hils_topk=10), tokens(80, rows=2)  # rounding changes no choice
    expected = model(ids).logits.detach()
    with torch.autocast("cpu", dtype):
        mixed = model(ids, labels=ids)
    mixed.loss.backward()
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)
    error = (mixed.logits.detach().float() - expected).abs().max() / expected.abs().max()
    assert 0 < float(error) < 0.05


# The published implementation


@pytest.mark.parametrize("calls", [None, (150,), (100, 1), (7,), (63, 64, 9)])
@torch.no_grad()
def test_a_model_is_the_published_one(calls: tuple[int, ...] | None) -> None:
    given = oracle("hils_model_olmo.npz")
    model = published(given)
    (ids,) = tensors(given, "ids")
    found = model(ids).logits if calls is None else in_pieces(model, ids, model.new_cache(1), *calls)
    # The published logits are float32, and 8e-6 from the same formulas in float64. So each is held to those.
    exact = model.double()(ids).logits.numpy()
    assert np.abs(exact - given["logits"]).max() <= 1e-5
    assert np.abs(exact[0, 99:] - given["decode_logits_from_token_99"]).max() <= 1e-5
    assert np.abs(found.numpy() - exact).max() <= 1e-5


@torch.no_grad()
def test_its_layers_pass_on_what_the_published_ones_do() -> None:
    given = oracle("hils_model_olmo.npz")
    model = published(given)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(*tensors(given, "ids"))
    for number, hidden in enumerate(seen):
        assert np.abs(hidden.numpy() - given[f"hidden_{number}"]).max() <= 1e-5


@pytest.mark.parametrize("name", ["olmo_mha", "qwen_gqa4_softmax1"])
def test_a_layer_is_the_published_one_with_its_gradients(name: str) -> None:
    given, olmo = oracle(f"hils_layer_{name}.npz"), name.startswith("olmo")
    heads, groups = given["q_rot"].shape[2], given["k_rot"].shape[2]
    config = HilsConfig(
        head_dim=16, chunk_size=int(given["S"]), sliding_window=int(given["W"]), hils_topk=int(given["K"]),
        hidden_size=given["x"].shape[-1], num_attention_heads=heads, num_key_value_heads=groups, lmk_q_lora_dim=8,
        rope_context_length=256, layerwise_qk_norm=olmo, layerwise_lmkq_norm=olmo, norm_after=olmo,
        enable_softmax1=bool(given["softmax1"]),
    )  # fmt: skip
    layer = HilsProjections(config, 0)
    layer.load_state_dict(weights_of(given))
    (x,) = tensors(given, "x")
    stream = HilsStream(config, x.shape[1], x)
    for state, wanted in zip(layer.states(x, stream), ("q_rot", "k_rot", "v", "u_rot"), strict=True):
        assert state is not None
        assert np.abs(state.detach().transpose(1, 2).numpy() - given[wanted]).max() <= 1e-5
    out = layer(x.requires_grad_(), stream)
    assert np.abs(out.detach().numpy() - given["out"]).max() <= 1e-5
    names = [name for name, _ in layer.named_parameters()]
    found = torch.autograd.grad(out, [x, *layer.parameters()], tensors(given, "dout"))
    for wanted, gradient in zip(["dx", *(f"dw.{name}" for name in names)], found, strict=True):
        assert np.abs(gradient.numpy() - given[wanted]).max() <= 1e-5 * np.abs(given[wanted]).max(), wanted


@pytest.mark.parametrize(("name", "dim", "theta"), [("7B", 128, 5e5), ("345M", 64, 1e4)])
def test_rotations_are_the_published_ones(name: str, dim: int, theta: float) -> None:
    given = oracle("hils_hope.npz")
    config = HilsConfig(head_dim=dim, rope_theta=theta)
    rotary, positions = config.rotary(hils=True), torch.from_numpy(given["positions"])
    assert np.abs(rotary.frequencies().numpy() - given[f"{name}_inv_freq"]).max() <= 1e-7
    assert int((rotary.frequencies() > 0).sum()) == {"7B": 32, "345M": 23}[name]
    turns = rotary.turns(positions)
    # Theirs are angles in float32, which have few digits at position 131,071; ours are not.
    few = positions[0] < 10_000
    assert np.abs(turns.cos[:, few].numpy() - given[f"{name}_cos"][:, few]).max() <= 1e-3
    near = positions[0] < 128
    assert np.abs(turns.cos[:, near].numpy() - given[f"{name}_cos"][:, near]).max() <= 1e-5
    half = dim // 2
    assert np.abs(turns.sin[:, near, half:].numpy() - given[f"{name}_sin"][:, near, half:]).max() <= 1e-5
    plain = HilsConfig(head_dim=dim, rope_theta=theta, enable_inrange_rope=False).rotary(hils=True)
    assert np.abs(plain.frequencies().numpy() - given[f"{name}_inv_freq_unmasked"]).max() <= 1e-7


@pytest.mark.parametrize("case", ["S64_n1", "S64_n63", "S64_n64", "S64_n200", "S16_n100", "S4_n7", "S4_n6"])
def test_landmarks_come_where_the_published_code_puts_them(case: str) -> None:
    given = oracle("hils_insert.npz")
    size, count = (int(part[1:]) for part in case.split("_"))
    ids, positions, labels = (given[f"{case}_{name}"][0] for name in ("ids", "pos", "labels"))
    real = torch.from_numpy(ids[ids != 60])[None]
    packing = Packing(real, None, [0], size)
    assert (packing.ids[0].numpy() == np.where(ids == 60, -1, ids)).all()
    found = HilsConfig(chunk_size=size).positions(torch.arange(packing.items))
    assert (found.numpy() == positions).all()
    # Labels of a loss that shifts by one, here on the tokens alone: each predicts the next token.
    assert real.shape[1] == count
    assert (labels[labels >= 0] == real[0, 1:].numpy()).all()


# Checkpoints


def test_a_released_checkpoint_loads_as_it_is(tmp_path: Path) -> None:
    given = oracle("hils_model_olmo.npz")
    weights = {name: tensor.contiguous() for name, tensor in weights_of(given).items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    told = {**json.loads(str(given["config_json"])), "model_type": "olmo_hils", "architectures": ["OlmoForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (ids,) = tensors(given, "ids")
    for load in (HilsForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        model: Any = load(tmp_path)
        assert isinstance(model, HilsForCausalLM)
        with torch.no_grad():
            assert np.abs(model(ids).logits.numpy() - given["logits"]).max() <= 1e-5
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(HilsForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, model(ids).logits)


def test_a_checkpoint_in_the_other_layout_loads_too(tmp_path: Path) -> None:
    sizes = {**SIZES, "tie_word_embeddings": True, "vocab_size": 100}
    told = {name: value for name, value in sizes.items() if value is not None}
    made = HilsForCausalLM(QwenHilsConfig(**told))
    made.train(False)
    assert made.config.enable_softmax1, "released configurations of this layout do not say, and have it"
    made.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "qwen_hils"
    model = HilsForCausalLM.from_pretrained(tmp_path)
    assert isinstance(model.config, QwenHilsConfig)
    names = {name for name, _ in model.named_parameters()}
    assert {f"model.layers.0.{each}.weight" for each in (
        "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.lmk_q_norm",
        "self_attn.lmk_q_proj.0", "self_attn.lmk_q_proj.1", "mlp.gate_proj",
    )} <= names  # fmt: skip
    assert "model.lmk_embed" not in names
    assert model.model.embed_tokens.weight.shape[0] == 128, "the next multiple of 32 above 101"
    ids = tokens(60)
    with torch.no_grad():
        before = model(ids).logits
        assert torch.equal(before, made(ids).logits)
        assert before.shape[-1] == 128
        model.model.embed_tokens.weight[100] += 1
        assert not torch.equal(model(ids).logits[:, 40:, :100], before[:, 40:, :100]), "row 100 is the landmark"


def test_the_7b_has_its_layers_and_sizes() -> None:
    config = HilsConfig.preset("7b")
    assert config.hils_layers == (3, 7, 11, 15, 19, 23, 27, 31)
    assert (config.head_dim, config.table_rows, config.segment_tokens) == (128, 100_278, 8 * 63)
    assert (config.block_size, config.window, config.retrieval_top_k) == (64, 512, 32)
    with torch.device("meta"):
        model = HilsForCausalLM(config)
    parameters = sum(each.numel() for each in model.parameters())
    assert 7.2e9 < parameters < 7.4e9


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"chunk_size": 1}, InvalidArgument, "at least 2"),
        ({"sliding_window": 7}, InvalidArgument, "must be at least a block"),
        ({"num_key_value_heads": 3}, InvalidArgument, "multiple of"),
        ({"full_attn_interleave": 9}, InvalidArgument, "layers is a HiLS layer"),
        ({"rope_theta": 0}, InvalidArgument, "above 0"),
        ({"hils_topk": 0}, InvalidArgument, "hils_topk must be"),
        ({"mask_lmk_token": False}, UnsupportedModel, "mask_lmk_token=False"),
        ({"rope_scaling": {"type": "yarn"}}, UnsupportedModel, "scales"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        HilsConfig(**{**SIZES, **changes})


# However it is called


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_length_give_what_the_whole_text_gives(kind: str) -> None:
    model, ids = make(kind), tokens(150, rows=2)
    with torch.no_grad():
        whole = model(ids).logits
    for lengths in ((150,), (1,), (7, 14, 50), (100, 1)):
        close(in_pieces(model, ids, model.new_cache(2), *lengths), whole)


def test_padding_is_left_out() -> None:
    model, ids = make(), tokens(60)
    with torch.no_grad():
        alone = model(ids).logits
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids, torch.zeros(1, 4, dtype=torch.int64)], 1)
        mask = torch.zeros_like(padded)
        mask[:, 5:65] = 1
        close(model(padded, attention_mask=mask).logits[:, 5:65], alone)
        out = model(padded, attention_mask=mask, use_cache=True)
        close(out.logits[:, 5:65], alone)
        more = tokens(20, seed=3)
        both = model(torch.cat([ids, more], 1)).logits[:, 60:]
        close(model(more, past_key_values=out.past_key_values).logits, both)


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
@pytest.mark.parametrize("beams", [1, 2])
def test_rows_of_different_lengths_go_on_as_each_alone(kind: str, beams: int) -> None:
    model, rows = make(kind), [tokens(count, seed=count) for count in (75, 9, 40)]
    ids = torch.cat([torch.nn.functional.pad(row, (75 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (75 - row.shape[1], 0)) for row in rows])
    options: dict[str, Any] = {"max_new_tokens": 30, "num_beams": beams, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, alone in zip(together, rows, strict=True):
        assert torch.equal(row[75:], model.generate(alone, **options)[0, alone.shape[1] :])


def test_rows_may_come_apart_after_they_went_together() -> None:
    model, first, more = make(), tokens(50, rows=2), tokens(30, rows=2, seed=2)
    mask = torch.ones_like(more)
    mask[0, :20] = 0
    mask[1, 25:] = 0
    cache = model.new_cache(2)
    with torch.no_grad():
        model(first, past_key_values=cache)
        logits = model(more, attention_mask=mask, past_key_values=cache).logits
        for row in range(2):
            real = more[row, mask[row].bool()]
            alone = model(torch.cat([first[row], real])[None]).logits[0, 50:]
            close(logits[row, mask[row].bool()], alone)


def test_the_loss_is_that_of_the_tokens() -> None:
    model, ids = make(), tokens(60)
    out = model(ids, labels=ids)
    logits = out.logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_gradient_checkpointing_changes_nothing() -> None:
    model, ids = make(), tokens(60)
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.activation_checkpointing_enable()
    model.train()
    model(ids, labels=ids).loss.backward()
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.grad, wanted)


def test_generate_goes_on_token_by_token() -> None:
    model, ids = make("olmo"), tokens(70, rows=2)
    out = model.generate(ids, max_new_tokens=30, do_sample=False)
    with torch.no_grad():
        logits = model(out[:, :-1]).logits[:, 69:]
    assert torch.equal(logits.argmax(-1), out[:, 70:])


def test_a_generation_config_may_come_by_position() -> None:
    model, ids = make("qwen"), tokens(20)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    best = int(model.generate(ids, **options)[0, 20])
    given = GenerationConfig(suppress_tokens=[best], **options)
    found = model.generate(ids, given)
    assert int(found[0, 20]) != best
    assert torch.equal(found, model.generate(ids, generation_config=given))


def test_beams_are_rows_that_change_places() -> None:
    model, ids = make(), tokens(50)
    out = model.generate(ids, max_new_tokens=9, num_beams=3, num_return_sequences=3, do_sample=False)
    assert len({tuple(row) for row in out.tolist()}) == 3
    cache = model.new_cache(2)
    two = tokens(50, rows=2)
    with torch.no_grad():
        model(two, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        more = tokens(20, rows=3, seed=4)
        found = model(more, past_key_values=cache).logits
        close(found, model(torch.cat([two[[1, 1, 0]], more], 1)).logits[:, 50:])


def test_a_cache_of_something_else_is_refused() -> None:
    model, other = make(), make(seed=1)
    cache = model.new_cache(1)
    model(tokens(5), past_key_values=cache)
    for wrong, use in ((cache, other), (HilsCache(make("olmo").config, 1), model), (model.new_cache(2), model)):
        with pytest.raises(InvalidArgument):
            use(tokens(5), past_key_values=wrong)
