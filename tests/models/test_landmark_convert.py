"""A stock model becomes a landmark model with the same weights, is trained, and becomes a stock model again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.landmark import LandmarkForCausalLM, make_landmark, unmake_landmark
from tests.models.landmark import VOCABULARY, close, logits, make, tokens
from tests.models.stock import realigned

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STOCK: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    "tied llama": (LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 8}),
    "qwen2": (Qwen2Config, {}),
}


def stock(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    cls, options = STOCK[kind]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(cls(**{**SIZES, **options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.train(False)
    return model


@torch.no_grad()
def expected(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(ids).logits
    return result


@pytest.mark.parametrize("kind", STOCK)
def test_texts_without_a_landmark_have_the_same_logits(kind: str) -> None:
    model, ids = stock(kind), tokens(49, rows=2)
    before = expected(model, ids)
    made = make_landmark(model)
    assert isinstance(made, LandmarkForCausalLM)
    torch.testing.assert_close(logits(made, ids), before, atol=1e-5, rtol=0)
    longer = tokens(60)
    assert float((logits(made, longer)[:, 52:] - expected(model, longer)[:, 52:]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", STOCK)
def test_the_weights_are_shared_and_the_landmark_is_the_mean(kind: str) -> None:
    model = stock(kind)
    made = make_landmark(model, block_size=8, context_miss=True)
    assert isinstance(made, LandmarkForCausalLM)
    theirs = dict(model.named_parameters())
    own = {name: tensor for name, tensor in made.named_parameters() if theirs.get(name) is not tensor}
    assert sorted(own) == ["model.context_miss.weight", "model.landmark.weight"]
    mean = theirs["model.embed_tokens.weight"].mean(0)
    for tensor in own.values():
        torch.testing.assert_close(tensor[0], mean)
    assert set(theirs) <= {name for name, _ in made.named_parameters()}
    assert made.config.eos_token_id == 2
    assert not made.training


@pytest.mark.parametrize("kind", STOCK)
def test_as_a_baseline_with_full_attention_it_is_the_stock_model(kind: str) -> None:
    model, ids = stock(kind), tokens(60, rows=2)
    made = make_landmark(model, block_size=8, attention="full")
    assert isinstance(made, LandmarkForCausalLM)
    torch.testing.assert_close(logits(made, ids), expected(model, ids), atol=1e-5, rtol=0)
    assert torch.equal(expected(unmake_landmark(made), ids), expected(model, ids))


@pytest.mark.parametrize("kind", STOCK)
def test_and_back_it_is_the_stock_model(kind: str, tmp_path: Path) -> None:
    model, ids = stock(kind), tokens(60)
    before = expected(model, ids)
    made = make_landmark(model, block_size=8)
    assert isinstance(made, LandmarkForCausalLM)
    made.save_pretrained(tmp_path)
    for landmark in (made, realigned(LandmarkForCausalLM.from_pretrained(tmp_path))):
        back = unmake_landmark(landmark)
        assert type(back) is type(model)
        assert back.config.to_dict() == model.config.to_dict()
        assert torch.equal(expected(back, ids), before)
        assert not back.training
    back.save_pretrained(tmp_path / "stock")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert torch.equal(expected(realigned(loaded), ids), before)


def step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.train(False)


def test_what_was_fine_tuned_comes_back() -> None:
    model, ids = stock(), tokens(60, rows=2)
    before = expected(model, ids)
    made = make_landmark(model, block_size=8)
    step(made, ids)
    back = expected(unmake_landmark(made), ids)
    assert float((back - before).abs().max()) > 1e-3
    assert torch.equal(back, expected(model, ids)), "the parameters are the same ones"


@pytest.mark.parametrize(
    "lora", [4, LoraConfig(r=2, target_modules=["up_proj"], modules_to_save=["norm"])], ids=["rank", "own"]
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers by an old name
def test_lora_trains_adapters_and_landmark_only_and_is_merged_on_the_way_back(
    lora: int | LoraConfig, tmp_path: Path
) -> None:
    model, ids = stock("qwen2"), tokens(60, rows=2)
    before, weights = expected(model, ids), {name: x.clone() for name, x in model.state_dict().items()}
    made = make_landmark(model, block_size=8, lora=lora, context_miss=True)
    assert isinstance(made, PeftModel)
    names = [name for name, x in made.named_parameters() if x.requires_grad]
    assert all(any(word in name for word in ("lora_", "landmark", "context_miss", "norm")) for name in names)
    assert any("landmark" in name for name in names)
    for _ in range(2):  # the second factor of an adapter begins as 0
        step(made, ids)
    trained = made(input_ids=ids).logits.detach()
    assert all(torch.equal(model.state_dict()[name], x) for name, x in weights.items() if "proj" in name)
    made.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(make_landmark(stock("qwen2"), block_size=8, context_miss=True), str(tmp_path))
    close(again(input_ids=ids).logits.detach(), trained)
    back = unmake_landmark(made)
    assert float((expected(back, ids) - before).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type is 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout=0"),
    ],
)
def test_a_llama_that_computes_something_else_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        make_landmark(stock(**changes))


def test_what_cannot_be_made_or_unmade_is_refused() -> None:
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=VOCABULARY))
    with pytest.raises(UnsupportedModel, match=r"'gpt2' model cannot become .* llama, mistral, qwen2"):
        make_landmark(gpt2)
    with pytest.raises(UnsupportedModel, match="sliding_window=None"):
        make_landmark(stock("mistral", sliding_window=16))
    with pytest.raises(InvalidArgument, match="block_size"):
        make_landmark(stock(), block_size=1)
    with pytest.raises(InvalidArgument, match="leave architecture out"):
        make_landmark(stock(), architecture="gpt2")
    for rank in (0, True):
        with pytest.raises(InvalidArgument, match="rank"):
            make_landmark(stock(), lora=rank)
    with pytest.raises(InvalidArgument, match=r"takes a model .* got a str"):
        make_landmark("smollm2")  # type: ignore[arg-type]  # what it refuses
    with pytest.raises(InvalidArgument, match="no option blocks_size, rope_interleaved; it has attention, block_size"):
        make_landmark(stock(), blocks_size=8, rope_interleaved=True)
    with pytest.raises(InvalidArgument, match="no option hidden_size; it has attention, block_size"):
        make_landmark(stock(), hidden_size=64)
    assert make_landmark(stock(), architecture="llama", pad_token_id=1).config.pad_token_id == 1
    with pytest.raises(InvalidArgument, match="made by make_landmark"):
        unmake_landmark(make())
    odd = stock()
    odd.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModel, match="extra"):
        make_landmark(odd)
