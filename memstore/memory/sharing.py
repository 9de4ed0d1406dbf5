"""Blocks that several documents share: what may be deleted, and how a fork begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from memstore.memory.history import digest_at
from memstore.memory.layouts import plain_layouts, token_layout
from memstore.memory.places import Home, Places, put_home, told
from memstore.memory.shared import Shared
from memstore.memory.state import Address, DocumentState
from memstore.memory.tensors import Rows, to_record
from memstore.memory.usage import Usage, present
from memstore.store.contract import Batch, Record

_AS_STORED: Mapping[int, DocumentState] = MappingProxyType({})


class Deleting:
    """What is deleted when documents change, one after the other. Raises ``DamagedError`` where it cannot be known.

    Of documents ``changed``, what their new entry says is what they use.
    """

    def __init__(self, shared: Shared, changed: Mapping[int, DocumentState] = _AS_STORED) -> None:
        self._shared = shared
        self._changed = changed
        self._usage = Usage()
        self._homes: dict[int, Home] = {}
        """Those of the documents that were read."""
        self._roots: set[int] = set()
        """Roots of the trees all of whose documents were read."""

    def forget(self, numbers: Collection[int]) -> Batch:
        """What takes documents away, and nothing that others use, once those forgotten before are gone."""
        batch = Batch()
        for number in numbers:
            self._read(number)
        self._usage.settle()
        for number in numbers:
            self._usage.remove(number, self._homes.pop(number))
            batch.delete(Address(number).entry)
        self._release(batch)
        return batch

    def change(self, batch: Batch, changes: Mapping[int, tuple[DocumentState, Home]]) -> None:
        """Delete what documents do not use any more once they have these states and homes; entries are put too."""
        for number in changes:
            self._read(number)
        self._usage.settle()
        for number, (after, home) in changes.items():
            before, self._homes[number] = self._homes[number], home
            self._usage.put(number, home, present(after))
            if home.number != before.number:
                self._usage.remove(number, before)
            batch.put(Address(number).entry, after.to_record())
        self._release(batch)

    def used_by_others(self, number: int) -> list[range]:
        """The blocks under the home of a document that others use."""
        self._read(number)
        home, blocks = self._homes[number], present(self._shared.state(number) or DocumentState(name=""))
        self._usage.put(number, home, [])
        others = self._usage.used(home.number)
        self._usage.put(number, home, blocks)
        return others

    def _read(self, number: int) -> None:
        """Put a document, and all whose homes are of the same tree: no others can share blocks with it."""
        state = self._shared.state(number) or DocumentState(name="")
        home = self._shared.homes.of(number, state)
        if home.root not in self._roots:
            for each in self._related(home.root):
                self._put(each)
            self._roots.add(home.root)
        if number not in self._homes:
            self._homes[number] = home
            self._usage.put(number, home, present(state))

    def _related(self, root: int) -> Collection[int]:
        catalog = self._shared.catalog
        everything = catalog.known()
        homes = self._shared.homes.documents()
        if catalog.listing or any(home.below is not None and home.below.listed for home, _ in homes.values()):
            return everything  # an entry with spans tells of no tree
        return {root, *(document for home, document in homes.values() if home.root == root)}

    def _put(self, number: int) -> None:
        state = self._changed.get(number) or self._shared.state(number)
        if state is not None and number not in self._homes:
            self._homes[number] = self._shared.homes.of(number, state)
            self._usage.put(number, self._homes[number], present(state))

    def _release(self, batch: Batch) -> None:
        for owner, gaps, used in self._usage.freed():
            for gap in gaps:
                release(batch, self._shared, owner, self._usage.base(owner), gap, used)
        for home in self._usage.unused:
            batch.delete(Address(home).branch)


def release(batch: Batch, shared: Shared, owner: int, base: int, gap: range, used: Sequence[range]) -> None:
    """Delete everything of the blocks ``gap`` under a number, next to those ``used``. Raises ``DamagedError``."""
    address, first, last = Address(owner), gap.start, gap.stop - 1
    batch.delete(address.tokens(first), address.tokens(last))
    for layer in range(shared.spec.layers):
        batch.delete(address.block(layer, first), address.block(layer, last))
    for runs in (shared.history, *map(shared.runs, shared.spec.index_layers)):
        runs.release(batch, owner, base, gap, used)


def truncation(
    shared: Shared, number: int, before: DocumentState, blocks: int, fresh: int
) -> tuple[Batch, DocumentState]:
    """What cuts document ``number`` to ``blocks`` complete blocks, and its state then.

    Where it would write again blocks that others use, or that lie before its home, it moves to the home ``fresh``; its
    state says so.
    """
    batch, places, deleting = Batch(), shared.places(number, before), Deleting(shared)
    digest = digest_at(shared.history, places, before, blocks, shared.spec)
    after, home = replace(before.cut(blocks, shared.spec.block_size), digest=digest), places.node
    if blocks < places.start or any(used.stop > blocks for used in deleting.used_by_others(number)):
        after, home = moved(batch, number, places, after, fresh)
    deleting.change(batch, {number: (after, home)})
    return batch, after


def moved(batch: Batch, number: int, places: Places, after: DocumentState, fresh: int) -> tuple[DocumentState, Home]:
    """State and home of a document that shares all its blocks with what it was, and goes on at the home ``fresh``."""
    home = places.branch(fresh, after.blocks)
    _put_homes(batch, home, number, places)
    return replace(after, home=fresh, **told(home)), home


def _put_homes(batch: Batch, home: Home, number: int, of: Places) -> None:
    """Store a new home, and the one that it is a branch of where only an entry with spans says so yet."""
    put_home(batch, home, number)
    if home.below is of.node:
        put_home(batch, of.node, of.number)


def forking(shared: Shared, of: int | None, state: DocumentState, name: str, blocks: int, number: int) -> Batch:
    """What makes document ``number``, which begins with the first ``blocks`` blocks of the document ``of``.

    Only the incomplete last block, if it is among them, is copied. Raises ``DamagedError`` and ``NotFound``.
    """
    size = shared.spec.block_size
    whole = min(blocks, state.tokens // size)
    parent = shared.places(number if of is None else of, state)
    home = parent.branch(number, whole)
    fork = DocumentState(
        name=name,
        tokens=min(state.tokens, blocks * size),
        blocks=blocks,
        first=min(state.first, blocks),
        **told(home),
        digest=digest_at(shared.history, parent, state, whole, shared.spec),
        reading=state.reading,
        dropped=state.dropped_below(whole),
    )
    batch, places = Batch(), Places(number, fork, home)
    _put_homes(batch, home, number, parent)
    if blocks > whole:
        _copy_block(batch, shared, parent, places, whole, fork.tokens - whole * size)
    batch.put(places.entry, fork.to_record())
    return batch


def _copy_block(batch: Batch, shared: Shared, parent: Places, places: Places, block: int, tokens: int) -> None:
    """Copy an incomplete last block, which has ``tokens``: ids, states and landmarks."""
    store, layouts = shared.store, plain_layouts(shared.spec)
    ids = Rows(1, [token_layout(tokens)])
    store.read([parent.tokens(block)], [token_layout(tokens)], ids.out)
    batch.put(places.tokens(block), to_record(ids.tensors()[0][0]))
    layers = range(shared.spec.layers)
    rows = Rows(len(layers), layouts)
    store.read([parent.block(layer, block) for layer in layers], layouts, rows.out)
    for layer in layers:
        records = (Record(layout, out[layer]) for layout, out in zip(layouts, rows.out, strict=True))
        batch.put(places.block(layer, block), *records)
    for layer in shared.spec.index_layers:
        runs = shared.runs(layer)
        marks = torch.cat([keys for _, keys in runs.read(parent, range(block, block + 1))])
        runs.write(batch, places, block, marks, block)
