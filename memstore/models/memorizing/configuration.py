"""Sizes and options of a Memorizing Transformer, and the paper's presets."""

from __future__ import annotations

from typing import Any

from memstore.errors import InvalidArgument
from memstore.models.causal import ModelConfig, check_heads, check_sizes, preset

SIZES = ("num_hidden_layers", "window", "retrieval_top_k", "distance_buckets")


class MemorizingConfig(ModelConfig):
    """Configuration of ``MemorizingForCausalLM``. Raises ``InvalidArgument`` for what does not fit together."""

    model_type = "memstore-memorizing"

    intermediate_size: int = 256
    """Inner width of the feed-forward layers."""
    num_hidden_layers: int = 4
    """Layers, the one with the memory among them."""
    memory_layer: int | None = 2
    """The layer that looks tokens up, counted from 0. None: no layer does (the Transformer-XL baseline)."""
    memory_size: int = 8192
    """Tokens of each document that can be found; 0: none. A model can be given another size at any time."""
    retrieval_top_k: int = 32
    """Tokens that each query of each head looks up."""
    window: int = 128
    """Earlier tokens that a token sees directly, including those of the segment before."""
    joint: bool = False
    """Use one softmax over the window and the tokens found, and no gate, as in a well-known reimplementation."""
    distance_buckets: int = 32
    """Number of buckets of the bias by distance."""
    farthest: int = 128
    """The distance, in tokens, from which on all distances share a bucket."""
    previous_token_heads: int = 0
    """Heads of each layer below the memory layer that begin with a bias to the token before, the one before that, and
    so on. 0: all biases begin at 0. The token before a word can find what followed that word earlier. It has not been
    shown that a model learns more with such heads."""
    layer_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    @property
    def leaves_parameters_unused(self) -> bool:
        """Return whether parameters get no gradient: those of a gate, while the memory is empty."""
        return self.memory_layer is not None

    @classmethod
    def preset(cls, name: str, **changes: Any) -> MemorizingConfig:
        """Return ``tiny``, ``small`` (for a CPU) or ``paper``: 12 layers of 1024, memory at the 9th (section 4.2)."""
        return cls(**preset(PRESETS, name, changes))

    def _check(self) -> None:
        super()._check()
        check_sizes(self, SIZES)
        check_sizes(self, ("memory_size", "previous_token_heads"), least=0)
        if self.memory_layer is not None and self.memory_layer not in range(self.num_hidden_layers):
            raise InvalidArgument(
                f"memory_layer must be from 0 to {self.num_hidden_layers - 1}, or None, not {self.memory_layer!r}"
            )
        check_heads(self)
        if not self.distance_buckets // 2 < self.farthest:
            raise InvalidArgument(
                f"farthest must be more than half of distance_buckets {self.distance_buckets}, not {self.farthest}"
            )


_PAPER = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 12,
    "memory_layer": 8,
    "memory_size": 65_536,
    "retrieval_top_k": 32,
    "window": 512,
}
_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 512,
    "previous_token_heads": 2,
    "initializer_range": 0.05,
}
PRESETS: dict[str, dict[str, Any]] = {"tiny": {}, "small": _SMALL, "paper": _PAPER}
