"""How to train: what decides the result, and what does not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from memstore.errors import InvalidArgument

LEARNING_RATES = {"tiny": 2e-3, "paper": 2e-3, "small-128m": 4e-4, "medium-350m": 3e-4}
"""By preset, from nothing."""
FINE_TUNING_RATE = 5e-4


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """AdamW and its schedule. The same values on the same data give the same model."""

    steps: int | None = None
    """Optimizer steps; if None, ``epochs`` times through the data."""
    epochs: float = 1.0
    """Times through the data, where ``steps`` is None."""
    batch: int = 4
    """Segments a step, of each process."""
    accumulate: int = 1
    """Batches whose gradients are added up before a step."""
    learning_rate: float = 2e-3
    """The highest, after warming up."""
    final_rate: float = 0.1
    """The last learning rate, as a part of the highest; between them a cosine."""
    restart: float | None = None
    """Part of the training after which the schedule begins anew; None: never."""
    restart_rate: float = 0.5
    """The highest rate then, as a part of the first."""
    warmup: int = 50
    """Steps of linear warm-up; a tenth of all steps at most."""
    weight_decay: float = 1e-3
    """On matrices; vectors do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    seed: int = 0
    """Of the first weights, the order of the data and the noise."""
    bf16: bool = False
    """Compute in bfloat16; weights stay in float32."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("batch", "accumulate"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.steps is not None and self.steps < 1) or not 0 < self.epochs < math.inf:
            raise InvalidArgument(f"nothing would be trained with steps={self.steps}, epochs={self.epochs}")
        if not 0 < self.learning_rate < 1:
            raise InvalidArgument(f"learning_rate must be above 0 and below 1, got {self.learning_rate}")

    def to_dict(self) -> dict[str, Any]:
        """As a run's settings keep it."""
        return {**asdict(self), "betas": list(self.betas)}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how visibly to train: nothing here changes the result beyond rounding, so it may change on resuming."""

    device: str = "auto"
    """``"auto"`` (a GPU if there is one) or ``"cpu"``."""
    save_every: int = 500
    """Steps between checkpoints."""
    log_every: int = 50
    """Steps between lines of the log."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    progress: bool = False
    """Show a bar on standard error, where that is a terminal."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.device not in ("auto", "cpu"):
            raise InvalidArgument(
                f"device must be auto or cpu, not {self.device!r}; CUDA_VISIBLE_DEVICES chooses a GPU"
            )
        if self.save_every < 1 or self.log_every < 1:
            raise InvalidArgument("save_every and log_every must be at least 1")
