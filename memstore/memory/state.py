"""What the store knows about one document, and where its values lie."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from memstore.errors import ForeignMemory
from memstore.store.contract import Key, Record, Table

LAST_DOCUMENT = 2**32 - 2
LAST_ITEM = 2**63 - 1

HEADER = Key(Table.META)
"""JSON ``{"format", "library", "spec", "blocks_per_run"}``, written once."""
NEXT_DOCUMENT = Key(Table.META, item=1)
"""JSON ``{"next_document": n}``: numbers of documents are never used twice."""
KEEPING = Key(Table.META, item=2)
"""JSON, only where there is a limit or another rule: see ``keeping.py``."""
FIRST_NAMED = Key(Table.META, item=16)
"""From here on: arrays and facts under names, see ``named.py``."""

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
    reading: dict[str, Any] | None = None
    """What the states depend on beside fingerprint and tokens, in the words of whoever computed them."""
    dropped: tuple[tuple[int, int], ...] = ()
    """``(start, stop)``: complete blocks that were damaged and are gone, ascending; see ``dropping.py``."""

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
        plain = asdict(DocumentState(name=self.name))
        values = asdict(self)
        return Record.from_json({key: values[key] for key in values if key in _ALWAYS or values[key] != plain[key]})

    @classmethod
    def from_record(cls, record: Record) -> DocumentState:
        """The inverse of ``to_record``."""
        values = record.to_json()
        if unknown := set(values) - set(cls.__dataclass_fields__):
            raise ForeignMemory(
                f"a newer memstore wrote this memory: a document has {', '.join(unknown)}; upgrade memstore"
            )
        spans = tuple((int(owner), int(start), int(stop)) for owner, start, stop in values.pop("spans", ()))
        dropped = tuple((int(start), int(stop)) for start, stop in values.pop("dropped", ()))
        branch = values.pop("branch", None)
        if branch is not None:
            parent, stop = map(int, branch)
            branch = parent, stop
        return cls(**values, branch=branch, spans=spans, dropped=dropped)


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
