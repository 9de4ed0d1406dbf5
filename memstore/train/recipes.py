"""Recipes: all that is needed to train a small model that retrieves, from nothing, on a CPU.

A recipe is data. Its texts are those that every Python carries; needles are made up while it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from memstore.errors import InvalidArgument
from memstore.train.settings import Optimisation


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train, on what, and how."""

    name: str
    task: str
    """What it is all about, and is measured at the end."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the preset ``tiny``."""
    stages: tuple[tuple[float, Mapping[str, float]], ...]
    """At which part of the training, from 0 to 1, which tasks have which shares of the rows; in between, a line.

    Tasks are those of ``memstore.eval.tasks``, and ``one-hop``.
    """
    optimisation: Optimisation
    """``batch`` and ``accumulate`` are not used: a step has ``tokens``."""
    tokens: int = 2048
    """Tokens a step, at most."""
    blocks: tuple[int, int] = (3, 7)
    """Fewest and most blocks of a row before its answer."""
    digits: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"passkey": (5, 20), "two-hop": (2, 4), "one-hop": (2, 4), "multi-needle": (5, 5)}
    )
    """Fewest and most digits of the numbers of each task."""
    answer_weight: float = 1.0
    """Of the answer's loss."""
    text_weight: float = 0.2
    """Of the loss of all other tokens: language modelling."""
    near_misses: float = 0.3
    """Part of the rows with things that look like needles, from ``hard_from`` on."""
    nonsense: float = 0.15
    """Part of the rows whose text is random tokens, from ``hard_from`` on."""
    few_digits: float = 0.0
    """Part of the numbers made of two to four digits alone: they cannot be copied by the last digit or two."""
    ramp: float = 0.0
    """Part of the training in which the longest numbers and the most blocks grow from the fewest on."""
    share_rows: bool = True
    """Whether rows of a step may retrieve each other's blocks: distractors that cost nothing."""
    hard_from: float = 0.66
    """Part of the training after which there are distractors: those of rows and bank, near misses and nonsense.

    Before it has learned to copy, a model does not learn to copy what it cannot find.
    """
    bank: int = 4096
    """Blocks of earlier steps that may be retrieved too."""
    bank_growth: float = 0.08
    """Part of the training in which the bank opens, slowly at first."""
    checked: int = 256
    """Rows that measure the result."""
    next_command: str
    """What to try with the model."""

    def tasks_at(self, progress: float) -> Mapping[str, float]:
        """The share of each task at a part of the training, from 0 to 1."""
        places = [place for place, _ in self.stages]
        names = sorted({name for _, tasks in self.stages for name in tasks})
        shares = {
            name: np.interp(progress, places, [tasks.get(name, 0.0) for _, tasks in self.stages]) for name in names
        }
        return {name: float(share) for name, share in shares.items()}

    def ramped(self, bounds: tuple[int, int], progress: float) -> tuple[int, int]:
        """``bounds`` as they are at a part of the training."""
        grown = min(1.0, progress / self.ramp) if self.ramp else 1.0
        return bounds[0], round(bounds[0] + (bounds[1] - bounds[0]) * grown)

    def asking_only(self, task: str) -> Recipe:
        """With this task alone."""
        return replace(self, stages=((0.0, {task: 1.0}),))

    def with_groups(self, groups: int) -> Recipe:
        """With the upper layers in so many groups, each of which retrieves once."""
        layers = sum(self.model["upper_layers"])
        if groups < 1 or layers % groups:
            raise InvalidArgument(f"the {layers} upper layers of {self.name} cannot be divided into {groups} groups")
        return replace(self, model={**self.model, "upper_layers": [layers // groups] * groups})

    def to_dict(self) -> dict[str, Any]:
        """As a run's settings keep it: what the result depends on."""
        return {**asdict(self), "optimisation": self.optimisation.to_dict()}


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="passkey-cpu",
            task="passkey",
            model={"upper_layers": [2], "initializer_range": 0.06},
            stages=((0.0, {"passkey": 1.0}),),
            optimisation=Optimisation(steps=4000, restart=0.66),
            tokens=2048,
            ramp=0.2,
            next_command="memstore eval passkey --model {model}",
        ),
        Recipe(
            name="two-hop-cpu",
            task="two-hop",
            model={"upper_layers": [2, 2], "landmark_uses_own": True, "initializer_range": 0.06},
            stages=(
                (0.0, {"passkey": 1.0}),
                (0.3, {"passkey": 1.0}),
                (0.35, {"passkey": 0.2, "one-hop": 0.4, "two-hop": 0.4}),
                (0.7, {"passkey": 0.2, "two-hop": 0.8}),
            ),
            optimisation=Optimisation(steps=5000, restart=0.7),
            tokens=2048,
            ramp=0.15,
            hard_from=0.7,
            next_command="memstore eval two-hop --model {model}",
        ),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``."""
    if name not in RECIPES:
        raise InvalidArgument(f"no recipe is called {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
