"""How one kind of model is trained: its classes, trainers, recipes, and the options of its command."""

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
    """How one kind of model is trained. ``Kind.training`` names it."""

    kind: Kind
    config: type[Any]
    """The class of its configuration, with presets, ``block_size`` and ``tokens_per_block``."""
    model: type[Any]
    train: Callable[[Any, Any], dict[str, Any]]
    """The function behind its command. It trains by options and a ``Runtime``, and returns the report."""
    text_trainer: type[MemoryTrainer]
    needle_trainer: type[AnswerTrainer] | None = None
    """None if no recipe trains it."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """Recipes by name; they need no text."""
    adopt: Callable[..., Any] | None = None
    """Function that converts a stock Hugging Face model in a folder to this kind; None if that is impossible."""
    adapt: Callable[..., Any] | None = None
    """Function that adds low-rank adapters of a rank to a model; None if training always changes all weights."""
    check_rank: Callable[[int], Any] | None = None
    """Function that raises ``InvalidArgument`` for a rank that adapters cannot have."""
    grow: Callable[..., Any] | None = None
    """Function that makes a model of a larger configuration from an existing one; None if that is impossible."""
    of_recipe: Callable[[Any], Training] | None = None
    """Function that returns the ``Training`` for a recipe, if recipes differ in it; None: this one serves all."""
    outgrow: Callable[..., Any] | None = None
    """Function that returns the configuration of a model that grows to another, or raises ``InvalidArgument``."""

    def has(self, folder: str | Path) -> bool:
        """Return whether ``folder`` has this kind of model. Raises ``NotFound``, or ``InvalidArgument`` if none."""
        return kind_in(folder) is self.kind


def training_of(kind: Kind) -> Training:
    """Return how models of ``kind`` are trained. Raises ``UnsupportedModel`` if they cannot be trained."""
    if not kind.training:
        raise UnsupportedModel(f"a {kind.name} cannot be trained with this command")
    family: Training = resolve_name(kind.training)
    return family


def recipes() -> dict[str, Recipe]:
    """Return the recipes of all kinds, by name."""
    families = [training_of(kind) for kind in trainable().values()]
    return {name: recipe for family in families for name, recipe in family.recipes.items()}


def load_weights(kind: Any, folder: str | Path) -> Any:
    """Load the model in ``folder``, in float32, by the class ``kind``. Raises ``DamagedError`` if loading fails."""
    try:
        return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"the model {folder} cannot be loaded: {error}") from None
