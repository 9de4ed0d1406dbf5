"""Training of landmark models: the ordinary one, with a warm start if weights are new.

With the grouped softmax from the first step on, the model learns nothing over a distance. A landmark without weight
gets no gradient that could teach it what it stands for. So attention begins as an ordinary causal softmax (``ramp`` 0).
It becomes the paper's (``ramp`` 1) by adding a growing part of a block's landmark score to the scores of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from memstore.errors import InvalidArgument
from memstore.json_checks import maybe, number, table
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.modeling import LandmarkForCausalLM, lora_config, make_landmark, with_adapters
from memstore.models.landmark.options import LandmarkTraining
from memstore.readers import kinds
from memstore.train.options import (
    OPTIMISATION,
    Optimisation,
    Runtime,
    changes_of,
    check_fit,
    optimisation_of,
    refuse_unfit,
    with_optimisation,
)
from memstore.train.recipes import PASSKEYS, Recipe, find_recipe
from memstore.train.run import Run, read_json, write_json
from memstore.train.texts import train_on_texts, train_recipe
from memstore.train.trainer import AnswerTrainer, MemoryTrainer
from memstore.train.training import Training, config_of, load_weights


@dataclass(frozen=True, kw_only=True)
class LandmarkRecipe(Recipe):
    """What to train a landmark model on, and how."""

    warm_until: float = 0.3
    """Smoothed loss of the answers below which landmarks begin to count."""
    ramp_steps: int = 100
    """Steps from causal softmax to the grouped one."""
    kind: ClassVar[str] = "landmark"
    aligned: ClassVar[bool] = False


MEMORY = 0.95
"""Weight of the earlier steps, at each step, in the smoothed loss of the answers."""
WARM, RAMPED = 0.1, 0.25
"""For texts: parts of the training after which landmarks begin to count, and count in full."""
RAMP_FILE = "ramp.json"


# Seeds differ in how soon they copy answers, so the ramp begins when answers are learned, not at a step. Texts have no
# answers, and their ramp depends on the step alone. Weights that were trained before begin with the full softmax.
class Ramp:
    """The position of attention on its way to the grouped softmax, which begins when answers are learned."""

    def __init__(self, recipe: LandmarkRecipe) -> None:
        self._recipe = recipe
        self.value = 0.0
        self.answer: float | None = None
        """The smoothed loss of the answers."""

    def pace(self, answer: float) -> None:
        """Take a step's ``answer`` loss. The ramp begins when answers are learned, and then continues to its end."""
        self.answer = answer if self.answer is None else MEMORY * self.answer + (1 - MEMORY) * answer
        if self.value or self.answer < self._recipe.warm_until:
            self.value = min(1.0, self.value + 1 / self._recipe.ramp_steps)


class LandmarkTextTrainer(MemoryTrainer):
    """Trains a landmark model, or the adapters of one (a ``PeftModel``), on batches with ``labels``."""

    def __init__(self, run: Run, model: Any, *rest: Any, **options: Any) -> None:
        super().__init__(run, model, *rest, **options)
        self._adapted = model if hasattr(model, "get_base_model") else None
        """The model with its adapters, if only these are trained."""
        if self._adapted is not None:
            self.trained = self._adapted.get_base_model()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Set the ramp, which depends on the step alone, and train a step. See ``MemoryTrainer``."""
        begun = (self.progress - WARM) / (RAMPED - WARM)
        self.trained.ramp = min(1.0, max(0.0, begun)) if self.fresh else 1.0
        return super().training_step(model, inputs, num_items_in_batch)

    def finish(self) -> None:
        """Merge adapters into the weights, so that the model is measured in its final form."""
        if self._adapted is not None:
            self.trained = self._adapted.merge_and_unload()
        self.trained.ramp = 1.0


class _NeedleTrainer(AnswerTrainer):
    def __init__(self, recipe: LandmarkRecipe, run: Run, model: Any, *rest: Any, **options: Any) -> None:
        super().__init__(recipe, run, model, *rest, **options)
        self.ramp = Ramp(recipe)
        if not self.fresh:
            self.ramp.value = 1.0

    def logits_of(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        self.trained.ramp = self.ramp.value
        return super().logits_of(model, inputs)

    def learned(self, answer: Tensor, found: float) -> None:  # noqa: ARG002 - the bank's measure
        self.ramp.pace(float(self.accelerator.reduce(answer, "mean")))  # all processes have the same ramp
        self._note("ramp", torch.tensor(self.ramp.value))

    def keep(self, checkpoint: Path) -> None:
        if self.args.process_index == 0:
            write_json(checkpoint / RAMP_FILE, {"value": self.ramp.value, "answer": self.ramp.answer})

    def resume(self, checkpoint: Path) -> None:
        kept = read_json(checkpoint / RAMP_FILE, table(value=number(1), answer=maybe(number(1e9))))
        self.ramp.value, self.ramp.answer = kept["value"], kept["answer"]

    def finish(self) -> None:
        self.trained.ramp = 1.0


def landmark_of_stock(folder: str | Path, **changes: Any) -> LandmarkForCausalLM:
    """Return a landmark model with the weights of the stock model in ``folder``.

    Raises ``DamagedError`` if it cannot be loaded, ``UnsupportedModel`` if it has another architecture.
    """
    made = make_landmark(load_weights(AutoModelForCausalLM, folder), **changes)
    assert isinstance(made, LandmarkForCausalLM)
    return made


LANDMARK_RECIPES: dict[str, LandmarkRecipe] = {
    recipe.name: recipe
    for recipe in (
        LandmarkRecipe(
            name="landmark-cpu",
            model={"initializer_range": 0.06, "local_layers": [0, 1, 2]},
            optimisation=Optimisation(steps=2600, learning_rate=3e-3, restart=0.6),
            **PASSKEYS,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class _TextRecipe:
    """How to train a landmark model on texts that the user names."""

    name: str
    preset: str | None
    """Sizes of the model; None: a stock model that the user names is fine-tuned."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the preset."""
    context: int
    """Tokens of a segment."""
    valid: float = 0.0
    """Part of the text that is held out."""
    optimisation: Optimisation

    def config(self, **changes: Any) -> Any:
        """Return the configuration of its model, with changes; None for a stock model's."""
        return None if self.preset is None else LandmarkConfig.preset(self.preset, **{**self.model, **changes})


