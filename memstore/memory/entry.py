"""What the store knows about one document, and where its values lie."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from memstore.errors import DamagedError, ForeignMemory
from memstore.store.contract import MAX_DOCUMENT, MAX_ITEM, BlockStore, Key, Record, Table
from memstore.stored import anything, array, fit, maybe, members, parse, ranges, row, table, text, whole

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
"""Of the history of a document, see ``history.py``: a run, which every append rewrites, takes one page of 4 KiB."""
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
    """``(parent, stop)``: blocks below ``stop`` lie where the home ``parent`` has them, see ``places.py``."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """``(owner, start, stop)``, ascending from block 0 on: what earlier versions wrote in place of a branch."""
    home: int | None = None
    """The number under which the blocks after these lie; None: the document's own."""
    digest: str | None = None
    """Hash of the history of all complete blocks, see ``history.py``; None where it was never computed."""
    # Part of the history: text that was read in another way has other states, and must not be taken for the same.
    reading: dict[str, Any] | None = None
    """What the states depend on beside fingerprint and tokens, in the words of whoever computed them."""
    dropped: tuple[tuple[int, int], ...] = ()
    """``(start, stop)``: complete blocks that were damaged and are gone, ascending; see ``places.py``."""

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

    def grown(self, tokens: int, block_size: int, capacity: int | None) -> DocumentState:
        """After an append of ``tokens`` tokens."""
        total = self.tokens + tokens
        blocks = -(-total // block_size)
        first = self.first if capacity is None else max(self.first, blocks - capacity)
        return replace(self, tokens=total, blocks=blocks, first=first)

    def cut(self, blocks: int, block_size: int) -> DocumentState:
        """After a truncation to ``blocks``. Where they lie may have to change too, see ``Usage.truncation``."""
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
            f"a newer memstore wrote this memory: a document has {', '.join(unknown)}; upgrade memstore"
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


def stored_state(store: BlockStore, document: int) -> DocumentState | None:
    """The entry of a document; None where there is none. Raises ``DamagedError`` and ``ForeignMemory``."""
    records = store.get(Address(document).entry)
    return None if records is None else DocumentState.from_record(records[0])
