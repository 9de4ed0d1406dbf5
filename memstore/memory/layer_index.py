"""The vector index of one layer of a document, kept equal to the landmarks in the store, and measured against them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument
from memstore.index import SearchResult, VectorIndex
from memstore.memory.entry import DocumentState, lacking
from memstore.memory.index_files import LayerLandmarks
from memstore.memory.shared import Handle
from memstore.memory.tensors import own_types
from memstore.store.contract import Progress

TOP_K = 8
LOGGED = 64
"""Queries that are remembered, or taken from the keys where nobody has searched yet."""


def recall(index: VectorIndex, source: LayerLandmarks, blocks: range, logged: Sequence[Tensor]) -> dict[str, Any]:
    """Share of the true best eight of ``blocks`` that ``index`` finds: JSON values for ``memstore stats``.

    ``logged`` are queries ``[H, 1, D]`` of the last searches. Without them keys of the index are its queries, which is
    easier than real ones: the answer says which of the two it was.
    """
    alike = [queries for queries in logged if queries.shape == logged[-1].shape]
    queries = torch.cat(alike, 1).float() if alike else _keys(source, blocks)
    found = index.search(queries, TOP_K).scores
    truth = _truth(source, blocks, queries)
    there = truth > -torch.inf
    # Any of several equal blocks is right, so scores are compared, and float32 sums in another order agree.
    last = torch.where(there, truth, torch.inf).amin(2, keepdim=True)
    hits = (found >= last - 1e-5 * last.abs()) & there
    share = float(hits.sum() / there.sum().clamp(min=1))
    return {"recall": round(share, 4), "recall_at": TOP_K, "recall_queries": "logged" if alike else "keys"}


def _keys(source: LayerLandmarks, blocks: range) -> Tensor:
    """The first key of some blocks: ``[G, T, D]``."""
    some = [blocks[len(blocks) * place // LOGGED] for place in range(min(LOGGED, len(blocks)))]
    rows = [next(iter(source.landmarks.read(source.places, range(b, b + 1))))[1] for b in dict.fromkeys(some)]
    return torch.cat(rows)[:, :, 0].transpose(0, 1).contiguous()


def _truth(source: LayerLandmarks, blocks: range, queries: Tensor) -> Tensor:
    """Best scores by brute force, a piece of the store at a time: ``[H, T, TOP_K]``, -inf where there are fewer."""
    best = torch.full((*queries.shape[:2], TOP_K), -torch.inf)
    for _, keys in source.landmarks.read(source.places, blocks):
        heads = keys.repeat_interleave(len(queries) // keys.shape[1], 1)  # [n, H, P, D]
        scores = torch.einsum("htd,nhpd->htnp", queries, heads).amax(3)
        best = torch.cat([best, scores], 2).topk(TOP_K, dim=2).values
    return best


WORTH_KEEPING = 1 << 14
"""Keys of a head from which on an index is kept when its memory is closed; fewer are built faster than found."""

_watcher: ContextVar[Progress | None] = ContextVar("watcher", default=None)


# A context variable, because searches are asked for deep inside of a model's attention; `ask` and `search` draw a bar
# from it.
@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Inside, searches of this thread tell ``progress`` how many blocks of how many they have put into an index."""
    token = _watcher.set(progress)
    try:
        yield
    finally:
        _watcher.reset(token)


def cannot_score(index: str) -> str:
    """What to say to somebody who wants every block scored by an index that only finds the best."""
    return (
        f"the index {index!r} finds the best blocks and cannot score all of them, as attached models, lists that heads "
        "or tokens share, and searches by vectors need: open the memory with index='exact' (nothing stored changes)."
    )


