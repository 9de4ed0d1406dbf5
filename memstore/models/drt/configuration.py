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
    """Configuration of ``DRTForCausalLM``. Raises ``InvalidArgument`` for what does not fit together.

    Args:
        vocab_size: tokens; the landmark is not one of them, the model inserts its own.
        hidden_size: width of the model, of block states and of landmarks.
        intermediate_size: inner width of the feed-forward layers.
        num_attention_heads: query heads.
        num_key_value_heads: key-value heads; as many as query heads if None.
        lower_layers: layers before retrieval; together with the encoder they are all that reading needs.
        encoder_layers: bidirectional layers of the block encoder.
        upper_layers: layers of each group, such as ``[6]`` or ``[3, 3]``; each group retrieves once for all its layers.
        block_size: tokens of a block, its landmark counted.
        window: tokens that self-attention sees, the query counted; landmarks are counted too.
        retrieval_top_k: blocks that are retrieved.
        positions: ``"alibi"`` (the paper) or ``"rope"``, in self-attention.
        retrieval: ``"causal"`` (learned, the paper), or a baseline: ``"random"`` earlier blocks with equal weights,
            ``"external"`` (embeddings of a function of yours, see ``DRTForCausalLM.set_retriever``), ``"none"``.
        fusion: ``"grouped"`` (the paper), or ``"chunked"``: all retrieved blocks under one softmax.
        tied_retriever: scores without projections, as in the published code.
        normalise_scores: cosines times a learned factor.
        gumbel: factor on the Gumbel noise that varies which blocks are taken while training; 0 for none.
        off_by_one: softmax-off-by-one in cross attention, so that tokens can find nothing in a block.
        landmark_uses_own: the landmark of a block attends to what was retrieved for the next one, which is what it
            asked for itself; then the retrieval of a second group can build on that of the first at once. In the paper
            it attends to what its own block was given.
        state_dtype: block states and landmarks are rounded to this type wherever they are used, so that a memory can
            keep them in it and give exactly the same results.
    """

    model_type = "memstore-drt"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers reads it from the class

    def __init__(
        self,
        *,
        vocab_size: int = 512,
        hidden_size: int = 64,
        intermediate_size: int = 160,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        lower_layers: int = 2,
        encoder_layers: int = 1,
        upper_layers: Sequence[int] = (2,),
        block_size: int = 32,
        window: int = 64,
        retrieval_top_k: int = 4,
        positions: str = "alibi",
        rope_theta: float = 10_000.0,
        retrieval: str = "causal",
        fusion: str = "grouped",
        tied_retriever: bool = False,
        normalise_scores: bool = False,
        gumbel: float = 1.0,
        off_by_one: bool = True,
        landmark_uses_own: bool = False,
        state_dtype: str = "float32",
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.lower_layers = lower_layers
        self.encoder_layers = encoder_layers
        self.upper_layers = list(upper_layers)
        self.block_size = block_size
        self.window = window
        self.retrieval_top_k = retrieval_top_k
        self.positions = positions
        self.rope_theta = rope_theta
        self.retrieval = retrieval
        self.fusion = fusion
        self.tied_retriever = tied_retriever
        self.normalise_scores = normalise_scores
        self.gumbel = gumbel
        self.off_by_one = off_by_one
        self.landmark_uses_own = landmark_uses_own
        self.state_dtype = state_dtype
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**{"tie_word_embeddings": tie_word_embeddings, **kwargs})
        self._check()

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder, without the block encoder."""
        return self.lower_layers + sum(self.upper_layers)

    @property
    def leaves_parameters_unused(self) -> bool:
        """Whether parameters go without a gradient: those of scores that weigh nothing."""
        return self.fusion == "chunked" or self.retrieval == "external"

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block without its landmark."""
        return self.block_size - 1

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DRTConfig:
        """``tiny`` (a CPU trains it in minutes), or ``small-128m`` and ``medium-350m`` of the paper's appendix A."""
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
            raise InvalidArgument(f"upper_layers has one number of layers for each group, not {self.upper_layers}")
        check_heads(self)
        if self.head_dim % 2:
            raise InvalidArgument(f"hidden_size / num_attention_heads must be even, not {self.head_dim}")
        check_choices(self, CHOICES)


_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "lower_layers": 1,
    "encoder_layers": 1,
    "upper_layers": (2,),
    "block_size": 32,
    "window": 64,
    "retrieval_top_k": 4,
    "positions": "rope",
    "state_dtype": "float16",
}
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
