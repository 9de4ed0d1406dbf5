"""Training of landmark models: the ordinary one, with a warm start where weights are new.

With the grouped softmax from the first step on, nothing is learned over a distance: a landmark that weighs nothing gets
no gradient that says what it stands for. So attention begins as an ordinary causal softmax (``ramp`` 0) and becomes the
paper's from there (``ramp`` 1), by adding a growing part of what a block's landmark says to the scores of its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memstore.train.recipes import LandmarkRecipe
from memstore.train.run import Run, write_json
from memstore.train.trainer import AnswerTrainer, MemoryTrainer

MEMORY = 0.95
"""How much of the answers' loss in the steps before counts, at each step."""
WARM, RAMPED = 0.1, 0.25
"""On texts: parts of the training after which landmarks begin to count, and count in full."""
RAMP_FILE = "ramp.json"


# The ramp begins where answers are copied, not at a step. With the grouped softmax from the start a model stays at
# chance, and how soon a seed copies varies. On texts there are no answers, so there it depends on the step alone (a
# tenth of the training plain, full at a quarter). Weights that were trained before begin with the full softmax.
class Ramp:
    """How far attention is on its way to the grouped softmax, where answers say when it may begin."""

    def __init__(self, recipe: LandmarkRecipe) -> None:
        self._recipe = recipe
        self.value = 0.0
        self.answer: float | None = None
        """The answers' loss, smoothed."""

    def pace(self, answer: float) -> None:
        """Hear of a step's ``answer`` loss: the ramp begins where answers are learned, and then goes on to its end."""
        self.answer = answer if self.answer is None else MEMORY * self.answer + (1 - MEMORY) * answer
        if self.value or self.answer < self._recipe.warm_until:
            self.value = min(1.0, self.value + 1 / self._recipe.ramp_steps)


class LandmarkTextTrainer(MemoryTrainer):
    """Trains a landmark model, or the adapters of one (a ``PeftModel``), on batches with ``labels``."""

    def __init__(self, run: Run, model: Any, *rest: Any, **options: Any) -> None:
        super().__init__(run, model, *rest, **options)
        self._adapted = model if hasattr(model, "get_base_model") else None
        """The model with its adapters around it, where they are what is trained."""
        if self._adapted is not None:
            self.trained = self._adapted.get_base_model()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """See ``MemoryTrainer``; the ramp depends on the step alone."""
        begun = (self.progress - WARM) / (RAMPED - WARM)
        self.trained.ramp = min(1.0, max(0.0, begun)) if self.fresh else 1.0
        return super().training_step(model, inputs, num_items_in_batch)

    def finish(self) -> None:
        """Let the model be measured as it will be used: its adapters become part of its weights."""
        if self._adapted is not None:
            self.trained = self._adapted.merge_and_unload()
        self.trained.ramp = 1.0


class LandmarkNeedleTrainer(AnswerTrainer):
    """Trains a landmark model on needles."""

    def __init__(self, recipe: LandmarkRecipe, run: Run, model: Any, *rest: Any, **options: Any) -> None:
        super().__init__(recipe, run, model, *rest, **options)
        self.ramp = Ramp(recipe)
        if not self.fresh:
            self.ramp.value = 1.0

    def logits_of(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """See ``AnswerTrainer``."""
        self.trained.ramp = self.ramp.value
        logits: Tensor = model(input_ids=inputs["input_ids"], use_cache=False).logits
        return logits

    def learned(self, answer: Tensor, found: float) -> None:  # noqa: ARG002 - the bank's measure
        """See ``AnswerTrainer``. All processes are at the same place of the ramp."""
        self.ramp.pace(float(self.accelerator.reduce(answer, "mean")))
        self._note("ramp", torch.tensor(self.ramp.value))

    def keep(self, checkpoint: Path) -> None:
        """The ramp."""
        if self.args.process_index == 0:
            write_json(checkpoint / RAMP_FILE, {"value": self.ramp.value, "answer": self.ramp.answer})

    def resume(self, checkpoint: Path) -> None:
        """The ramp."""
        kept = json.loads((checkpoint / RAMP_FILE).read_text("utf-8"))
        self.ramp.value, self.ramp.answer = kept["value"], kept["answer"]

    def finish(self) -> None:
        """Let the model be measured as it will be used."""
        self.trained.ramp = 1.0
