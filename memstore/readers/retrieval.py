"""How blocks are chosen: the options of a retrieval, and which option means something to which kind of model.

Two tables say the latter, which docs/models.md prints. What a kind does not take is refused where it is given, instead
of being passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from memstore.errors import InvalidArgument
from memstore.readers.kinds import ATTACHED, DRT, KNN, LANDMARK, MEMORIZING, STOCK, Kind

Share = Literal["none", "group", "layer", "model"]
Positions = Literal["stingy", "true", "clamped"]


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """How many blocks are retrieved, how often, for whom, and where they are placed.

    Attributes:
        top_k: Blocks in a list. ``"all"`` attends to everything stored: exact, and as slow as full attention.
        every: Tokens between two choices while generating. ``"segment"`` chooses once per prompt and keeps the list
            while answering; 1 chooses for every token. (While reading, a list is chosen at the start of each segment.)
        share: Who shares one list: all layers, a layer, the query heads of a key-value head, or nobody.
        share_tokens: Whether the tokens that a model processes together share one list. False lets each token choose
            for itself (``every=1``), or the first one for those that follow it. Only landmark models can do without.
        threshold: Weight of the context-miss token below which nothing is retrieved, from 0 to 1; None retrieves
            always. For landmark models that were trained with one.
        pool: ``share="model"``: a block's score is that of its best (or mean) group of ``span`` query tokens.
            Otherwise: the score of its best (or mean) query token.
        span: Query tokens that choose together. Pooling over hundreds of tokens loses what a question asks for.
        query: Which tokens of a prompt choose: the last ``span`` ones, or all of them, in groups of ``span``.
        words: ``share="model"``: how much the words count that a query and a block have in common: a factor of their
            BM25 score, of the block and of it with a neighbour, added to that of the states where there is more
            than a little in common. 0 leaves words out. Only where somebody asks in words: ``generate(query=...)`` and
            ``search``.
        rerank: ``share="model"``: so many of the best blocks are ranked once more, by how likely the model finds the
            query behind each of them (Sachan et al. 2022), and both orders vote by reciprocal ranks. 0: they are not.
            Each block costs a pass over the query, so 32 of them make a question two to three times as long. Only
            where ``words`` count.
        passes: 2 reads a prompt twice: the first pass chooses, at the last layer that has landmarks; the second
            attends.
        positions: Where retrieved blocks are placed: in small consecutive slots before the window, where they truly
            were, or there but never further away than the model was trained for.
        order: Which blocks take which of the stingy slots: the best one next to the window, or the latest one. A small
            model that has fetched several similar passages believes the nearest. Landmark models always take the order
            of time.
        on_error: What happens to a prompt or its answer when a chosen block cannot be read: an error, or the block is
            left out, counted and logged once. While a text is read it is always an error, for what is computed then is
            kept.
    """

    top_k: int | Literal["all"] = 8
    every: int | Literal["segment"] = "segment"
    share: Share = "model"
    share_tokens: bool = True
    threshold: float | None = None
    pool: Literal["max", "mean"] = "max"
    span: int = 32
    query: Literal["last", "all"] = "last"
    words: float = 2.0
    rerank: int = 0
    passes: Literal[1, 2] = 1
    positions: Positions = "stingy"
    order: Literal["score", "time"] = "score"
    on_error: Literal["raise", "miss"] = "raise"

    def __post_init__(self) -> None:
        self._positive("top_k", "all")
        self._positive("every", "segment")
        self._positive("span")
        self._one_of("share", ("none", "group", "layer", "model"))
        self._one_of("share_tokens", (True, False))
        self._one_of("pool", ("max", "mean"))
        self._one_of("query", ("last", "all"))
        if isinstance(self.words, bool) or not isinstance(self.words, int | float) or not 0 <= self.words < math.inf:
            raise InvalidArgument(f"Retrieval.words must be a number of at least 0, got {self.words!r}")
        if isinstance(self.rerank, bool) or not isinstance(self.rerank, int) or self.rerank < 0:
            raise InvalidArgument(f"Retrieval.rerank must be a whole number of at least 0, got {self.rerank!r}")
        if self.rerank and self.share != "model":
            raise InvalidArgument(f"Retrieval.rerank needs share='model', got share={self.share!r}")
        self._one_of("passes", (1, 2))
        self._one_of("positions", ("stingy", "true", "clamped"))
        self._one_of("order", ("score", "time"))
        self._one_of("on_error", ("raise", "miss"))
        value = self.threshold
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
            raise InvalidArgument(f"Retrieval.threshold must be a number from 0 to 1 or None, got {value!r}")

    def _positive(self, name: str, *words: str) -> None:
        value = getattr(self, name)
        if value in words or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return
        expected = " or ".join(["a whole number of at least 1", *(repr(word) for word in words)])
        raise InvalidArgument(f"Retrieval.{name} must be {expected}, got {value!r}")

    def _one_of(self, name: str, allowed: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise InvalidArgument(f"Retrieval.{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


OPTIONS: dict[str, tuple[Kind, ...]] = {
    "window": (STOCK,),
    "sink": (STOCK,),
    "segment": (STOCK,),
    "routing_layers": (STOCK,),
    "router": (STOCK,),
    "segment_blocks": (DRT,),
    "capacity": (LANDMARK,),
    "block_size": (STOCK, MEMORIZING, KNN),
    "codec": (STOCK, DRT, LANDMARK),
    "score": (STOCK,),
    "retrieve": (STOCK,),
    "query": (STOCK,),
    "opening": (STOCK,),
    "tail": (STOCK,),
}
"""Options of ``attach``, two of ``Reader.read``, ``query`` and ``opening`` of ``Reader.generate``, ``tail`` of
``Reader.ask``.

