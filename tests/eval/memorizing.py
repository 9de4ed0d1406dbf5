"""Small random Memorizing Transformers whose tokens are bytes, saved as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memstore.models.memorizing import MemorizingConfig, MemorizingForCausalLM
from tests.eval.drts import byte_tokenizer


def small_memorizing(seed: int = 0, **changes: Any) -> MemorizingForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "memory_layer": 1,
        "memory_size": 100,
        "retrieval_top_k": 2,
        "window": 12,
        "initializer_range": 0.3,
    }
    model = MemorizingForCausalLM(MemorizingConfig(**{**sizes, **changes}))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def save_memorizing(folder: Path, seed: int = 0, **changes: Any) -> Path:
    small_memorizing(seed, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
