"""Which options mean something to which kind of model: one table, which docs/models.md prints.

An option that a kind does not take is refused where it is given, instead of being passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from memstore.attention.retrieval import Retrieval
from memstore.errors import InvalidArgument
from memstore.readers.kinds import ATTACHED, DRT, KNN, LANDMARK, MEMORIZING, STOCK, Kind

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
