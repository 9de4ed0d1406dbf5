"""Where the values of a document lie: which of its blocks are stored under which number.

A document writes under a number of its own, its *home*. A fork shares the first blocks of another document: its home
is a *branch* of that one's home, and every block below the branch lies where the parent has it. What a home is a branch
of never changes. So it is stored once, for the home and not for each document that shares blocks, and a chain of forks
takes as much as its links are many. A document that writes again what others use, or what lies before its home,
moves to another home. Nothing is counted: what is in use follows from the entries of the documents of one tree of
homes, read when something is to be deleted (``usage.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memstore.errors import DamagedError
from memstore.memory.entry import BRANCH, Address, DocumentState
from memstore.memory.ranges import lacking
from memstore.store.contract import MAX_DOCUMENT, Batch, BlockStore, Key, Record, Table
from memstore.stored import fit


class Piece(NamedTuple):
    """Consecutive blocks that lie under one number."""

    owner: int
    blocks: range


class Home:
    """A number under which blocks lie from ``start`` on; those before it lie ``below``.

    Homes of one tree share what is below them. ``jump`` leads to one further below, so far that any block is found in
    as many steps as the number of homes has digits (the numbers of a skew binary system).
    """

    __slots__ = ("below", "depth", "jump", "listed", "number", "root", "start")

    def __init__(self, number: int, start: int = 0, below: Home | None = None, *, listed: bool = False) -> None:
        self.number = number
        self.start = start
        self.below = below
        self.listed = listed
        """Whether only the spans of an entry say what is below, so that no other home can refer to it."""
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
        """The home that a block lies at."""
        home = self
        while home.start > block:
            assert home.below is not None
            home = home.jump if home.jump.start > block else home.below
        return home

    def pieces(self, blocks: range) -> Iterator[Piece]:
        """``blocks`` from the last to the first, cut where the home changes."""
        stop, home = blocks.stop, self
        while stop > blocks.start:
            home = home.at(stop - 1)
            start = max(home.start, blocks.start)
            yield Piece(home.number, range(start, stop))
            stop = start


class Homes:
    """The homes of one store, each read once: what a home is a branch of never changes."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._known: dict[int, Home] = {}
        self._documents: dict[int, int] = {}

    def at(self, number: int) -> Home:
        """The home ``number``; one that is a branch of nothing where nothing is said of it. Raises ``DamagedError``."""
        chain: list[tuple[int, int]] = []
        met = set[int]()
        while number not in self._known:
            records = self._store.get(Address(number).branch)
            values = {} if records is None else fit(records[0].to_json(), BRANCH, f"what is stored of home {number}")
            if values:
                self._documents[number] = values["document"]
            if "parent" not in values:
                self._known[number] = listed(number, values.get("spans", ()))
                break
            met.add(number)
            chain.append((number, values.get("stop", 0)))
            number = values["parent"]
            if number in met:
                raise DamagedError(f"home {number} of this memory is a branch of itself; run verify")
        for each, stop in reversed(chain):
            self._known[each] = _joined(each, stop, self._known[number])
            number = each
        return self._known[number]

    def of(self, number: int, state: DocumentState) -> Home:
        """The home of document ``number``. Raises ``DamagedError``."""
        home = number if state.home is None else state.home
        if state.branch is None:
            return listed(home, state.spans)
        parent, stop = state.branch
        return _joined(home, stop, self.at(parent))  # not noted: it may not be stored yet

    def documents(self) -> dict[int, tuple[Home, int]]:
        """Every home of which something is stored, and the number of the document that it was made for."""
        keys = self._store.keys(Address(1).branch, Key(Table.META, MAX_DOCUMENT))
        numbers = [key.document for key in keys if key == Address(key.document).branch]
        homes = {number: self.at(number) for number in numbers}
        for number in numbers:
            if number not in self._documents:
                records = self._store.get(Address(number).branch)
                self._documents[number] = (
                    number if records is None else fit(records[0].to_json(), BRANCH, f"home {number}")["document"]
                )
        return {number: (home, self._documents[number]) for number, home in homes.items()}


