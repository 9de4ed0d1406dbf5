"""This library, as its README says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.peers.contract import Peer
from memstore.tools.models import load_model


class Memstore(Peer):
    """A stock model with a memory on disk."""

    def __init__(self, model: str, folder: Path, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._model, self._tokenizer = load_model(model, options["dtype"])
        self._memory = folder / "memory"
        self._reader: Any = None

    def version(self) -> str:
        """Of the package."""
        return f"memstore {memstore.__version__}"

    def read(self, text: str) -> None:
        """Read the text into the memory."""
        with memstore.attach(self._model, self._memory, document="text", tokenizer=self._tokenizer) as reader:
            reader.read(text)

    def restore(self) -> None:
        """Attach the memory again."""
        self._reader = memstore.attach(self._model, self._memory, document="text", tokenizer=self._tokenizer)
        self._reader.__enter__()

    def answer(self, prompt: str, tokens: int) -> str:
        """Ask."""
        answered: str = self._reader.ask(prompt, raw=True, max_tokens=tokens).text
        return answered
