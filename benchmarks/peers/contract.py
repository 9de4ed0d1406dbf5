"""What a peer does. Needs nothing but Python, since peers have environments of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class Peer(ABC):
    """Reads a text once, keeps what it needs in a folder, and answers from that in another process."""

    @abstractmethod
    def __init__(self, model: str, folder: Path, options: dict[str, Any]) -> None:
        """Load the model, a folder that transformers can load; ``options`` are the work's."""

    @abstractmethod
    def version(self) -> str:
        """Name and version of what is measured."""

    @abstractmethod
    def read(self, text: str) -> None:
        """Read the text and keep it in the folder, complete when this returns."""

    @abstractmethod
    def restore(self) -> None:
        """In a new process: what the folder has is ready to be asked."""

    @abstractmethod
    def answer(self, prompt: str, tokens: int) -> str:
        """The greedy continuation of the text and ``prompt``. Each prompt follows the text alone."""
