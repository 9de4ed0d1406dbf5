"""The kinds of models that can be trained: what they are called here, and their classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memstore.models.drt import DRTConfig, DRTForCausalLM


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    name: str
    """As messages call it."""
    config: type[Any]
    """Its configuration, which has presets, ``block_size`` and ``tokens_per_block``."""
    model: type[Any]


DRT = Family("DRT", DRTConfig, DRTForCausalLM)
