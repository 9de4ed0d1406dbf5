"""A decoder with a memory of tokens in one layer (Wu et al. 2022, *Memorizing Transformers*).

All layers see a window that reaches into the segment before, with a bias by distance. One layer also looks tokens up.
Norms stand before attention and feed-forward. Deliberate: the memory begins empty for each document, padding is left
out of everything, and a prompt can be continued at any place.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from memstore.attention.knn import KNNAttention, Tell, TokenMemory, WindowAttention
from memstore.attention.layers import States
from memstore.device_copies import to_device
from memstore.models.causal import CausalLM, Decoder, make_known
from memstore.models.memorizing.cache import MemorizingCache
from memstore.models.memorizing.configuration import MemorizingConfig
from memstore.readers.attachment import uncompiled


class _MemorizingLayer(nn.Module):
    def __init__(self, config: MemorizingConfig, number: int) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "key_value_heads": config.num_key_value_heads,
            "window": config.window,
            "buckets": config.distance_buckets,
            "farthest": config.farthest,
        }
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.attention: WindowAttention
        if number == config.memory_layer:
            self.attention = KNNAttention(hidden, heads, top_k=config.retrieval_top_k, joint=config.joint, **options)
        else:
            looks_back = config.memory_layer is not None and number < config.memory_layer
            options["previous"] = config.previous_token_heads if looks_back else 0
            self.attention = WindowAttention(hidden, heads, **options)
        self.attention_norm = nn.LayerNorm(hidden, config.layer_norm_eps)
        self.norm = nn.LayerNorm(hidden, config.layer_norm_eps)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, config.intermediate_size), nn.GELU(), nn.Linear(config.intermediate_size, hidden)
        )

    def forward(
        self, x: Tensor, past: States | None, empty: Tensor | None, memory: TokenMemory | None, tell: Tell | None = None
    ) -> tuple[Tensor, States]:
        """Return ``[B, T, hidden]`` for ``x [B, T, hidden]``, and the states of the segment."""
        searched = {"memory": memory, "tell": tell} if isinstance(self.attention, KNNAttention) else {}
        out, states = self.attention(self.attention_norm(x), past, empty, **searched)
        x = x + out
        return x + self.feed_forward(self.norm(x)), states


class MemorizingModel(Decoder):
    """The decoder without its output layer."""

    def __init__(self, config: MemorizingConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_MemorizingLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, ids: Tensor, cache: MemorizingCache | None) -> tuple[Tensor, list[States]]:
        """Return ``[B, T, hidden]`` after the last norm for tokens ``ids [B, T]``, and the states of each layer."""
        x = self.embed_tokens(ids)
        empty, memory = (None, None) if cache is None else (cache.empty, cache.memory)
        empty = None if empty is None else to_device([empty], x.device)[0]
        every: list[States] = []
        for number, layer in enumerate(self.layers):
            past = None if cache is None else cache.windows[number]
            tell = None if cache is None else cache.teller(number, cast("_MemorizingLayer", layer).attention)
            x, states = self.checkpointed(layer, x, past, empty, memory, tell)
            every.append(states)
        return self.norm(x), every


class MemorizingForCausalLM(CausalLM):
    """A Memorizing Transformer: ``from_pretrained``, ``save_pretrained``, ``generate`` and ``Trainer`` work as usual.

    Rows may have padding anywhere, and a prompt can be continued through ``past_key_values``. In training, pass the
    ``MemorizingCache`` of the step before, so that documents longer than a segment are remembered.
    """

    config: MemorizingConfig
    config_class = MemorizingConfig
    decoder_class = MemorizingModel
    cache_class = MemorizingCache
    _no_split_modules = ["_MemorizingLayer"]  # noqa: RUF012 - transformers reads it from the class

    def hidden(self, input_ids: Tensor, mask: Tensor | None, past: MemorizingCache | None) -> Tensor:
        """See ``CausalLM``. With a cache, earlier tokens can be looked up."""
        if past is not None:
            past.tell_begin(input_ids)
        if mask is not None and bool(mask.all()):
            mask = None
        # Tokens go first, padding last: no real token can see what comes after it.
        order = None if mask is None else (~mask).int().argsort(dim=1, stable=True)
        lengths = [input_ids.shape[1]] * len(input_ids) if mask is None else mask.sum(1).tolist()
        packed = input_ids if order is None else input_ids.gather(1, order)
        hidden: Tensor = self.model(packed, None)[0] if past is None else self._continued(packed, lengths, past)
        if order is None:
            return hidden
        return torch.zeros_like(hidden).scatter(1, order.unsqueeze(-1).expand_as(hidden), hidden)

    @uncompiled
    def _continued(self, ids: Tensor, lengths: list[int], cache: MemorizingCache) -> Tensor:
        """Return ``[B, T, hidden]`` after the tokens of the cache, in pieces that end where a row fills its window."""
        start, parts = 0, []
        while start < ids.shape[1]:
            if start and self.training and torch.is_grad_enabled():
                cache.detach()
            remaining = [length - start for length in lengths]
            cache.begin(remaining)
            part = ids[:, start : start + cache.room(remaining)]
            hidden, states = self.model(part, cache)
            real = [row[: max(0, left)] for row, left in zip(part, remaining, strict=True)]
            cache.end(real, states, part.shape[1])
            parts.append(hidden)
            start += part.shape[1]
        return torch.cat(parts, 1)


make_known(MemorizingForCausalLM)
