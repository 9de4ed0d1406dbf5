"""Blocks in memory above a store: pages on the accelerator, pages in host memory, then the disk.

The name of a page describes its content, never a place whose content can change, so nothing has to be invalidated. A
name that is found is right. Outdated pages are not requested again and are evicted in turn. Bytes are cached as they
are stored, and were verified when they were read. A page holds all records of a block, so a list of blocks is one copy.
In host memory NumPy does the copying and the viewing: PyTorch takes 1.5 times as long to copy, and three times as long
to view.

S3-FIFO decides which pages are kept, after Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).
New pages wait in a small queue, a tenth of all pages. A page that is used again while it waits moves to the main queue.
Other pages are evicted, and only their names are remembered for a while: a page that soon returns goes to the main
queue at once. So a scan of any length passes through the small queue and leaves the main one alone. A hit moves
nothing, it only increments a counter. Deviation from the paper: one use, not two, is enough to move to the main queue.
Every retrieval that chooses a list of blocks reads it, and two reads already show a habit.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memstore.errors import DamagedError, InvalidArgument
from memstore.lazy import device_copies, torch
from memstore.store.contract import BlockStore
from memstore.store.records import ITEM_BYTES, BlockKeys, Bytes, Key, Layout, Numbers

if TYPE_CHECKING:  # a memory is opened, listed and changed without PyTorch, which takes seconds to load
    from torch import Tensor

HOST_BYTES = 64 << 20
"""Bytes of host memory for blocks of a store on disk, by default of ``BlockCache``."""
PIECE_BYTES = 8 << 20
"""Bytes read ahead at a time, a limit for the buffer between store and pages."""
BOOKKEEPING_BYTES = 512
"""Bytes that a page's name takes beside the page, also after its eviction; part of a budget."""
UNKEPT = -1
"""The name of every incomplete block; these are never cached."""

_NUMBERS = {name: np.dtype("int16" if name == "bfloat16" else name) for name in ITEM_BYTES if name != "json"}
"""NumPy types of records. NumPy has no bfloat16, so a type of the same size replaces it."""

_MOST_USES = 3
_SMALL_SHARE = 10
"""One page in so many is for new blocks."""

_log = logging.getLogger("memstore")


class BlockRefs(NamedTuple):
    """Blocks of a document: their content and their place in the store."""

    document: int
    edits: int
    """Number of truncations of the document; while it stays the same, complete blocks do not change."""
    layers: Sequence[int]
    """The layer of each block."""
    blocks: Sequence[int]
    owners: Sequence[int]
    """The document numbers under which the blocks are stored; shared blocks belong to other documents."""
    stop: int
    """Blocks from here on are not complete."""

    @property
    def names(self) -> list[int]:
        """Return a name for the content of each block: equal names are equal bytes, as long as the store exists."""
        # One number, not a tuple: a gather from memory looks every name up, and that must take less time than the
        # copying.
        first, stop = (self.edits << 128) + (self.document << 96), self.stop
        of_layer = {layer: first + (layer << 64) for layer in set(self.layers)}
        if len(of_layer) == 1:  # most requests are for one layer
            (first,) = of_layer.values()
            return [first + block if block < stop else UNKEPT for block in self.blocks]
        return [
            of_layer[layer] + block if block < stop else UNKEPT
            for layer, block in zip(self.layers, self.blocks, strict=True)
        ]

    @property
    def keys(self) -> BlockKeys:
        return BlockKeys(self.layers, self.owners, self.blocks)

    def only(self, places: Sequence[int]) -> BlockRefs:
        """Return the blocks at ``places`` in the list."""
        layers, blocks, owners = ([each[place] for place in places] for each in (self.layers, self.blocks, self.owners))
        return self._replace(layers=layers, blocks=blocks, owners=owners)


class StaleBlocks(Exception):
    """A document was truncated during a read, so its blocks may be from two moments: read them again."""


@dataclass
class _TierCounts:
    """Counts of one tier since the memory was opened."""

    hits: int = 0
    """Blocks found in this tier."""
    misses: int = 0
    """Blocks requested and not found in this tier; on disk, blocks that could not be read."""
    bytes: int = 0
    """Bytes of the blocks found in this tier, as stored."""
    microseconds: int = 0
    """Time it took to find and copy them."""
    prefetched: int = 0
    """Blocks brought to this tier before they were requested."""

    def found(self, blocks: int, nbytes: int, begun: float) -> None:
        """Count ``blocks`` hits of ``nbytes`` in all, found since the ``perf_counter`` value ``begun``."""
        self.hits += blocks
        self.bytes += nbytes
        self.microseconds += round(1e6 * (time.perf_counter() - begun))


