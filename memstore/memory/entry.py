"""The store's records of its documents: entries, places of values, names, and first blocks.

A document writes under a number of its own, its *home*. A fork shares the first blocks of another document. Its home is
a *branch* of the parent's home, and every block below the branch lies with the parent. A home always stays a branch of
the same parent. So the branch is stored once for the home, and not for each document that shares blocks. The space of a
chain of forks grows only with its links. If a document rewrites blocks that others use, or blocks before its home, it
moves to another home. Nothing is counted: which blocks are in use follows from the entries of all documents in one tree
of homes. They are read when something is to be deleted (``usage.py``).

Entries are stored by number. Reading all of them for every name, text or query would become slower with each document.
So an open store keeps the entries that it has read. They belong to one commit, the last that it has seen. It knows the
changes of its own commits (``committing``). After a commit by another writer, or one without ``committing``, it reads
entries again on use and looks for new names.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from memstore.errors import DamagedError, ForeignMemory
from memstore.json_checks import anything, array, fit, maybe, members, parse, ranges, row, table, text, whole
from memstore.store.contract import BlockStore
from memstore.store.records import MAX_DOCUMENT, MAX_ITEM, Bytes, Key, Record, Table

HEADER = Key(Table.META)
"""JSON ``{"format", "library", "spec", "blocks_per_run"}``, written once."""
NEXT_DOCUMENT = Key(Table.META, item=1)
"""JSON ``{"next_document": n}``: document numbers are never used twice."""
NEXT_DOCUMENT_VALUE = table(next_document=whole(0, MAX_DOCUMENT + 1))
KEEPING = Key(Table.META, item=2)
"""JSON, only if there is a limit or another rule: see ``rules.py``."""
FIRST_NAMED = Key(Table.META, item=16)
"""The first key of named arrays and facts, see ``NamedValues``."""

NAMED_VALUE = table(kind=text(20), name=text(10_000))
HASH_BYTES = 16
HASHES_PER_RUN = 240
"""Hashes of a document's history in one run, see ``spec.py``. Every append rewrites a run, which takes a 4 KiB page."""
MOST_SPANS = 2**16
LONGEST_NAME = 511
"""Most bytes of a document's name."""
MOST_HELD = 64 << 20
"""Most bytes of histories kept in memory, so that later comparisons of texts and documents need not read them."""

_catalogs: WeakKeyDictionary[BlockStore, ref[Catalog]] = WeakKeyDictionary()  # catalogs refer to their stores
_guard = threading.Lock()
_ALWAYS = ("name", "tokens", "blocks", "first", "edits", "state")


