"""The kinds of models that can be trained: what they are called here, their classes, and who trains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from memstore.train.landmark import LandmarkNeedleTrainer, LandmarkTextTrainer
from memstore.train.trainer import AnswerTrainer, MemoryTrainer, NeedleTrainer


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    name: str
    """As messages call it."""
    config: type[Any]
    """Its configuration, which has presets, ``block_size`` and ``tokens_per_block``."""
    model: type[Any]
    text_trainer: type[MemoryTrainer]
    needle_trainer: type[AnswerTrainer]


DRT = Family("DRT", DRTConfig, DRTForCausalLM, MemoryTrainer, NeedleTrainer)
LANDMARK = Family(
    "landmark model",
    LandmarkConfig,
    LandmarkForCausalLM,
    LandmarkTextTrainer,
    LandmarkNeedleTrainer,
)