class BlockCache:
    """The blocks of one open store, read from the highest tier that has them. Safe to use from several threads."""

    def __init__(
        self,
        store: BlockStore,
        layouts: Sequence[Layout],
        *,
        host_bytes: int | None = None,
        device_bytes: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        """Create a cache for complete blocks of ``layouts``.

        Budgets are bytes; ``host_bytes`` None is ``HOST_BYTES``, or 0 for a store in host memory. Raises
        ``InvalidArgument``.
        """
        if host_bytes is None:
            host_bytes = HOST_BYTES if store.capabilities.durable else 0
        for name, value in {"host_bytes": host_bytes, "device_bytes": device_bytes}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{name} must be a number of bytes (0: none), not {value!r}.")
        self._store = store
        self._layouts = list(layouts)
        self._block_bytes = sum(layout.nbytes for layout in layouts)
        self._host = PagePool(host_bytes, layouts, None)
        self._device = PagePool(device_bytes, layouts, _pool_device(device) if device_bytes else None)
        self._disk = _TierCounts()
        self._gathered: Counter[int] = Counter()
        self._lost: set[tuple[int, Key]] = set()
        self._left_out = 0
        self._executor: Executor | None = None
        self._coming: dict[int, Future[None]] = {}
        self._lock = threading.RLock()
        self._closed = False

    def read(
        self, blocks: BlockRefs, unchanged: Callable[[], bool], device: torch.device | None = None, *, keep: bool = True
    ) -> list[Tensor]:
        """Return the verified blocks, ``[n, *shape]`` for each record, on ``device``; None is the CPU.

        Pass ``keep=False`` for blocks that are read only once. If the store needs no network, they are not cached in
        host memory, because that takes longer than reading them again. ``unchanged()`` says, after the read, whether
        the names are still right. Raises ``StaleBlocks`` if they are not, ``NotFound`` or ``DamagedError``.
        """
        if not blocks.blocks:
            rows = empty_rows(self._layouts)
            return rows if device is None else [each.to(device) for each in rows]
        if self._device.capacity and device == self._device.device:
            return self._through(self._device, blocks, lambda rest: self._from_host(rest, unchanged))
        near = self._store.capabilities.reads_ahead == 1
        rows = self._from_disk(blocks, unchanged) if near and not keep else self._from_host(blocks, unchanged)
        return rows if device is None else device_copies.to_device(rows, device)

    def rows(self, blocks: BlockRefs, unchanged: Callable[[], bool], which: Numbers, rows: Numbers) -> Tensor:
        """Return row ``rows[i]`` of block ``which[i]``, ``[n, ...]`` in host memory; each block has one record.

        A store that reads single rows gives them directly; otherwise whole blocks are read. Raises as ``read``.
        """
        layout = self._layouts[0]
        if not self._store.capabilities.reads_rows:
            (whole,) = self.read(blocks, unchanged)
            return whole[torch.from_numpy(which), torch.from_numpy(rows)]
        found = self._store.rows(blocks.keys, layout, which, rows)
        if not unchanged():
            raise StaleBlocks
        return as_tensor(found, Layout(layout.dtype, layout.shape[1:]))

    def where(self, blocks: BlockRefs) -> list[str]:
        """Return the tier that each block would be read from now: "device", "host" or "disk".

        Nothing is counted or moved.
        """
        below = "disk" if self._store.capabilities.durable else "host"
        with self._lock:
            device, host = self._device, self._host
            return ["device" if name in device else "host" if name in host else below for name in blocks.names]

    def at_hand(self, blocks: BlockRefs) -> bool:
        """Return whether reading the blocks needs no disk and no thread; this does not count as a use."""
        if not self._store.capabilities.durable:
            return True
        with self._lock:
            return all(name in self._host for name in blocks.names)

    @property
    def prefetches(self) -> bool:
        """Return whether there is room for prefetched blocks."""
        return self._host.capacity > 0 and not self._closed

    def prefetch(self, blocks: BlockRefs, unchanged: Callable[[], bool]) -> None:
        """Let a thread bring blocks into host memory, and return at once. Without a host tier this does nothing.

        Errors are ignored here: the later read meets the same error and raises it.
        """
        count = max(1, PIECE_BYTES // max(1, self._block_bytes))
        with self._lock:
            if not self.prefetches:
                return
            places = {name: place for place, name in enumerate(blocks.names) if not self._expected(name)}
            # More blocks would evict prefetched ones before they are used.
            new = list(places.items())[: max(0, self._host.capacity // 2 - len(self._coming))]
            if new and self._executor is None:
                self._executor = device_copies.background_workers(self._store.capabilities.reads_ahead)
            for start in range(0, len(new), count):
                names, at = zip(*new[start : start + count], strict=True)
                assert self._executor is not None
                self._coming |= dict.fromkeys(names, self._executor.submit(self._bring, blocks.only(at), unchanged))

    def leave_out(self, block: BlockRefs, error: DamagedError) -> None:
        """Count the single listed block as unreadable and left out; log it the first time."""
        lost = (block.edits, block.keys[0])
        with self._lock:
            self._left_out += 1
            if lost in self._lost:
                return
            self._lost.add(lost)
        _log.warning("a block is left out: %s", error)

    # Here, and not beside the rules that need it, because every gather passes here. A limit counts gathered blocks, not
    # copied or checked ones.
    def count(self, document: int, blocks: int) -> None:
        """Count gathered blocks of a document; the next write stores the count, see ``take_counts``."""
        if not self._store.read_only:  # otherwise nothing is written
            with self._lock:
                self._gathered[document] += blocks

    def take_counts(self) -> Counter[int]:
        """Return how many blocks of each document were gathered since the last call."""
        with self._lock:
            counts, self._gathered = self._gathered, Counter()
        return counts

    def give_back(self, counts: Mapping[int, int]) -> None:
        """Undo ``take_counts``, because the counts could not be stored."""
        with self._lock:
            self._gathered.update(counts)

    def stats(self) -> dict[str, Any]:
        """Return the counts of each tier, the bytes that it holds, and how many blocks were left out."""
        with self._lock:
            held = {"device": self._device, "host": self._host}
            pools = {tier: asdict(pool.counts) | {"held_bytes": pool.nbytes} for tier, pool in held.items()}
            return pools | {"disk": asdict(self._disk), "left_out": self._left_out}

    def close(self) -> None:
        """Stop reading ahead, wait for its thread, and drop all blocks. Closing twice is allowed."""
        with self._lock:
            self._closed, executor = True, self._executor
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        with self._lock:
            for pool in (self._host, self._device):
                pool.clear(0)  # also for reads that go on

    def _expected(self, name: int) -> bool:
        return name == UNKEPT or name in self._host or name in self._coming

    def _bring(self, blocks: BlockRefs, unchanged: Callable[[], bool]) -> None:
        names = blocks.names
        try:
            rows = self._from_disk(blocks, unchanged)
            with self._lock:
                self._host.put(names, rows, ahead=True)
        finally:
            with self._lock:
                for name in names:
                    del self._coming[name]

    def _from_host(self, blocks: BlockRefs, unchanged: Callable[[], bool]) -> list[Tensor]:
        if not self._host.capacity:
            return self._from_disk(blocks, unchanged)
        if self._coming:
            with self._lock:
                awaited = {self._coming[name] for name in blocks.names if name in self._coming}
            for future in awaited:
                # If the thread failed, reading the block here meets the same error and names it.
                with suppress(Exception):
                    future.result()
        return self._through(self._host, blocks, lambda missing: self._from_disk(missing, unchanged))

    def _through(self, pool: PagePool, blocks: BlockRefs, below: Callable[[BlockRefs], list[Tensor]]) -> list[Tensor]:
        """Return the blocks from ``pool``, and the missing ones from ``below``."""
        names = blocks.names
        with self._lock:
            found, missing = pool.take(names)
        if not missing:
            return found
        rows = below(blocks.only(missing) if found else blocks)
        if pool.device is not None:
            rows = device_copies.to_device(rows, pool.device)
        with self._lock:
            pool.put([names[place] for place in missing], rows)
        return rows if not found else [_merged(*pair, missing) for pair in zip(found, rows, strict=True)]

    def _from_disk(self, blocks: BlockRefs, unchanged: Callable[[], bool]) -> list[Tensor]:
        begun = time.perf_counter()
        try:
            rows = self._store.gather(blocks.keys, self._layouts)
        except Exception:
            with self._lock:
                self._disk.misses += 1
            raise
        with self._lock:
            self._disk.found(len(blocks.blocks), len(blocks.blocks) * self._block_bytes, begun)
        if not unchanged():
            raise StaleBlocks
        return list(map(as_tensor, rows, self._layouts))


def _pool_device(device: str | torch.device | None) -> torch.device:
    if device is None and not torch.cuda.is_available():
        raise InvalidArgument(
            "device_bytes needs an accelerator, but torch finds none; pass device=, or device_bytes=0."
        )
    return device_copies.device_of("cuda" if device is None else device)


def _merged(found: Tensor, others: Tensor, places: list[int]) -> Tensor:
    """Return the rows of both in order: ``others`` at ``places``, ``found`` at all other places."""
    total = len(found) + len(others)
    at = torch.tensor(places)
    rest = torch.ones(total, dtype=torch.bool)
    rest[at] = False
    rows = found.new_empty(total, *found.shape[1:])
    there, elsewhere = device_copies.to_device([at, rest.nonzero()[:, 0]], rows.device)
    rows[there], rows[elsewhere] = others, found
    return rows


class PagePool:
    """Named blocks in the pages of one slab, allocated for the first block.

    Not safe to use from several threads at once.
    """

    def __init__(self, budget: int, layouts: Sequence[Layout], device: torch.device | None) -> None:
        """Create a pool for blocks of ``layouts``; ``device`` None is host memory."""
        self.device = device
        self.counts = _TierCounts()
        self._layouts = list(layouts)
        self._block_bytes = sum(layout.nbytes for layout in layouts)
        self._kept = S3Fifo(budget // (self._block_bytes + BOOKKEEPING_BYTES))
        self._slab: _HostSlab | _DeviceSlab | None = None

    def __contains__(self, name: int) -> bool:
        return name in self._kept

    @property
    def capacity(self) -> int:
        """The number of pages."""
        return self._kept.pages

    @property
    def nbytes(self) -> int:
        return len(self._kept) * self._block_bytes

    def take(self, names: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Copy the blocks found here, ``[n, *shape]`` for each record; return them and the places of the others."""
        begun = time.perf_counter()
        pages, missing = self._kept.find(names), []
        if None in pages:
            missing = [place for place, page in enumerate(pages) if page is None]
            pages = [page for page in pages if page is not None]
            self.counts.misses += len(missing)
        if not pages or self._slab is None:
            return [], missing
        rows = self._slab.select(np.array(pages, np.int64))
        self.counts.found(len(pages), len(pages) * self._block_bytes, begun)
        return rows, missing

    def put(self, names: Sequence[int], rows: Sequence[Tensor], *, ahead: bool = False) -> None:
        """Store blocks, with ``rows [n, *shape]`` for each record. ``ahead`` marks prefetched blocks."""
        new = {name: row for row, name in enumerate(names) if name != UNKEPT and name not in self._kept}
        if not new or not self._kept.pages:
            return
        if self._slab is None:
            self._slab = self._allocate()
        # A page that was assigned twice belongs to the last block that got it.
        of_page = dict(zip(self._kept.place(new, ahead=ahead), new.values(), strict=True))
        try:
            self._slab.fill(np.array(list(of_page)), rows, np.array(list(of_page.values())))
        except BaseException:
            # The names have pages already, and their content is unknown: nothing in the pool can be trusted.
            self.clear(self.capacity)
            raise
        self.counts.prefetched += len(new) if ahead else 0

    def clear(self, pages: int) -> None:
        """Drop all blocks, and their memory. From now on there is room for ``pages``."""
        self._kept, self._slab = S3Fifo(pages), None

    def _allocate(self) -> _HostSlab | _DeviceSlab:
        if self.device is None or self.device.type == "cpu":
            return _HostSlab(self.capacity, self._layouts)
        return _DeviceSlab(self.capacity, self._layouts, self.device)


class _HostSlab:
    """As many pages as the budget allows; lists of blocks are tensors ``[n, *shape]``, one for each record."""

    def __init__(self, pages: int, layouts: Sequence[Layout]) -> None:
        fields = [(str(number), _NUMBERS[layout.dtype], layout.shape) for number, layout in enumerate(layouts)]
        page = np.dtype(fields, align=True)
        self._layouts = dict(zip(page.names or (), layouts, strict=True))
        # NumPy never touches what it allocates: memory is taken only as pages are used.
        self._pages = np.empty(pages, page)

    def select(self, pages: Numbers) -> list[Tensor]:
        # As fast as copying memory; index_select of bytes takes 1.5 times as long.
        rows = self._pages.take(pages)
        return [_seen(torch.from_numpy(rows[name]), layout) for name, layout in self._layouts.items()]

    def fill(self, pages: Numbers, rows: Sequence[Tensor], chosen: Numbers) -> None:
        """Copy the rows ``chosen`` to ``pages``."""
        # Not by PyTorch: a slab made in inference mode must not be changed outside of it, for example by another
        # thread.
        for (name, layout), source in zip(self._layouts.items(), rows, strict=True):
            numbers = source.cpu().view(torch.int16) if layout.dtype == "bfloat16" else source.cpu()
            self._pages[name][pages] = numbers.numpy()[chosen]


class _DeviceSlab:
    """Pages on an accelerator, like ``_HostSlab``."""

    def __init__(self, pages: int, layouts: Sequence[Layout], device: torch.device) -> None:
        self._device = device
        kinds = [(layout.shape, getattr(torch, layout.dtype)) for layout in layouts]
        self._records = [torch.empty(pages, *shape, dtype=dtype, device=device) for shape, dtype in kinds]

    def select(self, pages: Numbers) -> list[Tensor]:
        (at,) = device_copies.to_device([torch.from_numpy(pages)], self._device)
        return [records.index_select(0, at) for records in self._records]

    def fill(self, pages: Numbers, rows: Sequence[Tensor], chosen: Numbers) -> None:
        at, taken, *rows = device_copies.to_device(
            [torch.from_numpy(pages), torch.from_numpy(chosen), *rows], self._device
        )
        for records, source in zip(self._records, rows, strict=True):
            with torch.inference_mode(records.is_inference()):
                records.index_copy_(0, at, source.index_select(0, taken))


def empty_rows(layouts: Sequence[Layout]) -> list[Tensor]:
    """Return the states of no blocks: ``[0, *shape]`` for each of ``layouts``."""
    return [torch.empty(0, *layout.shape, dtype=getattr(torch, layout.dtype)) for layout in layouts]


def as_tensor(rows: Bytes, layout: Layout) -> Tensor:
    """View bytes ``[n, bytes]`` as a tensor ``[n, *shape]``; gaps between the rows are allowed."""
    numbers = rows.view(_NUMBERS[layout.dtype]).reshape(len(rows), *layout.shape)
    return _seen(torch.from_numpy(numbers), layout)


def _seen(numbers: Tensor, layout: Layout) -> Tensor:
    return numbers.view(torch.bfloat16) if layout.dtype == "bfloat16" else numbers


# Our own, because libraries keep Python objects and take one call per name. Here a policy only hands out pages of a
# slab: a hit of 32 blocks is one dict lookup for each and one copy for all.
class S3Fifo:
    """Names and the pages ``0 ... pages - 1`` that hold them. Not safe to use from several threads at once."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._held: dict[Hashable, int] = {}
        self._new: deque[Hashable] = deque()
        self._main: deque[Hashable] = deque()
        self._left: dict[Hashable, None] = {}  # names without pages, the oldest first
        self._uses = array("b", bytes(pages))  # small enough to stay in the processor's cache
        self._room_for_new = max(1, pages // _SMALL_SHARE)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def find(self, names: Iterable[Hashable]) -> list[int | None]:
        """Return the page of each name, or None; each page found counts as used."""
        pages = list(map(self._held.get, names))
        uses = self._uses
        for page in set(pages):
            if page is not None and uses[page] < _MOST_USES:
                uses[page] += 1
        return pages

    def place(self, names: Collection[Hashable], *, ahead: bool = False) -> list[int]:
        """Assign a page to each of ``names``, which had none; the former names of these pages lose them.

        With more names than pages, pages repeat: the last name that got a page has it. ``ahead`` marks prefetched
        names: their first request does not count as a second use.
        """
        return [self._place(name, -1 if ahead else 0) for name in names]

    def _place(self, name: Hashable, uses: int) -> int:
        page = len(self._held) if len(self._held) < self.pages else self._evict()
        queue = self._main if name in self._left else self._new
        self._left.pop(name, None)
        queue.append(name)
        self._held[name] = page
        self._uses[page] = uses
        return page

    def _evict(self) -> int:
        """Free the page that deserves its place least."""
        while True:
            new = len(self._new) > self._room_for_new or not self._main
            name = (self._new if new else self._main).popleft()
            page = self._held[name]
            if self._uses[page] <= 0:
                break
            self._uses[page] = 0 if new else self._uses[page] - 1
            self._main.append(name)
        if new:
            self._left[name] = None
            if len(self._left) > self.pages:
                del self._left[next(iter(self._left))]
        return self._held.pop(name)
