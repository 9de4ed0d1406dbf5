from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.memory.spec import Fingerprint
from memstore.tools.app import main
from memstore.tools.models import remember
from tests.eval.drts import byte_tokenizer
from tests.instruct import instruct_model, instruct_tokenizer, tiny_llama

LAYERS, HEADS, SIZE, BLOCK = 2, 2, 8, 4


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], children_are_forks: None) -> Cli:
    """Run the command line in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


def tiny_spec() -> memstore.MemorySpec:
    return memstore.MemorySpec(
        layers=LAYERS,
        fields={"k": (HEADS, BLOCK, SIZE), "v": (HEADS, BLOCK, SIZE)},
        index_layers=(1,),
        key_heads=1,
        key_dim=SIZE,
        block_size=BLOCK,
        keys_per_block=1,
        fingerprint=Fingerprint(
            architecture="tiny",
            weights="0",
            tokenizer=None,
            positions="rope",
            layout="kv",
            dtype="float32",
            block_size=BLOCK,
        ),
    )


def append(document: memstore.Document, n_tokens: int) -> None:
    """Add tokens with random states; a last block that is not full is padded with zeros."""
    with document.append(range(n_tokens)) as batch:
        n = len(batch.blocks)
        keep = (torch.arange(n * BLOCK) < n_tokens).view(n, 1, BLOCK, 1)
        for layer in range(LAYERS):
            k, v = (torch.randn(n, HEADS, BLOCK, SIZE) * keep for _ in "kv")
            landmarks = torch.randn(n, 1, 1, SIZE) if layer == 1 else None
            batch.put(layer, landmarks=landmarks, k=k, v=v)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A memory on disk: `whale` of 10 tokens (two blocks and a half), `ship` of 4."""
    torch.manual_seed(0)
    path = tmp_path / "notes.mem"
    with memstore.open(path, spec=tiny_spec()) as opened:
        append(opened.document("whale"), 10)
        append(opened.document("ship"), 4)
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    remember(str(folder))  # the user's own
    return folder


def save_tiny_model(folder: Path) -> None:
    """Put a tiny random llama whose tokens are bytes into a folder."""
    byte_tokenizer().save_pretrained(folder)
    tiny_llama(256).save_pretrained(folder)


@pytest.fixture(scope="session")
def instruct_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a chat template; it says whatever it says."""
    folder = tmp_path_factory.mktemp("instruct")
    instruct_tokenizer().save_pretrained(folder)
    instruct_model().save_pretrained(folder)
    remember(str(folder))
    return folder
