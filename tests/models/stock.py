"""Small random Llamas, as stock models that are given a memory."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

M = TypeVar("M", bound=nn.Module)


def realigned(loaded: M) -> M:
    """A copy whose weights begin at multiples of 64 bytes, as those of models that were made here.

    Loaded ones lie as in their file, often 8 bytes off, and on some processors products then sum in another order.
    """
    return copy.deepcopy(loaded)


def small_llama(vocabulary: int = 256, layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config)
    return made.eval()  # type: ignore[no-any-return]
