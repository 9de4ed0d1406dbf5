"""Training in two processes: ``torchrun --nproc-per-node 2 -m tests.train.two TEXT OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import tests.conftest  # noqa: F401 - the same settings of PyTorch
from memstore.models.drt import DRTConfig
from memstore.train import Optimisation, train_on_texts
from tests.train.helpers import CONTEXT, RUNTIME


def train(text: str | Path, out: str | Path, batch: int) -> None:
    """Without noise, which would be another in each process."""
    train_on_texts(
        [text],
        out,
        config=DRTConfig.preset("tiny", gumbel=0.0),
        context=CONTEXT,
        optimisation=Optimisation(steps=3, batch=batch),
        runtime=RUNTIME,
    )


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], batch=1)
