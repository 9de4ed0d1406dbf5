"""Training of DRTs: on texts, on pairs, and by recipes whose needles have distractors from a bank of earlier blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memstore.errors import InvalidArgument
from memstore.models.drt.configuration import DRTConfig
from memstore.models.drt.modeling import DTYPES, DRTForCausalLM
from memstore.models.drt.options import DRTTraining
from memstore.models.drt.retrieval import SharedBlocks
from memstore.readers import kinds
from memstore.train.options import (
    OPTIMISATION,
    Optimisation,
    Runtime,
    check_fit,
    optimisation_of,
    refuse_unfit,
    with_optimisation,
)
from memstore.train.recipes import Recipe, find_recipe
from memstore.train.run import Run
from memstore.train.texts import train_on_pairs, train_on_texts, train_recipe
from memstore.train.trainer import AnswerTrainer, MemoryTrainer
from memstore.train.training import Folder, Training, load_config

MEMORY = 0.95
"""Weight of the earlier steps, at each step, in the running share of needles found."""


class Bank:
    """Blocks that rows may retrieve beside their own.

    The bank listens to the block encoder and keeps the latest blocks, without gradients. It opens as long as needles
    are found, and closes when they are not. Among ``n`` distractors the Gumbel noise of the choice reaches ``log n``. A
    block that does not lead them by as much is not taken, and gets no gradient then. Each doubling needs the same
    growth of that lead. ``docs/notes/drt.md`` describes the runs that failed.
    """

    opened: float = 0.0
    """0: no distractors; 1: all. In between their number grows exponentially."""
    found: float = 1.0
    """The share of the needles that were found lately."""

    states: Tensor | None = None
    """``[P, S, hidden]``, the latest first."""
    landmarks: Tensor | None = None
    """``[P, hidden]``"""

    def __init__(self, model: DRTForCausalLM, recipe: Recipe) -> None:
        self._recipe = recipe
        self._dtype = DTYPES[model.config.state_dtype]
        self._size = model.config.tokens_per_block
        self._encoded: tuple[Tensor, Tensor] | None = None
        if recipe.bank:
            model.model.encoder.register_forward_hook(self._listen)

    def _listen(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG002 - a hook
        if module.training:
            self._encoded = output[0].detach(), output[1].detach()

    def shared(self, free: Tensor, progress: float) -> SharedBlocks | None:
        """Return blocks to share at ``progress``. Tokens ``free [B, T]`` hold no answer to other rows' questions."""
        recipe = self._recipe
        count = round(recipe.bank**self.opened) if recipe.bank else 0
        if progress < recipe.hard_from or self.states is None or self.landmarks is None or count < 2:
            return None
        # The blocks of other rows add many distractors at once.
        rows = free if recipe.share_rows and count * self._size >= free.numel() else None
        return SharedBlocks(rows=rows, states=self.states[:count], landmarks=self.landmarks[:count])

    def pace(self, found: float, progress: float, steps: int) -> None:
        """Open or close by a step, given the share of needles ``found`` at ``progress`` in a training of ``steps``."""
        recipe = self._recipe
        if progress >= recipe.hard_from:
            self.found = MEMORY * self.found + (1 - MEMORY) * found
            width = 1 / max(1.0, recipe.bank_growth * steps)
            self.opened = min(1.0, max(0.0, self.opened + (width if self.found >= recipe.ready else -width)))

    def keep(self, free: Tensor) -> None:
        """Keep the free blocks of the rows that were just encoded."""
        if self._encoded is None:
            return
        blocks = free.unflatten(1, (-1, self._size)).all(-1)
        states, landmarks = (part[blocks].to(self._dtype) for part in self._encoded)
        self._encoded = None
        if self.states is not None and self.landmarks is not None:
            states, landmarks = torch.cat([states, self.states]), torch.cat([landmarks, self.landmarks])
        self.states, self.landmarks = states[: self._recipe.bank], landmarks[: self._recipe.bank]

    def save(self, path: Path) -> None:
        """Write the blocks, if there are any."""
        tensors = {name: getattr(self, name) for name in ("states", "landmarks") if getattr(self, name) is not None}
        if tensors:
            pace = torch.tensor([self.opened, self.found], dtype=torch.float64)
            save_file({**{name: tensor.contiguous() for name, tensor in tensors.items()}, "pace": pace}, path)

    def load(self, path: Path, device: torch.device) -> None:
        """Continue with the blocks of ``path``, if there are any."""
        if path.exists():
            tensors = load_file(path, device=str(device))
            self.opened, self.found = tensors["pace"].tolist()
            self.states, self.landmarks = tensors["states"], tensors["landmarks"]


