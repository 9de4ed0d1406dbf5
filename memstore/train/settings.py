"""Settings of training: those that decide the result, and the others."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from memstore.errors import InvalidArgument

LEARNING_RATES = {"tiny": 2e-3, "paper": 2e-3, "small-128m": 4e-4, "medium-350m": 3e-4}
"""By preset, for a model trained from nothing."""
FINE_TUNING_RATE = 5e-4


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """AdamW and its schedule. The same values on the same data give the same model."""

    steps: int | None = None
    """Optimizer steps. If None, ``epochs`` passes through the data."""
    epochs: float = 1.0
    """Passes through the data, if ``steps`` is None."""
    batch: int = 4
    """Segments per step, in each process."""
    accumulate: int = 1
    """Batches whose gradients are added up before a step."""
    learning_rate: float = 2e-3
    """The highest rate, after the warm-up."""
    final_rate: float = 0.1
    """The last learning rate, as a part of the highest. Between them the rate follows a cosine."""
    restart: float | None = None
    """Part of the training after which the schedule starts again; None: never."""
    restart_rate: float = 0.5
    """The highest rate after the restart, as a part of the first."""
    warmup: int = 50
    """Steps of linear warm-up; at most a tenth of all steps."""
    weight_decay: float = 1e-3
    """Weight decay of matrices; vectors do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """The two betas of AdamW."""
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    seed: int = 0
    """Seed of the first weights, the order of the data, and the noise."""
    bf16: bool = False
    """Compute in bfloat16; weights stay in float32."""

    def __post_init__(self) -> None:
        """Raise an error for settings that cannot work."""
        for name in ("batch", "accumulate"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.steps is not None and self.steps < 1) or not 0 < self.epochs < math.inf:
            raise InvalidArgument(f"steps and epochs must be above 0, got steps={self.steps}, epochs={self.epochs}")
        if not 0 < self.learning_rate < 1:
            raise InvalidArgument(f"learning_rate must be above 0 and below 1, got {self.learning_rate}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a run keeps them."""
        return {**asdict(self), "betas": list(self.betas)}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how visibly to train. It changes the result only by rounding, so it may change on resuming."""

    device: str = "auto"
    """``"auto"`` (a GPU if there is one) or ``"cpu"``."""
    save_every: int = 500
    """Steps between checkpoints."""
    log_every: int = 50
    """Steps between lines of the log."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    progress: bool = False
    """Show a progress bar on standard error, if that is a terminal."""

    def __post_init__(self) -> None:
        """Raise an error for settings that cannot work."""
        if self.device not in ("auto", "cpu"):
            raise InvalidArgument(
                f"device must be auto or cpu, not {self.device!r}; choose a GPU with CUDA_VISIBLE_DEVICES"
            )
        if self.save_every < 1 or self.log_every < 1:
            raise InvalidArgument("save_every and log_every must be at least 1")
