"""The vector index of one layer of a document, kept equal to the landmarks in the store."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from memstore.errors import DamagedError
from memstore.index import Found, VectorIndex
from memstore.memory.handle import Handle
from memstore.memory.places import dropped, lacking
from memstore.memory.state import DocumentState


class LayerIndex:
    """Built from the store at the first search; later searches add what was committed since and drop what left.

    The store is the only truth, so this works the same whoever wrote: this thread, another one, or another process.
    A lock lets one thread in at a time, since an index cannot be searched while it changes.
    """

    def __init__(self, handle: Handle, layer: int) -> None:
        self._handle = handle
        self._layer = layer
        self._lock = threading.RLock()
        self._index: VectorIndex | None = None
        self._edits = -1
        self._held = range(0)
        self._dropped: list[range] = []  # blocks within ``_held`` that are not there

    @property
    def nbytes(self) -> int:
        """Bytes that the index holds; 0 before the first search."""
        with self._lock:
            return 0 if self._index is None else self._index.nbytes

    def search(self, queries: Tensor, top_k: int, allowed: range | Tensor | None) -> Found:
        """Search all blocks that are complete and committed now."""
        with self._lock:
            return self._synced().search(queries, top_k, allowed=allowed)

    def score(self, queries: Tensor, allowed: range | Tensor | None) -> tuple[Tensor, Tensor]:
        """Score all blocks that are complete and committed now."""
        with self._lock:
            return self._synced().score(queries, allowed=allowed)

    def cut(self, before: DocumentState, after: DocumentState) -> None:
        """A truncation of this process: drop its blocks here too, which is cheaper than building again."""
        with self._lock:
            if self._index is not None and self._edits == before.edits:
                self._keep(range(min(self._held.start, after.blocks), min(self._held.stop, after.blocks)))
                self._edits, self._dropped = after.edits, dropped(after)

    def _synced(self) -> VectorIndex:
        while True:
            state = self._handle.current()
            try:
                index = self._catch_up(state)
            except DamagedError:
                # What was to be read may have been truncated, or have left, since.
                if self._handle.current() == state:
                    raise
                continue
            if self._handle.current().edits == state.edits:
                return index

    def _catch_up(self, state: DocumentState) -> VectorIndex:
        complete = state.complete(self._handle.shared.spec.block_size)
        if self._index is None or self._edits != state.edits:
            self._index, self._edits = self._handle.shared.new_index(), state.edits
            self._held, self._dropped = range(complete.start, complete.start), dropped(state)
        self._keep(range(max(self._held.start, complete.start), self._held.stop))
        if complete.stop <= self._held.stop:
            return self._index
        runs = self._handle.shared.runs(self._layer)
        for part in lacking(range(self._held.stop, complete.stop), self._dropped):
            for blocks, keys in runs.read(self._handle.places, part):
                self._index.add(torch.arange(blocks.start, blocks.stop), keys)
                self._held = range(self._held.start, blocks.stop)
        self._held = range(self._held.start, complete.stop)
        return self._index

    def _keep(self, blocks: range) -> None:
        """Drop what is not in ``blocks``; an empty range stays where it is, so that new blocks follow it."""
        assert self._index is not None
        before = range(self._held.start, min(blocks.start, self._held.stop))
        after = range(max(blocks.stop, before.stop, self._held.start), self._held.stop)
        gone = [block for part in (before, after) for left in lacking(part, self._dropped) for block in left]
        if gone:
            self._index.remove(torch.tensor(gone))
        self._held = blocks or range(blocks.start, blocks.start)
