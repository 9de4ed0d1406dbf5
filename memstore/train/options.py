"""The options of trainings, for the command line and each kind of model. Nothing here needs PyTorch.

A kind's own options are a dataclass that continues one of these. ``option`` gives the command line's text for each. An
option at None was not given.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memstore.errors import InvalidArgument

OPTIMISATION = ("steps", "epochs", "batch", "accumulate", "learning_rate", "warmup", "seed", "bf16")
"""Options that are fields of ``Optimisation`` too."""


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

    out: Path = field(metadata={"help": "Folder for the model; the same folder again resumes."})
    steps: int | None = option("Optimizer steps. Without it: as the recipe or --epochs says.", min=1)
    learning_rate: float | None = option("Highest learning rate. Without it: what suits the size.")
    warmup: int | None = option("Steps of warm-up. Without it: 50.", min=0)
    seed: int | None = option("Of weights, order and noise. Without it: 0.", min=0)
    bf16: bool | None = option(
        "Compute in bfloat16. Without it: as the recipe says, else in float32.", flags="--bf16/--no-bf16"
    )
    gradient_checkpointing: bool = option(
        "Use less memory and a third more time.", False, flags="--gradient-checkpointing"
    )
    save_every: int = option("Steps between checkpoints.", 200, min=1)
    log_every: int = option("Steps between lines of the log.", 50, min=1)
    device: str = option("auto (a GPU if there is one) or cpu.", "auto")

    def given(self) -> dict[str, Any]:
        """Return the given options that say what is trained, without those at None."""
        return {name: value for name, value in vars(self).items() if name not in _RUNNING and value is not None}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RunOptions):
    """The options of trainings on texts."""

    text: list[str] | None = option(
        "Text files, folders of .txt files, or Hugging Face dataset folders.", argument="[TEXT]..."
    )
    tokenizer: Path | None = option("Folder of a tokenizer. Without it: one is trained on the texts.")
    vocabulary: int | None = option("Tokens of a tokenizer that is trained.", min=258)
    column: str | None = option("Column of a dataset that holds the text. Without it: text.")
    epochs: float | None = option("Times through the data. Without it: once.")
    batch: int | None = option("Segments or pairs a step, per process. Without it: 4.", min=1)
    accumulate: int | None = option("Batches that make one step. Without it: 1.", min=1)


_RUNNING = {"text", "out", "gradient_checkpointing", "save_every", "log_every", "device", "recipe", "pairs"}
"""Options for where, how and on what a training runs; all others say what is trained."""


@dataclass(frozen=True, kw_only=True)
class SegmentOptions(TrainingOptions):
    """The options of trainings on segments of texts, or by a recipe."""

    block_size: int | None = option("Tokens in a block, its landmark counted.", min=2)
    context: int | None = option("Tokens of a segment. Without it: 32 blocks.", min=1)
    valid: float | None = option("Part of the text held out to measure perplexity, such as 0.05.")


def refuse_unfit(given: Mapping[str, Any], fitting: Set[str], kind: str) -> None:
    """Raise ``InvalidArgument`` for ``given`` options that are not among those ``fitting`` for ``kind``."""
    unfit = sorted(given.keys() - fitting)
    if unfit:
        options = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise InvalidArgument(f"{options} cannot be used with {kind}; leave it out.")


def check_fit(init: Path, given: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options that do not match the model in ``init``, which has ``there``."""
    if "preset" in given:
        raise InvalidArgument(f"--preset is for new models; that of {init} has its size. Leave --preset out.")
    for name, value in there.items():
        if given.get(name, value) != value:
            option = "--" + name.replace("_", "-")
            raise InvalidArgument(
                f"{option} {given[name]} does not match {init}, which has {value}: leave {option} out"
            )


def with_optimisation(recipe: Any, given: Mapping[str, Any]) -> Any:
    """Return the recipe, trained as the options say."""
    return replace(recipe, optimisation=replace(recipe.optimisation, **_optimisation(given)))


def optimisation_of(given: Mapping[str, Any]) -> Any:
    """Return the ``Optimisation`` that the options describe, with a learning rate that suits the size."""
    from memstore.train.settings import FINE_TUNING_RATE, LEARNING_RATES, Optimisation

    rate = FINE_TUNING_RATE if "init" in given else LEARNING_RATES.get(given.get("preset", "tiny"), FINE_TUNING_RATE)
    return Optimisation(**{"learning_rate": rate, **_optimisation(given)})


def _optimisation(given: Mapping[str, Any]) -> dict[str, Any]:
    changes = {name: given[name] for name in OPTIMISATION if name in given}
    return {"steps": None, **changes} if "epochs" in changes else changes
