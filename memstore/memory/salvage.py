"""Save all readable data of a memory that cannot be repaired in place, into a new memory.

If the tree around the values is damaged, reading can end the reading process. So a child process reads, block by block,
and announces each block before it starts. When the child dies, the next one continues after that block. A block is
saved if its token ids, its states in all layers and its landmarks exist and pass their checksums. Any other block is
lost, and the new memory lists it as dropped. Nothing is guessed. The damaged memory is only read.

Run as ``python -m memstore.memory.salvage``, it takes one JSON object on standard input, and prints one per line.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore import errors
from memstore.errors import DamagedError, MemstoreError, NotFound
from memstore.memory.copy import TRANSACTION_BYTES
from memstore.memory.document import Document
from memstore.memory.entry import Address, DocumentState, Places
from memstore.memory.memory import Memory, open_memory
from memstore.memory.repair import free_name, told_by_tokens
from memstore.memory.shared import NamedValues, SharedStore
from memstore.memory.spec import (
    block_layouts,
    kept_recurrent,
    no_states,
    plain_layouts,
    read_recurrent,
    read_rows,
    token_layout,
)
from memstore.memory.urls import open_unchecked
from memstore.memory.verify import DONE, lines_of_child, say
from memstore.paths import python_module
from memstore.store.cache import empty_rows
from memstore.store.encryption_keys import KeySource, MasterKey, read_key

_MOST_CRASHES = 1000
_PATIENCE = 300  # seconds for one block: walking a tree whose pages form a circle never ends
_WHOLE = -1  # in place of a block: the entry of a document
_LISTING, _FACTS, _RULES = (0, 0), (0, 1), (0, 2)  # other steps of a child, in place of (document, block)

At = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SavedDocument:
    """The result for one document."""

    document: str
    tokens: int
    """Number of its tokens in the new memory."""
    tokens_lost: int
    """Number of its other tokens, in blocks that could not be read completely."""
    message: str
    """The result in words, with the reason."""


# The tree is read, not the raw file: pages that LMDB freed hold forgotten documents and older states, whose
# checksums are right too. A child reads and may die; after 1,000 deaths the salvage gives up.
def salvage(source: str | Path, target: str | Path, *, key: KeySource | None = None) -> list[SavedDocument]:
    """Save all readable data of the memory at ``source`` into a new one at ``target``, document by document.

    Documents that shared blocks share none in the new memory. ``key``, as for ``memstore.open``, is that of both.
    Raises ``InvalidArgument`` if ``target`` exists, ``DamagedError`` if even the header cannot be read, ``StoreFull``,
    and the errors of opening a memory.
    """
    master = None if key is None else read_key(key)
    skip, again = set[At](), False
    while True:
        order = {"source": str(source), "target": str(target), "skip": sorted(skip), "again": again}
        order["key"] = None if master is None else master.raw.hex()
        lines, end = lines_of_child(python_module("memstore.memory.salvage"), json.dumps(order))
        for line in lines:
            if "failed" in line:
                raise getattr(errors, line["failed"])(line["message"], memory=line["memory"], remedy=line["remedy"])
        if end is None:
            return [SavedDocument(**line["saved"]) for line in lines if "saved" in line]
        at: At | None = next((tuple(line["at"]) for line in reversed(lines) if "at" in line), None)
        if at is None or at in skip or len(skip) == _MOST_CRASHES:
            raise DamagedError(
                f"memory {source} cannot be read: the process that tried was ended {end}. Restore the memory from "
                "a copy",
                memory=source,
                remedy="restore",
            )
        skip, again = {*skip, at}, again or any("made" in line for line in lines)


def main() -> None:
    """Run the child."""
    order = json.load(sys.stdin)
    try:
        key = None if order["key"] is None else MasterKey(bytes.fromhex(order["key"]))
        _save_all(order["source"], order["target"], {tuple(at) for at in order["skip"]}, key, again=order["again"])
    except MemstoreError as error:
        about = {"memory": error.memory, "remedy": error.remedy}
        say({"failed": type(error).__name__, "message": str(error), **about})
    else:
        say(DONE)


def _save_all(source: str, target: str, skip: set[At], key: MasterKey | None, *, again: bool) -> None:
    store = open_unchecked(source, key)
    old = SharedStore.opened(store, source, "r", "exact", None, {"host_bytes": 0})
    given = None if key is None else lambda: key.raw
    with open_memory(target, spec=old.spec, mode="a" if again else "x", key=given) as new:
        say({"made": True})
        if _begin(_FACTS, skip):
            with _named_if_lost("facts"):
                new.put_facts(*NamedValues(old).all(), old.url)
        names: dict[int, str] = {}
        states = {number: _state(old, number, skip) for number in _numbers(old, skip)}
        # Those that get a new name come last: it must not be the name of another.
        for number in sorted(states, key=lambda number: states[number] is None):
            saved = _Rescue(old, new, number, skip).run(states[number], names.values())
            names[number] = saved["document"]
            say({"saved": saved})
        if _begin(_RULES, skip):
            with _named_if_lost("the limit, pins and times to live"):
                new.take_rules(old.retention.rules().renamed(names), (), set(names.values()))
    store.close()


@contextmanager
def _named_if_lost(what: str) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        message = f"{what} of the memory are lost: {error}"
        say({"saved": {"document": "", "tokens": 0, "tokens_lost": 0, "message": message}})


def _numbers(old: SharedStore, skip: set[At]) -> Iterator[int]:
    """Return document numbers from the keys or, if these cannot be walked, all numbers ever given."""
    if _begin(_LISTING, skip):
        first, last = Address(0).entry, Address(2**32 - 2).entry
        yield from sorted({key.document for key in old.store.keys(first, last)})
    else:
        yield from range(1, old.next_document())


def _state(old: SharedStore, number: int, skip: set[At]) -> DocumentState | None:
    """Return the entry of a document, None if it is lost."""
    with suppress(DamagedError):
        return old.state(number) if _begin((number, _WHOLE), skip) else None
    return None


class _Rescue:
    """One document."""

    def __init__(self, old: SharedStore, new: Memory, number: int, skip: set[At]) -> None:
        self._old = old
        self._new = new
        self._number = number
        self._skip = skip
        self._size = old.spec.block_size
        self._lost: list[str] = []
        """Reasons for lost blocks."""
        self._waiting: list[_Block] = []

    def run(self, state: DocumentState | None, taken: Collection[str]) -> dict[str, Any]:
        """Save the document with the entry ``state``; return the content of its ``SavedDocument``.

        Documents with names in ``taken`` were saved before.
        """
        if state is None and _begin((self._number, _WHOLE), self._skip):
            with suppress(DamagedError):
                state = told_by_tokens(self._old, self._number, free_name(self._number, taken))
        if state is None:
            message = f"document number {self._number} is lost: its entry, which has its name, cannot be read"
            return {"document": "", "tokens": 0, "tokens_lost": 0, "message": message}
        if state.name in taken:
            state = replace(state, name=free_name(self._number, taken))
        target, places = self._new.document(state.name), self._old.places(self._number, state)
        if target.id is None:
            target.begin(state.first, state.reading)
        for part in places.present(range(target.n_blocks, state.blocks)):
            for block in part.blocks:
                self._save(target, state, places, block)
        self._flush(target)
        return self._told(target, state)

    def _save(self, target: Document, state: DocumentState, places: Places, block: int) -> None:
        try:
            if not _begin((self._number, block), self._skip):
                raise DamagedError("reading it crashed the process")
            found = _read(self._old, places, state, block)
            found.recurrent.update(self._recurrent(state, block))
        except (DamagedError, NotFound) as error:
            self._lost.append(f"block {block}: {error}")
            self._flush(target)
            return
        if target.n_blocks + len(self._waiting) < block:  # the blocks between are lost, or were dropped before
            self._flush(target)
            target.pass_over(block - target.n_blocks)
        self._waiting.append(found)
        if sum(each.nbytes for each in self._waiting) >= TRANSACTION_BYTES:
            self._flush(target)

    def _recurrent(self, state: DocumentState, block: int) -> dict[int, list[Tensor]]:
        """Return the recurrent states in a block, by place; damaged ones are skipped, as they can be computed again."""
        found, spec, store = dict[int, list[Tensor]](), self._old.spec, self._old.store
        if not spec.recurrent:
            return found
        last = min(state.tokens, (block + 1) * self._size)
        for place in kept_recurrent(store, self._number, last, first=block * self._size + 1):
            with suppress(DamagedError, NotFound):
                found[place] = read_recurrent(store, spec.recurrent, self._number, place)
        return found

    def _flush(self, target: Document) -> None:
        blocks, self._waiting = self._waiting, []
        if not blocks:
            return
        complete = blocks if len(blocks[-1].ids) == self._size else blocks[:-1]
        with target.append(torch.cat([block.ids for block in blocks])) as batch:
            for layer in range(self._old.spec.layers):
                stored = _stacked(self._old, complete, layer)
                last = {
                    name: blocks[-1].states[i][layer : layer + 1] if len(complete) < len(blocks) else empty
                    for i, (name, empty) in enumerate(no_states(self._old.spec).items())
                }
                marks = [block.landmarks[layer] for block in blocks if layer in block.landmarks]
                batch.put_stored(layer, stored, last, landmarks=torch.cat(marks) if marks else None)
            for block in blocks:
                for place, states in block.recurrent.items():
                    batch.put_recurrent(states, at=place)

    def _told(self, target: Document, state: DocumentState) -> dict[str, Any]:
        there = target.state.readable(self._size)
        lost = max(0, state.readable(self._size) - there)
        message = f"document {state.name!r}: {there} tokens saved, {lost} lost"
        if not lost and state.digest not in (None, target.digest):
            message += "; but its token ids have changed since they were read, so do not trust it"
        if lost and self._lost:
            message += f"; {self._lost[0]}" + (f", and {len(self._lost) - 1} more" if len(self._lost) > 1 else "")
        return {"document": state.name, "tokens": there, "tokens_lost": lost, "message": message}


@dataclass(frozen=True)
class _Block:
    ids: Tensor
    """``[t]`` int32"""
    states: list[Tensor]
    """``[layers, ...]`` for each of the layouts"""
    landmarks: Mapping[int, Tensor]
    """Layer -> ``[1, G, P, D]`` float32"""
    recurrent: dict[int, list[Tensor]] = field(default_factory=dict)
    """Place in the document, in tokens -> the recurrent state there."""

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in (*self.states, *chain(*self.recurrent.values())))


def _read(old: SharedStore, places: Places, state: DocumentState, block: int) -> _Block:
    """Read one block with all checks. Raises ``DamagedError`` and ``NotFound``."""
    spec, length = old.spec, min(old.spec.block_size, state.tokens - block * old.spec.block_size)
    ids = read_rows(old.store, [places.tokens(block)], [token_layout(length)])[0]
    layouts = block_layouts(spec) if length == spec.block_size else plain_layouts(spec)
    rows = read_rows(old.store, [places.block(layer, block) for layer in range(spec.layers)], layouts)
    here = range(block, block + 1)
    marks = {layer: torch.cat([keys for _, keys in old.runs(layer).read(places, here)]) for layer in spec.index_layers}
    return _Block(ids[0], rows, marks)


def _stacked(old: SharedStore, blocks: list[_Block], layer: int) -> list[Tensor]:
    """Return ``[n, ...]`` for each layout of complete blocks."""
    if not blocks:
        return empty_rows(block_layouts(old.spec))
    return [torch.stack([block.states[i][layer] for block in blocks]) for i in range(len(blocks[0].states))]


def _begin(at: At, skip: set[At]) -> bool:
    """Announce the next read; return False if it has ended a process before."""
    if at in skip:
        return False
    say({"at": at})
    signal.alarm(_PATIENCE)
    return True


if __name__ == "__main__":
    main()
