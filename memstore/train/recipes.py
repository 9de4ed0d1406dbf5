"""Recipes: all that is needed to train a small model that retrieves, from nothing, on a CPU.

A recipe is data. Its texts come with every Python; needles are made up during training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from memstore.errors import InvalidArgument
from memstore.train.options import Optimisation


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The model, the tasks and the settings of a training."""

    name: str
    task: str
    """The task that the recipe is for, and that is measured at the end."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from the preset ``tiny``."""
    stages: tuple[tuple[float, Mapping[str, float]], ...]
    """Shares of the tasks among the rows, at parts of the training from 0 to 1; they are interpolated linearly.

    Tasks come from ``memstore.eval.tasks``, and easier ones from ``memstore.train.needles``.
    """
    start: str | None = None
    """The recipe whose packaged model this one starts from; None: from nothing."""
    optimisation: Optimisation
    """``batch`` and ``accumulate`` are not used, because a step has ``tokens``."""
    tokens: int = 2048
    """Most tokens of a step."""
    blocks: tuple[int, int] = (3, 7)
    """Fewest and most blocks of a row before its answer."""
    closing: float = 0.0
    """Part of the training, at its end, with few, long rows of ``closing_blocks``. Other parts count up to its start.

    The model can find things among some hundred tokens by then, and learns to find them among more.
    """
    closing_blocks: tuple[int, int] = (8, 47)
    """Fewest and most blocks of a row in that part."""
    digits: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "passkey": (5, 20),
            "easy one-hop": (1, 2),
            "easy two-hop": (1, 2),
            "one-hop": (1, 3),
            "two-hop": (2, 2),
            "multi-needle": (5, 5),
        }
    )
    """Fewest and most digits of the numbers of each task."""
    answer_weight: float = 1.0
    """Weight of the answer's loss."""
    text_weight: float = 0.2
    """Weight of the loss of all other tokens: language modelling."""
    near_misses: float = 0.3
    """Part of the rows with text that looks like needles, from ``hard_from`` on."""
    places: int = 1
    """Places of a text of which a row takes the one with the most digits, from ``hard_from`` on."""
    nonsense: float = 0.15
    """Part of the rows whose text is random tokens, from ``hard_from`` on."""
    distinct_until: float = 0.0
    """Part of the training in which no number repeats a digit, so that each digit determines the next one."""
    few_digits: float = 0.3
    """Part of the numbers with only three to five different digits: the last one or two are not enough to copy them."""
    few_from: float = 0.0
    """Part of the training after which such numbers appear."""
    follow_ups: bool = True
    """Whether more questions follow the first, so that a row teaches more."""
    answers: int = 1
    """Blocks of a row with an answer. With one, all its questions share a list, so it must hold what they ask for."""
    ramp: float = 0.0
    """Part of the training in which the longest numbers and the most blocks grow from the fewest."""
    share_rows: bool = True
    """Whether rows of a step may retrieve each other's blocks: distractors without a cost."""
    hard_from: float = 0.6
    """Part of the training after which distractors appear: from rows and bank, near misses, and nonsense.

    Until a model has learned to copy, it cannot learn from needles that it does not find.
    """
    hard_gumbel: float = 0.2
    """The model's ``gumbel`` from then on.

    Noise finds blocks for a retriever that has learned nothing. A trained retriever learns more from the strongest
    distractors: among ``n`` of them the noise reaches ``log n``, and hides the needle from the lists.
    """
    bank: int = 4096
    """Blocks of earlier steps that may also be retrieved."""
    bank_growth: float = 0.1
    """Part of the training in which the bank opens, if needles are found throughout."""
    ready: float = 0.9
    """Part of the needles that must be found before it opens further."""
    checked: int = 256
    """Rows that measure the result."""
    next_command: str
    """A command to try with the model."""
    kind: ClassVar[str] = "drt"
    """The kind of its model, as the word after ``memstore train``."""
    aligned: ClassVar[bool] = True
    """Whether questions end with the first token of a block, as a DRT needs; otherwise they end anywhere."""

    def before_closing(self, progress: float) -> float:
        """Return how much of the time before the closing part is done, from 0 to 1, at a part of the training."""
        return min(1.0, progress / (1 - self.closing))

    def tasks_at(self, progress: float) -> Mapping[str, float]:
        """Return the share of each task at a part of the training, from 0 to 1."""
        places = [place for place, _ in self.stages]
        names = sorted({name for _, tasks in self.stages for name in tasks})
        shares = {
            name: np.interp(progress, places, [tasks.get(name, 0.0) for _, tasks in self.stages]) for name in names
        }
        return {name: float(share) for name, share in shares.items()}

    def ramped(self, bounds: tuple[int, int], progress: float) -> tuple[int, int]:
        """Return ``bounds`` as they are at a part of the training."""
        grown = min(1.0, progress / self.ramp) if self.ramp else 1.0
        return bounds[0], round(bounds[0] + (bounds[1] - bounds[0]) * grown)

    def asking_only(self, task: str) -> Recipe:
        """Return the recipe with this task alone, in the form in which models are measured."""
        return replace(self, stages=((0.0, {task: 1.0}),), follow_ups=False, answers=1)

    def with_groups(self, groups: int) -> Recipe:
        """Return the recipe with the upper layers in ``groups`` groups that retrieve once each."""
        layers = sum(self.model["upper_layers"])
        if groups < 1 or layers % groups:
            raise InvalidArgument(f"the {layers} upper layers of {self.name} cannot be divided into {groups} groups")
        return replace(self, model={**self.model, "upper_layers": [layers // groups] * groups})

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as a run's settings keep it: all that the result depends on."""
        return {**asdict(self), "optimisation": self.optimisation.to_dict()}


PASSKEYS: dict[str, Any] = {
    "task": "passkey",
    "stages": ((0.0, {"passkey": 1.0}),),
    "blocks": (1, 15),
    "ramp": 0.5,
    "distinct_until": 0.15,
    "few_from": 0.2,
    "hard_from": 0.5,
    "bank": 0,
    "next_command": "memstore eval passkey --model {model}",
}
"""Settings that all passkey recipes share, where no other row is retrieved from."""

LOOKUPS: dict[str, Any] = {
    **PASSKEYS,
    "task": "multi-needle",
    "stages": (
        (0.00, {"passkey": 1.0}),
        (0.25, {"passkey": 1.0}),
        (0.30, {"passkey": 0.3, "easy multi-needle": 0.7}),
        (0.50, {"passkey": 0.2, "easy multi-needle": 0.3, "multi-needle": 0.5}),
        (0.60, {"passkey": 0.2, "multi-needle": 0.4, "two-hop": 0.4}),
    ),
    "digits": {"passkey": (5, 20), "easy multi-needle": (2, 5), "multi-needle": (2, 5), "two-hop": (2, 2)},
    "ramp": 0.9,
    "distinct_until": 0.3,
    "few_from": 0.45,
    "hard_from": 0.7,
    "near_misses": 0.2,
    "nonsense": 0.05,
    "next_command": "memstore eval multi-needle --model {model}",
}
"""Settings that recipes share for passkeys, one of several named numbers, and chains of two links."""


def find_recipe(name: str, known: Mapping[str, Any]) -> Any:
    """Return the recipe called ``name`` among the ``known`` ones. Raises ``InvalidArgument``."""
    if name not in known:
        raise InvalidArgument(f"there is no recipe {name!r}; choose one of {', '.join(known)}")
    return known[name]
