"""Sizes and options of a DRT, and the paper's presets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from memstore.errors import InvalidArgument
from memstore.models.causal import check_block_size, check_choices, check_heads, check_sizes, preset

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "lower_layers",
    "encoder_layers",
    "block_size",
    "window",
    "retrieval_top_k",
)
CHOICES = {
    "positions": ("alibi", "rope"),
    "retrieval": ("causal", "random", "external", "none"),
    "fusion": ("grouped", "chunked"),
    "state_dtype": ("float32", "float16", "bfloat16"),
}


class DRTConfig(PreTrainedConfig):
    """Configuration of ``DRTForCausalLM``. Raises ``InvalidArgument`` for what does not fit together."""

    model_type = "memstore-drt"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers reads it from the class

    vocab_size: int = 512
    """Tokens. The landmark is not one of them: the model inserts its own."""
    hidden_size: int = 64
    """Width of the model, of block states and of landmarks."""
    intermediate_size: int = 160
    """Inner width of the feed-forward layers."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: Any = None
    """Key-value heads; as many as query heads if None."""
    lower_layers: int = 2
    """Layers before retrieval. Reading needs only them and the encoder."""
    encoder_layers: int = 1
    """Bidirectional layers of the block encoder."""
    upper_layers: Sequence[int] = (2,)
    """Layers of each group, such as ``[6]`` or ``[3, 3]``. Each group retrieves once for all its layers."""
    block_size: int = 32
    """Tokens of a block, including its landmark."""
    window: int = 64
    """Tokens that self-attention sees, including the query and landmarks."""
    retrieval_top_k: int = 4
    """Blocks that are retrieved."""
    positions: str = "alibi"
    """``"alibi"`` (the paper) or ``"rope"``, in self-attention."""
    rope_theta: float = 10_000.0
    retrieval: str = "causal"
    """``"causal"`` (learned, the paper), or a baseline: ``"random"`` earlier blocks with equal weights, ``"external"``
    (embeddings of a function of yours, see ``DRTForCausalLM.set_retriever``), ``"none"``."""
    fusion: str = "grouped"
    """``"grouped"`` (the paper), or ``"chunked"``: all retrieved blocks under one softmax."""
    tied_retriever: bool = False
    """Scores without projections, as in the published code."""
    normalise_scores: bool = False
    """Cosines times a learned factor."""
    gumbel: float = 1.0
    """Factor on the Gumbel noise that varies the choice of blocks in training; 0 for none."""
    off_by_one: bool = True
    """Softmax-off-by-one in cross attention, so that tokens can find nothing in a block."""
    landmark_uses_own: bool = False
    """Let the landmark of a block attend to the blocks retrieved for the next block, which it asked for itself. Then
    the retrieval of a second group can build at once on that of the first. In the paper it attends to the blocks that
    were given to its own block."""
    state_dtype: str = "float32"
    """Block states and landmarks are rounded to this type wherever they are used. So a memory can store them in it and
    give exactly the same results."""
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.upper_layers = list(self.upper_layers)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers annotates it in part
        self._check()

    @property
    def num_hidden_layers(self) -> int:
        """Return the number of layers of the decoder, without the block encoder."""
        return self.lower_layers + sum(self.upper_layers)

    @property
    def leaves_parameters_unused(self) -> bool:
        """Return whether parameters get no gradient: those of scores that weigh nothing."""
        return self.fusion == "chunked" or self.retrieval == "external"

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def tokens_per_block(self) -> int:
        """Return the tokens of a block without its landmark."""
        return self.block_size - 1

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DRTConfig:
        """Return ``tiny`` (a CPU trains it in minutes), ``small-128m`` or ``medium-350m`` of the paper's appendix A."""
        return cls(**preset(PRESETS, name, changes))

    def _check(self) -> None:
        check_sizes(self, SIZES)
        if not 0 <= self.gumbel < math.inf:
            raise InvalidArgument(f"gumbel must be at least 0, not {self.gumbel}")
        if not (self.rope_theta > 0 and self.rms_norm_eps > 0):
            raise InvalidArgument(
                f"rope_theta and rms_norm_eps must be above 0, not {self.rope_theta} and {self.rms_norm_eps}"
            )
        check_block_size(self)
        if not self.upper_layers or not all(isinstance(count, int) and count > 0 for count in self.upper_layers):
            raise InvalidArgument(f"upper_layers needs one number of layers for each group, not {self.upper_layers}")
        check_heads(self)
        if self.head_dim % 2:
            raise InvalidArgument(f"hidden_size / num_attention_heads must be even, not {self.head_dim}")
        check_choices(self, CHOICES)


_TINY = {"intermediate_size": 128, "lower_layers": 1, "positions": "rope", "state_dtype": "float16"}
_SMALL = {
    "vocab_size": 50_257,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "lower_layers": 6,
    "encoder_layers": 2,
    "upper_layers": (6,),
    "block_size": 64,
    "window": 512,
    "retrieval_top_k": 8,
    "positions": "alibi",
}
_MEDIUM = {
    **_SMALL,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "lower_layers": 12,
    "upper_layers": (12,),
}
PRESETS: dict[str, dict[str, Any]] = {"tiny": _TINY, "small-128m": _SMALL, "medium-350m": _MEDIUM}
