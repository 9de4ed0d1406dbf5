"""GGUF files of small random models, as converters of llama.cpp write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Qwen3MoeConfig,
)
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

TOKENS = [*sorted(ByteLevel.alphabet()), "th"]
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
"""Weights of GPT-2 that the other models have the other way round."""


def config(architecture: str) -> Any:
    """The sizes of a small model that llama.cpp calls ``architecture``."""
    match architecture:
        case "llama":
            return LlamaConfig(**SIZES, tie_word_embeddings=False)
        case "gemma2":
            return Gemma2Config(**SIZES, head_dim=8)
        case "qwen3moe":
            sizes = SIZES | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
            return Qwen3MoeConfig(**sizes)
        case "gpt2":
            return GPT2Config(vocab_size=len(TOKENS), n_embd=32, n_layer=3, n_head=4)
        case "falcon":
            return FalconConfig(
                vocab_size=len(TOKENS),
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_kv_heads=1,
                tie_word_embeddings=False,
            )
    raise AssertionError(architecture)


def save_gguf(file: Path, architecture: str = "llama", *, changed: dict[str, np.ndarray | None] | None = None) -> None:
    """Write a random model whose tokens are bytes. ``changed``: other tensors, or None for one that is left out."""
    torch.manual_seed(0)
    sizes = config(architecture)
    model = AutoModelForCausalLM.from_config(sizes)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_head_count(sizes.num_attention_heads)
    if architecture in ("gpt2", "falcon"):
        writer.add_layer_norm_eps(1e-5)
        writer.add_feed_forward_length(4 * sizes.hidden_size)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_feed_forward_length(sizes.intermediate_size)
        writer.add_head_count_kv(sizes.num_key_value_heads)
        writer.add_key_length(8)
        writer.add_vocab_size(len(TOKENS))
    if architecture == "falcon":
        writer.add_head_count_kv(sizes.num_kv_heads)
    if architecture == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    for name, weight in (tensors(model, architecture) | (changed or {})).items():
        if weight is None:
            continue
        if weight.ndim > 1 and weight.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The weights with llama.cpp's names. Queries and keys stay in the order of transformers: any order will do."""
    state = model.state_dict()
    if architecture == "qwen3moe":
        for layer in range(model.config.num_hidden_layers):
            both = state.pop(f"model.layers.{layer}.mlp.experts.gate_up_proj")
            state[f"blk.{layer}.ffn_gate_exps"], state[f"blk.{layer}.ffn_up_exps"] = both.chunk(2, dim=1)
    names = {hf: name for name, hf in get_gguf_hf_weights_map(model, TensorProcessor()).items()}
    found = dict[str, np.ndarray]()
    for hf, weight in state.items():
        if hf == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = names.get(hf, hf)
        if name.endswith("_exps"):
            name += ".weight"
        turned = architecture == "gpt2" and name.endswith(TRANSPOSED)
        found[name] = np.ascontiguousarray((weight.T if turned else weight).numpy())
    return found
