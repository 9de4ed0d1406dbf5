"""A stock model that is made a HiLS model says the same within a window, and is the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.hils import HilsForCausalLM, make_hils
from tests.models.hils import close, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
STOCK: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config),
}
BLOCKS: dict[str, Any] = {"chunk_size": 8, "hils_topk": 3, "sliding_window": 32, "lmk_q_lora_dim": 6}


def stock(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model, config = STOCK[kind]
    made = model(config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return made


@pytest.mark.parametrize("kind", STOCK)
@torch.no_grad()
def test_it_says_the_same_within_a_window(kind: str) -> None:
    model, ids = stock(kind, tie_word_embeddings=kind == "qwen3"), tokens(60)
    made = make_hils(model, **BLOCKS, enable_inrange_rope=False)
    inside = 28  # tokens, which with their landmarks fit into the window of 32
    close(made(ids).logits[:, :inside], model(ids).logits[:, :inside])
    assert not torch.allclose(made(ids).logits[:, 50:], model(ids).logits[:, 50:])
    assert len(made.config.hils_layers) == (1 if kind == "olmo3" else 4)


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
@torch.no_grad()
def test_where_every_block_is_chosen_it_is_near_the_stock_model(kind: str) -> None:
    """Landmark queries begin as queries, so estimates are first-order ones of the true shares."""
    model, ids = stock(kind, initializer_range=0.05), tokens(120)
    made = make_hils(model, **{**BLOCKS, "hils_topk": 40}, enable_inrange_rope=False)
    worse = make_hils(model, **{**BLOCKS, "hils_topk": 1}, enable_inrange_rope=False)
    truth = model(ids).logits.log_softmax(-1)[:, 60:]

    def divergence(other: HilsForCausalLM) -> float:
        return float((truth.exp() * (truth - other(ids).logits.log_softmax(-1)[:, 60:])).sum(-1).mean())

    assert divergence(made) < divergence(worse)


def test_it_holds_the_same_parameters_and_trains_new_ones() -> None:
    model = stock("qwen3")
    made = make_hils(model, **BLOCKS)
    assert isinstance(made, HilsForCausalLM)
    shared = dict(model.named_parameters())
    new = [name for name, parameter in made.named_parameters() if shared.get(name) is not parameter]
    assert {name.split(".", 3)[-1].replace("self_attn.", "") for name in new} == {
        "lmk_embed", "lmk_q_proj.0.weight", "lmk_q_proj.1.weight", "lmk_q_norm.weight"
    }  # fmt: skip
    ids = tokens(90)
    made.train()
    made(ids, labels=ids).loss.backward()
    for name in new:
        gradient = made.get_parameter(name).grad
        assert gradient is not None, name
        if "proj.0" not in name:  # behind zeros, it has none at first
            assert gradient.abs().max() > 0, name


def test_what_it_would_not_compute_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="takes a model"):
        make_hils(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no option block"):
        make_hils(stock("llama"), block=8)
    with pytest.raises(UnsupportedModel, match="use one of llama, qwen3, olmo2, olmo3"):
        make_hils(MistralForCausalLM(MistralConfig(**SIZES)))
    with pytest.raises(UnsupportedModel, match="biases"):
        make_hils(stock("llama", attention_bias=True))
    with pytest.raises(UnsupportedModel, match="'linear', not 'default'"):
        make_hils(stock("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}))
