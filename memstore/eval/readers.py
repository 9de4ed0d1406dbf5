"""What answers after a haystack, for each kind of model."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import memstore
from memstore import MemorySpec
from memstore.eval.asking import Reply
from memstore.eval.tasks import Sample
from memstore.readers.kinds import kind_of


def memory_spec(model: Any, tokenizer: Any) -> MemorySpec:
    """The spec of a memory for ``model``. Raises ``InvalidArgument`` for one without retrieval."""
    return memstore.attach(model, "ram:", tokenizer=tokenizer).spec()


def ask(model: Any, cache: Any, sample: Sample) -> Reply:
    """The answer to ``sample`` after the haystack in ``cache``."""
    reply: Reply = resolve_name(kind_of(model).question)(model, cache, sample)
    return reply
