"""Small random landmark models whose tokens are bytes, saved as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from tests.eval.drts import byte_tokenizer


def small_landmark(seed: int = 0, **changes: Any) -> LandmarkForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "block_size": 8,
        "segment_blocks": 2,
        "retrieval_top_k": 2,
        "window": 12,
        "initializer_range": 0.3,  # so that answers differ from one another
    }
    model = LandmarkForCausalLM(LandmarkConfig(**{**sizes, **changes}))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def save_landmark(folder: Path, seed: int = 0, **changes: Any) -> Path:
    small_landmark(seed, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
