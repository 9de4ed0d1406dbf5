"""A tiny random model that is spoken to with a chat template; its tokens are bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def instruct_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(ByteLevel.alphabet())
    bytewise = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytewise.decoder = ByteLevelDecoder()
    bytewise.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    tokenizer.chat_template = template
    return tokenizer


def instruct_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256 + len(MARKS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def saying(tokenizer: Any, text: str) -> list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """For ``logits_processor``: lets a model answer with ``text``, whatever it would say itself."""
    script = tokenizer(text, add_special_tokens=False).input_ids
    start: list[int] = []

    def say(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        start.append(ids.shape[1])
        wanted = torch.full_like(scores, float("-inf"))
        wanted[:, script[min(ids.shape[1] - start[0], len(script) - 1)]] = 0
        return wanted

    return [say]
