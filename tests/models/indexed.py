"""Tiny models with an index of their own, and what they say by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
_INDEX: dict[str, Any] = {"index_topk": 16, "index_head_dim": 24, "index_n_heads": 32}
"""So many heads that no scores tie: the model itself has one answer then."""
_DSA = {**_COMMON, **_EXPERTS, **_LATENT, **_INDEX, "num_hidden_layers": 4}
_TYPES = ["full", "shared", "full", "shared"]

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v32": _DSA,
    "glm_moe_dsa": {**_DSA, "indexer_types": _TYPES},
    "axk2": {**_DSA, "gated_norm_rank": 8},
    "hy_v4": {**_DSA, "indexer_types": _TYPES, "hc_mult": 2, "learnable_sink_init": 0.5},
    "dots3_note_text": {
        **_DSA,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
        "sliding_window": 24,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 48,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
        "shared_experts_intermediate_size": 24,
    },
    "minimax_m3_vl_text": {
        **_COMMON,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 24,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 4,
    },
    "qwen4_exp_text": {
        **_COMMON,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 101,
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "deepseek_v4": {
        **_COMMON,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 24,
        "partial_rotary_factor": 0.25,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "sliding_window": 12,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "glm5_next": {
        "text_config": {
            **_DSA,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
            "indexer_types": ["full", "full", "shared", "full"],
            "index_kpool": 4,
            "hc_mult": 2,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
        "vision_config": {
            "hidden_size": 16,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 16,
        },
    },
    "mistral_large4": {
        "text_config": {
            **_DSA,
            "num_hidden_layers": 5,
            "indexer_types": ["full", "shared", "full", "full", "shared"],
            "no_rope_layers": [1, 0, 1, 0, 1],
            "kv_source_layers": [0, 1, 0, 1, 4],
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": 28,
        },
    },
}
CONFIGS["qwen4_exp"] = {
    "text_config": CONFIGS["qwen4_exp_text"],
    "vision_config": CONFIGS["glm5_next"]["vision_config"],
}  # it gives its text part the tokens once more
"""Configurations whose index has to leave something out of a short text, by model type."""


TOPS = {"index_topk", "index_topk_blocks", "indexer_budget"}
"""What configurations call how much an index chooses."""


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, in evaluation mode, that computes eagerly."""
    torch.manual_seed(seed)
    options = CONFIGS[family]
    if "text_config" in options:
        options = {**options, "text_config": {**options["text_config"], **changes}}
    else:
        options = {**options, **changes}
    config = AutoConfig.for_model(family, **options)
    kind: Any = AutoModelForImageTextToText if "text_config" in options else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "softmax_scaling" in name:  # transformers makes them, but leaves them as they are
                weight.copy_(0.2 + 0.1 * torch.rand_like(weight))
            elif any(part in name for part in ("norm", "sinks", "alpha", "_ape")):
                weight += 0.1 * torch.randn_like(weight)  # as they are made, a mistake in them would not show
    return model


def text(length: int, seed: int = 1) -> Tensor:
    """Random tokens ``[length]``."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """What the model says of ``ids [B, T]`` in one call."""
    found: Tensor = model(input_ids=ids, **options).logits
    return found


@torch.no_grad()
def in_pieces(model: Any, ids: Tensor, size: int) -> Tensor:
    """What it says of ``ids [B, T]`` in calls of ``size`` tokens over one cache."""
    cache, found = None, []
    for piece in ids.split(size, 1):
        out = model(input_ids=piece, cache=cache, use_cache=True)
        cache = out.cache
        found.append(out.logits)
    return torch.cat(found, 1)