class _NeedleTrainer(AnswerTrainer):
    """Trains a DRT, with distractors from a bank."""

    def __init__(self, recipe: Recipe, run: Run, model: DRTForCausalLM, *rest: Any, **options: Any) -> None:
        super().__init__(recipe, run, model, *rest, **options)
        self.bank = Bank(model, recipe)
        self._gumbel = DRTConfig.preset("tiny", **recipe.model).gumbel

    def logits_of(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        ids, free = inputs["input_ids"], inputs["free"]
        self.trained.config.gumbel = self._gumbel if self.progress < self.recipe.hard_from else self.recipe.hard_gumbel
        shared = self.bank.shared(free, self.progress)
        logits: Tensor = model(input_ids=ids, shared=shared, use_cache=False).logits
        self.bank.keep(free)
        distractors = 0 if shared is None or shared.states is None else len(shared.states)
        self._note("distractors", torch.tensor(float(distractors)))
        return logits

    def learned(self, answer: Tensor, found: float) -> None:  # noqa: ARG002 - the ramp's measure
        self.bank.pace(found, self.progress, self.state.max_steps)

    def keep(self, checkpoint: Path) -> None:
        self.bank.save(checkpoint / f"bank-{self.args.process_index}.safetensors")

    def resume(self, checkpoint: Path) -> None:
        self.bank.load(checkpoint / f"bank-{self.args.process_index}.safetensors", self.args.device)


COPIED_OUTPUTS = 0.3
"""Factor on what copied layers add to the stream, so that twice the layers do not add twice as much."""


@torch.no_grad()
def grown(source: DRTForCausalLM, config: DRTConfig) -> DRTForCausalLM:
    """Return a model of ``config`` with the weights of ``source``. Its upper layers are repeated for those it lacks."""
    model = DRTForCausalLM(config)
    state, weights = model.state_dict(), source.state_dict()
    held = [f"model.upper.{g}.{n}." for g, count in enumerate(source.config.upper_layers) for n in range(count)]
    wanted = [f"model.upper.{g}.{n}." for g, count in enumerate(config.upper_layers) for n in range(count)]
    for number, prefix in enumerate(wanted):
        for name in [each for each in state if each.startswith(prefix)]:
            weight = weights[held[number % len(held)] + name.removeprefix(prefix)]
            added = number >= len(held) and name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            state[name].copy_(weight * COPIED_OUTPUTS if added else weight)
    last = len(source.config.upper_layers) - 1
    for name, weight in state.items():
        if name.startswith("model.retrievers."):
            _, _, group, rest = name.split(".", 3)
            weight.copy_(weights[f"model.retrievers.{min(int(group), last)}.{rest}"])
        elif not name.startswith("model.upper."):
            weight.copy_(weights[name])
    model.load_state_dict(state)
    return model


GROWN = ("upper_layers", "landmark_uses_own", "retrieval_top_k", "gumbel", "window")
"""Settings that may differ in a model that grows from another."""


def _outgrowing(source: DRTConfig, config: DRTConfig, init: Folder) -> DRTConfig:
    """Return the config of ``source``, with the settings that may differ taken from ``config``."""
    for name in ("block_size", "hidden_size", "intermediate_size", "num_attention_heads", "lower_layers", "positions"):
        if getattr(source, name) != getattr(config, name):
            raise InvalidArgument(
                f"this recipe trains models with {name}={getattr(config, name)}, but {init} has "
                f"{getattr(source, name)}. Leave --init out."
            )
    if sum(source.upper_layers) > sum(config.upper_layers):
        raise InvalidArgument(
            f"this recipe trains models with upper_layers={config.upper_layers}, but {init} has more: "
            f"{source.upper_layers}. Leave --init out."
        )
    changed = copy.deepcopy(source)
    for name in GROWN:
        setattr(changed, name, copy.deepcopy(getattr(config, name)))
    return DRTConfig.from_dict(changed.to_dict())


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="passkey-cpu",
            task="passkey",
            model={"upper_layers": [2], "initializer_range": 0.06},
            stages=((0.0, {"passkey": 1.0}),),
            optimisation=Optimisation(steps=3600, restart=0.5),
            blocks=(2, 7),
            ramp=0.2,
            distinct_until=0.2,
            few_from=0.25,
            hard_from=0.5,
            bank_growth=0.08,
            next_command="memstore eval passkey --model {model}",
        ),
        Recipe(
            name="two-hop-cpu",
            task="two-hop",
            start="passkey-cpu",
            model={"upper_layers": [2, 2], "landmark_uses_own": True, "retrieval_top_k": 8},
            stages=(
                (0.00, {"passkey": 0.1, "easy one-hop": 0.6, "easy two-hop": 0.3}),
                (0.24, {"passkey": 0.1, "easy one-hop": 0.6, "easy two-hop": 0.3}),
                (0.32, {"passkey": 0.1, "easy one-hop": 0.1, "one-hop": 0.4, "two-hop": 0.4}),
                (0.50, {"passkey": 0.1, "one-hop": 0.4, "two-hop": 0.5}),
                (0.60, {"passkey": 0.1, "one-hop": 0.2, "two-hop": 0.7}),
            ),
            optimisation=Optimisation(steps=6600, learning_rate=1.5e-3, restart=0.7),
            distinct_until=0.5,
            few_digits=0.0,
            hard_from=0.7,
            next_command="memstore eval two-hop --model {model}",
        ),
    )
}


