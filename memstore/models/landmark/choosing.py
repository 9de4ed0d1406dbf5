"""How a landmark model chooses blocks: which ways it has, and what all choices came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.errors import InvalidArgument
from memstore.memory.retrieval import Retrieval
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.readers import options
from memstore.readers.kinds import LANDMARK


def default_retrieval(config: LandmarkConfig) -> Retrieval:
    """The paper's most permissive scheme: each head and token chooses for itself."""
    return Retrieval(top_k=config.retrieval_top_k, every=1, share="none", share_tokens=False)


def check_capacity(retrieval: Retrieval, capacity: int | None) -> None:
    """Raise ``InvalidArgument`` for a capacity that does not hold the blocks of a list."""
    if capacity is None:
        return
    if retrieval.top_k == "all" or retrieval.positions == "true":
        raise InvalidArgument(
            "a capacity is for retrieval of a few blocks in stingy or clamped positions: with top_k='all' or "
            "positions='true' every block counts"
        )
    if capacity < retrieval.top_k:
        raise InvalidArgument(f"a capacity of {capacity} blocks does not hold the {retrieval.top_k} of a list")


def check_retrieval(config: LandmarkConfig, retrieval: Retrieval) -> None:
    """Raise ``InvalidArgument`` for what a landmark model cannot do."""
    if config.attention != "landmark":
        raise InvalidArgument(f"a model with attention={config.attention!r} has no landmarks and retrieves nothing")
    if retrieval.share == "model":
        raise InvalidArgument(
            "every layer of a landmark model chooses for itself: Retrieval.share must be 'none', 'group' or 'layer', "
            "not 'model'"
        )
    options.check_retrieval(LANDMARK, retrieval)
    every = retrieval.every
    if isinstance(every, int) and config.segment_tokens % every:
        raise InvalidArgument(
            f"Retrieval.every must divide the {config.segment_tokens} tokens of a segment, or be 'segment', not {every}"
        )
    if retrieval.threshold is not None and not config.context_miss:
        raise InvalidArgument("Retrieval.threshold is for models with a context-miss token; this one has none")


@dataclass
class SearchCounts:
    """What was asked of the memory; a segment here is a forward pass, for each row by itself."""

    queries: int = 0
    """Times a query head of a token had blocks in memory."""
    dropped: int = 0
    """Times the context-miss token's weight was below the threshold, so that nothing was retrieved."""
    searches: list[int] = field(default_factory=list)
    """Lists that were chosen, in each layer."""
    segments: list[int] = field(default_factory=list)
    """Segments for which blocks were fetched, in each layer."""
    fetched: list[int] = field(default_factory=list)
    """Blocks that were fetched, in each layer; within a segment each counts once."""

    @classmethod
    def of(cls, config: LandmarkConfig) -> SearchCounts:
        """Nothing was asked yet."""
        return cls(0, 0, *([0] * config.num_hidden_layers for _ in range(3)))

    @property
    def drop_rate(self) -> float:
        """The part of queries for which nothing was retrieved (the paper's appendix D)."""
        return self.dropped / self.queries if self.queries else 0.0

    def unique_blocks(self, layer: int) -> float:
        """Blocks fetched per segment in ``layer`` (the paper's appendix C); 0 where nothing was."""
        return self.fetched[layer] / self.segments[layer] if self.segments[layer] else 0.0
