"""What an open store knows of its documents: their names, numbers, entries, homes, and how they begin.

Entries are stored by number. To read all of them for every name, every text or every question would make each as slow
as there are documents, so an open store remembers what it has read. What it remembers is of one commit, the last that
it has seen. Of its own commits it knows what they changed (``committing``); where anybody else has committed, or
somebody without saying so, entries are read again as they are asked for, and new names are looked for.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary, ref

from memstore.errors import DamagedError
from memstore.memory.entry import NAMED, Address, DocumentState, Homes, Places, stored_state
from memstore.memory.history import Histories
from memstore.store.contract import MAX_DOCUMENT, BlockStore, Key, Record
from memstore.stored import fit

_catalogs: WeakKeyDictionary[BlockStore, ref[Catalog]] = WeakKeyDictionary()  # which refer to their stores
_guard = threading.Lock()


class Catalog:
    """The documents of one store. Safe to use from several threads.

    Two facts hold whoever else writes: numbers only grow, so a new document has a number behind all that were looked
    at, and a document keeps its name. Only a repair makes documents of numbers that were looked at before; it calls
    ``clear``.
    """

    def __init__(self, store: BlockStore, url: str) -> None:
        self._store = store
        self._url = url
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Know nothing any more."""
        with self._lock:
            self._names: dict[int, str] = {}
            self._numbers: dict[str, int] = {}
            self.homes = Homes(self._store)
            """Where documents have blocks that they share."""
            self.listing: set[int] = set()
            """Documents of which only their entry says where their blocks lie: see ``DocumentState.spans``."""
            self._next = 0
            """Documents below this number were looked at."""
            self.version = -1
            """The commit that what is below is of."""
            self._committing = False
            """Whether the next commit may be one that is about to be told of."""
            self._states: dict[int, DocumentState | None] = {}
            """Entries that were read or written."""
            self._whole = False
            """Whether ``_names`` are all that there are."""
            self._beginnings: Histories | None = None

    def state(self, number: int) -> DocumentState | None:
        """The entry of a document, None where there is none. Raises ``DamagedError`` and ``ForeignMemory``."""
        with self._lock:
            if not self._look():
                return stored_state(self._store, number)
            if number not in self._states:
                self._states[number] = stored_state(self._store, number)
            return self._states[number]

    def places(self, number: int, state: DocumentState) -> Places:
        """Where the blocks of a document lie. Raises ``DamagedError``."""
        return Places(number, state, self.homes.of(number, state))

    def beginnings(self) -> Histories:
        """Which documents begin with which blocks, at this moment. Raises ``DamagedError``."""
        with self._lock:
            self._look()
            if self._beginnings is None:
                self._beginnings = Histories(self.state, self.places)
                self._beginnings.changed(self.numbers(0))
            return self._beginnings

    def find(self, name: str) -> int | None:
        """The number of the document ``name``; None if there is none. Raises ``DamagedError``."""
        with self._lock:
            number = self._numbers.get(name)
            if number is not None:
                state = self.state(number)
                if state is not None and state.name == name:
                    return number
                self._remove(number)
            self._read_new()
            return self._numbers.get(name)

    def names(self) -> dict[int, str]:
        """Number -> name of every document, in the order they were made. Raises ``DamagedError``."""
        with self._lock:
            known = self._look()
            if not (known and self._whole):
                self._read_new()
                numbers = self.numbers(0)
                for number in numbers:
                    if number not in self._names:  # a repair has made it
                        self._add(number, self._store.get(Address(number).entry))
                for number in self._names.keys() - set(numbers):
                    self._remove(number)
                self._names = {number: self._names[number] for number in numbers if number in self._names}
                self._whole = known
            return dict(self._names)

    def known(self) -> Collection[int]:
        """Numbers of the documents as a writer knows them: nobody else writes, so what it forgets is all that goes."""
        with self._lock:
            self._read_new()
            return set(self._names)

    def numbers(self, first: int) -> list[int]:
        """Numbers of the documents from ``first`` on, as they are stored now. Raises ``DamagedError``."""
        keys = self._store.keys(Address(first).entry, Address(MAX_DOCUMENT).entry)
        return [self._number(key) for key in keys]

    @contextmanager
    def committing(self) -> Iterator[dict[int, DocumentState | None]]:
        """For whoever holds the right to write: inside is one commit, and what is put in the mapping it has changed.

        That is the new entries by the numbers of their documents, None for those that are gone.
        """
        changed: dict[int, DocumentState | None] = {}
        with self._lock:
            self._look()
            self._committing = True
        try:
            yield changed
        finally:
            self._committing = False
        with self._lock:
            self.version = self._store.version()
            for number, state in changed.items():
                self._states[number] = state
                if state is None:
                    self._remove(number)
                else:  # also of one that was there: it may have moved to a home that its entry alone tells of
                    self._note(number, state.name, lists=_lists(state))
            if self._beginnings is not None:
                self._beginnings.changed(changed)

    def _look(self) -> bool:
        """Take notice of commits that nobody has told of. False where another thread is about to tell of the last."""
        version = self._store.version()
        if version != self.version:
            if self._committing:
                return False
            self.version, self._states, self._whole, self._beginnings = version, {}, False, None
        return True

    def _number(self, key: Key) -> int:
        if key.layer or key.item:
            # A look for the document would not find it, and say that there is none.
            raise DamagedError(
                f"memory {self._url}: the entry of document {key.document} lies under a damaged key; run verify"
            )
        return key.document

    def _remove(self, number: int) -> None:
        name = self._names.pop(number, None)
        self.listing.discard(number)
        # Another document may have the name by now.
        if name is not None and self._numbers.get(name) == number:
            del self._numbers[name]

    def _read_new(self) -> None:
        for key, records in self._store.walk(Address(self._next).entry, Address(MAX_DOCUMENT).entry):
            self._add(self._number(key), records)
            self._next = key.document + 1

    def _add(self, number: int, records: Sequence[Record] | None) -> None:
        if records:
            # Whoever uses the document checks the rest of its entry.
            entry = fit(records[0].to_json(), NAMED, "the entry of a document")
            lists = bool(entry.get("spans")) or (entry.get("home") is not None and entry.get("branch") is None)
            self._note(number, entry["name"], lists=lists)

    def _note(self, number: int, name: str, *, lists: bool) -> None:
        self._names[number] = name
        self._numbers[name] = number
        if lists:
            self.listing.add(number)


def _lists(state: DocumentState) -> bool:
    return bool(state.spans) or (state.home is not None and state.branch is None)


def catalog_of(store: BlockStore, url: str) -> Catalog:
    """The catalog of ``store``: one for all memories on it, so that what one forgets no other has to notice."""
    with _guard:
        there = _catalogs.get(store)
        catalog = None if there is None else there()
        if catalog is None:
            catalog = Catalog(store, url)
            _catalogs[store] = ref(catalog)
        return catalog
