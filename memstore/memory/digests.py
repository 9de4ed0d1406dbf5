"""Digests of weights and tokenizers, for fingerprints."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash
from torch import nn


def digest_of_weights(model: nn.Module) -> str:
    """xxh3-128 over the names, dtypes, shapes and bytes of all weights."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy())
    return digest.hexdigest()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """xxh3-128 over what turns text into ids; padding and truncation, which callers change, do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = sorted(tokenizer.get_vocab().items())
    else:
        content = json.loads(backend.to_str())
        content.pop("padding", None)
        content.pop("truncation", None)
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
