"""Sizes and options of a landmark model, and two presets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memstore.attention.positions import Rotary
from memstore.errors import InvalidArgument
from memstore.models.causal import ModelConfig, check_block_size, check_choices, check_sizes, preset

SIZES = ("num_hidden_layers", "head_dim", "block_size", "window", "segment_blocks", "retrieval_top_k", "position_jump")
CHOICES = {"architecture": ("llama", "gpt2"), "attention": ("landmark", "full", "window", "xl")}


class LandmarkConfig(ModelConfig):
    """Configuration of ``LandmarkForCausalLM``. Raises ``InvalidArgument`` for what does not fit together."""

    model_type = "memstore-landmark"

    num_hidden_layers: int = 4
    """Layers."""
    head_dim: Any = None
    """Size of a head; ``hidden_size / num_attention_heads`` if None."""
    block_size: int = 32
    """Tokens of a block, including its landmark."""
    architecture: str = "llama"
    """``"llama"`` (RMSNorm, SwiGLU) or ``"gpt2"`` (the paper's section 4.1: LayerNorm and a feed-forward layer with
    GELU, no biases as in the published code); both with rotary positions."""
    attention: str = "landmark"
    """``"landmark"`` (the paper), or a baseline without landmarks: ``"full"`` attention, a sliding ``"window"``, or
    ``"xl"`` (Transformer-XL: windows side by side, each with the one before it as its cache)."""
    window: int = 256
    """Tokens that a query of ``"window"`` sees, including itself; tokens of one window of ``"xl"``."""
    local_layers: Sequence[int] = ()
    """Numbers of the layers that never search a memory (landmark attention at inference)."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_interleaved: bool = False
    """Rotate pairs of neighbours, as the paper's GPT-2-like model; else dimension ``i`` and ``i + D / 2``, as Llama."""
    attention_bias: bool = False
    """Biases on queries, keys and values (Qwen2)."""
    segment_blocks: int = 4
    """Blocks of one segment at inference."""
    retrieval_top_k: int = 4
    """Blocks that are retrieved at inference."""
    context_miss: bool = False
    """Train a context-miss token (appendix D)."""
    context_miss_share: float = 0.5
    """Probability that a landmark is under the context-miss token in training (the paper's P_CMT)."""
    position_jump: int = 1
    """In training, positions jump by at most this many after each landmark (appendix E); 1 for none."""
    stock: dict[str, Any] | None = None
    """The original configuration of the stock model, which ``make_landmark`` keeps."""
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            check_sizes(self, ("hidden_size", "num_attention_heads"))
            if self.hidden_size % self.num_attention_heads:
                raise InvalidArgument(
                    "hidden_size must be a multiple of num_attention_heads, unless head_dim is set; got "
                    f"{self.hidden_size} and {self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.local_layers = list(self.local_layers)
        super().__post_init__(**kwargs)

    @property
    def rotary(self) -> Rotary:
        """Return the rotary positions of all layers."""
        return Rotary(self.head_dim, self.rope_theta, interleaved=self.rope_interleaved)

    @property
    def segment_tokens(self) -> int:
        """Return the tokens of one segment at inference, without landmarks."""
        return self.segment_blocks * self.tokens_per_block if self.attention == "landmark" else self.window

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LandmarkConfig:
        """Return ``tiny`` (a CPU trains it in minutes), or ``paper`` (section 4.1: 12 layers, 8 heads of 128)."""
        return cls(**preset(PRESETS, name, changes))

    def _check(self) -> None:
        super()._check()
        check_sizes(self, SIZES)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidArgument(
                f"num_attention_heads must be a multiple of num_key_value_heads; got {self.num_attention_heads} "
                f"and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise InvalidArgument(f"head_dim must be even for rotary positions, not {self.head_dim}")
        check_choices(self, CHOICES)
        check_block_size(self)
        wrong = [layer for layer in self.local_layers if layer not in range(self.num_hidden_layers)]
        if wrong:
            raise InvalidArgument(f"local_layers must be numbers from 0 to {self.num_hidden_layers - 1}, not {wrong}")
        if not 0 <= self.context_miss_share <= 1:
            raise InvalidArgument(f"context_miss_share must be from 0 to 1, not {self.context_miss_share}")
        if self.context_miss and self.attention != "landmark":
            raise InvalidArgument(f"context_miss needs landmarks, but attention={self.attention!r} has none")
        if self.rope_theta <= 0:
            raise InvalidArgument(f"rope_theta must be above 0, not {self.rope_theta}")


_PAPER = {
    "vocab_size": 50_257,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 12,
    "block_size": 51,  # the paper counts 50 tokens, without the landmark
    "architecture": "gpt2",
    "rope_interleaved": True,
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
}
PRESETS: dict[str, dict[str, Any]] = {"tiny": {}, "paper": _PAPER}