TEXT_RECIPES: dict[str, _TextRecipe] = {
    recipe.name: recipe
    for recipe in (
        _TextRecipe(
            name="landmark-prose-cpu",
            preset="tiny",
            model={"vocab_size": 2048, "block_size": 51, "window": 256, "segment_blocks": 5, "retrieval_top_k": 2},
            context=512,
            valid=0.05,
            optimisation=Optimisation(steps=1200, batch=4, learning_rate=3e-3),
        ),
        # Section 4.1: AdamW 0.9/0.95 with decay 1e-3, 2e-3 to 4e-4 after a warm-up of 2%, 128 sequences of 512 a step.
        _TextRecipe(
            name="landmark-pg19",
            preset="paper",
            context=512,
            optimisation=Optimisation(
                steps=240_000, batch=16, accumulate=8, learning_rate=2e-3, final_rate=0.2, warmup=4800, bf16=True
            ),
        ),
        # The published command for LLaMA 7B: 128 sequences of 512 a step, 16 on each of its 8 GPUs.
        _TextRecipe(
            name="landmark-finetune",
            preset=None,
            model={"block_size": 64},
            context=512,
            optimisation=Optimisation(
                steps=15_000,
                batch=2,
                accumulate=64,
                learning_rate=2e-5,
                final_rate=0.0,
                warmup=450,
                weight_decay=0.1,
                betas=(0.9, 0.999),
                bf16=True,
            ),
        ),
    )
}


_OF_NEEDLES = {"steps", "learning_rate", "warmup", "seed", "bf16", "init"}
_MODEL = {
    "attention": "attention",
    "block_size": "block_size",
    "vocabulary": "vocab_size",
    "context_miss": "context_miss",
}
"""Options that define a model, and their names in its configuration."""
_DATA = ("tokenizer", "context", "valid", "column")
_OF_TEXTS = {*OPTIMISATION, *_MODEL, *_DATA, "preset", "init", "lora"}


def train(options: LandmarkTraining, runtime: Runtime) -> dict[str, Any]:
    """Run ``memstore train landmark``. Raise ``InvalidArgument`` for options that do not belong together."""
    given, name = options.given(), options.recipe
    recipe = None if name is None else find_recipe(name, {**LANDMARK_RECIPES, **TEXT_RECIPES})
    if name in LANDMARK_RECIPES:
        if options.text:
            raise InvalidArgument(f"--recipe {name} trains without texts; leave them out.")
        refuse_unfit(given, _OF_NEEDLES, f"--recipe {name}")
        return train_recipe(with_optimisation(recipe, given), options.out, init=options.init, runtime=runtime)
    if not options.text:
        raise InvalidArgument("train on texts, or with --recipe landmark-cpu, which needs none: got neither.")
    refuse_unfit(given, _OF_TEXTS, "texts")
    return _on_texts(options.text, recipe, options.out, given, runtime)


def _on_texts(texts: list[str], recipe: Any, out: Path, given: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    settings = {name: given[name] for name in _DATA if name in given}
    if recipe is not None:
        settings = {"context": recipe.context, "valid": recipe.valid, **settings}
    own_sizes = recipe is None or ("init" in given and LANDMARK.has(given["init"]))
    return train_on_texts(
        texts,
        out,
        config=_config(recipe, given),
        family=LANDMARK,
        changes={**({} if own_sizes else recipe.model), **changes_of(given, _MODEL)},
        init=given.get("init"),
        lora=given.get("lora"),
        **settings,
        optimisation=optimisation_of(given) if recipe is None else with_optimisation(recipe, given).optimisation,
        runtime=runtime,
    )


def _config(recipe: Any, given: Mapping[str, Any]) -> Any:
    """Return the new model's configuration; None if the training starts from a model."""
    init = given.get("init")
    if init is not None and not LANDMARK.has(init):  # a stock model, which gets landmarks now and keeps its vocabulary
        there = {"vocabulary": json.loads((init / "config.json").read_text("utf-8")).get("vocab_size")}
        check_fit(init, given, there)
    if init is not None or recipe is None:
        return config_of(LANDMARK, given, _MODEL)
    if "preset" in given:
        raise InvalidArgument(f"--recipe {recipe.name} sets the size of the model; leave --preset out.")
    if recipe.preset is None:
        raise InvalidArgument(f"--recipe {recipe.name} needs a model to start from: name its folder with --init")
    return recipe.config(**changes_of(given, _MODEL))


LANDMARK = Training(
    kinds.LANDMARK, LandmarkConfig, LandmarkForCausalLM, train, LandmarkTextTrainer, _NeedleTrainer, LANDMARK_RECIPES,
    landmark_of_stock, with_adapters, lora_config,
)  # fmt: skip
