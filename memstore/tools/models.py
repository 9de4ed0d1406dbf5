"""Finding and loading a model by its name: ``smollm2``, a directory, a hub id, or one that comes with the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from memstore.errors import InvalidArgument, MemstoreError, NotFound, UnsupportedModel
from memstore.readers.kinds import KNN, PASSKEY, STOCK, Kind, kind_in, model_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.memory import Memory

SMOLLM2 = "smollm2"
DRT = "drt"
"""The DRT of the demo, which comes with the package; like the other models there it has a name of its own too."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


class Loaded(NamedTuple):
    """A model, ready to read, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def resolve_model(name: str) -> str:
    """What ``from_pretrained`` takes for ``name``. ``smollm2`` is fetched and converted at its first use."""
    if name == SMOLLM2:
        from memstore.tools.smollm2 import smollm2_path

        return str(smollm2_path())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise InvalidArgument(f"{name} is not a model directory: it has no config.json.")
        return str(path.resolve())
    if (shipped := shipped_folder(name)) is not None:
        return str(shipped)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise NotFound(f"no model directory {name}. Name a directory, a hub id such as owner/name, or {SMOLLM2}.")
    return name


def shipped_folder(name: str) -> Path | None:
    """The folder of the model of this name that comes with the package, or None."""
    given = Path(PASSKEY if name == DRT else name)
    folder = model_folder(given)
    return folder if folder != given.expanduser() else None


# A model of the package is recorded by its name, so that a memory that moves to another machine finds it there.
def lasting_name(name: str) -> str:
    """What a memory calls its model, so that others find it: a shipped one by name, a directory by its whole path."""
    path = Path(name).expanduser()
    if not path.is_dir():
        return name
    path = path.resolve()
    return path.name if shipped_folder(path.name) == path else str(path)


def kind_named(name: str) -> Kind:
    """The kind of the model called ``name``. Nothing is fetched to find out: what is not here is a stock model."""
    if name == SMOLLM2:
        return STOCK
    source = resolve_model(name)
    return kind_in(source) if Path(source).is_dir() else STOCK


def load_model(name: str, dtype: str = "auto", *, device: str = "cpu") -> Loaded:
    """Load the model called ``name``, of whatever kind, in evaluation mode, with its tokenizer."""
    from memstore.readers import kinds

    check_device(device)
    precision = resolve_dtype(dtype, device=device)
    transformers = require_transformers()
    source, kind = resolve_model(name), kind_named(name)
    if kind is not STOCK:
        kind.reader_class()
        if dtype not in ("auto", "float32"):
            raise InvalidArgument(f"a {kind.name} computes in float32; --dtype {dtype} is for stock models.")
        with quiet_transformers():
            return Loaded(*kinds.load_model(Path(source), device))
    with _loading(name), quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=precision, trust_remote_code=False)
    return Loaded(model.eval().to(device), load_tokenizer(name))


def recorded_name(memory: Memory) -> str | None:
    """The name of the model that read the memory, None where the memory does not say."""
    name = memory.model_info().get("name")
    return name if isinstance(name, str) else None


def load_recorded(memory: Memory, model: str | None, dtype: str | None, *, device: str) -> Loaded:
    """The model that read the memory, in the precision it read with, unless others are named."""
    from memstore.tools.trust import chosen_name

    info = memory.model_info()
    return load_model(chosen_name(memory, model), dtype or info.get("dtype", "auto"), device=device)


def check_device(name: str) -> None:
    """Raise ``InvalidArgument`` for a device that PyTorch does not know, or that is not here."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # the second: PyTorch without CUDA
        raise InvalidArgument(f"no model can run on the device {name!r}: {_first_line(error)}") from None
    if device.type == "meta":
        raise InvalidArgument("no model can run on the device 'meta': it computes nothing.")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load only the tokenizer of the model called ``name``."""
    transformers = require_transformers()
    source = resolve_model(name)
    # Configurations of our own kinds may not be registered yet, and their tokenizers are all of one class.
    stock = kind_named(name) in (STOCK, KNN)
    loader = transformers.AutoTokenizer if stock else transformers.PreTrainedTokenizerFast
    with _loading(name), quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(source, trust_remote_code=False)
    return tokenizer


def tokenizer_of(memory: Memory) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """The tokenizer of the model that read the memory, or None and the reason why there is none."""
    from memstore.tools.trust import chosen_name

    if recorded_name(memory) is None:
        return None, "the memory does not say which model it belongs to"
    try:
        name = chosen_name(memory)
    except InvalidArgument as error:
        return None, str(error)
    return _tokenizer(name)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Loaded, or found missing, once: a verb may decode thousands of blocks with it."""
    try:
        return load_tokenizer(name), None
    except MemstoreError as error:
        return None, str(error)


def resolve_dtype(name: str, *, device: str = "cpu") -> torch.dtype:
    """The torch dtype for ``name``; ``auto`` is bfloat16 on a GPU and on CPUs that compute in it, else float32."""
    import torch

    if name not in DTYPES:
        raise InvalidArgument(f"no dtype is called {name!r}. Choose one of {', '.join(DTYPES)}.")
    if name == "auto":
        return torch.bfloat16 if device != "cpu" or computes_bfloat16() else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def computes_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16. Where PyTorch cannot tell (before 2.10), the answer is no."""
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def require_transformers() -> ModuleType:
    """The module transformers, or an error that says how to get it."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise NotFound("this needs the package transformers: pip install 'torch-memstore[hf]'") from None
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing bars and printing advice inside the block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn what transformers raises for a missing or unknown model into our errors."""
    try:
        yield
    except OSError as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise NotFound(f"no model {name!r} could be loaded{offline}: {_first_line(error)}") from error
    except ValueError as error:
        raise UnsupportedModel(f"the model {name!r} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
