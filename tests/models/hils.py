"""Tiny HiLS models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memstore.models.hils import HilsCache, HilsConfig, HilsForCausalLM

VOCABULARY = 97
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "chunk_size": 8,
    "hils_topk": 3,
    "sliding_window": 16,
    "lmk_q_lora_dim": 6,
    "rope_context_length": 128,
    "initializer_range": 0.3,  # weights so large that a mistake shows in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen": {},
    "olmo": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "norm_after": True,
        "layerwise_qk_norm": True,
        "layerwise_lmkq_norm": True,
        "full_attn_interleave": 2,
        "enable_external_lmk_embed": True,
        "enable_softmax1": False,
        "hope_in_windows": False,
        "sliding_window": 13,
        "hils_sliding_window": 16,
    },
    "no norms, a full landmark projection": {"qk_norm": False, "lmk_q_lora_dim": 0, "num_swa_layers": 1},
    "odd window, wide heads, tied": {"hils_sliding_window": 21, "head_dim": 12, "tie_word_embeddings": True},
}
"""Every way in which models differ, at least once."""


def make(kind: str = "qwen", seed: int = 0, **changes: Any) -> HilsForCausalLM:
    """A random HiLS model in evaluation mode."""
    torch.manual_seed(seed)
    model = HilsForCausalLM(HilsConfig(**{**SIZES, **KINDS[kind], **changes}))
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)  # norms that are all ones would hide that one is missing
    return model


def tokens(count: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random ids ``[rows, count]``."""
    return torch.randint(1, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def in_pieces(model: HilsForCausalLM, ids: Tensor, cache: HilsCache, *lengths: int) -> Tensor:
    """Logits of ``ids``, given in calls of these lengths, the last of which is repeated."""
    found, start, sizes = [], 0, list(lengths)
    while start < ids.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        found.append(model(ids[:, start : start + size], past_key_values=cache).logits)
        start += size
    return torch.cat(found, 1)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal within ``TOLERANCE``."""
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
