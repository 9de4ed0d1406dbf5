"""One layer of a document, as an attention layer sees it: search, then gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import index
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, MemstoreError, NotFound
from memstore.index.contract import check_tensor
from memstore.memory.entry import DocumentState
from memstore.memory.layer_index import LayerIndex
from memstore.memory.shared import Handle
from memstore.memory.tensors import decode_block_rows, read_last_block
from memstore.store.cache import BlockRefs, StaleBlocks

T = TypeVar("T")

_left_out: ContextVar[dict[tuple[str, int], str] | None] = ContextVar("left_out", default=None)


# A context variable, because blocks are left out deep inside of a model's attention.
@contextmanager
def noting_left_out() -> Iterator[dict[tuple[str, int], str]]:
    """Blocks that this thread has to leave out inside, as (document, block), and why."""
    noted: dict[tuple[str, int], str] = {}
    token = _left_out.set(noted)
    try:
        yield noted
    finally:
        _left_out.reset(token)


class Hits(NamedTuple):
    """Blocks found, best first; block -1 with score -inf where there are fewer than ``top_k``."""

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
        self.index = LayerIndex(handle, layer) if layer in self._shared.spec.index_layers else None
        """The index of this layer, or None where it has no landmarks."""

    def __repr__(self) -> str:
        return f"LayerView({self._name!r}, layer {self._layer})"

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the index of this layer holds."""
        return self.index.nbytes if self.index else 0

    def search(self, queries: Tensor, top_k: int, *, allowed: range | Tensor | None = None) -> Hits:
        """The ``top_k`` complete blocks for each of ``queries [H, T, D]``, among ``allowed`` (a range or int64 ids).

        Query head ``h`` of ``H`` uses key head ``h // (H // G)``. Raises ``InvalidArgument``, ``DamagedError``.
        """
        with self._searching() as index:
            return Hits(*index.search(queries, top_k, allowed))

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The score of every complete block: ``([H, T, N] float32, blocks [N])``.

        Raises ``InvalidArgument`` where the index cannot score every block, and ``DamagedError``.
        """
        with self._searching() as index:
            return index.score(queries, allowed)

    def route(self, queries: Tensor, top_k: int, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The ``top_k`` complete blocks for the query tokens ``[T, D]`` together: ``(scores [n], blocks [n])``.

        Only where ``Memory.index_capabilities.routes``. Raises ``DamagedError``.
        """
        with self._searching() as index:
            return index.route(queries, top_k, allowed)

    # What comes back may be strided views of one buffer: the fields of a block lie beside each other as they were read
    # or cached. Whoever needs contiguous tensors makes a copy.
    def gather(self, blocks: Tensor | Sequence[int], *, device: torch.device | None = None) -> dict[str, Tensor]:
        """The states of ``blocks [K]``: one tensor ``[K, *shape]`` per field, verified, on ``device`` (None: the CPU).

        Raises ``NotFound`` for a block that is not in the document, and ``DamagedError``; both name the block.
        """
        ids = _as_ids(blocks)
        if device is not None:
            device = _as_device(device)
        states = self._steadily(ids, lambda state: self._read(ids, state, device))
        self._count(ids)
        return states

    def _count(self, blocks: Sequence[int]) -> None:
        """Note that ``blocks`` were gathered."""
        if blocks and self._handle.id is not None:
            self._shared.blocks.count(self._handle.id, len(blocks))

    def stored(self, blocks: Tensor | Sequence[int]) -> list[Tensor]:
        """Complete ``blocks [K]`` as the store has them, verified: ``[K, ...]`` for each of ``block_layouts``.

        For ``Append.put_stored`` of a memory with the same codec. Raises like ``gather``.
        """
        ids = _as_ids(blocks)

        return self._steadily(
            ids, lambda state: self._shared.blocks.read(self._refs(ids, state), self._unmoved(state, ids))
        )

    def tiers(self, blocks: Tensor | Sequence[int]) -> list[str]:
        """Where each of ``blocks [K]`` is at the moment: "device", "host" or "disk". It does not count as a use."""
        return self._shared.blocks.where(self._refs(_as_ids(blocks), self._handle.current()))

    def checksums(self, blocks: Tensor | Sequence[int]) -> list[tuple[int, ...]]:
        """Checksums of the states of ``blocks [K]`` as the store has them: equal where they are the same, bit for bit.

        Comparable between memories of one layout and codec. Raises like ``gather``.
        """
        ids = _as_ids(blocks)

        def read(state: DocumentState) -> list[tuple[int, ...]]:
            places = self._shared.places(self._handle.id or 0, state)
            return self._shared.store.checksums([places.block(self._layer, block) for block in ids])

        return self._steadily(ids, read)

    # An error met while reading ahead is dropped, and met again, with its name, by whoever asks for the block.
    def prefetch(self, blocks: Tensor | Sequence[int]) -> None:
        """Let a thread bring ``blocks`` into host memory while something else computes; returns at once.

        Whatever cannot be brought, because it is not there or damaged, is an error of the ``gather`` that asks for it.
        """
        prefetch([self], blocks)

    def sound(self, blocks: Sequence[int]) -> list[int]:
        """Those of ``blocks`` that can be read; each of the others is counted, and logged the first time."""
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
        """Landmarks of ``blocks``: ``[n, G, P, D]`` float32, also of an incomplete last block.

        Raises ``NotFound`` for a block that is not in the document, and ``DamagedError``, which names the blocks.
        """
        self._searchable()
        if blocks.step != 1:
            raise InvalidArgument(f"blocks must be a range of step 1, not {blocks}.")
        spec = self._shared.spec
        while True:
            state = self._check_live(blocks)
            if not blocks:
                return torch.empty(0, spec.key_heads, spec.keys_per_block, spec.key_dim)
            try:
                landmarks = self._read_landmarks(blocks)
            except DamagedError as error:
                self._check_live(blocks)  # they may have left in the meantime
                raise self._blame_landmarks(blocks, error) from error
            if self._unmoved(state, blocks)():  # else the runs may be of different moments
                return landmarks

    def _read_landmarks(self, blocks: range) -> Tensor:
        runs = self._shared.runs(self._layer)
        return torch.cat([keys for _, keys in runs.read(self._handle.places, blocks)])

    @contextmanager
    def _searching(self) -> Iterator[LayerIndex]:
        """The index; damaged landmarks that it meets are named."""
        index = self._searchable()
        try:
            yield index
        except DamagedError as error:
            raise self._blame_landmarks(self._handle.current().live(), error) from error

    def _searchable(self) -> LayerIndex:
        if self.index is None:
            layers = ", ".join(str(layer) for layer in self._shared.spec.index_layers) or "none"
            raise InvalidArgument(f"layer {self._layer} has no landmarks to search; layers that have: {layers}.")
        return self.index

    def _refs(self, blocks: Sequence[int], state: DocumentState, layers: Sequence[int] = ()) -> BlockRefs:
        """Of ``blocks`` of this layer, or in each of ``layers``, layer by layer."""
        number = self._handle.id or 0  # of a document that has no number yet, no block is wanted
        if state.branch or state.spans:
            owners = list(map(self._shared.places(number, state).owner, blocks))
        else:  # most documents, and a gather from memory would feel it to ask where its blocks lie
            owners = [number if state.home is None else state.home] * len(blocks)
        of_each, times = [self._layer] * len(blocks), 1
        if layers:
            of_each, blocks, times = [layer for layer in layers for _ in blocks], [*blocks] * len(layers), len(layers)
        return BlockRefs(number, state.edits, of_each, blocks, owners * times, self._stop(state))

    def _stop(self, state: DocumentState) -> int:
        """Blocks from here on are not complete."""
        return max(state.first, state.tokens // self._shared.spec.block_size)

    def _unmoved(self, state: DocumentState, blocks: Sequence[int]) -> Callable[[], bool]:
        """Whether ``blocks`` are still what they were when the document was in ``state``, all of them.

        Complete blocks are until it is truncated. An incomplete one is until the document grows, and others may leave
        when it does: its new states beside their old ones would be of no moment at all.
        """
        stop = self._stop(state)
        grows = stop < state.blocks and bool(blocks) and max(blocks) >= stop

        def unmoved() -> bool:
            try:
                now = self._handle.current()
            except MemstoreError:  # forgotten, or closed
                return False
            return now.edits == state.edits and (not grows or now.tokens == state.tokens)

        return unmoved

    def _check_live(self, blocks: Sequence[int]) -> DocumentState:
        state = self._handle.current()
        if state.dropped and (lost := [block for block in blocks if any(block in gone for gone in state.gaps)]):
            raise NotFound(state.gap_message(lost[0]))
        if blocks and not state.first <= min(blocks) <= max(blocks) < state.blocks:
            live = state.live()
            wrong = next(block for block in blocks if block not in live)
            there = f"blocks {live.start} to {live.stop - 1}" if live else "no blocks"
            raise NotFound(f"document {self._name!r} has no block {wrong}; it has {there}.")
        return state

    def _blame(self, blocks: list[int], error: Exception) -> Exception:
        """Find the block that could not be read: the error for it, by the names that a user knows."""
        self._check_live(blocks)  # they may have left in the meantime
        for block in blocks:
            try:
                self._read([block], self._handle.current())
            except StaleBlocks:
                break
            except (DamagedError, NotFound) as reason:
                return DamagedError(
                    f"document {self._name!r}, layer {self._layer}, block {block} is damaged or lost ({reason}). "
                    "Nothing of it was used. Run verify to see what else is; forget the document and read it again."
                )
        return DamagedError(f"document {self._name!r}, layer {self._layer}: {error}")

    def _blame_landmarks(self, blocks: range, error: DamagedError) -> DamagedError:
        """The error for the first of ``blocks`` whose landmarks cannot be read, and those stored together with it."""
        length = self._shared.run_length
        for run in range(blocks.start // length, -(-blocks.stop // length)):
            piece = range(max(run * length, blocks.start), min((run + 1) * length, blocks.stop))
            try:
                self._read_landmarks(piece)
            except DamagedError as reason:
                return DamagedError(
                    f"document {self._name!r}, layer {self._layer}, landmarks of blocks {piece.start} to "
                    f"{piece.stop - 1} are damaged or lost ({reason}). Nothing of them was used. "
                    "Run verify to see what else is; forget the document and read it again."
                )
        return DamagedError(f"document {self._name!r}, layer {self._layer}: {error}")

    def _steadily(self, blocks: list[int], read: Callable[[DocumentState], T]) -> T:
        """What ``read`` gives for ``blocks``, again where the document changed in between; names what is damaged."""
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
        # The incomplete last block is among them: it lies there as it was put, whatever the codec.
        complete = [place for place, block in enumerate(blocks) if block < refs.stop]
        states = decode_block_rows(spec, cache.read(refs.only(complete), unmoved, device))
        last = read_last_block(self._shared.store, spec, next(key for key in refs.keys if key.item >= refs.stop))
        if not unmoved():
            raise StaleBlocks
        rows = {place: row for row, place in enumerate(complete)}
        order = torch.tensor([rows.get(place, len(complete)) for place in range(len(blocks))])
        return {field: torch.cat([each, last[field].to(each.device)])[order] for field, each in states.items()}


def _as_ids(blocks: Tensor | Sequence[int]) -> list[int]:
    if isinstance(blocks, Tensor):
        check_tensor("blocks", blocks)
        if blocks.dim() != 1 or blocks.dtype.is_floating_point or blocks.dtype == torch.bool:
            raise InvalidArgument(f"blocks must be integers of shape [K], not {blocks.dtype} of {list(blocks.shape)}.")
        return list(blocks.tolist())
    if isinstance(blocks, range) and blocks.step != 1:
        # One rule for tokens, landmarks and gather.
        raise InvalidArgument(f"blocks must be a range without steps, not {blocks}; name them one by one: list(...).")
    try:
        return list(map(index, blocks))
    except TypeError:
        raise InvalidArgument(f"blocks must be a sequence of integers, not {type(blocks).__name__}.") from None


def gathered(
    views: Sequence[LayerView], blocks: Tensor | Sequence[int], device: torch.device
) -> list[dict[str, Tensor]]:
    """``gather`` of the same ``blocks`` of several layers of a document, in one copy."""
    device, ids = _as_device(device), _as_ids(blocks)
    found = _together(views, ids, device) if len(views) > 1 and ids else None
    return [view.gather(ids, device=device) for view in views] if found is None else found


def _together(views: Sequence[LayerView], blocks: list[int], device: torch.device) -> list[dict[str, Tensor]] | None:
    """None where a layer has to be asked by itself: for a block that is not coded yet, or to say which is damaged."""
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


def at_hand(views: Sequence[LayerView], blocks: Sequence[int]) -> bool:
    """Whether ``blocks`` of several layers of a document can be gathered without waiting."""
    if not views:
        return True
    state = views[0]._handle.current()
    return views[0]._shared.blocks.at_hand(views[0]._refs(blocks, state, [view._layer for view in views]))


def prefetch(views: Sequence[LayerView], blocks: Tensor | Sequence[int]) -> None:
    """``LayerView.prefetch`` of the same ``blocks`` of several layers of a document."""
    if not views or not views[0]._shared.blocks.prefetches:
        return
    first, shared = views[0], views[0]._shared
    state = first._handle.current()
    complete, gone = state.complete(shared.spec.block_size), state.gaps
    ids = [block for block in _as_ids(blocks) if block in complete and not any(block in each for each in gone)]
    if ids:
        refs = first._refs(ids, state, [view._layer for view in views])
        shared.blocks.prefetch(refs, first._unmoved(state, ids))


def _as_device(device: object) -> torch.device:
    try:
        chosen = torch.device(device)  # type: ignore[call-overload]  # that is what is tried
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device must be a device of torch such as 'cpu' or 'cuda:0', not {device!r}.") from error
    assert isinstance(chosen, torch.device)
    # The pool is on a device with a number: "cuda" would not be taken for it.
    return torch.device("cuda", torch.cuda.current_device()) if chosen == torch.device("cuda") else chosen
