from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memstore.eval.needles import prose_text
from memstore.train import train_on_texts
from tests.train.helpers import CONTEXT, RUNTIME, SHORT


class Trained(NamedTuple):
    """A finished run."""

    folder: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:60_000])
    return path


@pytest.fixture(scope="session")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    report = train_on_texts([text], folder, context=CONTEXT, valid=0.1, optimisation=SHORT, runtime=RUNTIME)
    return Trained(folder, report)
