"""A document by name, and its state at the last commit: what a document and its views share."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.errors import NotFound
from memstore.memory.places import Places
from memstore.memory.shared import Shared
from memstore.memory.state import DocumentState


@dataclass(frozen=True)
class _Seen:
    version: int
    state: DocumentState


class Handle:
    """Knows the number of a document once it has one, and reads its entry again after every commit."""

    def __init__(self, shared: Shared, name: str) -> None:
        self.shared = shared
        self.name = name
        self.id = shared.catalog.find(name)
        """Number of the document; None before its first append."""
        self._seen: _Seen | None = None

    @property
    def places(self) -> Places:
        """Where its values lie; only for a document that has some."""
        state = self.current()
        assert self.id is not None
        return self.shared.places(self.id, state)

    def current(self) -> DocumentState:
        """The state at the last commit of whoever; reads the store only if something was committed since.

        Raises ``NotFound`` where the document was forgotten, and ``DamagedError``.
        """
        # The version is read first: a commit between the two reads only makes the next call look again.
        version = self.shared.store.version()
        seen = self._seen
        if seen is None or seen.version != version:
            seen = _Seen(version, self._load())
            self._seen = seen
        return seen.state

    def _load(self) -> DocumentState:
        number = self.id if self.id is not None else self.shared.catalog.find(self.name)
        if number is None:
            return DocumentState(name=self.name)
        self.id = number  # never back to None, which another thread may have found a moment ago
        state = self.shared.state(number)
        if state is None:
            raise NotFound(
                f"document {self.name!r} of memory {self.shared.url} was forgotten; ask the memory for it again."
            )
        return state
