"""The options of trainings, for the command line, Python and each kind of model. Nothing here needs PyTorch.

A kind's own options are a dataclass that continues one of these. ``option`` gives the command line's text for each. An
option at None was not given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memstore.errors import InvalidArgument
from memstore.json_checks import check_whole

OPTIMISATION = ("steps", "epochs", "batch", "accumulate", "learning_rate", "warmup", "seed", "bf16")
"""Options that are fields of ``Optimisation`` too."""


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
        whole = {"batch": 1, "accumulate": 1, "warmup": 0, "seed": 0} | ({} if self.steps is None else {"steps": 1})
        for name, least in whole.items():
            check_whole(name, getattr(self, name), least, 2**32 - 1)
        _check_number("epochs", self.epochs, math.inf)
        _check_number("learning_rate", self.learning_rate, 1)
        _check_number("restart", 0.5 if self.restart is None else self.restart, 1)
        _check_number("weight_decay", self.weight_decay, math.inf, zero=True)
        _check_number("clip", self.clip, math.inf, zero=True)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise InvalidArgument(f"betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            _check_number("each of betas", beta, 1, zero=True)
        if not isinstance(self.bf16, bool):
            raise InvalidArgument(f"bf16 must be True or False, not {self.bf16!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a run keeps them."""
        return {**asdict(self), "betas": list(self.betas)}


def _check_number(name: str, value: object, below: float, *, zero: bool = False) -> None:
    if not isinstance(value, int | float) or not 0 <= value < below or not (value or zero):
        raise InvalidArgument(f"{name} must be {'at least' if zero else 'above'} 0 and below {below}, got {value!r}")


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
        if self.device not in ("auto", "cpu"):
            raise InvalidArgument(
                f"device must be auto or cpu, not {self.device!r}; choose a GPU with CUDA_VISIBLE_DEVICES"
            )
        if self.save_every < 1 or self.log_every < 1:
            raise InvalidArgument("save_every and log_every must be at least 1")


def option(help: str, default: Any = None, **shown: Any) -> Any:  # noqa: A002 - as command lines call it
    """Return a dataclass field for an option.

    ``shown`` is for the command line, in addition to ``help``. It may have ``min``, ``max`` and ``flags``. ``argument``
    is for an option without a name. ``tokens`` is the least number of tokens, which may be written as ``8K``.
    ``model`` is for the folder or another name of a model.
    """
    return field(default=default, metadata={"help": help, **shown})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of every training; a kind's own options come after them."""

    out: Path = field(
        metadata={"help": "Write the model to this folder. With the same folder again, training continues."}
    )
    steps: int | None = option("Train for this many optimizer steps. Default: set by the recipe or --epochs.", min=1)
    learning_rate: float | None = option("Set the highest learning rate. Default: one that suits the model's size.")
    warmup: int | None = option("Warm up for this many steps. Default: 50.", min=0)
    seed: int | None = option("Seed of weights, order and noise. Default: 0.", min=0)
    bf16: bool | None = option(
        "Compute in bfloat16. Default: set by the recipe, else float32.", flags="--bf16/--no-bf16"
    )
    gradient_checkpointing: bool = option(
        "Use less memory, and a third more time.", False, flags="--gradient-checkpointing"
    )
    save_every: int = option("Write a checkpoint every so many steps.", 200, min=1)
    log_every: int = option("Log every so many steps.", 50, min=1)
    device: str = option("Train on auto (a GPU if there is one) or cpu.", "auto")

    def given(self) -> dict[str, Any]:
        """Return the given options that say what is trained, without those at None."""
        return {name: value for name, value in vars(self).items() if name not in _RUNNING and value is not None}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RunOptions):
    """The options of trainings on texts."""

    text: list[str] | None = option(
        "Text files, folders of .txt files, or Hugging Face dataset folders to train on.", argument="[TEXT]..."
    )
    tokenizer: Path | None = option("Use the tokenizer in this folder. Default: one trained on the texts.")
    vocabulary: int | None = option("Train a tokenizer with this many tokens.", min=258)
    column: str | None = option("Read the texts from this column of a dataset. Default: text.")
    epochs: float | None = option("Go through the data this many times. Default: once.")
    batch: int | None = option("Segments or pairs per step and process. Default: 4.", min=1)
    accumulate: int | None = option("Batches that are accumulated for one step. Default: 1.", min=1)


_RUNNING = {"text", "out", "gradient_checkpointing", "save_every", "log_every", "device", "recipe", "pairs"}
"""Options for where, how and on what a training runs; all others say what is trained."""


@dataclass(frozen=True, kw_only=True)
class SegmentOptions(TrainingOptions):
    """The options of trainings on segments of texts, or by a recipe."""

    block_size: int | None = option("Tokens in a block, including its landmark.", min=2)
    context: int | None = option("Tokens of a segment. Default: 32 blocks.", min=1)
    valid: float | None = option("Hold out this share of the text to measure perplexity, such as 0.05.")


def refuse_unfit(given: Mapping[str, Any], fitting: Set[str], kind: str) -> None:
    """Raise ``InvalidArgument`` for ``given`` options that are not among those ``fitting`` for ``kind``."""
    unfit = sorted(given.keys() - fitting)
    if unfit:
        options = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise InvalidArgument(f"{kind} does not take {options}; leave it out.")
    if {"tokenizer", "vocabulary"} <= given.keys():
        raise InvalidArgument("--tokenizer names a tokenizer, so none is trained: leave --vocabulary out")


def check_fit(init: Path, given: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options that do not match the model in ``init``, which has ``there``."""
    if "preset" in given:
        raise InvalidArgument(f"--preset is for new models, but {init} already has a size. Leave --preset out.")
    for name, value in there.items():
        if given.get(name, value) != value:
            option = "--" + name.replace("_", "-")
            raise InvalidArgument(f"{option} {given[name]} does not fit {init}, which has {value}: leave {option} out")


def with_optimisation(recipe: Any, given: Mapping[str, Any]) -> Any:
    """Return the recipe, trained as the options say."""
    return replace(recipe, optimisation=replace(recipe.optimisation, **_optimisation(given)))


def optimisation_of(given: Mapping[str, Any]) -> Optimisation:
    """Return the ``Optimisation`` that the options describe, with a learning rate that suits the size."""
    rate = FINE_TUNING_RATE if "init" in given else LEARNING_RATES.get(given.get("preset", "tiny"), FINE_TUNING_RATE)
    return Optimisation(**{"learning_rate": rate, **_optimisation(given)})


def _optimisation(given: Mapping[str, Any]) -> dict[str, Any]:
    changes = {name: given[name] for name in OPTIMISATION if name in given}
    return {"steps": None, **changes} if "epochs" in changes else changes


def changes_of(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``given`` options that define a model, under their ``names`` in its configuration."""
    return {names[name]: value for name, value in given.items() if name in names}
