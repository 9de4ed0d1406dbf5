"""How one kind of model is trained: its classes, trainers and recipes, and the model and tokenizer that it starts from.

A training starts from the sizes of a new model, or from a model folder.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from memstore.errors import DamagedError, InvalidArgument, NotFound, UnsupportedModel, first_line
from memstore.readers.kinds import Kind, kind_in, quiet_transformers, trainable
from memstore.train.options import changes_of, check_fit
from memstore.train.recipes import Recipe
from memstore.train.run import Run, digest_of_files
from memstore.train.trainer import AnswerTrainer, MemoryTrainer

Folder = str | Path


@dataclass(frozen=True)
class Training:
    """How one kind of model is trained. ``Kind.training`` names it."""

    kind: Kind
    config: type[Any]
    """The class of its configuration, with presets, ``block_size`` and ``tokens_per_block``."""
    model: type[Any]
    train: Callable[[Any, Any], dict[str, Any]]
    """The function behind its command. It trains by options and a ``Runtime``, and returns the report."""
    text_trainer: type[MemoryTrainer]
    needle_trainer: type[AnswerTrainer] | None = None
    """None if no recipe trains it."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """Recipes by name; they need no text."""
    adopt: Callable[..., Any] | None = None
    """Function that converts a stock Hugging Face model in a folder to this kind; None if that is impossible."""
    adapt: Callable[..., Any] | None = None
    """Function that adds low-rank adapters of a rank to a model; None if training always changes all weights."""
    check_rank: Callable[[int], Any] | None = None
    """Function that raises ``InvalidArgument`` for a rank that adapters cannot have."""
    grow: Callable[..., Any] | None = None
    """Function that makes a model of a larger configuration from an existing one; None if that is impossible."""
    of_recipe: Callable[[Any], Training] | None = None
    """Function that returns the ``Training`` for a recipe, if recipes differ in it; None: this one serves all."""
    outgrow: Callable[..., Any] | None = None
    """Function that returns the configuration of a model that grows to another, or raises ``InvalidArgument``."""

    def has(self, folder: str | Path) -> bool:
        """Return whether ``folder`` has this kind of model. Raises ``NotFound``, or ``InvalidArgument`` if none."""
        return kind_in(folder) is self.kind


def training_of(kind: Kind) -> Training:
    """Return how models of ``kind`` are trained. Raises ``UnsupportedModel`` if they cannot be trained."""
    if not kind.training:
        raise UnsupportedModel(f"a {kind.name} cannot be trained with this command")
    family: Training = resolve_name(kind.training)
    return family


def recipes() -> dict[str, Recipe]:
    """Return the recipes of all kinds, by name."""
    families = [training_of(kind) for kind in trainable().values()]
    return {name: recipe for family in families for name, recipe in family.recipes.items()}


def load_weights(kind: Any, folder: str | Path) -> Any:
    """Load the model in ``folder``, in float32, by the class ``kind``. Raises ``DamagedError`` if loading fails."""
    try:
        return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"the model {folder} cannot be loaded: {error}") from None


@dataclass(frozen=True)
class Start:
    """The model before the first step."""

    config: Any
    init: Folder | None
    """The folder of a model to start from; None for random weights."""
    tokenizer: Folder | None
    """The folder of a tokenizer. None means ``init``'s tokenizer, or one that is trained."""
    family: Training
    adopted: Any = None
    """The stock model of ``init``, converted to the family."""
    lora: int | None = None
    """Rank of the adapters that are trained instead of the model's weights; None trains the weights."""

    def settings(self) -> dict[str, Any]:
        """Return the start as a run's settings keep it."""
        known = inspect.signature(self.family.config).parameters
        names = [name for name in known if name not in ("kwargs", "use_cache", "dtype")]
        return {
            "config": {name: getattr(self.config, name) for name in names},
            "init": None if self.init is None else digest_of_files(Path(self.init), "*.safetensors"),
            "tokenizer": None if self.tokenizer is None else digest_of_files(Path(self.tokenizer), "tokenizer*.json"),
            **({} if self.lora is None else {"lora": self.lora}),
        }

    def tokenizer_of(
        self, run: Run, make: Callable[[], PreTrainedTokenizerBase] | None = None
    ) -> PreTrainedTokenizerBase:
        """Return the run's own tokenizer. If it has none, return the one to start from, or call ``make``."""
        if (run.out / "tokenizer.json").exists():
            return load_tokenizer(run.out)
        folder = self.tokenizer or self.init
        tokenizer = make() if folder is None and make is not None else load_tokenizer(str(folder))
        if len(tokenizer) > self.config.vocab_size:
            raise InvalidArgument(
                f"the tokenizer has {len(tokenizer):,} tokens, but the model only {self.config.vocab_size:,}: use "
                "the tokenizer of the model"
            )
        tokenizer.save_pretrained(run.out)
        return tokenizer

    def model(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
        """Return the model; ``seed`` decides new weights. With adapters, a ``PeftModel`` wraps it."""
        transformers.set_seed(seed)
        model = self._whole_model(tokenizer)
        if self.lora is None:
            return model
        assert self.family.adapt is not None, "checked before"
        return self.family.adapt(model, self.lora)

    def _whole_model(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        if self.adopted is not None:
            return self.adopted
        if self.init is not None:
            model = load_weights(self.family.model, self.init)
            grows = self.family.grow is not None and model.config.to_dict() != self.config.to_dict()
            return self.family.grow(model, self.config) if grows and self.family.grow else model
        self.config.eos_token_id, self.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        return self.family.model(self.config)


def starting(
    config: Any,
    init: Folder | None = None,
    tokenizer: Folder | None = None,
    *,
    family: Training,
    grow: bool = False,
    changes: Mapping[str, Any] | None = None,
    lora: int | None = None,
) -> Start:
    """Start from ``init`` if given, else from ``config`` with the vocabulary of ``tokenizer``.

    ``grow``: with an ``init``, start from a model of ``config`` that has its weights; see ``Training``. ``changes``:
    options that differ in the configuration that the family gives a stock ``init``. ``lora``: see ``Start``.
    """
    if lora is not None:
        _check_lora(lora, init, family)
    size = None if tokenizer is None else len(load_tokenizer(tokenizer))
    if init is not None and family.adopt is not None and not family.has(init):
        with quiet_transformers():
            adopted = family.adopt(init, **(changes or {}))
        return Start(adopted.config, init, tokenizer, family, adopted, lora)
    given = copy.deepcopy(config) if config is not None else family.config.preset("tiny")
    chosen = given if init is None else load_config(init, family)
    if wrong := [name for name, value in (changes or {}).items() if getattr(chosen, name, None) != value]:
        raise InvalidArgument(f"changes are for a stock init, which this is not: leave out {', '.join(wrong)}")
    if init is None:
        chosen.vocab_size = chosen.vocab_size if size is None else size
        return Start(chosen, init, tokenizer, family)
    if size is not None and size > chosen.vocab_size:
        raise InvalidArgument(
            f"the tokenizer {tokenizer} has {size:,} tokens, but the model {init} has {chosen.vocab_size:,}: "
            "leave --tokenizer out to use the model's own"
        )
    if grow and config is not None:
        assert family.outgrow is not None, "as it grows"
        chosen = family.outgrow(chosen, config, init)
    return Start(chosen, init, tokenizer, family, lora=lora)


# Adapters end with their training. Checkpoints hold the adapters and the landmark alone. The final folder holds the
# model with the adapters added to its weights, so every verb loads it like any other.
def _check_lora(rank: int, init: Folder | None, family: Training) -> None:
    if family.adapt is None:
        raise InvalidArgument(f"a {family.kind.name} is trained as a whole, without adapters; leave lora out")
    if init is None:
        raise InvalidArgument("lora trains adapters of an existing model: name its folder with --init")
    assert family.check_rank is not None, "as it is adapted"
    family.check_rank(rank)


def load_config(folder: Folder, family: Training) -> Any:
    """Return the configuration of the model in ``folder``. Raises ``InvalidArgument`` for another ``family``."""
    kind = kind_in(folder)
    if kind is not family.kind:
        raise InvalidArgument(
            f"the model in {folder} is a {kind.name}, not a {family.kind.name}: use a model of the right kind"
        )
    return family.config.from_pretrained(folder)


def config_of(
    family: Training, given: Mapping[str, Any], names: Mapping[str, str], *, free: tuple[str, ...] = ()
) -> Any:
    """Return the configuration of a new model by ``given`` options; None if the training starts from a model.

    ``names``: see ``changes_of``. The options must match the model to start from, except those in ``free``. A stock
    model has none of them yet.
    """
    if "init" not in given:
        return family.config.preset(given.get("preset", "tiny"), **changes_of(given, names))
    if family.has(given["init"]):
        there = load_config(given["init"], family)
        check_fit(
            given["init"], given, {option: getattr(there, name) for option, name in names.items() if option not in free}
        )
    return None


def load_tokenizer(folder: Folder) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``folder``. Raises ``NotFound``, and ``DamagedError`` if it cannot be loaded."""
    if not Path(folder).is_dir():
        raise NotFound(f"there is no folder {folder}: name the folder of a tokenizer")
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        if (Path(folder) / "tokenizer.json").exists():
            raise DamagedError(f"the tokenizer in {folder} is damaged ({first_line(error)})") from None
        raise NotFound(f"there is no tokenizer in {folder}: name a folder that has one") from None
    return tokenizer
