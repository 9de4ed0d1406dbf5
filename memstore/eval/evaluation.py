"""How one kind of model is measured. Kinds name theirs (``Kind.evaluation``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from memstore.errors import UnsupportedModel
from memstore.eval.needle import Reply
from memstore.readers.kinds import Kind
from memstore.report import Report


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What can be measured of a kind of model; None where there is nothing."""

    ask: Callable[..., Reply] | None = None
    """``(model, cache, sample)``: the model's answer after the haystack in its cache, and how it saw the needle."""
    perplexity: Callable[..., Report] | None = None
    """``(model, tokenizer, texts, folder, *, show, **options)``: its tables of perplexity, with the memory and with
    less of it; ``show``: draw a bar. The options are fields of the kind's ``PERPLEXITY`` (``Kind.options_module``)."""
    lookup: Callable[..., Any] | None = None
    """``(model, tokenizer, text, *, memory_size, examples, advance)``: what its memory of tokens is looked up for."""
    document_scorer: Callable[[Any], Any] | None = None
    """``(model)``: what scores documents with memories of tokens of any size."""


def evaluation_of(kind: Kind) -> Evaluation:
    """What can be measured of models of ``kind``."""
    evaluation: Evaluation = resolve_name(kind.evaluation) if kind.evaluation else Evaluation()
    return evaluation


def scorer_of(kind: Kind, model: Any) -> Any:
    """What scores documents with ``model`` and a memory of tokens. Raises ``UnsupportedModel`` without one."""
    scorer = evaluation_of(kind).document_scorer
    if scorer is None:
        raise UnsupportedModel(f"a {kind.name} has no memory of tokens")
    return scorer(model)
