"""Small texts, small recipes, and ways to stop a training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from memstore.eval.needles import prose_text
from memstore.models.drt.training import RECIPES
from memstore.train import Optimisation, Recipe, Runtime, corpora
from memstore.train.run import last_checkpoint
from memstore.train.trainer import MemoryTrainer

CONTEXT = 124
SHORT = Optimisation(steps=16, batch=2, seed=3)
RUNTIME = Runtime(device="cpu", save_every=5, log_every=4)


def small(name: str = "passkey-cpu", **changes: Any) -> Recipe:
    """A recipe of 16 small steps, which keeps blocks of earlier ones."""
    defaults: dict[str, Any] = {"tokens": 512, "bank": 24, "checked": 6, "optimisation": Optimisation(steps=16, seed=1)}
    return replace(RECIPES[name], **{**defaults, **changes})


def use_little_text(patch: pytest.MonkeyPatch) -> list[str]:
    """Let recipes train on a part of their texts, which is returned."""
    prose, sources = prose_text()[:60_000], corpora.sources(40_000)
    patch.setattr("memstore.train.texts.prose_text", lambda: prose)
    patch.setattr("memstore.train.texts.sources", lambda: sources)
    return [prose, sources]


class Stopped(Exception):
    """Ends a training from within."""


def stop() -> None:
    raise Stopped


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Do something when a step is about to begin."""
    ordinary = MemoryTrainer.training_step

    def acting(self: MemoryTrainer, *arguments: Any, **named: Any) -> torch.Tensor:
        if self.state.global_step + 1 == step:
            act()
        return ordinary(self, *arguments, **named)

    patch.setattr(MemoryTrainer, "training_step", acting)


def stopped_at(step: int, train: Callable[[], object], out: Path) -> Path:
    """Stop ``train`` when a step is about to begin; the last checkpoint that it left in ``out``."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, stop)
        with pytest.raises(Stopped):
            train()
    checkpoint = last_checkpoint(out)
    assert checkpoint is not None
    return checkpoint


def without_digests(checkpoint: Path) -> None:
    """Make it one of a version that kept no digests, whose damage is found only while it is loaded."""
    mark = checkpoint / "complete.json"
    values = json.loads(mark.read_text("utf-8"))
    assert "model.safetensors" in values.pop("files")
    mark.write_text(json.dumps(values), "utf-8")


def same_weights(one: Path, other: Path) -> bool:
    """Whether two model folders have the same weights, bit for bit."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(folder: Path) -> list[Any]:
    """Step and loss of each line of a run's log."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [(value["step"], value["loss"]) for value in map(json.loads, lines)]
