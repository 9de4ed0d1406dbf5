"""A memory: all documents of one model, on one store."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from memstore.errors import ForeignMemory, InvalidArgument, ReadOnlyMemory
from memstore.memory import verify
from memstore.memory.audit import Finding
from memstore.memory.document import Document
from memstore.memory.header import blank, read_header
from memstore.memory.layouts import run_layout
from memstore.memory.named import Named
from memstore.memory.shared import Shared, not_found
from memstore.memory.spec import MemorySpec
from memstore.memory.urls import Mode, Opened, is_path, open_store
from memstore.store.contract import BlockStore

LONGEST_NAME = 511  # bytes


def open_memory(url: str | Path, *, spec: MemorySpec | None = None, mode: Mode = "a", index: str = "exact") -> Memory:
    """Open the memory at ``url``, or create it; this is ``memstore.open``.

    ``url`` is a path, ``ram:`` (gone when closed) or ``ram:NAME`` (one memory per name, until the process ends).
    ``mode`` is "a" (open, or create if there is a spec), "r" (must exist, only read) or "x" (must not exist).
    ``index`` is the kind of vector index, see ``memstore.index.open_index``.

    Raises ``NotFound``, ``NotAMemory``, ``ForeignMemory`` (another model or layout than ``spec`` says, or a newer
    format), ``MemoryInUse`` (another process writes), ``ReadOnlyMemory``, ``InvalidArgument`` or ``DamagedError``.
    """
    opened = open_store(url, mode, None if spec is None else blank(spec))
    try:
        shared = _open_shared(opened.store, str(url), mode, index)
        shared.new_index()  # so that an unknown kind is an error now, not at the first search
        if spec is not None:
            check_same(spec, shared)
        return Memory(shared, opened)
    except BaseException:
        _close(opened)
        raise


class Memory:
    """Documents of one model. Made by ``memstore.open``; closed by ``close`` or by leaving ``with``."""

    def __init__(self, shared: Shared, opened: Opened) -> None:
        self._shared = shared
        self._opened = opened
        self._named = Named(shared)
        self._documents: dict[str, Document] = {}
        self._names: dict[int, str] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Memory({self.url!r}, mode={self.mode!r}, {self.spec.fingerprint.architecture})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def spec(self) -> MemorySpec:
        """The layout of this memory."""
        return self._shared.spec

    @property
    def url(self) -> str:
        """Where it is."""
        return self._shared.url

    @property
    def mode(self) -> str:
        """How it was opened: "a", "r" or "x"."""
        return self._shared.mode

    def documents(self) -> list[Document]:
        """All documents that have something in them, in the order they were made."""
        return [self._document(name) for name in self._known().values()]

    def document(self, name: str) -> Document:
        """The document ``name``; a new one, stored at its first append, if there is none.

        Raises ``InvalidArgument`` for a bad name, and ``NotFound`` where nothing can be made (mode "r").
        """
        _check_name(name)
        if self._read_only and self._find(name) is None:
            raise self._no_document(name)
        document = self._document(name)
        if self._read_only and document.id is None:  # forgotten since it was found
            raise self._no_document(name)
        return document

    def forget(self, name: str) -> None:
        """Delete a document and everything of it, in one transaction. Raises ``NotFound``, ``ReadOnlyMemory``."""
        self._check_writable()
        with self._shared.writing:
            number = self._find(name)
            if number is None:
                raise self._no_document(name)
            self._shared.store.delete(number)
        with self._lock:
            self._documents.pop(name, None)

    def put_arrays(self, name: str, arrays: dict[str, Tensor]) -> None:
        """Store tensors of the memory itself under ``name``, replacing what was there, in one transaction."""
        self._check_writable()
        self._named.put_arrays(name, arrays)

    def get_arrays(self, name: str) -> dict[str, Tensor] | None:
        """What ``put_arrays`` stored, or None."""
        return self._named.get_arrays(name)

    def put_info(self, name: str, value: Any) -> None:
        """Store a small JSON value of the memory itself under ``name``, replacing what was there."""
        self._check_writable()
        self._named.put_info(name, value)

    def get_info(self, name: str) -> Any:
        """What ``put_info`` stored, or None."""
        return self._named.get_info(name)

    def verify(self) -> list[Finding]:
        """Read and check every stored value, and whether all of them fit together. Nothing is changed.

        Returns what is wrong; an empty list is a clean memory. A memory on disk is read by a child process, so that
        damage that makes LMDB crash is a finding like any other.
        """
        if is_path(self.url):
            return verify.in_child(self.url)
        return verify.check(self._shared.store)

    def stats(self) -> dict[str, Any]:
        """Sizes, without reading any states. ``bytes`` are payloads as stored, before headers and rounding to pages."""
        states = [self._shared.state(number) for number in self._shared.documents()]
        live = [(state, len(state.live())) for state in states if state is not None]
        tokens = sum(state.tokens - state.first * self.spec.block_size for state, blocks in live if blocks)
        blocks = sum(count for _, count in live)
        disk = self._shared.store.size_bytes()
        with self._lock:
            views = [view for document in self._documents.values() for view in document.views()]
        return {
            "url": self.url,
            "documents": len(live),
            "tokens": tokens,
            "blocks": blocks,
            "bytes": self._bytes(tokens, blocks),
            "disk_bytes": disk,
            "disk_bytes_per_token": disk / tokens if tokens else None,
            "index_bytes": sum(view.nbytes for view in views),
        }

    def close(self) -> None:
        """Release the store. Closing twice is allowed."""
        _close(self._opened)

    def _bytes(self, tokens: int, blocks: int) -> dict[str, int]:
        spec = self.spec
        return {
            "tokens": 4 * tokens,
            "blocks": blocks * spec.layers * sum(layout.nbytes for layout in self._shared.block_layouts),
            "landmarks": blocks * len(spec.index_layers) * run_layout(spec, 1).nbytes,
        }

    @property
    def _read_only(self) -> bool:
        return self.mode == "r" or self._shared.store.read_only

    def _document(self, name: str) -> Document:
        with self._lock:
            # One that another process forgot may be there again, as another document of the same name.
            if name not in self._documents or self._documents[name].forgotten:
                self._documents[name] = Document(self._shared, name, self._find)
            return self._documents[name]

    def _find(self, name: str) -> int | None:
        return next((number for number, known in self._known().items() if known == name), None)

    def _known(self) -> dict[int, str]:
        """Number -> name of every document. Numbers are never used twice, so names read once stay true."""
        names: dict[int, str] = {}
        for number in self._shared.documents():
            if number in self._names:
                names[number] = self._names[number]
            elif (state := self._shared.state(number)) is not None:
                names[number] = state.name
        self._names = names
        return names

    def _no_document(self, name: str) -> Exception:
        return not_found(name, self.url, list(self._known().values()))

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyMemory(f"memory {self.url} is open for reading; open it with mode 'a' to write.")


def _check_name(name: object) -> None:
    try:
        good = isinstance(name, str) and 1 <= len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        good = False
    if not good:
        raise InvalidArgument(f"the name of a document is a text of 1 to {LONGEST_NAME} bytes in UTF-8, not {name!r}.")


def _open_shared(store: BlockStore, url: str, mode: str, index: str) -> Shared:
    header = read_header(store, url)
    return Shared(store, header.spec, url, mode, index, header.blocks_per_run)


def check_same(spec: MemorySpec, memory: Shared | Memory) -> None:
    """Raise ``ForeignMemory`` unless ``memory`` was made for ``spec``."""
    if differences := spec.differences(memory.spec):
        raise ForeignMemory(
            f"memory {memory.url} was made for something else: {'; '.join(differences)}. Its states are not used. "
            "Open it with the model and settings that it was made with, or make a new memory at another path."
        )


def _close(opened: Opened) -> None:
    if opened.own:
        opened.store.close()
