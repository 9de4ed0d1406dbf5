"""Usage of blocks by documents, and so which blocks may be deleted when some documents change.

Documents that share blocks have homes in one tree (``entry.py``). A home's blocks are used by the document that writes
there, and by the documents of its branches. So a change moves up from a home to its parents, and stops at the first one
that stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstore.memory.entry import Address, DocumentState, Home, Piece, common, lacking, merged
from memstore.memory.spec import cut_recurrent
from memstore.store.records import MAX_ITEM, Batch

if TYPE_CHECKING:  # it needs torch, but a check of a memory counts the blocks in use without torch
    from memstore.memory.shared import SharedStore


@dataclass
class _Node:
    """A home with blocks that some document uses."""

    home: Home
    listed: list[Piece]
    """The places of earlier blocks that have no node of their own."""
    document: int | None = None
    """The document that writes here."""
    own: list[range] = field(default_factory=list)
    """The blocks of that document."""
    used: list[range] = field(default_factory=list)
    """The blocks that it and the documents of all branches use, at any home."""
    branches: dict[int, _Node] = field(default_factory=dict)

    @property
    def before(self) -> list[range]:
        """The used blocks before this home."""
        return clipped(self.used, range(self.home.start))

    def gather(self) -> None:
        self.used = merged([*self.own, *(part for branch in self.branches.values() for part in branch.before)])


class Usage:
    """Which blocks under which number the added documents use."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._listing: dict[int, list[_Node]] = {}
        """Number -> homes that list it in their spans."""
        self._earlier: dict[int, list[range]] = {}
        """For each number that has changed since ``settle``, the blocks in use before."""
        self.unused: list[int] = []
        """Homes that no document has used since ``settle``."""

    def owners(self) -> list[int]:
        """Return all numbers with blocks in use."""
        return sorted({*self._nodes, *self._listing})

    def used(self, owner: int) -> list[range]:
        """Return the blocks in use under a number."""
        node = self._nodes.get(owner)
        parts = [] if node is None else clipped(node.used, range(node.home.start, MAX_ITEM + 1))
        for user in self._listing.get(owner, ()):
            for piece in user.listed:
                if piece.owner == owner:
                    parts = merged([*parts, *clipped(user.used, piece.blocks)])
        return parts

    def put(self, document: int, home: Home, blocks: Sequence[range]) -> None:
        """Let a document use ``blocks`` from ``home`` on; without blocks, its home still counts as used."""
        node = self._node(home)
        node.document = document
        self._set(node, list(blocks))

    def remove(self, document: int, home: Home) -> None:
        """Remove a document that is gone or moves to another home."""
        node: _Node | None = self._nodes.get(home.number)
        if node is None or node.document != document:
            return
        node.document = None
        self._set(node, [])
        while node is not None and node.document is None and not node.branches:
            number = node.home.number
            self.unused.append(number)
            del self._nodes[number]
            for piece in node.listed:
                self._listing[piece.owner].remove(node)
            node = self._parent(node)
            if node is not None:
                del node.branches[number]

    def settle(self) -> None:
        """Take the current usage as the starting point."""
        self._earlier, self.unused = {}, []

    def freed(self) -> Iterator[tuple[int, list[range], list[range]]]:
        """Yield a number, its blocks that are not in use any more since ``settle``, and those that still are.

        Everything after the last block that was in use is freed with it.
        """
        for owner, earlier in self._earlier.items():
            now = self.used(owner)
            gaps = [gap for part in earlier for gap in lacking(part, now)]
            if gaps and gaps[-1].stop == earlier[-1].stop and (not now or now[-1].stop <= gaps[-1].start):
                gaps[-1] = range(gaps[-1].start, MAX_ITEM + 1)
            if gaps:
                yield owner, gaps, now

    def documents(self, owner: int, blocks: range) -> Iterator[tuple[int, range]]:
        """Yield the documents that use any of ``blocks`` under a number, and which of them."""
        node = self._nodes.get(owner)
        waiting = [] if node is None else [(node, common(blocks, range(node.home.start, MAX_ITEM + 1)))]
        for user in self._listing.get(owner, ()):
            waiting += [(user, common(blocks, piece.blocks)) for piece in user.listed if piece.owner == owner]
        while waiting:
            node, wanted = waiting.pop()
            for part in clipped(node.own, wanted):
                if node.document is not None:
                    yield node.document, part
            waiting += [
                (branch, common(wanted, range(branch.home.start)))
                for branch in reversed(node.branches.values())
                if clipped(branch.before, wanted)
            ]

    def base(self, owner: int) -> int:
        """Return the first block of a number's first run of rows."""
        node = self._nodes.get(owner)
        return 0 if node is None else node.home.base

    def own(self, owner: int) -> int | None:
        """Return the document that writes under a number."""
        node = self._nodes.get(owner)
        return None if node is None else node.document

    def _node(self, home: Home) -> _Node:
        """Return the node of a home, and make its missing parents too."""
        new: list[_Node] = []
        at: Home | None = home
        while at is not None and at.number not in self._nodes:
            below, pieces = at.below, list[Piece]()
            while below is not None and below.listed:
                pieces.append(Piece(below.number, range(below.start, pieces[-1].blocks.start if pieces else at.start)))
                below = below.below
            node = self._nodes[at.number] = _Node(at, pieces)
            for piece in pieces:
                self._listing.setdefault(piece.owner, []).append(node)
            new.append(node)
            at = below
        for node in new:
            if (parent := self._parent(node)) is not None:
                parent.branches[node.home.number] = node
        return self._nodes[home.number]

    def _parent(self, node: _Node) -> _Node | None:
        below = node.home.below
        return None if below is None or below.listed else self._nodes[below.number]

    def _set(self, node: _Node, own: list[range]) -> None:
        node.own = own
        at: _Node | None = node
        while at is not None:
            for owner in (at.home.number, *(piece.owner for piece in at.listed)):
                if owner not in self._earlier:
                    self._earlier[owner] = self.used(owner)
            before = at.before
            at.gather()
            if at.before == before:
                return
            at = self._parent(at)


