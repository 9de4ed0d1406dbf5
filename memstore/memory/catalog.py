"""What an open store knows of its documents: their names, numbers, entries, homes, and how they begin.

Entries are stored by number. To read all of them for every name, every text or every question would make each as slow
as there are documents, so an open store remembers what it has read. What it remembers is of one commit, the last that
it has seen. Of its own commits it knows what they changed (``committing``); where anybody else has committed, or
somebody without saying so, entries are read again as they are asked for, and new names are looked for.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary, ref

from memstore.errors import DamagedError
from memstore.memory.entry import HASH_BYTES, NAMED, Address, DocumentState, Homes, Places, stored_state
from memstore.memory.runs import HistoryRuns
from memstore.store.contract import MAX_DOCUMENT, BlockStore, Bytes, Key, Record
from memstore.stored import fit

MOST_HELD = 64 << 20
"""Bytes of histories that are held, so that texts are compared with documents that were compared before."""

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


class Histories:
    """The documents of a store in the order of their histories: one that begins as a text does stands beside it.

    So a text is compared with a few documents, however many there are: with none where no other has its first block,
    else with those that a search by halves meets. Documents whose first blocks have left, or that have no digest, are
    not among them.
    """

    def __init__(
        self,
        state: Callable[[int], DocumentState | None],
        places: Callable[[int, DocumentState], Places],
    ) -> None:
        """``state`` and ``places`` are those of a document as it is now."""
        self._state, self._places = state, places
        self._changed: dict[int, None] = {}
        self._first: dict[int, bytes] = {}
        self._groups: dict[bytes, list[int]] = {}
        """Hash of the first block -> documents that begin with it, in the order of their histories."""
        self._held: dict[int, bytes] = {}
        """Histories that were read, of documents that others begin like."""

    def changed(self, documents: Iterable[int]) -> None:
        """These documents are new, others than they were, or gone."""
        self._changed.update(dict.fromkeys(documents))

    def find(self, history: HistoryRuns, hashes: Bytes, size: int) -> tuple[int, int] | None:
        """A document that has most first blocks of the history ``hashes [n, HASH_BYTES]``, and how many.

        None where none has the first. ``size`` is the number of tokens in a block; damaged documents are left out.
        """
        for document in self._changed:
            self._remove(document)
        while self._changed:
            self._add(self._changed.popitem()[0], history, size)
        text = hashes.tobytes()
        group = self._groups.get(text[:HASH_BYTES], [])
        count, document = self._place(group, text, history, size)[1]
        return (-document, count) if count else None

    def _add(self, document: int, history: HistoryRuns, size: int) -> None:
        try:
            state = self._state(document)
            if state is None or state.digest is None or state.first or state.tokens < size:
                return
            one = state.tokens < 2 * size
            first = bytes.fromhex(state.digest) if one else history.hash(self._places(document, state), 0)
            place = 0
            if group := self._groups.get(first):
                place = self._place(group, self._history(document, history, size), history, size)[0]
            # Not into ``group``: where all in it were damaged, it is no more.
            self._groups.setdefault(first, []).insert(place, document)
        except DamagedError:
            return  # verify names it; here it only means that nothing of this document is used
        self._first[document] = first

    def _remove(self, document: int) -> None:
        self._held.pop(document, None)
        first = self._first.pop(document, None)
        if first is not None:
            self._groups[first].remove(document)
            if not self._groups[first]:
                del self._groups[first]

    def _place(self, group: list[int], text: bytes, history: HistoryRuns, size: int) -> tuple[int, tuple[int, int]]:
        """Where the history ``text`` stands in ``group``; and the most blocks that any has, and minus that document."""
        low, high, best = 0, len(group), (0, 0)
        while low < high:
            middle = (low + high) // 2
            document = group[middle]
            try:
                other = self._history(document, history, size)
            except DamagedError:
                self._remove(document)
                high -= 1
                continue
            count = _agreeing(text, other)
            best = max(best, (count, -document))
            stop = (count + 1) * HASH_BYTES
            low, high = (middle + 1, high) if other[:stop] < text[:stop] else (low, middle)
        return low, best

    def _history(self, document: int, history: HistoryRuns, size: int) -> bytes:
        """The hashes of all complete blocks of a document, one after the other. Raises ``DamagedError``."""
        if document not in self._held:
            if sum(map(len, self._held.values())) > MOST_HELD:
                self._held.clear()
            state = self._state(document) or DocumentState(name="")
            parts = history.read(self._places(document, state), range(state.tokens // size))
            self._held[document] = b"".join(rows.numpy().tobytes() for _, rows in parts)
        return self._held[document]


def _agreeing(one: bytes, other: bytes) -> int:
    """How many first blocks two histories have in common: each hash says everything before it."""

    def differs(block: int) -> bool:
        part = slice(block * HASH_BYTES, (block + 1) * HASH_BYTES)
        return one[part] != other[part]

    return bisect_left(range(min(len(one), len(other)) // HASH_BYTES), True, key=differs)
