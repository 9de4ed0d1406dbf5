"""Where the values of a document lie: which of its blocks are stored under which number.

A document writes under a number of its own, its *home*. A fork shares blocks that another document wrote, so its first
blocks lie under the numbers of others, which its entry lists as *spans*. Nothing is counted: what is in use follows
from the entries of all documents, read when something is to be deleted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memstore.memory.state import LAST_ITEM, Address, DocumentState
from memstore.store.contract import Key, Table


class Piece(NamedTuple):
    """Consecutive blocks that lie under one number."""

    owner: int
    blocks: range


class Places:
    """Where the blocks of document ``number`` lie, as its entry has it."""

    def __init__(self, number: int, state: DocumentState) -> None:
        self.home = number if state.home is None else state.home
        """The number under which new blocks are written."""
        self._number = number
        self._spans = [Piece(owner, range(start, stop)) for owner, start, stop in state.spans]
        self._stops = [span.blocks.stop for span in self._spans]
        self.start = self._stops[-1] if self._stops else 0
        """The first block that lies at home, whether it exists or not."""
        self.whole = max([self.start, *(stop for _, stop in state.dropped)])
        """The first block from which on all blocks lie at home, and none was dropped."""
        self._dropped = dropped(state)

    @property
    def entry(self) -> Key:
        """Key of the DOCUMENTS entry."""
        return Address(self._number).entry

    def owner(self, block: int) -> int:
        """The number under which a block lies."""
        at = bisect_right(self._stops, block)
        return self.home if at == len(self._stops) else self._spans[at].owner

    def pieces(self, blocks: range) -> list[Piece]:
        """``blocks`` in order, cut where the owner changes."""
        everything = [*self._spans, Piece(self.home, range(self.start, LAST_ITEM))]
        parts = [Piece(owner, common(span, blocks)) for owner, span in everything]
        return [part for part in parts if part.blocks]

    def present(self, blocks: range) -> list[Piece]:
        """``blocks`` without those that were dropped, cut where the owner changes."""
        return [piece for part in lacking(blocks, self._dropped) for piece in self.pieces(part)]

    def below(self, stop: int) -> tuple[tuple[int, int, int], ...]:
        """The spans of a document that shares all blocks below ``stop``."""
        return tuple((owner, blocks.start, blocks.stop) for owner, blocks in self.pieces(range(stop)))

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


def owners(number: int, state: DocumentState, blocks: Sequence[int]) -> list[int]:
    """The numbers under which blocks of document ``number`` lie. Asked at every gather: most documents have one."""
    if state.spans:
        return list(map(Places(number, state).owner, blocks))
    return [number if state.home is None else state.home] * len(blocks)


def dropped(state: DocumentState) -> list[range]:
    """The blocks of a document that were damaged and are gone."""
    return [range(start, stop) for start, stop in state.dropped]


def dropped_message(document: str, block: int) -> str:
    """What to say to whoever wants a block that was dropped."""
    return f"document {document!r}: block {block} was damaged, and a repair has dropped it; the others are whole."


def common(one: range, other: range) -> range:
    """What two ranges of step 1 have in common."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def lacking(expected: range, there: Iterable[range]) -> list[range]:
    """What is in ``expected`` and in none of ``there``."""
    gaps, start = [], expected.start
    for part in sorted(there, key=lambda part: part.start):
        gaps.append(range(start, min(part.start, expected.stop)))
        start = max(start, part.stop)
    gaps.append(range(start, expected.stop))
    return [gap for gap in gaps if gap]


def count(pieces: Iterable[Piece]) -> int:
    """How many different blocks there are in ``pieces``."""
    total = 0
    for ranges in by_owner(pieces).values():
        done: list[range] = []
        for blocks in ranges:
            total += sum(map(len, lacking(blocks, done)))
            done.append(blocks)
    return total


def by_owner(pieces: Iterable[Piece]) -> dict[int, list[range]]:
    """The blocks of each owner; they may overlap."""
    used: dict[int, list[range]] = {}
    for owner, blocks in pieces:
        used.setdefault(owner, []).append(blocks)
    return used
