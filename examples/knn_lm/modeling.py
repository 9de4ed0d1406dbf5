"""A Llama whose next token is partly decided by what came after similar places of a text that it has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from memstore.readers.caches import CACHE


class KNNLMConfig(LlamaConfig):
    """That of a Llama, and how it looks things up."""

    model_type = "knn-lm"
    knn_tokens: int = 8
    """Stored tokens that vote."""
    knn_weight: float = 0.25
    """The part of the next token's probability that they decide."""
    knn_temperature: float = 0.1
    """Of the softmax over their cosines."""
    block_size: int = 16
    """Tokens that are read together, each block by itself."""


class KNNLMForCausalLM(LlamaForCausalLM):
    """A Llama with a place where a reader puts a memory."""

    config_class = KNNLMConfig
    neighbours: Callable[[Tensor], Tensor] | None = None
    """For hidden states ``[B, T, D]``, probabilities ``[B, T, vocab]`` of the token that follows; None: no memory."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **given: Any,
    ) -> CausalLMOutputWithPast:
        """See ``LlamaForCausalLM``. With a memory, logits are logarithms of the mixed probabilities."""
        if given.pop("return_dict", True) is False or given.get("output_attentions"):
            raise ValueError("a kNN-LM gives neither tuples nor attention weights: leave return_dict and those out")
        output = self.model(input_ids=input_ids, **given)
        hidden = output.last_hidden_state[:, -logits_to_keep:]
        logits = self.lm_head(hidden)
        if self.neighbours is not None:
            part = self.config.knn_weight
            logits = ((1 - part) * logits.float().softmax(-1) + part * self.neighbours(hidden).to(logits)).log()
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: output.get(CACHE)})

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """Hidden states ``[n, D]`` of ``tokens [n]``, blocks that know nothing of each other."""
        blocks = tokens.to(self.device).split(self.config.block_size)
        return torch.cat([self.model(input_ids=block[None], use_cache=False).last_hidden_state[0] for block in blocks])