def _joined(number: int, stop: int, below: Home) -> Home:
    if stop <= below.start:
        raise DamagedError(f"home {number} of this memory shares no block with home {below.number}; run verify")
    return Home(number, stop, below)


def told(home: Home) -> dict[str, Any]:
    """What the entry of a document says of its home: ``branch`` or ``spans``."""
    if home.below is None:
        return {"branch": None, "spans": ()}
    if not home.below.listed:
        return {"branch": (home.below.number, home.start), "spans": ()}
    pieces = list(home.below.pieces(range(home.start)))[::-1]
    return {"branch": None, "spans": tuple((owner, blocks.start, blocks.stop) for owner, blocks in pieces)}


def listed(number: int, spans: Sequence[Sequence[int]]) -> Home:
    """The home ``number``, and before it what ``spans`` list: see ``DocumentState.spans``."""
    below, stop = None, 0
    for owner, start, stop in spans:  # noqa: B007 - the last one
        below = Home(owner, start, below, listed=True)
    return Home(number, stop, below)


def put_home(batch: Batch, home: Home, document: int) -> None:
    """Store what ``home`` is a branch of; it was made for a document."""
    facts = told(home)
    if facts["branch"]:
        parent, stop = facts["branch"]
        batch.put(Address(home.number).branch, Record.from_json({"document": document, "parent": parent, "stop": stop}))
    elif facts["spans"]:
        batch.put(Address(home.number).branch, Record.from_json({"document": document, "spans": facts["spans"]}))


class Places:
    """Where the blocks of document ``number`` lie, which writes at the home ``node``."""

    def __init__(self, number: int, state: DocumentState, node: Home) -> None:
        self.node = node
        self.home = self.node.number
        """The number under which new blocks are written."""
        self.number = number
        self.start = self.node.start
        """The first block that lies at home, whether it exists or not."""
        self.whole = max([self.start, *(stop for _, stop in state.dropped)])
        """The first block from which on all blocks lie at home, and none was dropped."""
        self._dropped = dropped(state)

    @property
    def entry(self) -> Key:
        """Key of the DOCUMENTS entry."""
        return Address(self.number).entry

    def owner(self, block: int) -> int:
        """The number under which a block lies."""
        return self.node.at(block).number

    def pieces(self, blocks: range) -> list[Piece]:
        """``blocks`` in order, cut where the owner changes."""
        return list(self.node.pieces(blocks))[::-1]

    def present(self, blocks: range) -> list[Piece]:
        """``blocks`` without those that were dropped, cut where the owner changes."""
        return [piece for part in lacking(blocks, self._dropped) for piece in self.pieces(part)]

    def branch(self, number: int, stop: int) -> Home:
        """The home ``number`` of a document that shares all blocks below ``stop``."""
        return Home(number, stop, self.node.at(stop - 1)) if stop else Home(number)

    def tokens(self, block: int) -> Key:
        """Key of the token ids of a block."""
        return Address(self.owner(block)).tokens(block)

    def all_tokens(self, blocks: range) -> list[Key]:
        """Keys of the token ids of blocks."""
        return self._keys(Table.TOKENS, 0, blocks)

    def block(self, layer: int, block: int) -> Key:
        """Key of the states of a block."""
        return Address(self.owner(block)).block(layer, block)

    def all_blocks(self, layer: int, blocks: range) -> list[Key]:
        """Keys of the states of blocks."""
        return self._keys(Table.BLOCKS, layer, blocks)

    def _keys(self, table: Table, layer: int, blocks: range) -> list[Key]:
        """Keys of the values of blocks in ``table``."""
        return [Key(table, owner, layer, block) for owner, part in self.pieces(blocks) for block in part]


def dropped(state: DocumentState) -> list[range]:
    """The blocks of a document that were damaged and are gone."""
    return [range(start, stop) for start, stop in state.dropped]


def dropped_message(document: str, block: int) -> str:
    """What to say to whoever wants a block that was dropped."""
    return f"document {document!r}: block {block} was damaged, and a repair has dropped it; the others are whole."
