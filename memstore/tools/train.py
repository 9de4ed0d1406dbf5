"""``memstore train``: make a model that retrieves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.errors import InvalidArgument, NotFound
from memstore.tools.verb import Interruption, Json, Page, Report, Threads, taking, use_threads

OPTIMISATION = ("steps", "epochs", "batch", "accumulate", "learning_rate", "warmup", "seed", "bf16")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The options that every training has; a verb's own come after them."""

    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...",
            help="Text files, folders of .txt files, or Hugging Face dataset folders.",
            show_default=False,
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for the model; the same folder again resumes.", show_default=False)]
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer. Without it: one is trained on the texts.")
    ] = None
    vocabulary: Annotated[int | None, typer.Option(min=258, help="Tokens of a tokenizer that is trained.")] = None
    column: Annotated[str | None, typer.Option(help="Column of a dataset that holds the text. Without it: text.")] = (
        None
    )
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps. Without it: as --epochs says.")] = None
    epochs: Annotated[float | None, typer.Option(help="Times through the data. Without it: once.")] = None
    batch: Annotated[int | None, typer.Option(min=1, help="Segments or pairs a step, per process. Without it: 4.")] = (
        None
    )
    accumulate: Annotated[int | None, typer.Option(min=1, help="Batches that make one step. Without it: 1.")] = None
    learning_rate: Annotated[
        float | None, typer.Option(help="Highest learning rate. Without it: what suits the size.")
    ] = None
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps of warm-up. Without it: 50.")] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights, order and noise. Without it: 0.")] = None
    bf16: Annotated[
        bool | None,
        typer.Option("--bf16/--no-bf16", help="Compute in bfloat16. Without it: as the recipe says, else in float32."),
    ] = None
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Use less memory and a third more time.")
    ] = False
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200
    log_every: Annotated[int, typer.Option(min=1, help="Steps between lines of the log.")] = 50
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one) or cpu.")] = "auto"
    threads: Threads = None
    json: Json = False

    def given(self) -> dict[str, Any]:
        """The options that were given and that say what is trained; those left at None are not."""
        return {name: value for name, value in vars(self).items() if name not in _RUNNING and value is not None}

    def carry_out(self, train: Callable[[Any], dict[str, Any]]) -> Report:
        """The report of a training in the folder ``out``, which ``train`` does with a ``Runtime``."""
        use_threads(self.threads)
        _require_packages()
        from memstore.train import Runtime

        runtime = Runtime(
            device=self.device,
            save_every=self.save_every,
            log_every=self.log_every,
            gradient_checkpointing=self.gradient_checkpointing,
            progress=not self.json,
        )
        _one_voice()
        try:
            data = train(runtime)
        except KeyboardInterrupt:
            raise _interrupted(self.out) from None
        return Report(data=data, text=lambda page: _show(page, data))


_RUNNING = {"text", "out", "gradient_checkpointing", "save_every", "log_every", "device", "threads", "json"}
_RUNNING |= {"recipe", "pairs"}
"""Options that say where and how a training runs, or on what; all others say what is trained."""


