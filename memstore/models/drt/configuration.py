"""Sizes and options of a DRT, and the paper's presets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memstore.errors import InvalidArgument
from memstore.models.causal import ModelConfig, check_block_size, check_choices, check_heads, check_sizes, preset

SIZES = ("lower_layers", "encoder_layers", "block_size", "window", "retrieval_top_k")
CHOICES = {
    "positions": ("alibi", "rope"),
    "retrieval": ("causal", "random", "external", "none"),
    "fusion": ("grouped", "chunked"),
    "state_dtype": ("float32", "float16", "bfloat16"),
}


class DRTConfig(ModelConfig):
    """Configuration of ``DRTForCausalLM``. Raises ``InvalidArgument`` for what does not fit together."""

    model_type = "memstore-drt"

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
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.upper_layers = list(self.upper_layers)
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """Return the number of layers of the decoder, without the block encoder."""
        return self.lower_layers + sum(self.upper_layers)

    @property
    def leaves_parameters_unused(self) -> bool:
        """Return whether parameters get no gradient: those of scores that weigh nothing."""
        return self.fusion == "chunked" or self.retrieval == "external"

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DRTConfig:
        """Return ``tiny`` (a CPU trains it in minutes), ``small-128m`` or ``medium-350m`` of the paper's appendix A."""
        return cls(**preset(PRESETS, name, changes))

    def _check(self) -> None:
        super()._check()
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
