"""The kinds of models that can be trained: what they are called here, their classes, and who trains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from memstore.errors import DamagedError
from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from memstore.models.landmark.convert import make_landmark, with_adapters
from memstore.models.memorizing import MemorizingConfig, MemorizingForCausalLM
from memstore.readers import kinds
from memstore.readers.kinds import Kind, kind_in
from memstore.train.landmark import LandmarkNeedleTrainer, LandmarkTextTrainer
from memstore.train.memorizing import MemorizingTrainer
from memstore.train.trainer import AnswerTrainer, MemoryTrainer, NeedleTrainer


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    kind: Kind
    config: type[Any]
    """Its configuration, which has presets, ``block_size`` and ``tokens_per_block``."""
    model: type[Any]
    text_trainer: type[MemoryTrainer]
    needle_trainer: type[AnswerTrainer] | None
    """None where no recipe trains it."""
    adopt: Callable[..., Any] | None = None
    """Makes one of a stock Hugging Face model in a folder; None where that cannot be."""
    adapt: Callable[..., Any] | None = None
    """Puts low-rank adapters of a rank into a model; None where all of it is trained always."""
    grow: Callable[..., Any] | None = None
    """Makes a model of a larger configuration of one that is there; None where that cannot be."""

    def has(self, folder: str | Path) -> bool:
        """Whether the model in ``folder`` is one. Raises ``NotFound``, and ``InvalidArgument`` where there is none."""
        return kind_in(folder) is self.kind


def load_weights(kind: Any, folder: str | Path) -> Any:
    """The model in ``folder``, in float32, by the class ``kind``. Raises ``DamagedError`` where it cannot be loaded."""
    try:
        return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"the model {folder} cannot be loaded: {error}") from None


def landmark_of_stock(folder: str | Path, **changes: Any) -> LandmarkForCausalLM:
    """A landmark model with the weights of the stock model in ``folder``.

    Raises ``DamagedError`` for one that cannot be loaded, ``UnsupportedModel`` for one of another architecture.
    """
    made = make_landmark(load_weights(AutoModelForCausalLM, folder), **changes)
    assert isinstance(made, LandmarkForCausalLM)
    return made


COPIED_OUTPUTS = 0.3
"""What is left of what copied layers add to the stream, so that twice the layers do not add twice as much."""


@torch.no_grad()
def grown(source: DRTForCausalLM, config: DRTConfig) -> DRTForCausalLM:
    """A model of ``config`` with the weights of ``source``, whose upper layers are repeated for those it lacks."""
    model = DRTForCausalLM(config)
    state, weights = model.state_dict(), source.state_dict()
    held = [f"model.upper.{g}.{n}." for g, count in enumerate(source.config.upper_layers) for n in range(count)]
    wanted = [f"model.upper.{g}.{n}." for g, count in enumerate(config.upper_layers) for n in range(count)]
    for number, prefix in enumerate(wanted):
        for name in [each for each in state if each.startswith(prefix)]:
            weight = weights[held[number % len(held)] + name.removeprefix(prefix)]
            added = number >= len(held) and name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            state[name].copy_(weight * COPIED_OUTPUTS if added else weight)
    last = len(source.config.upper_layers) - 1
    for name, weight in state.items():
        if name.startswith("model.retrievers."):
            _, _, group, rest = name.split(".", 3)
            weight.copy_(weights[f"model.retrievers.{min(int(group), last)}.{rest}"])
        elif not name.startswith("model.upper."):
            weight.copy_(weights[name])
    model.load_state_dict(state)
    return model


DRT = Family(kinds.DRT, DRTConfig, DRTForCausalLM, MemoryTrainer, NeedleTrainer, grow=grown)
LANDMARK = Family(
    kinds.LANDMARK,
    LandmarkConfig,
    LandmarkForCausalLM,
    LandmarkTextTrainer,
    LandmarkNeedleTrainer,
    landmark_of_stock,
    with_adapters,
)
MEMORIZING = Family(kinds.MEMORIZING, MemorizingConfig, MemorizingForCausalLM, MemorizingTrainer, needle_trainer=None)
