"""One layer of a document for an attention layer: search, then gather; and the index that is searched."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import index
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from memstore.device_copies import device_of, own_types
from memstore.errors import DamagedError, InvalidArgument, MemstoreError, NotFound
from memstore.index import VectorIndex
from memstore.index.contract import check_tensor
from memstore.memory.entry import DocumentState, lacking
from memstore.memory.index_files import LayerLandmarks
from memstore.memory.shared import Handle
from memstore.memory.spec import decode_block_rows, no_states, plain_layouts, read_rows
from memstore.store.cache import BlockRefs, StaleBlocks
from memstore.store.contract import Progress

T = TypeVar("T")
TOP_K = 8
"""Number of best blocks in the measurement of an index's recall."""
LOGGED = 64
"""Number of recent queries to keep, or of keys to use as queries before any search."""
WORTH_KEEPING = 1 << 14
"""Fewest keys per head for which an index is kept when its memory is closed; smaller ones are faster to build."""

# Context variables, because blocks are searched for, and left out, deep inside a model's attention.
_left_out: ContextVar[dict[tuple[str, int], str] | None] = ContextVar("left_out", default=None)
_watcher: ContextVar[Progress | None] = ContextVar("watcher", default=None)


@contextmanager
def noting_left_out() -> Iterator[dict[tuple[str, int], str]]:
    """Collect the blocks that this thread leaves out inside, as (document, block), and the reason."""
    noted: dict[tuple[str, int], str] = {}
    token = _left_out.set(noted)
    try:
        yield noted
    finally:
        _left_out.reset(token)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Inside, let searches of this thread call ``progress`` with the blocks added to an index and their total.

    ``ask`` and ``search`` draw a bar from it.
    """
    token = _watcher.set(progress)
    try:
        yield
    finally:
        _watcher.reset(token)


class Hits(NamedTuple):
    """Retrieved blocks, best first; block -1 with score -inf if there are fewer than ``top_k``."""

    scores: Tensor
    """``[H, T, top_k]`` float32"""
    blocks: Tensor
    """``[H, T, top_k]`` int64"""
    offsets: Tensor
    """``[H, T, top_k]`` int64: which of a block's keys matched best."""