What all kinds take, such as ``process_group``, is left out.
"""

RETRIEVAL: dict[str, tuple[Kind, ...]] = {
    "top_k": (STOCK, LANDMARK),
    "every": (STOCK, LANDMARK),
    "share": (STOCK, LANDMARK),
    "share_tokens": (LANDMARK,),
    "threshold": (LANDMARK,),
    "pool": (STOCK, LANDMARK),
    "span": (STOCK,),
    "query": (STOCK,),
    "words": (STOCK,),
    "rerank": (STOCK,),
    "passes": (STOCK,),
    "positions": (STOCK, LANDMARK),
    "order": (STOCK,),
    "on_error": (STOCK, DRT, LANDMARK),
}
"""Fields of ``Retrieval``. DRTs and memories of tokens retrieve as they were trained to."""

_PLAIN = Retrieval()


def check_options(kind: Kind, given: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options of ``attach`` that are given to a ``kind`` which does not take them."""
    for name, value in given.items():
        if value is not None and kind not in OPTIONS.get(name, ATTACHED):
            raise InvalidArgument(
                f"{name} is for {_names(OPTIONS[name])}; a {kind.name} does not take it: leave it out"
            )


def check_retrieval(kind: Kind, retrieval: Retrieval) -> None:
    """Raise ``InvalidArgument`` for what a ``kind`` cannot do: a field it does not take, and that is not as usual."""
    for field in fields(retrieval):
        value = getattr(retrieval, field.name)
        if kind not in RETRIEVAL[field.name] and value != getattr(_PLAIN, field.name):
            raise InvalidArgument(
                f"Retrieval.{field.name} is for {_names(RETRIEVAL[field.name])}; a {kind.name} does not take it: "
                "leave it out"
            )


def table() -> list[list[str]]:
    """What the documentation prints: a row for each option, a column for each kind."""
    rows = [(name, OPTIONS[name]) for name in OPTIONS] + [(f"Retrieval.{name}", RETRIEVAL[name]) for name in RETRIEVAL]
    return [[f"`{name}`", *("yes" if kind in kinds else "" for kind in ATTACHED)] for name, kinds in rows]


def _names(kinds: tuple[Kind, ...]) -> str:
    return " and ".join(f"{kind.name}s" for kind in kinds)
