"""``memstore train landmark``: make a model whose attention retrieves, or a baseline that it is compared with."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.errors import InvalidArgument
from memstore.tools import train
from memstore.tools.models import resolve_model
from memstore.tools.verb import Report, taking


@dataclass(frozen=True, kw_only=True)
class LandmarkTraining(train.SegmentTraining):
    """The options of ``memstore train landmark``."""

    recipe: Annotated[
        str | None,
        typer.Option(help="landmark-cpu (needs no text), landmark-prose-cpu, landmark-pg19 or landmark-finetune."),
    ] = None
    init: Annotated[
        Path | None,
        typer.Option(
            help="Start from the landmark model, or the stock Llama-like one, in this folder, or from smollm2."
        ),
    ] = None
    lora: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train adapters of this rank and the landmark only (LoRA); they are merged into the result."
        ),
    ] = None
    preset: Annotated[str | None, typer.Option(help="Size: tiny (without it), or paper.")] = None
    attention: Annotated[
        str | None, typer.Option(help="landmark (without it), or a baseline: full, window, xl (Transformer-XL).")
    ] = None
    context_miss: Annotated[
        bool, typer.Option("--context-miss", help="Train a context-miss token, which says when to skip.")
    ] = False


_OF_NEEDLES = {"steps", "learning_rate", "warmup", "seed", "bf16", "init"}
_MODEL = {
    "attention": "attention",
    "block_size": "block_size",
    "vocabulary": "vocab_size",
    "context_miss": "context_miss",
}
"""Options that a model is made of, and their names in its configuration."""
_DATA = ("tokenizer", "context", "valid", "column")
_OF_TEXTS = {*train.OPTIMISATION, *_MODEL, *_DATA, "preset", "init", "lora"}


@taking(LandmarkTraining)
def landmark(options: LandmarkTraining) -> Report:
    """Train a landmark model: a language model whose attention retrieves blocks of its own past.

    On texts, or by a recipe; other options change what the recipe says. Weights that are new begin with an ordinary
    softmax, and landmarks come to count as training goes. The result is a Hugging Face model folder. After an
    interruption the same command goes on from the last checkpoint, to the same result.

    Example:

        memstore train landmark book1.txt book2.txt --recipe landmark-prose-cpu --out prose
        memstore train landmark book1.txt --recipe landmark-finetune --init smollm2 --lora 8 --out tuned

    In Python: memstore.train.train_recipe and memstore.train.train_on_texts.
    """
    given = options.given()
    if not options.context_miss:  # a flag that is not set says nothing: a model to start from may have the token
        given.pop("context_miss", None)
    if "init" in given:
        given["init"] = Path(resolve_model(str(given["init"])))
    return options.carry_out(lambda runtime: _train(options.text or [], options.recipe, options.out, given, runtime))


def _train(texts: list[str], name: str | None, out: Path, given: dict[str, Any], runtime: Any) -> dict[str, Any]:
    from memstore.train.recipes import LANDMARK_RECIPES, TEXT_RECIPES, find_recipe

    recipe = None if name is None else find_recipe(name, {**LANDMARK_RECIPES, **TEXT_RECIPES})
    if name in LANDMARK_RECIPES:
        if texts:
            raise InvalidArgument(f"--recipe {name} trains without texts; leave them out.")
        train.refuse_unfit(given, _OF_NEEDLES, f"--recipe {name}")
        return _on_needles(recipe, out, given, runtime)
    if not texts:
        raise InvalidArgument("train on texts, or with --recipe landmark-cpu, which needs none: got neither.")
    train.refuse_unfit(given, _OF_TEXTS, "texts")
    return _on_texts(texts, recipe, out, given, runtime)


def _on_needles(recipe: Any, out: Path, given: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    from memstore.train import train_recipe

    return train_recipe(train.with_optimisation(recipe, given), out, init=given.get("init"), runtime=runtime)


def _on_texts(texts: list[str], recipe: Any, out: Path, given: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    from memstore.train import train_on_texts
    from memstore.train.family import LANDMARK

    settings = {name: given[name] for name in _DATA if name in given}
    if recipe is not None:
        settings = {"context": recipe.context, "valid": recipe.valid, **settings}
    return train_on_texts(
        texts,
        out,
        config=_config(recipe, given),
        family=LANDMARK,
        changes={**({} if recipe is None else recipe.model), **_changes(given)},
        init=given.get("init"),
        lora=given.get("lora"),
        **settings,
        optimisation=train.optimisation_of(given)
        if recipe is None
        else train.with_optimisation(recipe, given).optimisation,
        runtime=runtime,
    )


def _config(recipe: Any, given: Mapping[str, Any]) -> Any:
    """The new model's configuration; None where the training starts from a model."""
    from memstore.models.landmark import LandmarkConfig

    changes = _changes(given)
    init = given.get("init")
    if init is not None:
        _check_fit(init, given)
        return None
    if recipe is None:
        return LandmarkConfig.preset(given.get("preset", "tiny"), **changes)
    if "preset" in given:
        raise InvalidArgument(f"--recipe {recipe.name} says how large the model is; leave --preset out.")
    if recipe.preset is None:
        raise InvalidArgument(f"--recipe {recipe.name} needs a model to start from: name its folder with --init")
    return recipe.config(**changes)


def _changes(given: Mapping[str, Any]) -> dict[str, Any]:
    return {_MODEL[name]: value for name, value in given.items() if name in _MODEL}


def _check_fit(init: Path, given: Mapping[str, Any]) -> None:
    from memstore.train.family import LANDMARK
    from memstore.train.start import load_config

    if LANDMARK.has(init):
        config = load_config(init, LANDMARK)
        there = {option: getattr(config, name) for option, name in _MODEL.items()}
    else:  # a stock model, which gets landmarks now and keeps its words
        there = {"vocabulary": jsonlib.loads((init / "config.json").read_text("utf-8")).get("vocab_size")}
    train.check_fit(init, given, there)
