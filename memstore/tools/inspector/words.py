"""The text of tokens, as a page may show it: what would be obeyed instead of read is spelled out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memstore.errors import printable
from memstore.tools.models import tokenizer_of

if TYPE_CHECKING:
    from memstore.memory import Memory

_LARGEST = (1 << 32) - 1  # what a tokenizer takes; what is larger, or negative, is no token of it


class Words:
    """Decodes the tokens of a memory with the tokenizer of its model; the ids themselves where there is none.

    Safe to use from several threads. The tokenizer is loaded once, which takes seconds: call ``missing`` early, in a
    thread of its own.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._loaded: tuple[Any, str | None] | None = None
        """The tokenizer, or why there is none; None before it is asked for."""
        self.answers: dict[int, str] = {}
        """How the answers of traces begin that have ended, by their numbers."""

    @property
    def missing(self) -> str | None:
        """Why there is no text; None where there is."""
        return self._tokenizer()[1]

    @property
    def between(self) -> str:
        """What stands between two tokens."""
        return "" if self.missing is None else " "

    def of(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, not yet ``printable``: to be searched."""
        tokenizer, missing = self._tokenizer()
        if missing is not None:
            return " ".join(map(str, ids))
        with self._lock:
            return str(tokenizer.decode([each for each in ids if 0 <= each <= _LARGEST]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each of ``ids`` adds; one that ends within a character adds nothing, the next adds it."""
        pieces: list[str] = []
        begin = read = 0
        for end in range(1, len(ids) + 1):
            known, now = self.of(ids[begin:read]), self.of(ids[begin:end])
            if now.endswith("\ufffd") and end < len(ids):
                pieces.append("")
                continue
            pieces.append(printable(now[len(known) :]))
            begin, read = read, end
        return pieces

    def _tokenizer(self) -> tuple[Any, str | None]:
        with self._lock:
            if self._loaded is None:
                self._loaded = tokenizer_of(self._memory)
            return self._loaded
