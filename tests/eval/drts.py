"""Small random DRTs whose tokens are bytes, saved as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from memstore.models.drt import DRTConfig, DRTForCausalLM


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(ByteLevel.alphabet())
    bytewise = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


def small_drt(seed: int = 0, **changes: Any) -> DRTForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "lower_layers": 1,
        "upper_layers": (1, 1),
        "block_size": 8,
        "window": 12,
        "retrieval_top_k": 3,
        "positions": "rope",
        "initializer_range": 0.3,  # so that answers differ from one another
    }
    model = DRTForCausalLM(DRTConfig(**{**sizes, **changes}))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def save_drt(folder: Path, seed: int = 0, **changes: Any) -> Path:
    small_drt(seed, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
