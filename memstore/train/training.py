"""How one kind of model is trained: its classes, who trains it, its recipes, and the options of its command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors import SafetensorError

from memstore.errors import DamagedError, UnsupportedModel
from memstore.readers.kinds import Kind, kind_in, trainable
from memstore.train.recipes import Recipe
from memstore.train.trainer import AnswerTrainer, MemoryTrainer


@dataclass(frozen=True)
class Training:
    """How one kind of model is trained. Kinds name it (``Kind.training``)."""

    kind: Kind
    config: type[Any]
    """Its configuration, which has presets, ``block_size`` and ``tokens_per_block``."""
    model: type[Any]
    train: Callable[[Any, Any], dict[str, Any]]
    """What its command does: trains as its options and a ``Runtime`` say; the report."""
    text_trainer: type[MemoryTrainer]
    needle_trainer: type[AnswerTrainer] | None = None
    """None where no recipe trains it."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """By name: those that need no text."""
    adopt: Callable[..., Any] | None = None
    """Makes one of a stock Hugging Face model in a folder; None where that cannot be."""
    adapt: Callable[..., Any] | None = None
    """Puts low-rank adapters of a rank into a model; None where all of it is trained always."""
    check_rank: Callable[[int], Any] | None = None
    """Raises ``InvalidArgument`` for a rank that adapters cannot have."""
    grow: Callable[..., Any] | None = None
    """Makes a model of a larger configuration of one that is there; None where that cannot be."""
    of_recipe: Callable[[Any], Training] | None = None
    """For a recipe how its model is trained, where recipes differ in that; None: as here."""
    outgrow: Callable[..., Any] | None = None
    """The configuration of a model that grows to another; raises ``InvalidArgument`` where it cannot."""

    def has(self, folder: str | Path) -> bool:
        """Whether the model in ``folder`` is one. Raises ``NotFound``, and ``InvalidArgument`` where there is none."""
        return kind_in(folder) is self.kind


def training_of(kind: Kind) -> Training:
    """How models of ``kind`` are trained. Raises ``UnsupportedModel`` where they are not."""
    if not kind.training:
        raise UnsupportedModel(f"a {kind.name} is not trained here")
    family: Training = resolve_name(kind.training)
    return family


def recipes() -> dict[str, Recipe]:
    """Those of all kinds, by name."""
    families = [training_of(kind) for kind in trainable().values()]
    return {name: recipe for family in families for name, recipe in family.recipes.items()}


def load_weights(kind: Any, folder: str | Path) -> Any:
    """The model in ``folder``, in float32, by the class ``kind``. Raises ``DamagedError`` where it cannot be loaded."""
    try:
        return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"the model {folder} cannot be loaded: {error}") from None
