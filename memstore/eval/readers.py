"""What reads a haystack and answers, for each kind of model."""

from __future__ import annotations

from typing import Any

from memstore.errors import UnsupportedModel
from memstore.eval.asking import Reply
from memstore.eval.tasks import Sample
from memstore.memory import Memory, MemorySpec
from memstore.models.drt import Reader
from memstore.models.drt import reader as drt
from memstore.models.landmark import reader as landmark
from memstore.readers.kinds import DRT, LANDMARK, kind_of


def open_reader(model: Any, memory: Memory, document: str) -> Any:
    """A reader of ``document`` for ``model``, with ``append`` and ``cache``."""
    if kind_of(model) is DRT:
        return Reader(model, memory, document)
    return landmark.Reader(model, memory, document)


def memory_spec(model: Any, tokenizer: Any) -> MemorySpec:
    """The spec of a memory for ``model``. Raises ``UnsupportedModel`` for one without retrieval."""
    if kind_of(model) is DRT:
        return drt.memory_spec(model, tokenizer)
    if model.config.attention != "landmark":
        raise UnsupportedModel(f"a model with attention={model.config.attention!r} retrieves nothing")
    return landmark.memory_spec(model, tokenizer)


def ask(model: Any, cache: Any, sample: Sample) -> Reply:
    """The answer to ``sample`` after the haystack in ``cache``."""
    from memstore.eval import asking, landmark_asking

    asked = landmark_asking.ask if kind_of(model) is LANDMARK else asking.ask
    return asked(model, cache, sample)
