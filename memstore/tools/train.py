"""``memstore train``: make a model that retrieves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.errors import InvalidArgument, NotFound
from memstore.tools.failures import Interrupted
from memstore.tools.options import Threads, use_threads
from memstore.tools.output import Json, Page, Report

Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TEXT]...",
        help="Text files, folders of .txt files, or Hugging Face dataset folders.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the model; the same folder again resumes.", show_default=False)]
RecipeName = Annotated[str | None, typer.Option(help="Train without texts: passkey-cpu or two-hop-cpu.")]
Pairs = Annotated[Path | None, typer.Option(help="Fine-tune on this JSON Lines file of prompts and answers.")]
Init = Annotated[Path | None, typer.Option(help="Start from the model in this folder.")]
Preset = Annotated[str | None, typer.Option(help="Size: tiny (without it), small-128m or medium-350m.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Folder of a tokenizer. Without it: one is trained on the texts.")]
Vocabulary = Annotated[int | None, typer.Option(min=258, help="Tokens of a tokenizer that is trained.")]
BlockSize = Annotated[int | None, typer.Option(min=2, help="Tokens in a block, its landmark counted.")]
Groups = Annotated[int | None, typer.Option(min=1, help="Groups of upper layers; each retrieves once.")]
Context = Annotated[int | None, typer.Option(min=1, help="Tokens of a segment. Without it: 32 blocks.")]
Valid = Annotated[float | None, typer.Option(help="Part of the text held out to measure perplexity, such as 0.05.")]
Column = Annotated[str | None, typer.Option(help="Column of a dataset that holds the text. Without it: text.")]
PromptField = Annotated[str | None, typer.Option(help="Field of --pairs with the prompt. Without it: prompt.")]
AnswerField = Annotated[str | None, typer.Option(help="Field of --pairs with the answer. Without it: answer.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps. Without it: as --epochs says.")]
Epochs = Annotated[float | None, typer.Option(help="Times through the data. Without it: once.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Segments or pairs a step, per process. Without it: 4.")]
Accumulate = Annotated[int | None, typer.Option(min=1, help="Batches that make one step. Without it: 1.")]
LearningRate = Annotated[float | None, typer.Option(help="Highest learning rate. Without it: what suits the size.")]
Warmup = Annotated[int | None, typer.Option(min=0, help="Steps of warm-up. Without it: 50.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Of weights, order and noise. Without it: 0.")]
Bf16 = Annotated[
    bool | None,
    typer.Option("--bf16/--no-bf16", help="Compute in bfloat16. Without it: as the recipe says, else in float32."),
]
Checkpointing = Annotated[bool, typer.Option("--gradient-checkpointing", help="Use less memory and a third more time.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")]
LogEvery = Annotated[int, typer.Option(min=1, help="Steps between lines of the log.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one) or cpu.")]

OPTIMISATION = ("steps", "epochs", "batch", "accumulate", "learning_rate", "warmup", "seed", "bf16")
_MODEL = ("preset", "block_size", "groups", "vocabulary")
FITTING = {
    "texts": {*OPTIMISATION, *_MODEL, "tokenizer", "context", "valid", "column", "init"},
    "--recipe": {"steps", "learning_rate", "warmup", "seed", "bf16", "groups", "init"},
    "--pairs": {*OPTIMISATION, "prompt_field", "answer_field", "init", "block_size", "groups"},
}
"""What can be said beside each kind of data."""


def drt(
    text: Texts = None,
    *,
    out: Out,
    recipe: RecipeName = None,
    pairs: Pairs = None,
    init: Init = None,
    preset: Preset = None,
    tokenizer: Tokenizer = None,
    vocabulary: Vocabulary = None,
    block_size: BlockSize = None,
    groups: Groups = None,
    context: Context = None,
    valid: Valid = None,
    column: Column = None,
    prompt_field: PromptField = None,
    answer_field: AnswerField = None,
    steps: Steps = None,
    epochs: Epochs = None,
    batch: Batch = None,
    accumulate: Accumulate = None,
    learning_rate: LearningRate = None,
    warmup: Warmup = None,
    seed: Seed = None,
    bf16: Bf16 = None,
    gradient_checkpointing: Checkpointing = False,
    save_every: SaveEvery = 200,
    log_every: LogEvery = 50,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> Report:
    """Train a DRT: a language model that learns which blocks of its past to read again.

    On texts, by a recipe that needs none, or on prompts and answers. The result is a Hugging Face model folder.
    After an interruption the same command goes on from the last checkpoint, to the same result. Under torchrun
    (torchrun --nproc-per-node 2 -m memstore.tools.app train drt ...) every process trains on its part of a batch.

    Example:

        memstore train drt --recipe passkey-cpu --out passkey

    In Python: memstore.train.train_recipe, memstore.train.train_on_texts and memstore.train.train_on_pairs.
    """
    given = chosen(
        init=init,
        preset=preset,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        block_size=block_size,
        groups=groups,
        context=context,
        valid=valid,
        column=column,
        prompt_field=prompt_field,
        answer_field=answer_field,
        steps=steps,
        epochs=epochs,
        batch=batch,
        accumulate=accumulate,
        learning_rate=learning_rate,
        warmup=warmup,
        seed=seed,
        bf16=bf16,
    )
    _check(text, recipe, pairs, given)
    return carry_out(
        lambda runtime: _train(text, recipe, pairs, out, given, runtime),
        out,
        threads,
        device=device,
        save_every=save_every,
        log_every=log_every,
        gradient_checkpointing=gradient_checkpointing,
        progress=not json,
    )


def chosen(**options: Any) -> dict[str, Any]:
    """The options that were given: those left at None are not."""
    return {name: value for name, value in options.items() if value is not None}


def carry_out(train: Callable[[Any], dict[str, Any]], out: Path, threads: int | None, **settings: Any) -> Report:
    """The report of a training in the folder ``out``, which ``train`` does with a ``Runtime`` of ``settings``."""
    use_threads(threads)
    _require_packages()
    from memstore.train import Runtime

    runtime = Runtime(**settings)
    _one_voice()
    try:
        data = train(runtime)
    except KeyboardInterrupt:
        raise _interrupted(out) from None
    return Report(data=data, text=lambda page: _show(page, data))


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
    from dataclasses import replace

    from memstore.train.recipes import find_recipe

    recipe = find_recipe(name)
    if "groups" in given:
        recipe = recipe.with_groups(given["groups"])
    changes = {name: given[name] for name in OPTIMISATION if name in given}
    return replace(recipe, optimisation=replace(recipe.optimisation, **changes))


def optimisation_of(given: Mapping[str, Any]) -> Any:
    """The ``Optimisation`` that the options say, with the learning rate that suits the size."""
    from memstore.train.settings import FINE_TUNING_RATE, LEARNING_RATES, Optimisation

    rate = FINE_TUNING_RATE if "init" in given else LEARNING_RATES.get(given.get("preset", "tiny"), FINE_TUNING_RATE)
    return Optimisation(**{"learning_rate": rate, **{name: given[name] for name in OPTIMISATION if name in given}})


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


def _interrupted(out: Path) -> Interrupted:
    from memstore.train.run import complete, last_checkpoint

    last = last_checkpoint(out)
    where = f"go on from step {complete(last)['step']:,}" if last else "start again, for no checkpoint was written yet"
    return Interrupted(f"interrupted; run the same command again to {where}")


def _show(page: Page, data: Mapping[str, Any]) -> None:
    page.facts({name: value for name, value in data.items() if name != "next_command"})
    if "next_command" in data:
        page.line()
        page.line(f"Next: {data['next_command']}")
