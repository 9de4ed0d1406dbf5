"""The start of a training: sizes or a model folder, and a tokenizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from memstore.errors import InvalidArgument, NotFound, first_line
from memstore.readers.kinds import kind_in, quiet_transformers
from memstore.train.run import Run
from memstore.train.training import Training, load_weights

Folder = str | Path


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
    if init is None:
        chosen = copy.deepcopy(config) if config is not None else family.config.preset("tiny")
        chosen.vocab_size = chosen.vocab_size if size is None else size
        return Start(chosen, init, tokenizer, family)
    if family.adopt is not None and not family.has(init):
        with quiet_transformers():
            adopted = family.adopt(init, **(changes or {}))
        return Start(adopted.config, init, tokenizer, family, adopted, lora)
    chosen = load_config(init, family)
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


def load_tokenizer(folder: Folder) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``folder``. Raises ``NotFound``."""
    if not Path(folder).is_dir():
        raise NotFound(f"there is no folder {folder}: name the folder of a tokenizer")
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise NotFound(f"there is no tokenizer in {folder}: {first_line(error)}") from None
    return tokenizer


def digest_of_files(folder: Path, pattern: str) -> str:
    """Return a checksum of the files of ``folder`` whose names match ``pattern``."""
    state = xxhash.xxh3_64()
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                state.update(piece)
    return state.hexdigest()
