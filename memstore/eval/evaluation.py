"""The measurements of one kind of model. Kinds name theirs (``Kind.evaluation``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

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


def evaluation_of(kind: Kind) -> Evaluation:
    """Return the measurements for models of ``kind``."""
    evaluation: Evaluation = resolve_name(kind.evaluation) if kind.evaluation else Evaluation()
    return evaluation
