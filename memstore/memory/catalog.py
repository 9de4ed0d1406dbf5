"""Names of documents and their numbers, as far as this process knows them: what finds a document by its name.

Entries are stored by number. To read all of them for every name would make each append to a new document as slow as
there are documents, so an open store remembers what it has read. Three facts keep that true whoever else writes:
numbers only grow, so a new document has a number behind all that were looked at; a document keeps its name; and a name
that is found is read again in its entry before it is used, so one that was forgotten is noticed. Only a repair makes
documents of numbers that were looked at before; it calls ``clear``.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from weakref import WeakKeyDictionary, ref

from memstore.errors import DamagedError
from memstore.memory.places import Homes
from memstore.memory.state import LAST_DOCUMENT, Address, DocumentState
from memstore.store.contract import BlockStore

_catalogs: WeakKeyDictionary[BlockStore, ref[Catalog]] = WeakKeyDictionary()  # which refer to their stores
_guard = threading.Lock()


class Catalog:
    """The documents of one store. Safe to use from several threads."""

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

    def find(self, name: str) -> int | None:
        """The number of the document ``name``; None if there is none. Raises ``DamagedError``."""
        with self._lock:
            number = self._numbers.get(name)
            if number is not None:
                if self._name(number) == name:
                    return number
                self.remove([number])
            self._read_new()
            return self._numbers.get(name)

    def names(self) -> dict[int, str]:
        """Number -> name of every document, in the order they were made. Raises ``DamagedError``."""
        with self._lock:
            numbers = self.numbers(0)
            for number in numbers:
                if number not in self._names:
                    self._add(number)
            self.remove(self._names.keys() - set(numbers))
            return {number: self._names[number] for number in numbers if number in self._names}

    def known(self) -> Collection[int]:
        """Numbers of the documents as a writer knows them: nobody else writes, so what it forgets is all that goes."""
        with self._lock:
            self._read_new()
            return set(self._names)

    def numbers(self, first: int) -> list[int]:
        """Numbers of the documents from ``first`` on, as they are stored now. Raises ``DamagedError``."""
        keys = self._store.keys(Address(first).entry, Address(LAST_DOCUMENT).entry)
        for key in keys:
            if key != Address(key.document).entry:
                # A look for the document would not find it, and say that there is none.
                raise DamagedError(
                    f"memory {self._url}: the entry of document {key.document} lies under a damaged key; run verify"
                )
        return [key.document for key in keys]

    def remove(self, numbers: Collection[int]) -> None:
        """Note that documents were forgotten."""
        with self._lock:
            for number in list(numbers):
                name = self._names.pop(number, None)
                self.listing.discard(number)
                # Another document may have the name by now.
                if name is not None and self._numbers.get(name) == number:
                    del self._numbers[name]

    def _read_new(self) -> None:
        for number in self.numbers(self._next):
            self._add(number)
            self._next = number + 1

    def _add(self, number: int) -> None:
        state = self._state(number)
        if state is not None:
            self._names[number] = state.name
            self._numbers[state.name] = number
            if state.spans or (state.home is not None and state.branch is None):
                self.listing.add(number)

    def _name(self, number: int) -> str | None:
        state = self._state(number)
        return None if state is None else state.name

    def _state(self, number: int) -> DocumentState | None:
        records = self._store.get(Address(number).entry)
        return None if records is None else DocumentState.from_record(records[0])


def catalog_of(store: BlockStore, url: str) -> Catalog:
    """The catalog of ``store``: one for all memories on it, so that what one forgets no other has to notice."""
    with _guard:
        there = _catalogs.get(store)
        catalog = None if there is None else there()
        if catalog is None:
            catalog = Catalog(store, url)
            _catalogs[store] = ref(catalog)
        return catalog