_MODEL = ("preset", "block_size", "groups", "vocabulary")
FITTING = {
    "texts": {*OPTIMISATION, *_MODEL, "tokenizer", "context", "valid", "column", "init"},
    "--recipe": {"steps", "learning_rate", "warmup", "seed", "bf16", "groups", "init"},
    "--pairs": {*OPTIMISATION, "prompt_field", "answer_field", "init", "block_size", "groups"},
}
"""Options that can be set beside each kind of data."""


def train(options: DRTTraining, runtime: Runtime) -> dict[str, Any]:
    """Run ``memstore train drt``. Raise ``InvalidArgument`` for options that do not belong together."""
    given = options.given()
    data = {"texts": options.text, "--recipe": options.recipe, "--pairs": options.pairs}
    named = [kind for kind, value in data.items() if value]
    if len(named) != 1:
        what = " and ".join(named) if named else "nothing"
        raise InvalidArgument(f"train on texts, with --recipe or with --pairs: pass exactly one of them, got {what}.")
    if options.pairs and options.init is None:
        raise InvalidArgument("--pairs needs a trained model to start from: name its folder with --init")
    refuse_unfit(given, FITTING[named[0]], named[0])
    init: Any = options.init
    if init is not None:
        config = load_config(init, DRT)
        sizes = {"block_size": config.block_size, "vocabulary": config.vocab_size, "groups": len(config.upper_layers)}
        check_fit(init, given, sizes)
    if options.recipe is not None:
        return train_recipe(_recipe(options.recipe, given), options.out, init=init, runtime=runtime)
    settings: dict[str, Any] = {"optimisation": optimisation_of(given), "runtime": runtime}
    if options.pairs is not None:
        settings |= {name: given[name] for name in ("prompt_field", "answer_field") if name in given}
        return train_on_pairs(options.pairs, options.out, init=init, **settings)
    settings |= {name: given[name] for name in ("tokenizer", "context", "valid", "column") if name in given}
    settings["config"] = _config(given) if init is None else None
    return train_on_texts(options.text or [], options.out, init=init, **settings)


def _recipe(name: str, given: Mapping[str, Any]) -> Any:
    recipe = find_recipe(name, RECIPES)
    if "groups" in given:
        recipe = recipe.with_groups(given["groups"])
    return with_optimisation(recipe, given)


def _config(given: Mapping[str, Any]) -> Any:
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


DRT = Training(
    kinds.DRT, DRTConfig, DRTForCausalLM, train, MemoryTrainer, _NeedleTrainer, RECIPES, grow=grown, outgrow=_outgrowing
)
