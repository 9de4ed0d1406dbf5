"""A tiny random model that is spoken to with a chat template; its tokens are bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.eval.drts import byte_tokenizer

MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def instruct_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def instruct_model() -> LlamaForCausalLM:
    return tiny_llama(256 + len(MARKS))


def tiny_llama(tokens: int) -> LlamaForCausalLM:
    """A random model of so many tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokens,
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
