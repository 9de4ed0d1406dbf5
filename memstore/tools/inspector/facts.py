"""What a trace says of itself, as a page may use it.

Facts are JSON that somebody else wrote: whoever recorded, or whoever sent the memory. A fact of another kind than it
should be is one that is not there, and one without end is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from memstore.tools.inspector.words import readable

_Kind = TypeVar("_Kind")

MOST = 1024
"""Layers, heads and documents."""
LONGEST = 2000
"""Characters of a fact."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """``Trace.info``, checked. ``documents`` are names as they are stored; all other texts are ``readable``."""

    mechanism: str
    question: str
    started: str
    ended: bool
    prompt: list[int]
    documents: list[str]
    layers: list[int]
    heads: int
    top_k: int | None

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """The facts in ``info``."""
        heads, top_k = info.get("heads"), info.get("top_k")
        return cls(
            mechanism=_text(info.get("mechanism")),
            question=_text(info.get("question")),
            started=_text(info.get("started")),
            ended=bool(info.get("ended")),
            prompt=_all_of(int, info.get("prompt")),
            documents=_all_of(str, info.get("documents"))[:MOST],
            layers=_all_of(int, info.get("layers"))[:MOST],
            heads=min(MOST, heads) if isinstance(heads, int) else 0,
            top_k=top_k if isinstance(top_k, int) else None,
        )


def _text(value: object) -> str:
    if not isinstance(value, str):
        return ""
    return readable(value if len(value) <= LONGEST else f"{value[:LONGEST]}…")


def _all_of(kind: type[_Kind], values: object) -> list[_Kind]:
    return [each for each in values if isinstance(each, kind)] if isinstance(values, list) else []
