"""Tiny models of many architectures, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import memstore
from memstore.readers.stock.reader import StockReader

VOCABULARY = 97
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": {"head_dim": None, "num_key_value_heads": None},
    "phi": {"head_dim": None},
    "stablelm": {"head_dim": None},
    "gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 40, "num_hidden_layers": 6, "query_pre_attn_scalar": 8},
    "cohere2": {"sliding_window": 40, "num_hidden_layers": 4},
    "mistral": {"sliding_window": 100},
    "gpt_oss": {"sliding_window": 40, "num_local_experts": 2, "num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_experts_per_tok"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        "num_experts": 4,
    },
    "opt": {
        "head_dim": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    },
}


def tiny(name: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A random ``name`` model of four layers (six for Gemma 3), width 32."""
    base = GPT2_LIKE if name in ("gpt2", "gpt_bigcode") else LLAMA_LIKE
    options = {k: v for k, v in {**base, **OWN.get(name, {}), **more}.items() if v is not None or k == "eos_token_id"}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)).eval()
    with torch.no_grad():  # untrained weights are so small that a mistake would hardly show in the logits
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    assert isinstance(model, PreTrainedModel)
    return model


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """What ``model.generate`` returns: ``ids [B, T]`` and the tokens after them."""
    out = model.generate(ids, **options)  # type: ignore[operator]  # every causal LM has it, their base class has not
    assert isinstance(out, torch.Tensor)
    return out


def tokens(n: int, seed: int = 0, rows: int | None = None) -> torch.Tensor:
    """Random token ids ``[n]``, or ``[rows, n]``."""
    shape = (n,) if rows is None else (rows, n)
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def attach(*given: Any, **options: Any) -> StockReader:
    """``memstore.attach`` of a stock model."""
    reader = memstore.attach(*given, **options)
    assert isinstance(reader, StockReader)
    return reader
