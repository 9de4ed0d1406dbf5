"""Finding and loading a model by its name, and the names of models that memories may load.

A model is a directory, a GGUF file, a hub id, ``smollm2``, or one that comes with the package.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from memstore.errors import DamagedError, InvalidArgument, MemstoreError, NotFound, UnsupportedModel, first_line
from memstore.lazy import torch
from memstore.paths import user_folder
from memstore.readers import kinds
from memstore.readers.kinds import (
    NOT_INSTALLED,
    PASSKEY,
    STOCK,
    Kind,
    kind_in,
    quiet_transformers,
    require_transformers,
)
from memstore.wheels import MARKER

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.memory import Memory

SMOLLM2 = "smollm2"
GGUF = ".gguf"
DRT = "drt"
"""The DRT of the demo, which comes with the package. Like the other models there, it also has a name."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


class LoadedModel(NamedTuple):
    """A loaded model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def resolve_model(name: str, dtype: str | None = None) -> str:
    """Return the argument of ``from_pretrained`` for ``name``. The first use of ``smollm2`` fetches and converts it.

    ``dtype``: precision of a converted GGUF file's weights; see ``memstore.tools.gguf.converted``.
    """
    if name == SMOLLM2:
        from memstore.tools.gguf import smollm2_path

        return str(smollm2_path(dtype, precision))
    path = Path(name).expanduser()
    if (file := gguf_in(path)) is not None:
        from memstore.tools.gguf import converted

        return str(converted(file, dtype, precision))
    if path.is_dir():
        if not (path / "config.json").exists():
            raise InvalidArgument(f"{name} is not a model directory: it needs a config.json or one GGUF file.")
        return str(path.resolve())
    if not path.exists() and (shipped := _shipped(name)) is not None:
        return str(shipped)
    missing_file = path.suffix.lower() == GGUF
    if missing_file or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise NotFound(
            f"there is no model {'file' if missing_file else 'directory'} {name}. Name a directory, a GGUF file, "
            f"a hub id such as owner/name, or {SMOLLM2}."
        )
    return name


def gguf_in(path: Path) -> Path | None:
    """Return ``path`` if it is a GGUF file, or the only one in a folder without a Hugging Face model; else None."""
    if path.is_file():
        return path if path.suffix.lower() == GGUF else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = [each for each in path.iterdir() if each.suffix.lower() == GGUF]
    return files[0] if len(files) == 1 else None


def _shipped(name: str) -> Path | None:
    """Return the folder of the package's model with this name, or None."""
    return kinds.shipped_folder(PASSKEY if name == DRT else name)


# A model of the package is recorded by its name, so that a memory on another machine finds it there.
def lasting_name(name: str) -> str:
    """Return the name of a model for a memory: a model of the package by name, others by their whole path."""
    path = Path(name).expanduser()
    if not path.is_dir() and path.suffix.lower() != GGUF:
        return name
    path = path.resolve()
    return path.name if _shipped(path.name) == path else str(path)


def kind_named(name: str) -> Kind:
    """Return the kind of the model called ``name``. Nothing is fetched: a model that is not here counts as stock."""
    if name == SMOLLM2 or gguf_in(Path(name).expanduser()) is not None:  # they need not be converted yet
        return STOCK
    source = resolve_model(name)
    return kind_in(source) if Path(source).is_dir() else STOCK


# Collecting garbage among a million objects that stay takes a fifth of the time of loading, and nearly as much at any
# later collection. The objects belong to the libraries, so they are skipped from then on.
@cache
def import_libraries() -> Any:
    """Import the ``transformers`` package, with all that it loads for any model."""
    transformers = require_transformers()
    _ = transformers.PreTrainedModel  # names of the package are loaded at first use
    gc.freeze()
    atexit.register(gc.unfreeze)  # at exit, compiled libraries complain about objects that nobody frees
    return transformers