@dataclass(frozen=True, kw_only=True)
class DocumentState:
    """The DOCUMENTS entry: the state of one document at one commit."""

    name: str
    tokens: int = 0
    """Tokens appended and not truncated, including those in blocks that have left."""
    blocks: int = 0
    """One more than the last block, which may be incomplete."""
    first: int = 0
    """First live block. Earlier ones have left, because of ``capacity``."""
    edits: int = 0
    """Number of truncations and drops. While it stays the same, complete blocks never change."""
    state: str = "live"
    """Reserved for other states in later versions."""
    branch: tuple[int, int] | None = None
    """``(parent, stop)``: blocks below ``stop`` lie with the home ``parent``."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """``(owner, start, stop)``, ascending from block 0: earlier versions wrote this in place of a branch."""
    home: int | None = None
    """The number under which the blocks after the shared ones lie; None: the document's own."""
    digest: str | None = None
    """Hash of the history of all complete blocks, see ``spec.py``; None if it was never computed."""
    # Part of the history: the same text read with other options has other states and must not count as the same.
    reading: dict[str, Any] | None = None
    """Everything that the states depend on beside fingerprint and tokens, as the model's reader describes it."""
    dropped: tuple[tuple[int, int], ...] = ()
    """``(start, stop)``: complete blocks that were damaged and are dropped, ascending."""

    def check(self) -> None:
        """Raise ``DamagedError`` for numbers that no document can have."""
        ends = [0, *(stop for _, _, stop in self.spans)]
        if self.first > self.blocks or [start for _, start, _ in self.spans] != ends[:-1] or ends != sorted(set(ends)):
            raise DamagedError(
                f"the entry of document {self.name!r} contradicts itself (blocks {self.first} to {self.blocks}, "
                f"{len(self.spans)} spans). Run verify"
            )

    def live(self) -> range:
        """Return all live blocks."""
        return range(self.first, self.blocks)

    def complete(self, block_size: int) -> range:
        """Return live blocks that are full."""
        return range(self.first, max(self.first, self.tokens // block_size))

    @property
    def gaps(self) -> list[range]:
        """The damaged blocks that were dropped."""
        return [range(start, stop) for start, stop in self.dropped]

    def present(self, blocks: range | None = None) -> list[range]:
        """Return ``blocks``, or all live ones, without the gaps."""
        blocks = self.live() if blocks is None else blocks
        if self.dropped:
            return lacking(blocks, self.gaps)
        return [blocks] if blocks else []

    def readable(self, block_size: int) -> int:
        """Return the number of tokens that can be read: without those of blocks that have left or were dropped."""
        present = self.present()
        return sum(map(len, present)) * block_size - (-self.tokens % block_size if present else 0)

    def grown(self, tokens: int, block_size: int, capacity: int | None) -> DocumentState:
        """Return the state after an append of ``tokens`` tokens."""
        total = self.tokens + tokens
        blocks = -(-total // block_size)
        first = self.first if capacity is None else max(self.first, blocks - capacity)
        return replace(self, tokens=total, blocks=blocks, first=first)

    def cut(self, blocks: int, block_size: int) -> DocumentState:
        """Return the state after a truncation to ``blocks``.

        The places may have to change too, see ``append.truncation``.
        """
        return replace(
            self,
            tokens=min(self.tokens, blocks * block_size),
            blocks=blocks,
            first=min(self.first, blocks),
            edits=self.edits + 1,
            dropped=self.dropped_below(blocks),
        )

    def passed_over(self, blocks: int, block_size: int) -> DocumentState:
        """Return the state with ``blocks`` more blocks, all of them dropped."""
        tokens, stop = self.tokens + blocks * block_size, self.blocks + blocks
        return replace(self, tokens=tokens, blocks=stop, dropped=(*self.dropped, (self.blocks, stop)), digest=None)

    def dropped_below(self, blocks: int) -> tuple[tuple[int, int], ...]:
        """Return the part of ``dropped`` within the first ``blocks`` blocks."""
        return tuple((start, min(stop, blocks)) for start, stop in self.dropped if start < blocks)

    def to_record(self) -> Record:
        """Return the record to store. It leaves out optional values, so plain entries have their original form."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return Record.from_json(
            {name: value for name, (value, default) in values.items() if name in _ALWAYS or value != default}
        )

    @classmethod
    def from_record(cls, record: Record) -> DocumentState:
        """Invert ``to_record``. Raises ``DamagedError`` and ``ForeignMemory``."""
        return _state(record.payload.tobytes())


@lru_cache(256)  # each use after a commit reads the entry again, usually unchanged
def _state(entry: bytes) -> DocumentState:
    values = fit(parse(entry, "the entry of a document"), ENTRY, "the entry of a document")
    if unknown := values.keys() - _FIELDS:
        raise ForeignMemory.newer("a document has", unknown)
    for name in values.keys() & {"spans", "dropped"}:
        values[name] = tuple(map(tuple, values[name]))
    if values.get("branch"):
        values["branch"] = tuple(values["branch"])
    return DocumentState(**values)


_FIELDS = frozenset(each.name for each in fields(DocumentState))
_NUMBER, _BLOCK = whole(0, MAX_DOCUMENT), whole(0, MAX_ITEM)
_SPANS = array(row(_NUMBER, _BLOCK, _BLOCK), MOST_SPANS)
BRANCH = table({"parent": _NUMBER, "stop": _BLOCK, "spans": _SPANS}, document=_NUMBER)
"""Schema of the stored branch of a home."""
READING = members(anything, 1000)
ENTRY = table(
    {
        "branch": maybe(row(_NUMBER, _BLOCK)),
        "spans": _SPANS,
        "home": maybe(whole(0, MAX_DOCUMENT)),
        "digest": maybe(text(64)),
        "reading": maybe(READING),
        "dropped": ranges(MAX_ITEM),
    },
    name=text(LONGEST_NAME),
    tokens=whole(0, 2**53),
    blocks=whole(0, MAX_ITEM),
    first=whole(0, MAX_ITEM),
    edits=whole(),
    state=text(64),
)


NAMED = table(name=text(LONGEST_NAME))
"""Schema of the entry's part that name look-up needs."""


@dataclass(frozen=True)
class Address:
    """Keys of the values under number ``id``, which is a document's or the home that a document moved to."""

    id: int

    @property
    def entry(self) -> Key:
        """The key of its DOCUMENTS entry."""
        return Key(Table.DOCUMENTS, self.id)

    @property
    def branch(self) -> Key:
        """The key of its branch, if it is a home that shares blocks."""
        return Key(Table.META, self.id)

    def tokens(self, block: int) -> Key:
        """Return the key of a block's token ids."""
        return Key(Table.TOKENS, self.id, 0, block)

    def block(self, layer: int, block: int) -> Key:
        """Return the key of a block's states."""
        return Key(Table.BLOCKS, self.id, layer, block)

    def recurrent(self, tokens: int) -> Key:
        """Return the key of a document's recurrent state after so many tokens, see ``spec.py``."""
        return Key(Table.RECURRENT, self.id, 0, tokens)


def stored_state(store: BlockStore, document: int) -> DocumentState | None:
    """Return the entry of a document, None if it is missing. Raises ``DamagedError`` and ``ForeignMemory``."""
    records = store.get(Address(document).entry)
    return None if records is None else DocumentState.from_record(records[0])


class Piece(NamedTuple):
    """Consecutive blocks that lie under one number."""

    owner: int
    blocks: range


class Home:
    """A number under which blocks lie from ``start`` on; earlier ones lie in the home ``below``.

    Homes of one tree share the homes below them. ``jump`` leads to a home further below. With these jumps, finding a
    block takes as many steps as the number of homes has digits (a skew binary number system).
    """

    __slots__ = ("below", "depth", "jump", "listed", "number", "root", "start")

    def __init__(self, number: int, start: int = 0, below: Home | None = None, *, listed: bool = False) -> None:
        self.number = number
        self.start = start
        self.below = below
        self.listed = listed
        """Whether only the spans of an entry describe the homes below, so no other home can refer to it."""
        self.depth: int = 0 if below is None else below.depth + 1
        self.root: int = number if below is None else below.root
        self.jump: Home = self if below is None else below
        if below is not None and below.depth - below.jump.depth == below.jump.depth - below.jump.jump.depth:
            self.jump = below.jump.jump

    @property
    def base(self) -> int:
        """The block that its first run of rows begins with: see ``Runs``. Homes of earlier versions begin with 0."""
        return 0 if self.below is None or self.below.listed else self.start

    def at(self, block: int) -> Home:
        """Return the home that contains a block."""
        home = self
        while home.start > block:
            assert home.below is not None
            home = home.jump if home.jump.start > block else home.below
        return home

    def pieces(self, blocks: range) -> Iterator[Piece]:
        """Yield ``blocks`` from the last to the first, split at each change of home."""
        stop, home = blocks.stop, self
        while stop > blocks.start:
            home = home.at(stop - 1)
            start = max(home.start, blocks.start)
            yield Piece(home.number, range(start, stop))
            stop = start


class Homes:
    """The homes of one store, each read once, because their branches never change."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._known: dict[int, Home] = {}
        self._documents: dict[int, int] = {}

    def at(self, number: int) -> Home:
        """Return the home ``number``; without a stored branch, it is the root of a tree. Raises ``DamagedError``."""
        chain: list[tuple[int, int]] = []
        met = set[int]()
        while number not in self._known:
            values = self._branch(number)
            if "parent" not in values:
                self._known[number] = listed(number, values.get("spans", ()))
                break
            met.add(number)
            chain.append((number, values.get("stop", 0)))
            number = values["parent"]
            if number in met:
                raise DamagedError(f"the blocks of number {number} branch off from themselves. Run verify")
        for each, stop in reversed(chain):
            self._known[each] = _joined(each, stop, self._known[number])
            number = each
        return self._known[number]

    def of(self, number: int, state: DocumentState) -> Home:
        """Return the home of document ``number``. Raises ``DamagedError``."""
        home = number if state.home is None else state.home
        if state.branch is None:
            return listed(home, state.spans)
        parent, stop = state.branch
        return _joined(home, stop, self.at(parent))  # not kept: it may not be stored yet

    def documents(self) -> dict[int, tuple[Home, int]]:
        """Return every home with a stored branch, and the number of the document that it was made for."""
        keys = self._store.keys(Address(1).branch, Key(Table.META, MAX_DOCUMENT))
        numbers = [key.document for key in keys if key == Address(key.document).branch]
        homes = {number: self.at(number) for number in numbers}
        for number in numbers:
            if number not in self._documents:
                self._branch(number)
        return {number: (home, self._documents.get(number, number)) for number, home in homes.items()}

    def _branch(self, number: int) -> Mapping[str, Any]:
        """Return the stored branch of a home, empty without one, and remember its document. Raises ``DamagedError``."""
        if (records := self._store.get(Address(number).branch)) is None:
            return {}
        values: dict[str, Any] = fit(records[0].to_json(), BRANCH, f"the stored branch of number {number}")
        self._documents[number] = values["document"]
        return values


def _joined(number: int, stop: int, below: Home) -> Home:
    if stop <= below.start:
        raise DamagedError(f"number {number} of this memory shares no block with number {below.number}. Run verify")
    return Home(number, stop, below)


def listed(number: int, spans: Sequence[Sequence[int]]) -> Home:
    """Return the home ``number``, with the places of earlier blocks from ``spans``: see ``DocumentState.spans``."""
    below, stop = None, 0
    for owner, start, stop in spans:  # noqa: B007 - the last one
        below = Home(owner, start, below, listed=True)
    return Home(number, stop, below)


class Places:
    """The places of the blocks of document ``number``, which writes at the home ``node``."""

    def __init__(self, number: int, state: DocumentState, node: Home) -> None:
        self.node = node
        self.home = self.node.number
        """The number under which new blocks are written."""
        self.number = number
        self.start = self.node.start
        """The first block that lies at home, whether it exists or not."""
        self.whole = max([self.start, *(stop for _, stop in state.dropped)])
        """The first block from which on all blocks lie at home and none was dropped."""
        self._state = state

    @property
    def entry(self) -> Key:
        """Key of the DOCUMENTS entry."""
        return Address(self.number).entry

    def owner(self, block: int) -> int:
        """Return the number under which a block lies."""
        return self.node.at(block).number

    def pieces(self, blocks: range) -> list[Piece]:
        """Return ``blocks`` in order, split at each change of owner."""
        return list(self.node.pieces(blocks))[::-1]

    def present(self, blocks: range) -> list[Piece]:
        """Return ``blocks`` without dropped ones, split at each change of owner."""
        return [piece for part in self._state.present(blocks) for piece in self.pieces(part)]

    def branch(self, number: int, stop: int) -> Home:
        """Return the home ``number`` of a document that shares all blocks below ``stop``."""
        return Home(number, stop, self.node.at(stop - 1)) if stop else Home(number)

    def tokens(self, block: int) -> Key:
        """Return the key of a block's token ids."""
        return Address(self.owner(block)).tokens(block)

    def all_tokens(self, blocks: range) -> list[Key]:
        """Return the keys of the token ids of ``blocks``."""
        return self._keys(Table.TOKENS, 0, blocks)

    def block(self, layer: int, block: int) -> Key:
        """Return the key of a block's states."""
        return Address(self.owner(block)).block(layer, block)

    def all_blocks(self, layer: int, blocks: range) -> list[Key]:
        """Return the keys of the states of ``blocks``."""
        return self._keys(Table.BLOCKS, layer, blocks)

    def _keys(self, table: Table, layer: int, blocks: range) -> list[Key]:
        return [Key(table, owner, layer, block) for owner, part in self.pieces(blocks) for block in part]


class Catalog:
    """The documents of one store. Safe to use from several threads.

    Two facts hold even if others write. Numbers only grow, so a new document has a higher number than all seen before.
    And a document keeps its name. Only a repair creates documents under numbers that were seen before; it calls
    ``clear``.
    """

    def __init__(self, store: BlockStore, url: str) -> None:
        self._store = store
        self._url = url
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Discard everything it has read."""
        with self._lock:
            self._names: dict[int, str] = {}
            self._numbers: dict[str, int] = {}
            self.homes = Homes(self._store)
            """The homes of the documents' blocks."""
            self.listing: set[int] = set()
            """Documents whose places stand only in their entry: see ``DocumentState.spans``."""
            self._next = 0
            """Documents below this number were read."""
            self.version = -1
            """The commit that the attributes below belong to."""
            self._committing = False
            """Whether the next commit may be our own, whose changes follow."""
            self._states: dict[int, DocumentState | None] = {}
            """Entries that were read or written."""
            self._whole = False
            """Whether ``_names`` is complete."""
            self._beginnings: Histories | None = None

    def state(self, number: int) -> DocumentState | None:
        """Return the entry of a document, None if it is missing. Raises ``DamagedError`` and ``ForeignMemory``."""
        with self._lock:
            if not self._look():
                return stored_state(self._store, number)
            if number not in self._states:
                self._states[number] = stored_state(self._store, number)
            return self._states[number]

    def places(self, number: int, state: DocumentState) -> Places:
        """Return the places of a document's blocks. Raises ``DamagedError``."""
        return Places(number, state, self.homes.of(number, state))

    def beginnings(self) -> Histories:
        """Return the current index of documents by their first blocks. Raises ``DamagedError``."""
        with self._lock:
            self._look()
            if self._beginnings is None:
                self._beginnings = Histories(self.state, self.places)
                self._beginnings.changed(self.numbers())
            return self._beginnings

    def find(self, name: str) -> int | None:
        """Return the number of the document ``name``; None if it is missing. Raises ``DamagedError``."""
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
        """Return number -> name of every document, in the order they were made. Raises ``DamagedError``."""
        with self._lock:
            known = self._look()
            if not (known and self._whole):
                self._read_new()
                numbers = self.numbers()
                for number in numbers:
                    if number not in self._names:  # made by a repair
                        self._add(number, self._store.get(Address(number).entry))
                for number in self._names.keys() - set(numbers):
                    self._remove(number)
                self._names = {number: self._names[number] for number in numbers if number in self._names}
                self._whole = known
            return dict(self._names)

    def known(self) -> Collection[int]:
        """Return the document numbers that a writer knows: nobody else writes, so only its own deletions count."""
        with self._lock:
            self._read_new()
            return set(self._names)

    def numbers(self) -> list[int]:
        """Return the document numbers as stored now, in the order they were made. Raises ``DamagedError``."""
        keys = self._store.keys(Address(0).entry, Address(MAX_DOCUMENT).entry)
        return [self._number(key) for key in keys]

    @contextmanager
    def committing(self) -> Iterator[dict[int, DocumentState | None]]:
        """Take the changes of one commit; the caller has the right to write. Fill the mapping inside the block.

        It maps the numbers of changed documents to their new entries, or None if they are gone.
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
                else:  # also for old documents: one may have moved to a home described only in its entry
                    self._note(number, vars(state))
            if self._beginnings is not None:
                self._beginnings.changed(changed)

    def _look(self) -> bool:
        """Notice commits without ``committing``. Return False while another thread is about to report the last one."""
        version = self._store.version()
        if version != self.version:
            if self._committing:
                return False
            self.version, self._states, self._whole, self._beginnings = version, {}, False, None
        return True

    def _number(self, key: Key) -> int:
        if key.layer or key.item:
            # A look-up of the document would not find it, and report it as missing.
            raise DamagedError(
                f"memory {self._url}: the entry of document {key.document} is stored under a damaged key. Run verify"
            )
        return key.document

    def _remove(self, number: int) -> None:
        name = self._names.pop(number, None)
        self.listing.discard(number)
        # Another document may have taken the name by now.
        if name is not None and self._numbers.get(name) == number:
            del self._numbers[name]

    def _read_new(self) -> None:
        for key, records in self._store.walk(Address(self._next).entry, Address(MAX_DOCUMENT).entry):
            self._add(self._number(key), records)
            self._next = key.document + 1

    def _add(self, number: int, records: Sequence[Record] | None) -> None:
        if records:
            # The rest of the entry is checked when the document is used.
            self._note(number, fit(records[0].to_json(), NAMED, "the entry of a document"))

    def _note(self, number: int, entry: Mapping[str, Any]) -> None:
        self._names[number] = entry["name"]
        self._numbers[entry["name"]] = number
        if entry.get("spans") or (entry.get("home") is not None and entry.get("branch") is None):
            self.listing.add(number)


def catalog_of(store: BlockStore, url: str) -> Catalog:
    """Return the one catalog of ``store``, which all its memories share, so they all see what one of them forgets."""
    with _guard:
        there = _catalogs.get(store)
        catalog = None if there is None else there()
        if catalog is None:
            catalog = Catalog(store, url)
            _catalogs[store] = ref(catalog)
        return catalog


ReadHashes = Callable[[Places, range], bytes]
"""Returns the stored hashes of blocks, one after the other."""


class Histories:
    """The documents of a store sorted by their histories, so documents with the same beginning are neighbours.

    So a text is compared with only a few documents: those in a binary search, or none if its first block is unknown.
    Documents whose first blocks have left, or without a digest, are left out.
    """

    def __init__(
        self, state: Callable[[int], DocumentState | None], places: Callable[[int, DocumentState], Places]
    ) -> None:
        """``state`` and ``places`` return those of a document as it is now."""
        self._state, self._places = state, places
        self._lock = threading.Lock()  # of ``find`` alone: a commit, which calls ``changed``, must not wait for it
        self._changed: dict[int, None] = {}
        self._first: dict[int, bytes] = {}
        self._groups: dict[bytes, list[int]] = {}
        """Hash of the first block -> documents that begin with it, sorted by history."""
        self._held: dict[int, bytes] = {}
        """Histories already read, of documents that share a beginning."""

    def changed(self, documents: Iterable[int]) -> None:
        """Take note that these documents are new, changed or gone."""
        self._changed.update(dict.fromkeys(documents))

    def find(self, read: ReadHashes, hashes: Bytes, size: int) -> tuple[int, int] | None:
        """Return a document that has most first blocks of the history ``hashes [n, HASH_BYTES]``, and their number.

        None if no document has the first block. ``size`` is the number of tokens in a block. Damaged documents are left
        out.
        """
        with self._lock:
            while changed := list(self._changed):
                for document in changed:
                    self._remove(document)
                for document in changed:
                    del self._changed[document]
                    self._add(document, read, size)
            text = hashes.tobytes()
            group = self._groups.get(text[:HASH_BYTES], [])
            count, document = self._place(group, text, read, size)[1]
            return (-document, count) if count else None

    def _add(self, document: int, read: ReadHashes, size: int) -> None:
        try:
            state = self._state(document)
            if state is None or state.digest is None or state.first or state.tokens < size:
                return
            one = state.tokens < 2 * size
            first = bytes.fromhex(state.digest) if one else read(self._places(document, state), range(1))
            place = 0
            if group := self._groups.get(first):
                place = self._place(group, self._history(document, read, size), read, size)[0]
            # Not into ``group``: if all its documents were damaged, it has been removed.
            self._groups.setdefault(first, []).insert(place, document)
        except DamagedError:
            return  # verify reports it; here the document is just not used
        self._first[document] = first

    def _remove(self, document: int) -> None:
        self._held.pop(document, None)
        first = self._first.pop(document, None)
        if first is not None:
            self._groups[first].remove(document)
            if not self._groups[first]:
                del self._groups[first]

    def _place(self, group: list[int], text: bytes, read: ReadHashes, size: int) -> tuple[int, tuple[int, int]]:
        """Return the place of the history ``text`` in ``group``; and (most shared blocks, minus the document)."""
        low, high, best = 0, len(group), (0, 0)
        while low < high:
            middle = (low + high) // 2
            document = group[middle]
            try:
                other = self._history(document, read, size)
            except DamagedError:
                self._remove(document)
                high -= 1
                continue
            count = _agreeing(text, other)
            best = max(best, (count, -document))
            stop = (count + 1) * HASH_BYTES
            low, high = (middle + 1, high) if other[:stop] < text[:stop] else (low, middle)
        return low, best

    def _history(self, document: int, read: ReadHashes, size: int) -> bytes:
        """Return the hashes of all complete blocks of a document, one after the other. Raises ``DamagedError``."""
        if document not in self._held:
            if sum(map(len, self._held.values())) > MOST_HELD:
                self._held.clear()
            state = self._state(document) or DocumentState(name="")
            self._held[document] = read(self._places(document, state), range(state.tokens // size))
        return self._held[document]


def _agreeing(one: bytes, other: bytes) -> int:
    """Return the number of first blocks that two histories share; each hash covers everything before it."""

    def differs(block: int) -> bool:
        part = slice(block * HASH_BYTES, (block + 1) * HASH_BYTES)
        return one[part] != other[part]

    return bisect_left(range(min(len(one), len(other)) // HASH_BYTES), True, key=differs)


def common(one: range, other: range) -> range:
    """Return the intersection of two ranges of blocks; here and below each has step 1."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def lacking(expected: range, there: Iterable[range]) -> list[range]:
    """Return the parts of ``expected`` that are in none of ``there``."""
    gaps, start = [], expected.start
    for part in sorted(there, key=lambda part: part.start):
        gaps.append(range(start, min(part.start, expected.stop)))
        start = max(start, part.stop)
    gaps.append(range(start, expected.stop))
    return [gap for gap in gaps if gap]


def merged(parts: Iterable[range]) -> list[range]:
    """Return ranges in order, with adjacent ones merged."""
    found: list[range] = []
    for part in sorted((part for part in parts if part), key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found
