"""What the parts of one open memory share.

A document by name, and its state at the last commit: what a document and its views share.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn
from weakref import WeakKeyDictionary

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.index import IndexCapabilities, VectorIndex, open_index
from memstore.memory.blocks import BlockReader
from memstore.memory.entry import NEXT_DOCUMENT, NEXT_DOCUMENT_VALUE, Address, DocumentState
from memstore.memory.history import history_runs
from memstore.memory.index_files import IndexFiles
from memstore.memory.places import Catalog, Homes, Places, catalog_of
from memstore.memory.rules import Keeper
from memstore.memory.spec import MemorySpec, Room, block_layouts
from memstore.memory.tensors import LandmarkRuns, Runs, index_dtype
from memstore.store.contract import BlockStore, Layout, Record
from memstore.stored import check_whole, fit

_locks: WeakKeyDictionary[BlockStore, threading.RLock] = WeakKeyDictionary()
_guard = threading.Lock()


@dataclass(frozen=True, eq=False)
class Shared:
    """A store, how to read it, and the lock that writers of this process hold."""

    store: BlockStore
    spec: MemorySpec
    url: str
    mode: str
    index: str
    """Kind of the vector indexes."""
    run_length: int
    """Blocks whose landmarks are stored together."""
    blocks: BlockReader
    """Reads blocks, from memory where they are there."""
    keeper: Keeper
    """Commits appends as the memory's rules want it."""
    index_files: IndexFiles
    """Indexes that are kept beside the store."""

    def __reduce__(self) -> NoReturn:
        # For pickle and copy alike: two memories on one store would close it for one another.
        raise InvalidArgument(
            f"the open memory {self.url} cannot be copied or sent to another process; send its url, and open it in the "
            "worker: memstore.open(url, mode='r')",
            memory=self.url,
        )

    @property
    def writing(self) -> threading.RLock:
        """Held while a batch is composed and written; one for all memories on the same store."""
        with _guard:
            return _locks.setdefault(self.store, threading.RLock())

    @cached_property
    def catalog(self) -> Catalog:
        """Names and numbers of the documents."""
        return catalog_of(self.store, self.url)

    @property
    def homes(self) -> Homes:
        """Where documents have blocks that they share."""
        return self.catalog.homes

    def places(self, number: int, state: DocumentState) -> Places:
        """Where the blocks of a document lie. Raises ``DamagedError``."""
        return Places(number, state, self.catalog.homes.of(number, state))

    @property
    def block_layouts(self) -> list[Layout]:
        """Layout of each field of a block, in the order of the records."""
        return block_layouts(self.spec)

    def runs(self, layer: int) -> LandmarkRuns:
        """The stored landmarks of one layer."""
        return LandmarkRuns(self.store, self.spec, layer, self.run_length)

    @property
    def history(self) -> Runs:
        """The stored hashes of the histories of documents."""
        return history_runs(self.store)

    def new_index(self) -> VectorIndex:
        """An empty index for one layer of a document."""
        spec = self.spec
        return open_index(
            self.index,
            key_heads=spec.key_heads,
            key_dim=spec.key_dim,
            keys_per_block=spec.keys_per_block,
            dtype=index_dtype(spec.key_dtype),
        )

    @cached_property
    def capabilities(self) -> IndexCapabilities:
        """What its indexes can do. Raises ``InvalidArgument`` for an unknown kind, or one that cannot be made here."""
        index = self.new_index()
        index.close()
        return index.capabilities

    def documents(self) -> list[int]:
        """Numbers of the documents, in the order they were made. Raises ``DamagedError``."""
        return self.catalog.numbers(0)

    def state(self, document: int) -> DocumentState | None:
        """The DOCUMENTS entry of a document. Raises ``DamagedError``."""
        state = self._stored_state(document)
        if state is None or self._room.holds(state):
            return state
        # Between the two looks a writer may have forgotten it, and its bytes with it.
        state = self._stored_state(document)
        if state is None or self._room.holds(state):
            return state
        raise DamagedError(
            f"the entry of document {state.name!r} is damaged: {state.tokens:,} tokens in {state.blocks:,} blocks are "
            "more than the whole memory holds; run verify",
            memory=self.url,
        )

    @cached_property
    def _room(self) -> Room:
        return Room(self.store, self.spec)

    def _stored_state(self, document: int) -> DocumentState | None:
        records = self.store.get(Address(document).entry)
        return None if records is None else DocumentState.from_record(records[0])

    def next_document(self) -> int:
        """The number that the next new document gets. Raises ``DamagedError``."""
        records = self.store.get(NEXT_DOCUMENT)
        if records is not None:
            told = fit(records[0].to_json(), NEXT_DOCUMENT_VALUE, "the number of the next document")
            return int(told["next_document"])
        if self.documents():
            raise DamagedError(f"memory {self.url} has lost the number of its next document; run repair")
        return 1

    def check_layer(self, layer: int) -> None:
        """Raise ``InvalidArgument`` for a layer that the memory does not have."""
        check_whole("layer", layer, 0, self.spec.layers - 1)


def next_document_record(number: int) -> Record:
    """The record under ``NEXT_DOCUMENT``."""
    return Record.from_json({"next_document": number})


def not_found(name: str, url: str, names: list[str]) -> NotFound:
    """The error for a document that does not exist."""
    shown = ", ".join(repr(known) for known in names[:10]) + (", ..." if len(names) > 10 else "")
    return NotFound(f"memory {url} has no document {name!r}; it has {shown or 'none'}.")


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