def clipped(parts: Sequence[range], to: range) -> list[range]:
    """Return the parts of ``parts`` within ``to``."""
    return [part for each in parts if (part := common(each, to))]


class Deletion:
    """Deletions that follow from changes of documents, one after the other.

    Raises ``DamagedError`` if usage is unknown.

    Documents in ``changed`` use the blocks of their new entries.
    """

    def __init__(self, shared: SharedStore, changed: Mapping[int, DocumentState] | None = None) -> None:
        self._shared = shared
        self._changed = changed or {}
        self._usage = Usage()
        self._homes: dict[int, Home] = {}
        """Homes of the documents that were read."""
        self._roots: set[int] = set()
        """Roots of the trees whose documents were all read."""

    def forget(self, numbers: Collection[int]) -> Batch:
        """Return the batch that deletes documents, but no blocks that others use. Earlier deletions come first.

        The facts about them are deleted too, see ``NamedValues.forget``.
        """
        batch = Batch()
        for number in numbers:
            self._read(number)
            if (state := self._shared.state(number)) is not None:
                self._shared.named.forget(batch, state.name)
        self._usage.settle()
        for number in numbers:
            self._usage.remove(number, self._homes.pop(number))
            batch.delete(Address(number).entry)
            if self._shared.spec.recurrent:
                cut_recurrent(batch, number, 0)
        self._release(batch)
        return batch

    def change(self, batch: Batch, changes: Mapping[int, tuple[DocumentState, Home]]) -> None:
        """Delete blocks that documents do not use with their new states and homes; put the new entries too."""
        for number in changes:
            self._read(number)
        self._usage.settle()
        for number, (after, home) in changes.items():
            before, self._homes[number] = self._homes[number], home
            self._usage.put(number, home, after.present())
            if home.number != before.number:
                self._usage.remove(number, before)
            batch.put(Address(number).entry, after.to_record())
            if self._shared.spec.recurrent:
                cut_recurrent(batch, number, after.tokens)
        self._release(batch)

    def used_by_others(self, number: int) -> list[range]:
        """Return the blocks under a document's home that others use."""
        self._read(number)
        home, blocks = self._homes[number], (self._shared.state(number) or DocumentState(name="")).present()
        self._usage.put(number, home, [])
        others = self._usage.used(home.number)
        self._usage.put(number, home, blocks)
        return others

    def _read(self, number: int) -> None:
        """Add a document, and all documents with homes in the same tree: no others can share blocks with it."""
        state = self._shared.state(number) or DocumentState(name="")
        home = self._shared.catalog.homes.of(number, state)
        if home.root not in self._roots:
            for each in self._related(home.root):
                self._put(each, self._changed.get(each) or self._shared.state(each))
            self._roots.add(home.root)
        self._put(number, state)

    def _related(self, root: int) -> Collection[int]:
        catalog = self._shared.catalog
        everything = catalog.known()
        homes = self._shared.catalog.homes.documents()
        if catalog.listing or any(home.below is not None and home.below.listed for home, _ in homes.values()):
            return everything  # an entry with spans does not name its tree
        return {root, *(document for home, document in homes.values() if home.root == root)}

    def _put(self, number: int, state: DocumentState | None) -> None:
        if state is not None and number not in self._homes:
            self._homes[number] = self._shared.catalog.homes.of(number, state)
            self._usage.put(number, self._homes[number], state.present())

    def _release(self, batch: Batch) -> None:
        for owner, gaps, used in self._usage.freed():
            for gap in gaps:
                release(batch, self._shared, owner, self._usage.base(owner), gap, used)
        for home in self._usage.unused:
            batch.delete(Address(home).branch)


def release(batch: Batch, shared: SharedStore, owner: int, base: int, gap: range, used: Sequence[range]) -> None:
    """Delete all values of the blocks ``gap`` under a number, next to the ``used`` ones. Raises ``DamagedError``."""
    address, first, last = Address(owner), gap.start, gap.stop - 1
    batch.delete(address.tokens(first), address.tokens(last))
    for layer in range(shared.spec.layers):
        batch.delete(address.block(layer, first), address.block(layer, last))
    for runs in (shared.history, *map(shared.runs, shared.spec.index_layers)):
        runs.release(batch, owner, base, gap, used)