@dataclass(frozen=True, kw_only=True)
class SegmentTraining(Training):
    """The options of trainings on segments of texts, or by a recipe."""

    block_size: Annotated[int | None, typer.Option(min=2, help="Tokens in a block, its landmark counted.")] = None
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a segment. Without it: 32 blocks.")] = None
    valid: Annotated[
        float | None, typer.Option(help="Part of the text held out to measure perplexity, such as 0.05.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DRTTraining(SegmentTraining):
    """The options of ``memstore train drt``."""

    recipe: Annotated[str | None, typer.Option(help="Train without texts: passkey-cpu or two-hop-cpu.")] = None
    pairs: Annotated[Path | None, typer.Option(help="Fine-tune on this JSON Lines file of prompts and answers.")] = None
    init: Annotated[Path | None, typer.Option(help="Start from the model in this folder.")] = None
    preset: Annotated[str | None, typer.Option(help="Size: tiny (without it), small-128m or medium-350m.")] = None
    groups: Annotated[int | None, typer.Option(min=1, help="Groups of upper layers; each retrieves once.")] = None
    prompt_field: Annotated[str | None, typer.Option(help="Field of --pairs with the prompt. Without it: prompt.")] = (
        None
    )
    answer_field: Annotated[str | None, typer.Option(help="Field of --pairs with the answer. Without it: answer.")] = (
        None
    )


_MODEL = ("preset", "block_size", "groups", "vocabulary")
FITTING = {
    "texts": {*OPTIMISATION, *_MODEL, "tokenizer", "context", "valid", "column", "init"},
    "--recipe": {"steps", "learning_rate", "warmup", "seed", "bf16", "groups", "init"},
    "--pairs": {*OPTIMISATION, "prompt_field", "answer_field", "init", "block_size", "groups"},
}
"""What can be said beside each kind of data."""


@taking(DRTTraining)
def drt(options: DRTTraining) -> Report:
    """Train a DRT: a language model that learns which blocks of its past to read again.

    On texts, by a recipe that needs none, or on prompts and answers. The result is a Hugging Face model folder.
    After an interruption the same command goes on from the last checkpoint, to the same result. Under torchrun
    (torchrun --nproc-per-node 2 -m memstore.tools.app train drt ...) every process trains on its part of a batch.

    Example:

        memstore train drt --recipe passkey-cpu --out passkey

    In Python: memstore.train.train_recipe, memstore.train.train_on_texts and memstore.train.train_on_pairs.
    """
    given = options.given()
    _check(options.text, options.recipe, options.pairs, given)
    return options.carry_out(
        lambda runtime: _train(options.text, options.recipe, options.pairs, options.out, given, runtime)
    )


def _check(texts: list[str] | None, recipe: str | None, pairs: Path | None, given: Mapping[str, Any]) -> None:
    kinds = [kind for kind, value in (("texts", texts), ("--recipe", recipe), ("--pairs", pairs)) if value]
    if len(kinds) != 1:
        what = " and ".join(kinds) if kinds else "nothing"
        raise InvalidArgument(f"train on texts, with --recipe or with --pairs: one of them is needed, got {what}.")
    if kinds == ["--pairs"] and "init" not in given:
        raise InvalidArgument("--pairs needs a model that can read: name its folder with --init")
    refuse_unfit(given, FITTING[kinds[0]], kinds[0])


def refuse_unfit(given: Mapping[str, Any], fitting: Set[str], kind: str) -> None:
    """Raise ``InvalidArgument`` for options that are ``given`` and do not belong to those ``fitting`` for ``kind``."""
    unfit = sorted(given.keys() - fitting)
    if unfit:
        options = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise InvalidArgument(f"{options} cannot be used with {kind}; leave it out.")


def _require_packages() -> None:
    try:
        import accelerate
        import transformers
    except ModuleNotFoundError as error:
        raise NotFound(f"training needs the package {error.name}: pip install 'torch-memstore[train]'") from None
    del accelerate, transformers


def _one_voice() -> None:
    """Let only the first of several processes that torchrun started report."""
    if int(os.environ.get("RANK", "0")):
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends


def _train(
    texts: list[str] | None, recipe: str | None, pairs: Path | None, out: Path, given: dict[str, Any], runtime: Any
) -> dict[str, Any]:
    from memstore.train import train_on_pairs, train_on_texts, train_recipe

    init: Any = given.get("init")
    if recipe is not None:
        if init is not None:
            _check_fit(init, given)
        return train_recipe(_recipe(recipe, given), out, init=init, runtime=runtime)
    optimisation = optimisation_of(given)
    if pairs is not None:
        _check_fit(init, given)
        fields = {name: given[name] for name in ("prompt_field", "answer_field") if name in given}
        return train_on_pairs(pairs, out, init=init, **fields, optimisation=optimisation, runtime=runtime)
    config = None
    if init is None:
        config = _config(given)
    else:
        _check_fit(init, given)
    options = {name: given[name] for name in ("tokenizer", "context", "valid", "column") if name in given}
    return train_on_texts(
        texts or [], out, config=config, init=init, **options, optimisation=optimisation, runtime=runtime
    )


def _recipe(name: str, given: Mapping[str, Any]) -> Any:
    from memstore.train.recipes import find_recipe

    recipe = find_recipe(name)
    if "groups" in given:
        recipe = recipe.with_groups(given["groups"])
    return with_optimisation(recipe, given)


def with_optimisation(recipe: Any, given: Mapping[str, Any]) -> Any:
    """A recipe, trained as the options say."""
    return replace(recipe, optimisation=replace(recipe.optimisation, **_optimisation(given)))


def _optimisation(given: Mapping[str, Any]) -> dict[str, Any]:
    changes = {name: given[name] for name in OPTIMISATION if name in given}
    return {"steps": None, **changes} if "epochs" in changes else changes


def optimisation_of(given: Mapping[str, Any]) -> Any:
    """The ``Optimisation`` that the options say, with the learning rate that suits the size."""
    from memstore.train.settings import FINE_TUNING_RATE, LEARNING_RATES, Optimisation

    rate = FINE_TUNING_RATE if "init" in given else LEARNING_RATES.get(given.get("preset", "tiny"), FINE_TUNING_RATE)
    return Optimisation(**{"learning_rate": rate, **_optimisation(given)})


def _config(given: Mapping[str, Any]) -> Any:
    from memstore.models.drt import DRTConfig

    config = DRTConfig.preset(given.get("preset", "tiny"))
    changes = {name: given[key] for key, name in _NAMES.items() if key in given}
    if "groups" in given:
        changes["upper_layers"] = _divided(sum(config.upper_layers), given["groups"])
    return DRTConfig.preset(given.get("preset", "tiny"), **changes)


_NAMES = {"block_size": "block_size", "vocabulary": "vocab_size"}


def _divided(layers: int, groups: int) -> tuple[int, ...]:
    if layers % groups:
        raise InvalidArgument(f"--groups must divide the {layers} upper layers, got {groups}")
    return (layers // groups,) * groups


def _check_fit(init: Path, given: Mapping[str, Any]) -> None:
    from memstore.train.start import load_config

    config = load_config(init)
    sizes = {"block_size": config.block_size, "vocabulary": config.vocab_size, "groups": len(config.upper_layers)}
    check_fit(init, given, sizes)


def check_fit(init: Path, given: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options that ask for another model than that in ``init``, which has ``there``."""
    if "preset" in given:
        raise InvalidArgument(f"--preset is for new models; that of {init} has its size. Leave --preset out.")
    for name, value in there.items():
        if given.get(name, value) != value:
            option = "--" + name.replace("_", "-")
            raise InvalidArgument(
                f"{option} {given[name]} does not match {init}, which has {value}: leave {option} out"
            )


def _interrupted(out: Path) -> Interruption:
    from memstore.train.run import complete, last_checkpoint

    last = last_checkpoint(out)
    where = f"go on from step {complete(last)['step']:,}" if last else "start again, for no checkpoint was written yet"
    return Interruption(f"interrupted; run the same command again to {where}")


def _show(page: Page, data: Mapping[str, Any]) -> None:
    page.facts({name: value for name, value in data.items() if name != "next_command"})
    if "next_command" in data:
        page.line()
        page.line(f"Next: {data['next_command']}")