@contextmanager
def _uncollected() -> Iterator[None]:
    """Run the body without garbage collection."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@_uncollected()
def load_model(name: str, dtype: str = "auto", *, device: str = "cpu", weights: bool = True) -> LoadedModel:
    """Load the model called ``name``, of any kind, in evaluation mode, with its tokenizer.

    Without ``weights``, most models with their own index are only described, on the device ``meta``.
    """
    check_device(device)
    precision = resolve_dtype(dtype, device=device)
    transformers = import_libraries()
    kind = kind_named(name)
    source = resolve_model(name, str(precision).removeprefix("torch."))
    if not kind.half:
        if dtype not in ("auto", "float32"):
            raise InvalidArgument(f"a {kind.name} computes in float32 only; --dtype {dtype} is for stock models.")
        with quiet_transformers():
            return _named(LoadedModel(*kinds.load_folder(Path(source), device)), name)
    with _loading(name, source), quiet_transformers():
        if kind.loader.startswith("transformers:"):
            model = _stock(transformers, source, precision)
        elif kind is kinds.INDEXED and not weights:
            model, device = kind.load(source, dtype=precision, weights=False), "meta"
        else:  # this branch checks what it has loaded
            model = kind.load(source, dtype=precision, trust_remote_code=False)
    return _named(LoadedModel(model.eval().to(device), load_tokenizer(name)), name)


def _stock(transformers: Any, source: str, dtype: torch.dtype) -> Any:
    """Load the stock model at ``source``; of a model of pictures and text, only the text part."""
    config, kind = None, transformers.AutoModelForCausalLM
    with contextlib.suppress(OSError):  # an adapter has none of its own; loading reports other faults
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    causal, pictures = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in pictures and type(config) not in causal:
        kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(source, config=config, dtype=dtype, trust_remote_code=False)


def _named(loaded: LoadedModel, name: str) -> LoadedModel:
    """Give ``loaded`` the name that finds it again. ``attach`` writes it into new memories."""
    for each in loaded:
        each.name_or_path = lasting_name(name)
    return loaded


_named_here: WeakKeyDictionary[Memory, str] = WeakKeyDictionary()


def name_model(memory: Memory, model: str | None) -> None:
    """Set ``model``, if given, as the model that read ``memory``, while the memory is open."""
    if model is not None:
        _named_here[memory] = remember(model)


def named_model(memory: Memory) -> str | None:
    """Return the model that ``name_model`` was given for the memory."""
    return _named_here.get(memory)


def recorded_name(memory: Memory) -> str | None:
    """Return the name of the model that read the memory; None if neither the memory nor the user gives it."""
    name = _named_here.get(memory) or memory.model_info().get("name")
    return name if isinstance(name, str) else None


def chosen_name(memory: Memory, model: str | None = None) -> str:
    """Return ``model``, which is trusted from now on, or the trusted one that read the memory.

    Raises ``InvalidArgument`` if the memory names no model, or one that this user has never named.
    """
    if model is not None:
        remember(model)
        return model
    name = recorded_name(memory)
    if name is None:
        raise InvalidArgument("the memory does not name the model that read it. Name it with --model.")
    if (found := trusted(name)) is None:
        raise InvalidArgument(
            f"the memory asks for the model {name!r}, which you have never used. If you trust it: --model NAME in "
            "commands with this option, or memstore trust NAME"
        )
    return found


def remember(model: str) -> str:
    """Trust ``model`` from now on, and return its name in memories."""
    name = lasting_name(model)
    if "\n" in name:
        raise InvalidArgument(f"there is no model {name!r}.")
    if not is_trusted(name):
        with contextlib.suppress(OSError):  # a read-only home folder; next time the user must name it again
            path = _trusted_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
    return name


def record_model(memory: Memory, name: str, loaded: LoadedModel) -> None:
    """Record in ``memory`` which model reads it, so that other verbs need no --model. It is trusted from now on."""
    memory.put_info("model", {"name": remember(name), "dtype": str(loaded.model.dtype).removeprefix("torch.")})


def is_trusted(name: str) -> bool:
    """Check whether a memory that names this model may load it: our own code put it here, or the user has named it."""
    if name == SMOLLM2:
        from memstore.tools.gguf import is_cached

        if is_cached():
            return True
    elif _shipped(name) is not None:
        return True
    # A relative name means a folder of the working directory if it exists: lasting_name gives that folder's path.
    try:
        return lasting_name(name) in _trusted_file().read_text("utf-8").split("\n")
    except (OSError, ValueError):  # the second: not UTF-8, or a name with a NUL
        return False


def trusted(name: str) -> str | None:
    """Return the argument of ``load_model`` for a model that a memory names; None if it may not be loaded."""
    if not is_trusted(name):
        return None
    shipped = _shipped(name)
    # Such a name is trusted as the package's model. Otherwise a folder "drt" beside a foreign memory would be loaded.
    return name if shipped is None or not Path(name).exists() else str(shipped)


def _trusted_file() -> Path:
    return user_folder("config") / "trusted-models"


def load_recorded(memory: Memory, model: str | None, dtype: str | None, *, device: str) -> LoadedModel:
    """Load the model that read the memory, in the precision of that reading, unless others are named."""
    name = chosen_name(memory, model)
    return load_model(name, dtype or usual_dtype(name, memory.model_info().get("dtype")), device=device)


def usual_dtype(name: str, recorded: object) -> str:
    """Return the recorded dtype for the model ``name``; auto if none is recorded or the model has only one."""
    return recorded if isinstance(recorded, str) and kind_named(name).half else "auto"


def check_device(name: str) -> None:
    """Raise ``InvalidArgument`` for a device that PyTorch does not know, or that this machine lacks."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # the second: PyTorch without CUDA
        raise InvalidArgument(f"no model can run on the device {name!r}: {first_line(error)}") from None
    if device.type == "meta":
        raise InvalidArgument("no model can run on the device 'meta': it computes nothing.")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load only the tokenizer of the model called ``name``."""
    require_transformers()
    source = resolve_model(name)
    loader = resolve_name(kind_named(name).tokenizer)
    with _loading(name, source), quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(source, trust_remote_code=False)
    return tokenizer


def tokenizer_of(memory: Memory) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Return the tokenizer of the model that read the memory, or None and the reason why it is missing."""
    if recorded_name(memory) is None:
        return None, "the memory does not name the model that read it: name it with --model"
    try:
        name = chosen_name(memory)
    except InvalidArgument as error:
        return None, str(error)
    return _tokenizer(name)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Load the tokenizer, or find it missing, only once: a verb may decode thousands of blocks with it."""
    try:
        return load_tokenizer(name), None
    except MemstoreError as error:
        return None, str(error)


def resolve_dtype(name: str, *, device: str = "cpu") -> torch.dtype:
    """Return the dtype for ``name``. ``auto`` is bfloat16 on a GPU and on CPUs that compute in it, else float32."""
    if name not in DTYPES:
        raise InvalidArgument(f"there is no dtype {name!r}. Choose one of {', '.join(DTYPES)}.")
    if name == "auto":
        return torch.bfloat16 if device != "cpu" or computes_bfloat16() else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def precision(dtype: str = "auto", device: str = "cpu") -> str:
    """Return the name of a dtype; ``auto`` is resolved as in ``resolve_dtype``."""
    return str(resolve_dtype(dtype, device=device)).removeprefix("torch.")


def computes_bfloat16() -> bool:
    """Check for bfloat16 instructions of this CPU that PyTorch may use: ATEN_CPU_CAPABILITY=avx2 forbids them.

    If PyTorch cannot tell (before 2.10), the answer is no.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return False
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@contextmanager
def _loading(name: str, source: str) -> Iterator[None]:
    """Turn errors of transformers about a missing, unknown or damaged model into our errors."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        made = (Path(source) / MARKER).exists()
        again = f"Delete {source}, and it is made again" if made else "Copy or download it again"
        raise DamagedError(f"the weights of the model {name!r} are damaged: {first_line(error)}. {again}.") from None
    except OSError as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise NotFound(f"the model {name!r} could not be loaded{offline}: {first_line(error)}") from error
    except ValueError as error:
        hint = f" {NOT_INSTALLED}" if "does not recognize this architecture" in str(error) else ""
        raise UnsupportedModel(f"the model {name!r} cannot be loaded: {first_line(error)}{hint}") from error