class LayerView:
    """The blocks of one layer of one document. Safe to use while another thread appends."""

    def __init__(self, handle: Handle, layer: int) -> None:
        self._handle = handle
        self._shared = handle.shared
        self._name = handle.name
        self._layer = layer
        self.index = _LayerIndex(handle, layer) if layer in self._shared.spec.index_layers else None
        """The index of this layer, or None if it has no landmarks."""

    def __repr__(self) -> str:
        return f"LayerView({self._name!r}, layer {self._layer})"

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for the index of this layer."""
        return self.index.nbytes if self.index else 0

    def search(self, queries: Tensor, top_k: int, *, allowed: range | Tensor | None = None) -> Hits:
        """Return the ``top_k`` complete blocks for each of ``queries [H, T, D]``. ``allowed`` is a range or int64 ids.

        Query head ``h`` of ``H`` uses key head ``h // (H // G)``. Raises ``InvalidArgument``, ``DamagedError``.
        """
        with self._searching() as index:
            found = index.search(queries, top_k, allowed=allowed)
            if self.index and queries.shape[1] and not index.capabilities.exact:
                self.index.log(queries)
            return Hits(*found)

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the score of every complete block: ``([H, T, N] float32, blocks [N])``.

        Raises ``InvalidArgument`` if the index cannot score every block, and ``DamagedError``.
        """
        with self._searching() as index:
            if not index.capabilities.dense:
                raise InvalidArgument(cannot_score(self._shared.index))
            scores, blocks = index.score(queries.to(self._shared.index_device), allowed=allowed)
            return scores.to(queries.device), blocks.to(queries.device)

    # The results may be strided views of one buffer: the fields of a block lie beside each other as they were read
    # or cached. Copy them if you need contiguous tensors.
    def gather(self, blocks: Tensor | Sequence[int], *, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return states of ``blocks [K]``: one tensor ``[K, *shape]`` per field, verified, on ``device`` (None: CPU).

        Raises ``NotFound`` for a block that is not in the document, and ``DamagedError``; both name the block.
        """
        ids = _as_ids(blocks)
        if device is not None:
            device = device_of(device)
        states = self._steadily(ids, lambda state: self._read(ids, state, device))
        self._count(ids)
        return states

    def rows(self, tokens: Tensor) -> Tensor:
        """Return stored rows of single ``tokens [n]``, ascending: ``[n, ...]`` of the one field, verified, on the CPU.

        For memories whose blocks have one field, ``[block_size, ...]``, and no codec. If the store can, it reads only
        these rows of a block. Raises ``InvalidArgument``, and the errors of ``gather``.
        """
        spec = self._shared.spec
        if len(spec.fields) != 1 or spec.codec != "none":
            raise InvalidArgument("rows can be read only in memories with one field and no codec.")
        blocks, which = np.unique(tokens.numpy() // spec.block_size, return_inverse=True)
        ids, rows = blocks.tolist(), tokens.numpy() % spec.block_size
        if not ids:
            return no_states(spec).popitem()[1].flatten(0, 1)
        cache = self._shared.blocks
        found = self._steadily(
            ids, lambda state: cache.rows(self._refs(ids, state), self._unmoved(state, ids), which, rows)
        )
        self._count(ids)
        return found

    def _count(self, blocks: Sequence[int]) -> None:
        """Count ``blocks`` as gathered."""
        if blocks and self._handle.id is not None:
            self._shared.blocks.count(self._handle.id, len(blocks))

    def stored(self, blocks: Tensor | Sequence[int]) -> list[Tensor]:
        """Return complete ``blocks [K]`` in stored form, verified: ``[K, ...]`` for each of ``block_layouts``.

        For ``Append.put_stored`` of a memory with the same codec. Raises the errors of ``gather``.
        """
        ids = _as_ids(blocks)

        return self._steadily(
            ids, lambda state: self._shared.blocks.read(self._refs(ids, state), self._unmoved(state, ids))
        )

    def tiers(self, blocks: Tensor | Sequence[int]) -> list[str]:
        """Return the current tier of each of ``blocks [K]``: "device", "host" or "disk". It does not count as a use."""
        return self._shared.blocks.where(self._refs(_as_ids(blocks), self._handle.current()))

    def checksums(self, blocks: Tensor | Sequence[int]) -> list[tuple[int, ...]]:
        """Return the stored checksums of the states of ``blocks [K]``; identical states have equal checksums.

        Comparable between memories of one layout and codec. Raises the errors of ``gather``.
        """
        ids = _as_ids(blocks)

        def read(state: DocumentState) -> list[tuple[int, ...]]:
            places, unmoved = self._shared.places(self._handle.id or 0, state), self._unmoved(state, ids)
            sums = self._shared.store.checksums([places.block(self._layer, block) for block in ids])
            if not unmoved():  # a store may read one block after the other
                raise StaleBlocks
            return sums

        return self._steadily(ids, read)

    def prefetch(self, blocks: Tensor | Sequence[int]) -> None:
        """Let a thread bring ``blocks`` into host memory during other computations; return at once.

        If a block is missing or damaged, the later ``gather`` of it raises the error.
        """
        prefetch([self], blocks)

    def sound(self, blocks: Sequence[int]) -> list[int]:
        """Return the readable ones of ``blocks``. The others are counted, and logged the first time."""
        good = []
        for block in blocks:
            try:
                self.gather([block])
                good.append(block)
            except DamagedError as error:
                self._shared.blocks.leave_out(self._refs([block], self._handle.current()), error)
                if (noted := _left_out.get()) is not None:
                    noted[self._name, block] = str(error)
        return good

    def landmarks(self, blocks: range) -> Tensor:
        """Return landmarks of ``blocks``: ``[n, G, P, D]`` float32, also of an incomplete last block.

        Raises ``NotFound`` for a block that is not in the document, and ``DamagedError``, which names the blocks.
        """
        self._searchable()
        if not isinstance(blocks, range) or blocks.step != 1:
            raise InvalidArgument(f"blocks must be a range of step 1, not {blocks}.")
        spec = self._shared.spec
        while True:
            state = self._check_live(blocks)
            if not blocks:
                return torch.empty(0, spec.key_heads, spec.keys_per_block, spec.key_dim)
            try:
                landmarks = self._read_landmarks(blocks)
            except DamagedError as error:
                # Another thread or process may have changed the document in between.
                if self._handle.current() == state:
                    raise self._blame_landmarks(blocks, error) from error
                continue
            if self._unmoved(state, blocks)():  # otherwise the runs may be from different moments
                return landmarks

    def _read_landmarks(self, blocks: range) -> Tensor:
        runs = self._shared.runs(self._layer)
        return torch.cat([keys for _, keys in runs.read(self._handle.places, blocks)])

    @contextmanager
    def _searching(self) -> Iterator[VectorIndex]:
        """Yield the index of all blocks that are complete and committed now; name damaged landmarks in its errors."""
        try:
            with self._searchable().synced() as index:
                yield index
        except DamagedError as error:
            raise self._blame_landmarks(self._handle.current().live(), error) from error

    def _searchable(self) -> _LayerIndex:
        if self.index is None:
            layers = ", ".join(str(layer) for layer in self._shared.spec.index_layers) or "none"
            raise InvalidArgument(f"layer {self._layer} has no landmarks to search; layers with landmarks: {layers}.")
        return self.index

    def _refs(self, blocks: Sequence[int], state: DocumentState, layers: Sequence[int] = ()) -> BlockRefs:
        """Return references to ``blocks`` of this layer or, layer by layer, of each of ``layers``."""
        number = self._handle.id or 0  # a document without a number has no blocks to read
        if state.branch or state.spans:
            owners = list(map(self._shared.places(number, state).owner, blocks))
        else:  # most documents; looking up places would slow a gather from memory
            owners = [number if state.home is None else state.home] * len(blocks)
        of_each, times = [self._layer] * len(blocks), 1
        if layers:
            of_each, blocks, times = [layer for layer in layers for _ in blocks], [*blocks] * len(layers), len(layers)
        return BlockRefs(number, state.edits, of_each, blocks, owners * times, self._stop(state))

    def _stop(self, state: DocumentState) -> int:
        """Return the first block that is not complete."""
        return max(state.first, state.tokens // self._shared.spec.block_size)

    def _unmoved(self, state: DocumentState, blocks: Sequence[int]) -> Callable[[], bool]:
        """Return a check that ``blocks`` are all unchanged since the document was in ``state``.

        Complete blocks stay unchanged until a truncation. An incomplete one changes when the document grows, and others
        may then leave. Its new states with their old ones would mix two moments.
        """
        stop = self._stop(state)
        grows = stop < state.blocks and bool(blocks) and max(blocks) >= stop

        def unmoved() -> bool:
            try:
                now = self._handle.current()
            except MemstoreError:  # forgotten or closed
                return False
            return now.edits == state.edits and (not grows or now.tokens == state.tokens)

        return unmoved

    def _check_live(self, blocks: Sequence[int]) -> DocumentState:
        state = self._handle.current()
        check_present(state, blocks)
        return state

    def _blame(self, blocks: list[int], error: Exception) -> Exception:
        """Return the error for the block that could not be read, by the names that a user knows."""
        self._check_live(blocks)  # they may have left in the meantime
        for block in blocks:
            try:
                self._read([block], self._handle.current())
            except StaleBlocks:
                break
            except (DamagedError, NotFound) as reason:
                return DamagedError(
                    f"document {self._name!r}, layer {self._layer}, block {block} is damaged or lost ({reason}). "
                    "It was not used. Run verify to find other damage; forget the document and read it again."
                )
        return DamagedError(f"document {self._name!r}, layer {self._layer}: {error}")

    def _blame_landmarks(self, blocks: range, error: DamagedError) -> DamagedError:
        """Return the error for the first of ``blocks`` with unreadable landmarks, and those stored together with it."""
        length = self._shared.run_length
        for run in range(blocks.start // length, -(-blocks.stop // length)):
            piece = range(max(run * length, blocks.start), min((run + 1) * length, blocks.stop))
            try:
                self._read_landmarks(piece)
            except DamagedError as reason:
                return DamagedError(
                    f"document {self._name!r}, layer {self._layer}, landmarks of blocks {piece.start} to "
                    f"{piece.stop - 1} are damaged or lost ({reason}). They were not used. Run verify to find "
                    "other damage; forget the document and read it again."
                )
        return DamagedError(f"document {self._name!r}, layer {self._layer}: {error}")

    def _steadily(self, blocks: list[int], read: Callable[[DocumentState], T]) -> T:
        """Return the result of ``read`` for ``blocks``; repeat it if the document changes, and name damaged blocks."""
        while True:
            state = self._check_live(blocks)
            try:
                return read(state)
            except StaleBlocks:
                continue
            except (DamagedError, NotFound) as error:
                # Another thread or process may have changed the document in between.
                if self._handle.current() == state:
                    raise self._blame(blocks, error) from error

    def _read(self, blocks: list[int], state: DocumentState, device: torch.device | None = None) -> dict[str, Tensor]:
        spec, cache = self._shared.spec, self._shared.blocks
        refs, unmoved = self._refs(blocks, state), self._unmoved(state, blocks)
        if not blocks or spec.codec == "none" or max(blocks) < refs.stop:
            return decode_block_rows(spec, cache.read(refs, unmoved, device))
        # The incomplete last block is among them; it is stored without the codec.
        complete = [place for place, block in enumerate(blocks) if block < refs.stop]
        states = decode_block_rows(spec, cache.read(refs.only(complete), unmoved, device))
        end = next(key for key in refs.keys if key.item >= refs.stop)
        last = dict(zip(spec.fields, read_rows(self._shared.store, [end], plain_layouts(spec)), strict=True))
        if not unmoved():
            raise StaleBlocks
        rows = {place: row for row, place in enumerate(complete)}
        order = torch.tensor([rows.get(place, len(complete)) for place in range(len(blocks))])
        return {field: torch.cat([each, last[field].to(each.device)])[order] for field, each in states.items()}


def check_present(state: DocumentState, blocks: Sequence[int]) -> None:
    """Raise ``NotFound`` unless all ``blocks`` are live, and none was dropped. A range must have step 1."""
    ends = (blocks[0], blocks[-1]) if blocks and isinstance(blocks, range) else blocks
    if blocks and not state.first <= min(ends) <= max(ends) < state.blocks:
        live = state.live()
        wrong = next(block for block in blocks if block not in live)
        there = f"blocks {live.start} to {live.stop - 1}" if live else "no blocks"
        raise NotFound(f"document {state.name!r} has no block {wrong}; it has {there}.")
    if state.dropped and (lost := [block for block in blocks if any(block in gone for gone in state.gaps)]):
        raise NotFound(
            f"document {state.name!r}: block {lost[0]} was damaged, and a repair removed it; the other blocks are "
            "intact."
        )


def _as_ids(blocks: Tensor | Sequence[int]) -> list[int]:
    if isinstance(blocks, Tensor):
        check_tensor("blocks", blocks)
        if blocks.dim() != 1 or blocks.dtype.is_floating_point or blocks.dtype == torch.bool:
            raise InvalidArgument(f"blocks must be integers of shape [K], not {blocks.dtype} of {list(blocks.shape)}.")
        return list(blocks.tolist())
    if isinstance(blocks, range) and blocks.step != 1:
        # One rule for tokens, landmarks and gather.
        raise InvalidArgument(f"blocks must be a range of step 1, not {blocks}; for other steps pass list(...).")
    try:
        return list(map(index, blocks))
    except TypeError:
        raise InvalidArgument(f"blocks must be a sequence of integers, not {type(blocks).__name__}.") from None


def gathered(
    views: Sequence[LayerView], blocks: Tensor | Sequence[int], device: torch.device
) -> list[dict[str, Tensor]]:
    """Run ``gather`` for the same ``blocks`` of several layers of a document, in one copy."""
    device, ids = device_of(device), _as_ids(blocks)
    found = _together(views, ids, device) if len(views) > 1 and ids else None
    return _apart(views, [ids] * len(views), device) if found is None else found


def _apart(
    views: Sequence[LayerView], lists: Sequence[Sequence[int]], device: torch.device | None
) -> list[dict[str, Tensor]]:
    """Gather each layer's own blocks by itself; repeat it if the document changes between two layers."""
    ids = [block for each in lists for block in each]
    while True:
        unmoved = views[0]._unmoved(views[0]._check_live(ids), ids) if ids else lambda: True
        found = [view.gather(each, device=device) for view, each in zip(views, lists, strict=True)]
        if unmoved():
            return found


def _together(views: Sequence[LayerView], blocks: list[int], device: torch.device) -> list[dict[str, Tensor]] | None:
    """Gather in one copy. None if layers need separate reads: for a block without codec, or to name a damaged one."""
    first, shared, count = views[0], views[0]._shared, len(blocks)
    state = first._check_live(blocks)
    if shared.spec.codec != "none" and max(blocks) >= first._stop(state):
        return None
    refs = first._refs(blocks, state, [view._layer for view in views])
    try:
        rows = shared.blocks.read(refs, first._unmoved(state, blocks), device)
    except (StaleBlocks, DamagedError, NotFound):
        return None
    first._count(refs.blocks)
    parts = zip(*(each.split(count) for each in rows), strict=True)
    return [decode_block_rows(shared.spec, part) for part in parts]


def gathered_each(
    views: Sequence[LayerView], lists: Sequence[Sequence[int]], device: torch.device | None = None
) -> dict[str, Tensor]:
    """Gather complete blocks, with a separate list for each layer of a document, in one copy, layer after layer.

    They are not cached in host memory if the store is near. Raises the errors of ``LayerView.gather``.
    """
    ids, first = [block for each in lists for block in each], views[0]
    device, shared = None if device is None else device_of(device), first._shared
    state = first._check_live(ids)
    layers = [view._layer for view, each in zip(views, lists, strict=True) for _ in each]
    refs = first._refs(ids, state)._replace(layers=layers)
    try:
        rows = shared.blocks.read(refs, first._unmoved(state, ids), device, keep=False)
    except (StaleBlocks, DamagedError, NotFound):  # one by one, to name the faulty one
        parts = _apart(views, lists, device)
        return {name: torch.cat([part[name] for part in parts]) for name in shared.spec.fields}
    first._count(ids)
    return decode_block_rows(shared.spec, rows)


def at_hand(views: Sequence[LayerView], blocks: Sequence[int]) -> bool:
    """Whether ``blocks`` of several layers of a document can be gathered without waiting."""
    if not views:
        return True
    state = views[0]._handle.current()
    return views[0]._shared.blocks.at_hand(views[0]._refs(blocks, state, [view._layer for view in views]))


def prefetch(views: Sequence[LayerView], blocks: Tensor | Sequence[int]) -> None:
    """Run ``LayerView.prefetch`` for the same ``blocks`` of several layers of a document."""
    if not views or not views[0]._shared.blocks.prefetches:
        return
    first, shared = views[0], views[0]._shared
    state = first._handle.current()
    complete, gone = state.complete(shared.spec.block_size), state.gaps
    ids = [block for block in _as_ids(blocks) if block in complete and not any(block in each for each in gone)]
    if ids:
        refs = first._refs(ids, state, [view._layer for view in views])
        shared.blocks.prefetch(refs, first._unmoved(state, ids))


def cannot_score(index: str) -> str:
    """Return the error message for scoring every block with an index that only finds the best."""
    return (
        f"the index {index!r} finds the best blocks, but cannot score all of them. Attached models, top-k lists "
        "shared by heads or tokens, and searches by vector need all scores: open the memory with index='exact' "
        "(nothing stored changes)."
    )


class _LayerIndex:
    """Loaded from its file or built from the store at the first search; later searches add new commits.

    The store is the only truth, so it works for any writer: this thread, another one, or another process. A lock lets
    one thread in at a time, because an index cannot be searched while it changes.
    """

    def __init__(self, handle: Handle, layer: int) -> None:
        self._handle = handle
        self._layer = layer
        self._lock = threading.RLock()
        self._index: VectorIndex | None = None
        self._edits = -1
        self._held = range(0)
        self._dropped: list[range] = []  # missing blocks within ``_held``
        self._kept = range(0)
        self._queries: deque[Tensor] = deque(maxlen=LOGGED)
        self._measured: Mapping[str, Any] = {}

    @property
    def nbytes(self) -> int:
        with self._lock:
            return 0 if self._index is None else self._index.nbytes

    @property
    def device(self) -> torch.device:
        """Its device; queries from another one are copied."""
        return self._handle.shared.index_device

    @contextmanager
    def synced(self) -> Iterator[VectorIndex]:
        """Yield the index for one thread at a time, with the last commit of any writer."""
        with self._lock, own_types():
            yield self._synced()

    def log(self, queries: Tensor) -> None:
        """Keep the last of ``queries [H, T, D]`` for measuring recall."""
        self._queries.append(queries[:, -1:].detach().cpu().clone())

    def build(self) -> None:
        """Update the index to the last commit, let it finish, measure it, and keep it beside the store.

        Raises ``DamagedError`` if landmarks cannot be read, and ``OSError`` if the disk is full.
        """
        with self.synced() as index:
            index.finish()
        # Not beside appends: they may delete the blocks that are read here, and sweep away the unfinished file.
        with self._handle.shared.writing, self.synced() as index:
            if not index.capabilities.exact and len(index):
                self._measured = recall(index, self._source(), self._held, list(self._queries))
            self._keep_file()

    def close(self) -> None:
        """Keep an index that has grown since it was last kept, if files are kept, and release it."""
        with self._handle.shared.writing, self._lock:
            worth = len(self._held) * self._handle.shared.spec.keys_per_block >= WORTH_KEEPING
            try:
                if self._index is not None and worth and self._kept != self._held:
                    self._keep_file()
            finally:
                self.drop()

    def drop(self) -> None:
        """Release the index, if there is one, without keeping it."""
        with self._lock:
            index, self._index = self._index, None
            if index is not None:
                index.close()

    def facts(self) -> dict[str, Any] | None:
        """Return the facts about the index; None before the first search."""
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
        """Keep the index beside the store, without the blocks that have left. The caller holds ``writing``."""
        assert self._index is not None
        files, source = self._handle.shared.index_files, self._source()
        if not files.writable or self._dropped or source.state.edits != self._edits:
            return
        self._keep(range(max(self._held.start, source.state.first), self._held.stop))
        if self._held:
            files.save(self._index, source, self._held, self._told())
            self._kept = self._held

    def cut(self, before: DocumentState, after: DocumentState) -> None:
        """Drop the blocks that this process truncated, which is cheaper than a new build."""
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
                # The blocks to read may have been truncated, or have left, since.
                if self._handle.current() == state:
                    raise
                continue
            if self._handle.current().edits == state.edits:
                return index

    def _catch_up(self, state: DocumentState) -> VectorIndex:
        complete = state.complete(self._handle.shared.spec.block_size)
        if self._index is None or self._edits != state.edits:
            with self._changing(state.edits):
                self._index = self._renewed()
                self._held, self._dropped = range(complete.start, complete.start), state.gaps
                self._load(complete)
        self._dropped = state.gaps  # a copy skips the blocks that its source lacks, without an edit
        self._keep(range(max(self._held.start, complete.start), self._held.stop))
        if complete.stop <= self._held.stop:
            return self._index
        runs, told, start = self._handle.shared.runs(self._layer), _watcher.get(), self._held.stop
        for part in lacking(range(self._held.stop, complete.stop), self._dropped):
            for blocks, keys in runs.read(self._handle.places, part):
                with self._changing(state.edits):
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
        elif len(self._index):  # the file did not hold the blocks that it listed
            self._index = self._renewed()

    # Close an index before replacing it: a collection in Milvus outlives the process that forgot it.
    def _renewed(self) -> VectorIndex:
        self.drop()
        return self._handle.shared.new_index()

    def _keep(self, blocks: range) -> None:
        """Drop blocks outside ``blocks``; an empty range keeps its position, so that new blocks follow it."""
        assert self._index is not None
        before = range(self._held.start, min(blocks.start, self._held.stop))
        after = range(max(blocks.stop, before.stop, self._held.start), self._held.stop)
        gone = [block for part in (before, after) for left in lacking(part, self._dropped) for block in left]
        with self._changing(self._edits):
            if gone:
                self._index.remove(torch.tensor(gone))
            self._held = blocks or range(blocks.start, blocks.start)

    @contextmanager
    def _changing(self, edits: int) -> Iterator[None]:
        """Inside, the index and ``_held`` may disagree. If the change is interrupted, the index is built anew."""
        self._edits = -1
        yield
        self._edits = edits


def recall(index: VectorIndex, source: LayerLandmarks, blocks: range, logged: Sequence[Tensor]) -> dict[str, Any]:
    """Measure the share of the true best eight of ``blocks`` that ``index`` finds: JSON values for ``memstore stats``.

    ``logged`` are queries ``[H, 1, D]`` of the last searches. Without them, keys of the index serve as queries, which
    are easier than real ones. The result says which of the two it was.
    """
    alike = [queries for queries in logged if queries.shape == logged[-1].shape]
    queries = torch.cat(alike, 1).float() if alike else _keys(source, blocks)
    found = index.search(queries, TOP_K).scores
    truth = _truth(source, blocks, queries)
    there = truth > -torch.inf
    # Any of several equal blocks is right, so scores are compared. Float32 sums in another order count as equal.
    last = torch.where(there, truth, torch.inf).amin(2, keepdim=True)
    hits = (found >= last - 1e-5 * last.abs()) & there
    share = float(hits.sum() / there.sum().clamp(min=1))
    return {"recall": round(share, 4), "recall_at": TOP_K, "recall_queries": "logged" if alike else "keys"}


def _keys(source: LayerLandmarks, blocks: range) -> Tensor:
    """Return the first key of some blocks: ``[G, T, D]``."""
    some = [blocks[len(blocks) * place // LOGGED] for place in range(min(LOGGED, len(blocks)))]
    rows = [next(iter(source.landmarks.read(source.places, range(b, b + 1))))[1] for b in dict.fromkeys(some)]
    return torch.cat(rows)[:, :, 0].transpose(0, 1).contiguous()


def _truth(source: LayerLandmarks, blocks: range, queries: Tensor) -> Tensor:
    """Return the best scores by brute force, one piece of the store at a time: ``[H, T, TOP_K]``, padded with -inf."""
    best = torch.full((*queries.shape[:2], TOP_K), -torch.inf)
    for _, keys in source.landmarks.read(source.places, blocks):
        heads = keys.repeat_interleave(len(queries) // keys.shape[1], 1)  # [n, H, P, D]
        scores = torch.einsum("htd,nhpd->htnp", queries, heads).amax(3)
        best = torch.cat([best, scores], 2).topk(TOP_K, dim=2).values
    return best