class LayerIndex:
    """Taken from its file or built from the store at the first search; later ones add what was committed since.

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
        self._kept = range(0)
        self._queries: deque[Tensor] = deque(maxlen=LOGGED)
        self._measured: Mapping[str, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the index holds; 0 before the first search."""
        with self._lock:
            return 0 if self._index is None else self._index.nbytes

    @property
    def device(self) -> torch.device:
        """Where it lies; asking it from elsewhere takes copies."""
        return self._handle.shared.index_device

    def search(self, queries: Tensor, top_k: int, allowed: range | Tensor | None) -> SearchResult:
        """Search all blocks that are complete and committed now."""
        with self._lock, own_types():
            index = self._synced()
            found = index.search(queries, top_k, allowed=allowed)
            if queries.shape[1] and not index.capabilities.exact:
                self._queries.append(queries[:, -1:].detach().cpu().clone())  # to measure recall with
            return found

    def score(self, queries: Tensor, allowed: range | Tensor | None) -> tuple[Tensor, Tensor]:
        """Score all blocks that are complete and committed now. Raises ``InvalidArgument`` where the index cannot."""
        with self._lock, own_types():
            index = self._synced()
            if not index.capabilities.dense:
                raise InvalidArgument(cannot_score(self._handle.shared.index))
            scores, blocks = index.score(queries.to(self.device), allowed=allowed)
            return scores.to(queries.device), blocks.to(queries.device)

    def route(self, queries: Tensor, top_k: int, allowed: range | Tensor | None) -> tuple[Tensor, Tensor]:
        """Route among all blocks that are complete and committed now; see ``VectorIndex.route``."""
        with self._lock, own_types():
            return self._synced().route(queries.to(self.device), top_k, allowed=allowed)

    def build(self) -> None:
        """Bring the index up to the last commit, let it finish, measure it, and keep it beside the store.

        Raises ``DamagedError`` where landmarks cannot be read, and ``OSError`` where there is no room.
        """
        with self._lock, own_types():
            index = self._synced()
            index.finish()
            if not index.capabilities.exact and len(index):
                self._measured = recall(index, self._source(), self._held, list(self._queries))
            self._keep_file()

    def close(self) -> None:
        """Keep an index that has grown since it was kept, where files are kept, and let go of it."""
        with self._lock:
            index, self._index = self._index, None
            if index is None:
                return
            try:
                if (
                    len(self._held) * self._handle.shared.spec.keys_per_block >= WORTH_KEEPING
                    and self._kept != self._held
                ):
                    self._index = index
                    self._keep_file()
            finally:
                self._index = None
                index.close()

    def drop(self) -> None:
        """Let go of the index of a document that was forgotten, which is not kept."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None

    def facts(self) -> dict[str, Any] | None:
        """What there is to tell of the index; None before the first search."""
        with self._lock:
            if self._index is None:
                return None
            return {"layer": self._layer, "blocks": len(self._held), "bytes": self._index.nbytes} | self._told()

    def _told(self) -> dict[str, Any]:
        assert self._index is not None
        certain = {"recall": 1.0} if self._index.capabilities.exact else self._measured
        return {**self._index.facts(), **certain}

    def _source(self) -> LayerLandmarks:
        number, state = self._handle.id, self._handle.current()
        assert number is not None
        shared = self._handle.shared
        return LayerLandmarks(number, self._layer, state, shared.runs(self._layer), shared.history, self._handle.places)

    def _keep_file(self) -> None:
        assert self._index is not None
        files, source = self._handle.shared.index_files, self._source()
        if files.writable and self._held and not self._dropped and source.state.edits == self._edits:
            files.save(self._index, source, self._held, self._told())
            self._kept = self._held

    def cut(self, before: DocumentState, after: DocumentState) -> None:
        """A truncation of this process: drop its blocks here too, which is cheaper than building again."""
        with self._lock:
            if self._index is not None and self._edits == before.edits:
                self._keep(range(min(self._held.start, after.blocks), min(self._held.stop, after.blocks)))
                self._edits, self._dropped = after.edits, after.gaps

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
            self._index, self._edits = self._renewed(), state.edits
            self._held, self._dropped = range(complete.start, complete.start), state.gaps
            self._load(complete)
        self._dropped = state.gaps  # a copy passes over the blocks that its source lacks, without an edit
        self._keep(range(max(self._held.start, complete.start), self._held.stop))
        if complete.stop <= self._held.stop:
            return self._index
        runs, told, start = self._handle.shared.runs(self._layer), _watcher.get(), self._held.stop
        for part in lacking(range(self._held.stop, complete.stop), self._dropped):
            for blocks, keys in runs.read(self._handle.places, part):
                self._index.add(torch.arange(blocks.start, blocks.stop), keys)
                self._held = range(self._held.start, blocks.stop)
                if told is not None:
                    told(blocks.stop - start, complete.stop - start)
        self._held = range(self._held.start, complete.stop)
        return self._index

    def _load(self, complete: range) -> None:
        assert self._index is not None
        if self._handle.id is None or self._dropped:  # no file is kept where blocks are missing
            return
        loaded = self._handle.shared.index_files.load(self._index, self._source(), complete)
        if loaded is not None:
            self._held, facts = loaded
            self._kept = self._held
            self._measured = {name: facts[name] for name in facts if name.startswith("recall")}
        elif len(self._index):  # what it took from a file was not what the file promised
            self._index = self._renewed()

    # What takes another index's place closes it: a collection in Milvus outlives the process that forgot it.
    def _renewed(self) -> VectorIndex:
        """An empty index in place of the one that there was."""
        self.drop()
        return self._handle.shared.new_index()

    def _keep(self, blocks: range) -> None:
        """Drop what is not in ``blocks``; an empty range stays where it is, so that new blocks follow it."""
        assert self._index is not None
        before = range(self._held.start, min(blocks.start, self._held.stop))
        after = range(max(blocks.stop, before.stop, self._held.start), self._held.stop)
        gone = [block for part in (before, after) for left in lacking(part, self._dropped) for block in left]
        if gone:
            self._index.remove(torch.tensor(gone))
        self._held = blocks or range(blocks.start, blocks.start)
