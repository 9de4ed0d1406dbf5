"""Sizes and options of a HiLS model, with the names of the released configurations, and presets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memstore.attention.positions import Rotary
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.causal import ModelConfig, check_sizes, preset

SIZES = ("num_hidden_layers", "head_dim", "hils_topk", "sliding_window", "hils_sliding_window", "full_attn_interleave")
ASSUMED = {
    "adjust_lmk_pos": True,
    "apply_hils_rope": True,
    "enable_lmk_q_proj": True,
    "enable_prior_query": True,
    "mask_lmk_token": True,
}
"""Options of the released code that have one value in all released configurations, and here."""


class HilsConfig(ModelConfig):
    """Configuration of ``HilsForCausalLM``. Raises ``InvalidArgument`` for options that do not fit together."""

    model_type = "memstore-hils"
    attribute_map = {  # noqa: RUF012 - transformers reads these from the class
        "block_size": "chunk_size",
        "retrieval_top_k": "hils_topk",
        "window": "hils_sliding_window",
    }

    num_hidden_layers: int = 4
    """Layers."""
    head_dim: Any = None
    """Size of a head; ``hidden_size / num_attention_heads`` if None."""
    chunk_size: int = 64
    """Tokens of a block, including its landmark (also ``block_size``)."""
    hils_topk: int = 32
    """Blocks that each token chooses for each key-value head."""
    sliding_window: int = 512
    """Positions that a token sees in a window layer."""
    hils_sliding_window: Any = None
    """Positions that a token sees directly in a HiLS layer, with the whole first block (also ``window``); as many as in
    a window layer if None."""
    num_swa_layers: int = 0
    """Number of first layers that are window layers."""
    full_attn_interleave: int = 1
    """In every group of this many layers after them, the last one is a HiLS layer; the others are window layers."""
    norm_after: bool = False
    """Norms behind attention and feed-forward (OLMo 2 and 3), not before them (Llama, Qwen3)."""
    qk_norm: bool = True
    """Norms of queries, keys and landmark queries (OLMo, Qwen3; not Llama)."""
    layerwise_qk_norm: bool = False
    """These norms over all heads together (OLMo), not in each head (Qwen3)."""
    layerwise_lmkq_norm: bool = False
    """The same for landmark queries."""
    lmk_q_lora_dim: int = 64
    """Rank of the part that a landmark query adds to the query; below 1: it has a full projection."""
    enable_external_lmk_embed: bool = False
    """The landmark's embedding is a separate vector; else it is an extra row of a table, which has a multiple of 32
    rows."""
    enable_softmax1: bool = True
    """One more score of 0 beside those of blocks and window. True if a released configuration does not set it."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    enable_inrange_rope: bool = True
    """Leave out rotations whose period is longer than ``rope_context_length / rope_period_multiplier`` (HoPE)."""
    rope_context_length: int = 8192
    rope_period_multiplier: float = 2.0
    use_hope: bool = True
    """Leave them out in HiLS layers."""
    hope_in_windows: bool = True
    """Leave them out in window layers."""
    rms_norm_eps: float = 1e-6
    hils_norm_eps: float = 1e-6
    """Epsilon of the norms in HiLS layers; the others have ``rms_norm_eps``."""
    tie_word_embeddings: bool = False
    stock: dict[str, Any] | None = None
    """Options that ``make_hils`` keeps of the stock configuration."""

    def __post_init__(self, **kwargs: Any) -> None:
        wrong = [f"{name}={kwargs[name]!r}" for name, only in ASSUMED.items() if kwargs.get(name, only) != only]
        if wrong:
            raise UnsupportedModel(f"a HiLS model with {', '.join(wrong)} is not supported; no released model has it")
        rope = kwargs.pop("rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default" or kwargs.get("rope_scaling"):
            raise UnsupportedModel("a HiLS model needs plain rotary frequencies, but this configuration scales them")
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)
        if self.hils_sliding_window is None:
            self.hils_sliding_window = self.sliding_window
        self.rope_theta = float(rope.get("rope_theta", self.rope_theta))
        super().__post_init__(**kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load as any configuration of transformers does; released ones keep their own class."""
        if cls is HilsConfig:
            found, _ = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
            released = {each.model_type: each for each in (OlmoHilsConfig, QwenHilsConfig)}
            if (kind := released.get(found.get("model_type", ""))) is not None:
                return kind.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @property
    def hils_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that choose blocks."""
        every, first = self.full_attn_interleave, self.num_swa_layers
        return tuple(n for n in range(first, self.num_hidden_layers) if (n - first) % every == every - 1)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Numbers of the other layers."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.hils_layers)

    @property
    def table_rows(self) -> int:
        """Rows of the embedding table and of the output layer."""
        return self.vocab_size if self.enable_external_lmk_embed else -(-(self.vocab_size + 1) // 32) * 32

    @property
    def segment_tokens(self) -> int:
        """Tokens of a forward pass at inference: at most a window, so that chosen blocks lie before it."""
        return int(self.hils_sliding_window) // self.chunk_size * self.tokens_per_block

    def positions(self, places: Tensor) -> Tensor:
        """Return the positions of the items at ``places`` of a stream; landmarks do not count."""
        return places - places.div(self.chunk_size, rounding_mode="floor")

    def rotary(self, *, hils: bool) -> _HoPE:
        """Return the rotary positions of HiLS layers, or of window layers."""
        longest = math.inf
        if self.enable_inrange_rope and (self.use_hope if hils else self.hope_in_windows):
            longest = self.rope_context_length / self.rope_period_multiplier
        return _HoPE(self.head_dim, self.rope_theta, longest)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> HilsConfig:
        """Return ``tiny`` (a CPU trains it in minutes), or ``7b``, as released."""
        return cls(**preset(PRESETS, name, changes))

    def _check(self) -> None:
        super()._check()
        check_sizes(self, SIZES)
        check_sizes(self, ("num_swa_layers",), least=0)
        if self.chunk_size < 2:
            raise InvalidArgument(f"chunk_size includes the landmark, so it must be at least 2, not {self.chunk_size}")
        if self.hils_sliding_window < self.chunk_size:
            raise InvalidArgument(
                f"hils_sliding_window must be at least a block of {self.chunk_size} tokens, not "
                f"{self.hils_sliding_window}"
            )
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise InvalidArgument(
                "num_attention_heads must be a multiple of num_key_value_heads, and head_dim must be even; got "
                f"{self.num_attention_heads}, {self.num_key_value_heads} and {self.head_dim}"
            )
        if not self.hils_layers:
            raise InvalidArgument(
                f"none of the {self.num_hidden_layers} layers is a HiLS layer, with "
                f"num_swa_layers={self.num_swa_layers} and full_attn_interleave={self.full_attn_interleave}"
            )
        if self.rope_theta <= 0 or self.rope_context_length <= 0 or self.rope_period_multiplier <= 0:
            raise InvalidArgument("rope_theta, rope_context_length and rope_period_multiplier must be above 0")


class OlmoHilsConfig(HilsConfig):
    """Options of the released 7B: norms behind the sub-layers, over all heads; windows in three layers of four."""

    model_type = "olmo_hils"

    use_hope: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.norm_after, self.hope_in_windows = True, False
        super().__post_init__(**kwargs)


class QwenHilsConfig(HilsConfig):
    """Options of the released 345M and 1B: norms before the sub-layers, in each head; one rotation for all layers."""

    model_type = "qwen_hils"

    def __post_init__(self, **kwargs: Any) -> None:
        self.norm_after, self.hope_in_windows, self.use_hope = False, True, True
        super().__post_init__(**kwargs)


class _HoPE(Rotary):
    """Rotary positions without rotations of long periods, because training hardly saw distances between them.

    HiLS-Attention (arXiv 2607.02980). Pairs are as in Llama. The first pair always turns.
    """

    def __init__(self, dim: int, theta: float, longest: float = math.inf) -> None:
        """``longest``: the longest period of a pair that turns, in positions."""
        super().__init__(dim, theta)
        self._longest = longest

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        frequencies = super().frequencies(device)
        turning = frequencies >= 2 * math.pi / self._longest
        turning[0] = True
        return frequencies * turning


_TINY = {
    "chunk_size": 32, "hils_topk": 4, "sliding_window": 64, "lmk_q_lora_dim": 16, "enable_external_lmk_embed": True,
    "enable_softmax1": False, "rope_context_length": 512,
}  # fmt: skip
_7B = {
    "vocab_size": 100_278, "hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32,
    "num_hidden_layers": 32, "full_attn_interleave": 4, "norm_after": True, "layerwise_qk_norm": True,
    "layerwise_lmkq_norm": True, "lmk_q_lora_dim": 256, "enable_external_lmk_embed": True, "enable_softmax1": False,
    "rope_theta": 500_000.0, "hope_in_windows": False,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {"tiny": _TINY, "7b": _7B}
