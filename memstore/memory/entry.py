"""What the store knows about one document, and where its values lie: which of its blocks under which number.

A document writes under a number of its own, its *home*. A fork shares the first blocks of another document: its home
is a *branch* of that one's home, and every block below the branch lies where the parent has it. What a home is a branch
of never changes. So it is stored once, for the home and not for each document that shares blocks, and a chain of forks
takes as much as its links are many. A document that writes again what others use, or what lies before its home,
moves to another home. Nothing is counted: what is in use follows from the entries of the documents of one tree of
homes, read when something is to be deleted (``usage.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from memstore.errors import DamagedError, ForeignMemory
from memstore.store.contract import MAX_DOCUMENT, MAX_ITEM, Batch, BlockStore, Key, Record, Table
from memstore.stored import anything, array, fit, maybe, members, on_one_line, parse, ranges, row, table, text, whole

HEADER = Key(Table.META)
"""JSON ``{"format", "library", "spec", "blocks_per_run"}``, written once."""
NEXT_DOCUMENT = Key(Table.META, item=1)
"""JSON ``{"next_document": n}``: numbers of documents are never used twice."""
NEXT_DOCUMENT_VALUE = table(next_document=whole(0, MAX_DOCUMENT + 1))
KEEPING = Key(Table.META, item=2)
"""JSON, only where there is a limit or another rule: see ``rules.py``."""
FIRST_NAMED = Key(Table.META, item=16)
"""From here on: arrays and facts under names, see ``NamedValues``."""

NAMED_VALUE = table(kind=text(20), name=text(10_000))
HASH_BYTES = 16
HASHES_PER_RUN = 240
"""Of the history of a document, see ``runs.py``: a run, which every append rewrites, takes one page of 4 KiB."""
MOST_SPANS = 2**16
LONGEST_NAME = 511
"""Bytes of the name of a document."""

_ALWAYS = ("name", "tokens", "blocks", "first", "edits", "state")


@dataclass(frozen=True, kw_only=True)
class DocumentState:
    """The DOCUMENTS entry: lengths of one document at one commit."""

    name: str
    tokens: int = 0
    """Tokens ever appended (and not truncated), those of blocks that have left included."""
    blocks: int = 0
    """One more than the last block, which may be incomplete."""
    first: int = 0
    """First live block; those before it have left, because of ``capacity``."""
    edits: int = 0
    """Number of truncations and drops. While it stays the same, complete blocks never change."""
    state: str = "live"
    """Room for other states in later versions."""
    branch: tuple[int, int] | None = None
    """``(parent, stop)``: blocks below ``stop`` lie where the home ``parent`` has them."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """``(owner, start, stop)``, ascending from block 0 on: what earlier versions wrote in place of a branch."""
    home: int | None = None
    """The number under which the blocks after these lie; None: the document's own."""
    digest: str | None = None
    """Hash of the history of all complete blocks, see ``runs.py``; None where it was never computed."""
    # Part of the history: text that was read in another way has other states, and must not be taken for the same.
    reading: dict[str, Any] | None = None
    """What the states depend on beside fingerprint and tokens, in the words of whoever computed them."""
    dropped: tuple[tuple[int, int], ...] = ()
    """``(start, stop)``: complete blocks that were damaged and are gone, ascending."""

    def check(self) -> None:
        """Raise ``DamagedError`` for numbers that cannot be those of a document."""
        ends = [0, *(stop for _, _, stop in self.spans)]
        if self.first > self.blocks or [start for _, start, _ in self.spans] != ends[:-1] or ends != sorted(set(ends)):
            raise DamagedError(
                f"the entry of document {self.name!r} contradicts itself (blocks {self.first} to {self.blocks}, "
                f"{len(self.spans)} spans); run verify"
            )

    def live(self) -> range:
        """All live blocks."""
        return range(self.first, self.blocks)

    def complete(self, block_size: int) -> range:
        """Live blocks that are full."""
        return range(self.first, max(self.first, self.tokens // block_size))

    @property
    def gaps(self) -> list[range]:
        """The blocks that were damaged and are gone."""
        return [range(start, stop) for start, stop in self.dropped]

    def present(self, blocks: range | None = None) -> list[range]:
        """``blocks``, or all that are live, without the gaps."""
        blocks = self.live() if blocks is None else blocks
        if self.dropped:
            return lacking(blocks, self.gaps)
        return [blocks] if blocks else []

    def gap_message(self, block: int) -> str:
        """What to say to whoever wants a block in a gap."""
        return f"document {self.name!r}: block {block} was damaged, and a repair has dropped it; the others are whole."

    def grown(self, tokens: int, block_size: int, capacity: int | None) -> DocumentState:
        """After an append of ``tokens`` tokens."""
        total = self.tokens + tokens
        blocks = -(-total // block_size)
        first = self.first if capacity is None else max(self.first, blocks - capacity)
        return replace(self, tokens=total, blocks=blocks, first=first)

    def cut(self, blocks: int, block_size: int) -> DocumentState:
        """After a truncation to ``blocks``. Where they lie may have to change too, see ``append.truncation``."""
        tokens = min(self.tokens, blocks * block_size)
        first = min(self.first, blocks)
        return replace(
            self,
            tokens=tokens,
            blocks=blocks,
            first=first,
            edits=self.edits + 1,
            dropped=self.dropped_below(blocks),
        )

    def passed_over(self, blocks: int, block_size: int) -> DocumentState:
        """With ``blocks`` blocks more, all of them dropped."""
        tokens, stop = self.tokens + blocks * block_size, self.blocks + blocks
        return replace(self, tokens=tokens, blocks=stop, dropped=(*self.dropped, (self.blocks, stop)), digest=None)

    def dropped_below(self, blocks: int) -> tuple[tuple[int, int], ...]:
        """``dropped``, as far as it concerns the first ``blocks`` blocks."""
        return tuple((start, min(stop, blocks)) for start, stop in self.dropped if start < blocks)

    def to_record(self) -> Record:
        """As stored: what not every document has is left out, so that plain entries stay as they always were."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return Record.from_json(
            {name: value for name, (value, default) in values.items() if name in _ALWAYS or value != default}
        )

    @classmethod
    def from_record(cls, record: Record) -> DocumentState:
        """The inverse of ``to_record``. Raises ``DamagedError`` and ``ForeignMemory``."""
        return _state(record.payload.tobytes())


@lru_cache(256)  # each use after a commit reads the entry again, which is mostly what it was
def _state(entry: bytes) -> DocumentState:
    values = fit(parse(entry, "the entry of a document"), ENTRY, "the entry of a document")
    if unknown := values.keys() - _FIELDS:
        raise ForeignMemory(
            f"a newer memstore wrote this memory: a document has {on_one_line(unknown)}; upgrade memstore"
        )
    spans = tuple((int(owner), int(start), int(stop)) for owner, start, stop in values.pop("spans", ()))
    dropped = tuple((int(start), int(stop)) for start, stop in values.pop("dropped", ()))
    branch = values.pop("branch", None)
    if branch is not None:
        parent, stop = map(int, branch)
        branch = parent, stop
    return DocumentState(**values, branch=branch, spans=spans, dropped=dropped)


_FIELDS = frozenset(each.name for each in fields(DocumentState))
_NUMBER, _BLOCK = whole(0, MAX_DOCUMENT), whole(0, MAX_ITEM)
_SPANS = array(row(_NUMBER, _BLOCK, _BLOCK), MOST_SPANS)
BRANCH = table({"parent": _NUMBER, "stop": _BLOCK, "spans": _SPANS}, document=_NUMBER)
"""What is stored of a home that is a branch."""
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
"""What finds a document needs of its entry."""


@dataclass(frozen=True)
class Address:
    """Keys of the values that lie under number ``id``, which is a document's or the home that a document moved to."""

    id: int

    @property
    def entry(self) -> Key:
        """Of its DOCUMENTS entry."""
        return Key(Table.DOCUMENTS, self.id)

    @property
    def branch(self) -> Key:
        """Of where the blocks before its own lie, if it is a home that shares some."""
        return Key(Table.META, self.id)

    def tokens(self, block: int) -> Key:
        """Of the token ids of a block."""
        return Key(Table.TOKENS, self.id, 0, block)

    def block(self, layer: int, block: int) -> Key:
        """Of the states of a block."""
        return Key(Table.BLOCKS, self.id, layer, block)

    def run(self, layer: int, run: int) -> Key:
        """Of the landmarks of a run of blocks."""
        return Key(Table.LANDMARKS, self.id, layer, run)

    def recurrent(self, tokens: int) -> Key:
        """Of the recurrent state of a document after so many tokens, see ``recurrent.py``."""
        return Key(Table.RECURRENT, self.id, 0, tokens)


def stored_state(store: BlockStore, document: int) -> DocumentState | None:
    """The entry of a document; None where there is none. Raises ``DamagedError`` and ``ForeignMemory``."""
    records = store.get(Address(document).entry)
    return None if records is None else DocumentState.from_record(records[0])


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
        self._state = state

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
        return [piece for part in self._state.present(blocks) for piece in self.pieces(part)]

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


def common(one: range, other: range) -> range:
    """What two ranges of blocks have in common; here and below each has step 1."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def lacking(expected: range, there: Iterable[range]) -> list[range]:
    """What is in ``expected`` and in none of ``there``."""
    gaps, start = [], expected.start
    for part in sorted(there, key=lambda part: part.start):
        gaps.append(range(start, min(part.start, expected.stop)))
        start = max(start, part.stop)
    gaps.append(range(start, expected.stop))
    return [gap for gap in gaps if gap]


def merged(parts: Iterable[range]) -> list[range]:
    """Ranges in order, those that touch each other as one."""
    found: list[range] = []
    for part in sorted((part for part in parts if part), key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found
