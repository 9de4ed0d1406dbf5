"""Training in two processes: ``torchrun --nproc-per-node 2 -m tests.train.two_memorizing TEXTS OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import tests.conftest  # noqa: F401 - the same settings of PyTorch
from memstore.models.memorizing import MemorizingConfig
from memstore.models.memorizing.training import train_on_documents
from memstore.train import Optimisation
from tests.train.helpers import RUNTIME


def train(texts: str | Path, out: str | Path, batch: int) -> None:
    """Rows that are divided among processes read the same as those of one."""
    train_on_documents(
        [texts],
        out,
        config=MemorizingConfig(vocab_size=300, window=16, memory_size=64),
        optimisation=Optimisation(steps=6, batch=batch),
        runtime=RUNTIME,
    )


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], batch=1)
