"""Blocks that several documents share: what may be deleted, and how a fork begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from memstore.memory.history import digest_at
from memstore.memory.layouts import plain_layouts, token_layout
from memstore.memory.places import Piece, Places, by_owner, lacking
from memstore.memory.shared import Shared
from memstore.memory.state import LAST_ITEM, Address, DocumentState
from memstore.memory.tensors import Rows, to_record
from memstore.store.contract import Batch, Record

_AS_STORED: Mapping[int, DocumentState] = MappingProxyType({})


def used_by_others(
    shared: Shared, *documents: int | None, changed: Mapping[int, DocumentState] = _AS_STORED
) -> list[Piece]:
    """Where the live blocks of all other documents lie; ``changed`` are those whose entry is about to be another one.

    Raises ``DamagedError`` where an entry cannot be read.
    """
    pieces: list[Piece] = []
    for number in shared.documents():
        if number not in documents and (state := changed.get(number) or shared.state(number)) is not None:
            pieces += Places(number, state).present(state.live())
    return pieces


def release(batch: Batch, shared: Shared, freed: Iterable[Piece], kept: Iterable[Piece]) -> None:
    """Delete everything of the blocks ``freed`` that is not among those ``kept``. Raises ``DamagedError``."""
    used = by_owner(kept)
    for owner, blocks in freed:
        there, address = used.get(owner, []), Address(owner)
        for gap in lacking(blocks, there):
            first, last = gap.start, gap.stop - 1
            batch.delete(address.tokens(first), address.tokens(last))
            for layer in range(shared.spec.layers):
                batch.delete(address.block(layer, first), address.block(layer, last))
            for runs in (shared.history, *map(shared.runs, shared.spec.index_layers)):
                runs.release(batch, owner, gap, there)


def forgetting(
    shared: Shared,
    numbers: Collection[int],
    gone: Collection[int] = (),
    changed: Mapping[int, DocumentState] = _AS_STORED,
) -> Batch:
    """What takes documents away, and nothing that others use.

    Documents that are ``gone`` go before them; those ``changed`` use by then what their new entry says. Raises
    ``DamagedError`` where the entry of any document cannot be read: then what it uses cannot be known.
    """
    batch, freed = Batch(), list[Piece]()
    for number in numbers:
        places = Places(number, shared.state(number) or DocumentState(name=""))
        batch.delete(places.entry)
        freed += places.pieces(range(LAST_ITEM))
    release(batch, shared, freed, used_by_others(shared, *numbers, *gone, changed=changed))
    return batch


def truncation(
    shared: Shared, number: int, before: DocumentState, blocks: int, fresh: int
) -> tuple[Batch, DocumentState]:
    """What cuts document ``number`` to ``blocks`` complete blocks, and its state then.

    Where others use blocks that it would write again, it moves to the number ``fresh``; its state says so.
    """
    batch, places = Batch(), Places(number, before)
    others = used_by_others(shared, number)
    digest = digest_at(shared.history, places, before, blocks, shared.spec)
    after = replace(before.cut(blocks, shared.spec.block_size), digest=digest)
    if any(owner == places.home and used.stop > blocks for owner, used in others):
        after = replace(after, spans=places.below(blocks), home=fresh)
    kept = [*Places(number, after).present(after.live()), *others]
    release(batch, shared, places.pieces(range(blocks, LAST_ITEM)), kept)
    batch.put(places.entry, after.to_record())
    return batch, after


def forking(shared: Shared, parent: Places, state: DocumentState, name: str, blocks: int, number: int) -> Batch:
    """What makes document ``number``, which begins with the first ``blocks`` blocks of another.

    Only the incomplete last block, if it is among them, is copied. Raises ``DamagedError`` and ``NotFound``.
    """
    size = shared.spec.block_size
    whole = min(blocks, state.tokens // size)
    fork = DocumentState(
        name=name,
        tokens=min(state.tokens, blocks * size),
        blocks=blocks,
        first=min(state.first, blocks),
        spans=parent.below(whole),
        digest=digest_at(shared.history, parent, state, whole, shared.spec),
        reading=state.reading,
        dropped=state.dropped_below(whole),
    )
    batch, places = Batch(), Places(number, fork)
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
