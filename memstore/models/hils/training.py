"""Training HiLS models: on texts like any model, and by a recipe on needles.

No warm-up stage is needed. From the first step, the loss reaches the choice through the weights of the chosen blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoModelForCausalLM

from memstore.errors import InvalidArgument
from memstore.models.hils.configuration import HilsConfig
from memstore.models.hils.modeling import HilsForCausalLM, make_hils
from memstore.models.hils.options import HilsTraining
from memstore.readers import kinds
from memstore.train.options import (
    OPTIMISATION,
    Optimisation,
    Runtime,
    changes_of,
    optimisation_of,
    refuse_unfit,
    with_optimisation,
)
from memstore.train.recipes import LOOKUPS, PASSKEYS, Recipe, find_recipe
from memstore.train.texts import train_on_texts, train_recipe
from memstore.train.trainer import AnswerTrainer, MemoryTrainer
from memstore.train.training import Training, config_of, load_weights


class HilsRecipe(Recipe):
    """A recipe for training a HiLS model."""

    kind: ClassVar[str] = "hils"
    aligned: ClassVar[bool] = False


_SMALL = {"initializer_range": 0.06, "num_swa_layers": 3}
RECIPES: dict[str, HilsRecipe] = {
    recipe.name: recipe
    for recipe in (
        HilsRecipe(
            name="hils-passkey-cpu",
            model=_SMALL,
            optimisation=Optimisation(steps=2600, learning_rate=3e-3, restart=0.6),
            **PASSKEYS,
        ),
        HilsRecipe(
            name="hils-lookups-cpu", model=_SMALL, optimisation=Optimisation(steps=1600, learning_rate=3e-3), **LOOKUPS
        ),
    )
}
_OF_NEEDLES = {"steps", "learning_rate", "warmup", "seed", "bf16", "init"}
_MODEL = {"block_size": "chunk_size", "vocabulary": "vocab_size"}
"""Options that decide the model's shape, with their names in its configuration."""
_DATA = ("tokenizer", "context", "valid", "column")


def train(options: HilsTraining, runtime: Runtime) -> dict[str, Any]:
    """Run ``memstore train hils``. Raises ``InvalidArgument`` for options that do not belong together."""
    given = options.given()
    if bool(options.text) == (options.recipe is not None):
        got = "both" if options.text else "neither"
        raise InvalidArgument(
            f"train on texts, or with --recipe hils-passkey-cpu: pass exactly one of them, got {got}."
        )
    if options.recipe is not None:
        recipe = find_recipe(options.recipe, RECIPES)
        refuse_unfit(given, _OF_NEEDLES, f"--recipe {recipe.name}")
        return train_recipe(with_optimisation(recipe, given), options.out, init=options.init, runtime=runtime)
    refuse_unfit(given, {*OPTIMISATION, *_MODEL, *_DATA, "preset", "init"}, "texts")
    return train_on_texts(
        options.text or [],
        options.out,
        config=config_of(HILS, given, _MODEL),
        family=HILS,
        changes=changes_of(given, _MODEL),
        init=options.init,
        **{name: given[name] for name in _DATA if name in given},
        optimisation=optimisation_of(given),
        runtime=runtime,
    )


def hils_of_stock(folder: str | Path, **changes: Any) -> HilsForCausalLM:
    """Convert the stock model in ``folder`` to a HiLS model. Raises ``DamagedError``, ``UnsupportedModel``."""
    return make_hils(load_weights(AutoModelForCausalLM, folder), **changes)


HILS = Training(
    kinds.HILS, HilsConfig, HilsForCausalLM, train, MemoryTrainer, AnswerTrainer, RECIPES, adopt=hils_of_stock
)
