"""The measurements of one kind of model. Kinds name theirs (``Kind.evaluation``)."""

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
    """The measurements of a kind of model; None for those that it lacks."""

    ask: Callable[..., Reply] | None = None
    """``(model, cache, sample)``: the model's answer after the haystack in its cache, and how it retrieved the needle.
    """
    perplexity: Callable[..., Report] | None = None
    """``(model, tokenizer, texts, folder, *, lengths, scored, samples, show)``: perplexity with the memory and without
    it, by length of the context; see ``memstore.eval.perplexity.by_context``. ``show``: draw a bar."""
    document_scorer: Callable[[Any], Any] | None = None
    """``(model)``: a function that scores documents with memories of tokens of any size."""


def evaluation_of(kind: Kind) -> Evaluation:
    """Return the measurements for models of ``kind``."""
    evaluation: Evaluation = resolve_name(kind.evaluation) if kind.evaluation else Evaluation()
    return evaluation


def scorer_of(kind: Kind, model: Any) -> Any:
    """Return the scorer of documents with ``model`` and a memory of tokens. Raises ``UnsupportedModel`` without one."""
    scorer = evaluation_of(kind).document_scorer
    if scorer is None:
        raise UnsupportedModel(f"a {kind.name} has no memory of tokens: choose a model that has one")
    return scorer(model)
