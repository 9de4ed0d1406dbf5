"""Blocks in memory above a store: pages on the accelerator, pages in host memory, then the disk.

Pages are named by what is in them, never by a place whose content can change, so nothing ever has to be invalidated:
a name that is found is right, and what is out of date is not asked for again and leaves in its turn. Bytes are kept as
they are stored, and were verified when they were read. A page holds all records of a block, so that a list of blocks is
one copy. In host memory NumPy does the copying and the viewing: PyTorch takes half as long again for the one, and three
times as long for the other.

Which pages are kept is decided by S3-FIFO, after Yang et al., "FIFO queues are all you need for cache eviction" (SOSP
2023): what comes new waits in a small queue, a tenth of all pages. What is asked for again while it waits there moves
to the main queue; what is not leaves, and only its name is remembered for a while, so that it goes to the main queue at
once if it comes back soon. So a scan, however long, passes through the small queue and leaves the main one alone.
Nothing is moved when it is found: a use is a number that goes up. Deviation from the paper: one use, not two, is enough
to move to the main queue. A list of blocks is asked for at every retrieval that chooses it, and twice is already a
habit.
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
from memstore.store.contract import BlockStore
from memstore.store.records import ITEM_BYTES, BlockKeys, Bytes, Key, Layout, Numbers

if TYPE_CHECKING:  # a memory is opened, listed and changed without PyTorch, which takes seconds to load
    import torch
    from torch import Tensor

HOST_BYTES = 64 << 20
"""Bytes of host memory for blocks of a store on disk, unless ``BlockCache`` is told otherwise."""
PIECE_BYTES = 8 << 20
"""Bytes that are read ahead at a time: a bound for the buffer between store and pages."""
BOOKKEEPING_BYTES = 512
"""What the name of a page, and of one that has left, take beside the page: part of a budget."""
UNKEPT = -1
"""The name of every block that is not complete, which is never kept."""

_NUMBERS = {name: np.dtype("int16" if name == "bfloat16" else name) for name in ITEM_BYTES if name != "json"}
"""The types of records in NumPy, which knows no bfloat16: what has the same size stands for it."""

_MOST_USES = 3
_SMALL_SHARE = 10
"""One page of so many is for what came new."""

_log = logging.getLogger("memstore")


class BlockRefs(NamedTuple):
    """Blocks of a document, what is in them, and where they are in the store."""

    document: int
    edits: int
    """Number of truncations of the document: while it is the same, complete blocks never change."""
    layers: Sequence[int]
    """The layer of each."""
    blocks: Sequence[int]
    owners: Sequence[int]
    """The numbers under which they lie: those of other documents, where they are shared."""
    stop: int
    """Blocks from here on are not complete."""

    @property
    def names(self) -> list[int]:
        """A name of the content of each block: the same name is the same bytes, as long as the store exists."""
        # One number, not a tuple: a gather from memory looks every name up, and that is to take less than the copying.
        first, stop = (self.edits << 128) + (self.document << 96), self.stop
        of_layer = {layer: first + (layer << 64) for layer in set(self.layers)}
        if len(of_layer) == 1:  # those of one layer are asked for most
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
        """Those of the blocks that are at ``places`` in the list."""
        layers, blocks, owners = ([each[place] for place in places] for each in (self.layers, self.blocks, self.owners))
        return self._replace(layers=layers, blocks=blocks, owners=owners)


class StaleBlocks(Exception):
    """A document was truncated while its blocks were read, so that they may be of two moments: to be read again."""


@dataclass
class _TierCounts:
    """What one tier has done since the memory was opened."""

    hits: int = 0
    """Blocks found here."""
    misses: int = 0
    """Blocks asked for and not found here; on disk, those that could not be read."""
    bytes: int = 0
    """Bytes of the blocks found here, as stored."""
    microseconds: int = 0
    """Time it took to find and copy them."""
    prefetched: int = 0
    """Blocks that were brought here before they were asked for."""

    def found(self, blocks: int, nbytes: int, begun: float) -> None:
        """Count blocks that were here, ``nbytes`` in all, since ``perf_counter`` was ``begun``."""
        self.hits += blocks
        self.bytes += nbytes
        self.microseconds += round(1e6 * (time.perf_counter() - begun))


class BlockCache:
    """The blocks of one open store, read from the highest tier that has them. Safe to use from several threads."""

    def __init__(
        self,
        store: BlockStore,
        layouts: Sequence[Layout],
        workers: Callable[[], Executor],
        *,
        host_bytes: int | None = None,
        device_bytes: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        """``layouts`` are those of the records of a complete block; ``workers`` makes the threads that read ahead.

        Budgets are bytes; ``host_bytes`` None is ``HOST_BYTES``, and 0 for a store that is in host memory itself.
        Raises ``InvalidArgument``.
        """
        if host_bytes is None:
            host_bytes = HOST_BYTES if store.capabilities.durable else 0
        for name, value in {"host_bytes": host_bytes, "device_bytes": device_bytes}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgument(f"{name} is a number of bytes, 0 for none, not {value!r}.")
        self._store = store
        self._layouts = list(layouts)
        self._block_bytes = sum(layout.nbytes for layout in layouts)
        self._workers = workers
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
        self,
        blocks: BlockRefs,
        unchanged: Callable[[], bool],
        device: torch.device | None = None,
        *,
        keep: bool = True,
    ) -> list[Tensor]:
        """The blocks: ``[n, *shape]`` for each record, verified, on ``device``; None is the CPU.

        ``keep=False`` is for whoever asks for other blocks each time: where the store waits for no network, they are
        not kept in host memory, which takes longer than to read them again.
        ``unchanged()`` says whether the names are still right, after what they stand for was read from the store.
        Raises ``StaleBlocks`` where they are not, ``NotFound`` or ``DamagedError``.
        """
        if not blocks.blocks:
            rows = empty_rows(self._layouts)
            return rows if device is None else [each.to(device) for each in rows]
        from memstore.device_copies import to_device

        if device is not None and self.holds_on(device):
            return self._through(self._device, blocks, lambda rest: self._from_host(rest, unchanged))
        near = self._store.capabilities.reads_ahead == 1
        rows = self._from_disk(blocks, unchanged) if near and not keep else self._from_host(blocks, unchanged)
        return rows if device is None else to_device(rows, device)

    def rows(self, blocks: BlockRefs, unchanged: Callable[[], bool], which: Numbers, rows: Numbers) -> Tensor:
        """Row ``rows[i]`` of block ``which[i]`` of the list, ``[n, ...]`` in host memory; blocks of one record each.

        Straight from a store that reads rows by themselves, else from whole blocks. Raises as ``read``.
        """
        layout = self._layouts[0]
        if not self._store.capabilities.reads_rows:
            import torch

            (whole,) = self.read(blocks, unchanged)
            return whole[torch.from_numpy(which), torch.from_numpy(rows)]
        found = self._store.rows(blocks.keys, layout, which, rows)
        if not unchanged():
            raise StaleBlocks
        return as_tensor(found, Layout(layout.dtype, layout.shape[1:]))

    def where(self, blocks: BlockRefs) -> list[str]:
        """The tier that each block would be read from now: "device", "host" or "disk". Nothing is counted or moved."""
        below = "disk" if self._store.capabilities.durable else "host"
        with self._lock:
            device, host = self._device, self._host
            return ["device" if name in device else "host" if name in host else below for name in blocks.names]

    def at_hand(self, blocks: BlockRefs) -> bool:
        """Whether reading the blocks waits for no disk and no thread: it does not count as a use."""
        if not self._store.capabilities.durable:
            return True
        with self._lock:
            return all(name in self._host for name in blocks.names)

    @property
    def prefetches(self) -> bool:
        """Whether there is room for what is brought ahead."""
        return self._host.capacity > 0 and not self._closed

    def prefetch(self, blocks: BlockRefs, unchanged: Callable[[], bool]) -> None:
        """Let a thread bring blocks into host memory; returns at once. Without a host tier it does nothing.

        What cannot be read is left to whoever asks for it: reading it again there gives the error.
        """
        count = max(1, PIECE_BYTES // max(1, self._block_bytes))
        with self._lock:
            if not self.prefetches:
                return
            places = {name: place for place, name in enumerate(blocks.names) if not self._expected(name)}
            # More than that would push out what was brought before anybody has seen it.
            new = list(places.items())[: max(0, self._host.capacity // 2 - len(self._coming))]
            if new and self._executor is None:
                self._executor = self._workers()
            for start in range(0, len(new), count):
                names, at = zip(*new[start : start + count], strict=True)
                assert self._executor is not None
                self._coming |= dict.fromkeys(names, self._executor.submit(self._bring, blocks.only(at), unchanged))

    def leave_out(self, block: BlockRefs, error: DamagedError) -> None:
        """Count a block, the only one listed, that cannot be read and is done without; log it the first time."""
        lost = (block.edits, block.keys[0])
        with self._lock:
            self._left_out += 1
            if lost in self._lost:
                return
            self._lost.add(lost)
        _log.warning("a block is left out: %s", error)

    # Here and not with the rules that want it, for each gather passes here anyway. A limit counts what is gathered, and
    # not what is copied or checked.
    def count(self, document: int, blocks: int) -> None:
        """Note that blocks of a document were gathered, for the next write to store: see ``take_counts``."""
        if not self._store.read_only:  # else there will be none
            with self._lock:
                self._gathered[document] += blocks

    def take_counts(self) -> Counter[int]:
        """How many blocks of each document were gathered since the last call."""
        with self._lock:
            counts, self._gathered = self._gathered, Counter()
        return counts

    def give_back(self, counts: Mapping[int, int]) -> None:
        """Undo ``take_counts``: they could not be stored."""
        with self._lock:
            self._gathered.update(counts)

    def stats(self) -> dict[str, Any]:
        """Counts of each tier and the bytes that it holds, and how often a block was left out."""
        with self._lock:
            held = {"device": self._device, "host": self._host}
            pools = {tier: asdict(pool.counts) | {"held_bytes": pool.nbytes} for tier, pool in held.items()}
            return pools | {"disk": asdict(self._disk), "left_out": self._left_out}

    def holds_on(self, device: torch.device) -> bool:
        return bool(self._device.capacity) and device == self._device.device

    def close(self) -> None:
        """Stop reading ahead; returns when the thread has ended. Closing twice is allowed."""
        with self._lock:
            self._closed, executor = True, self._executor
        if executor is not None:
            executor.shutdown(cancel_futures=True)

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
            for future in self._awaited(blocks.names):
                # An error in the thread is met again, and named, when the block is read here.
                with suppress(Exception):
                    future.result()
        return self._through(self._host, blocks, lambda missing: self._from_disk(missing, unchanged))

    def _awaited(self, names: Sequence[int]) -> set[Future[None]]:
        with self._lock:
            return {self._coming[name] for name in names if name in self._coming}

    def _through(self, pool: PagePool, blocks: BlockRefs, below: Callable[[BlockRefs], list[Tensor]]) -> list[Tensor]:
        """The blocks from ``pool``, and those that it has not from ``below``."""
        names = blocks.names
        with self._lock:
            found, missing = pool.take(names)
        if not missing:
            return found
        rows = below(blocks.only(missing) if found else blocks)
        if pool.device is not None:
            from memstore.device_copies import to_device

            rows = to_device(rows, pool.device)
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
    import torch

    from memstore.device_copies import device_of

    if device is None and not torch.cuda.is_available():
        raise InvalidArgument(
            "device_bytes needs an accelerator, and torch sees none; pass device=, or device_bytes=0."
        )
    return device_of("cuda" if device is None else device)


def _merged(found: Tensor, others: Tensor, places: list[int]) -> Tensor:
    """Rows of both, in order: ``others`` at ``places``, ``found`` at all other places."""
    import torch

    from memstore.device_copies import to_device

    total = len(found) + len(others)
    at = torch.tensor(places)
    rest = torch.ones(total, dtype=torch.bool)
    rest[at] = False
    rows = found.new_empty(total, *found.shape[1:])
    there, elsewhere = to_device([at, rest.nonzero()[:, 0]], rows.device)
    rows[there], rows[elsewhere] = others, found
    return rows


class PagePool:
    """Named blocks in the pages of one slab, allocated when the first comes. Not for several threads at once."""

    def __init__(self, budget: int, layouts: Sequence[Layout], device: torch.device | None) -> None:
        """``layouts`` are those of the records of a block; ``device`` None is host memory."""
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
        """Pages."""
        return self._kept.pages

    @property
    def nbytes(self) -> int:
        return len(self._kept) * self._block_bytes

    # Bytes are cached as stored, after they were verified; what decodes them comes after the cache. A cached block is
    # one page with all its records, and its name is one number, so a list of blocks is one copy.
    def take(self, names: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Copies of the blocks that are here, ``[n, *shape]`` for each record, and the places of the others."""
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
        """Keep blocks: ``rows`` are ``[n, *shape]`` for each record. ``ahead``: nobody has asked for them yet."""
        new = {name: row for row, name in enumerate(names) if name != UNKEPT and name not in self._kept}
        if not new or not self._kept.pages:
            return
        if self._slab is None:
            self._slab = self._allocate()
        # A page that was given twice belongs to the one that got it last.
        of_page = dict(zip(self._kept.place(new, ahead=ahead), new.values(), strict=True))
        try:
            self._slab.fill(np.array(list(of_page)), rows, np.array(list(of_page.values())))
        except BaseException:
            # Names have their pages already, and nobody knows what is in these: nothing of the pool is to be trusted.
            self._kept = S3Fifo(self._kept.pages)
            raise
        self.counts.prefetched += len(new) if ahead else 0

    def _allocate(self) -> _HostSlab | _DeviceSlab:
        if self.device is None or self.device.type == "cpu":
            return _HostSlab(self.capacity, self._layouts)
        return _DeviceSlab(self.capacity, self._layouts, self.device)


class _HostSlab:
    """As many pages as a budget allows; a block is a tensor for each record, lists of blocks are ``[n, *shape]``."""

    def __init__(self, pages: int, layouts: Sequence[Layout]) -> None:
        fields = [(str(number), _NUMBERS[layout.dtype], layout.shape) for number, layout in enumerate(layouts)]
        page = np.dtype(fields, align=True)
        self._layouts = dict(zip(page.names or (), layouts, strict=True))
        # NumPy leaves what it allocates untouched, always: memory is taken as pages are used.
        self._pages = np.empty(pages, page)

    def select(self, pages: Numbers) -> list[Tensor]:
        """Copies of pages."""
        import torch

        # As fast as copying memory, where index_select of bytes takes half as long again.
        rows = self._pages.take(pages)
        return [_seen(torch.from_numpy(rows[name]), layout) for name, layout in self._layouts.items()]

    def fill(self, pages: Numbers, rows: Sequence[Tensor], chosen: Numbers) -> None:
        """Copy the rows ``chosen`` to ``pages``."""
        import torch

        # Not by PyTorch: a slab made in inference mode may not be changed outside of it, such as by another thread.
        for (name, layout), source in zip(self._layouts.items(), rows, strict=True):
            numbers = source.cpu().view(torch.int16) if layout.dtype == "bfloat16" else source.cpu()
            self._pages[name][pages] = numbers.numpy()[chosen]


class _DeviceSlab:
    """The same on an accelerator."""

    def __init__(self, pages: int, layouts: Sequence[Layout], device: torch.device) -> None:
        import torch

        self._device = device
        kinds = [(layout.shape, getattr(torch, layout.dtype)) for layout in layouts]
        self._records = [torch.empty(pages, *shape, dtype=dtype, device=device) for shape, dtype in kinds]

    def select(self, pages: Numbers) -> list[Tensor]:
        import torch

        from memstore.device_copies import to_device

        (at,) = to_device([torch.from_numpy(pages)], self._device)
        return [records.index_select(0, at) for records in self._records]

    def fill(self, pages: Numbers, rows: Sequence[Tensor], chosen: Numbers) -> None:
        import torch

        from memstore.device_copies import to_device

        at, taken, *rows = to_device([torch.from_numpy(pages), torch.from_numpy(chosen), *rows], self._device)
        for records, source in zip(self._records, rows, strict=True):
            with torch.inference_mode(records.is_inference()):
                records.index_copy_(0, at, source.index_select(0, taken))


def empty_rows(layouts: Sequence[Layout]) -> list[Tensor]:
    """What is stored of no block: ``[0, *shape]`` for each of ``layouts``."""
    import torch

    return [torch.empty(0, *layout.shape, dtype=getattr(torch, layout.dtype)) for layout in layouts]


def as_tensor(rows: Bytes, layout: Layout) -> Tensor:
    """Bytes ``[n, bytes]``, between whose rows there may be gaps, seen as a tensor ``[n, *shape]``."""
    import torch

    numbers = rows.view(_NUMBERS[layout.dtype]).reshape(len(rows), *layout.shape)
    return _seen(torch.from_numpy(numbers), layout)


def _seen(numbers: Tensor, layout: Layout) -> Tensor:
    import torch

    return numbers.view(torch.bfloat16) if layout.dtype == "bfloat16" else numbers


# Our own, since libraries keep Python objects, one call per name: here a policy only hands out pages of a slab, and a
# hit of 32 blocks is one look into a dict for each and one copy for all.
class S3Fifo:
    """Names and the pages ``0 ... pages - 1`` that hold them. Not safe to use from several threads at once."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._held: dict[Hashable, int] = {}
        self._new: deque[Hashable] = deque()
        self._main: deque[Hashable] = deque()
        self._left: dict[Hashable, None] = {}  # names without pages, the one that left first first
        self._uses = array("b", bytes(pages))  # small enough to stay in the processor's cache
        self._room_for_new = max(1, pages // _SMALL_SHARE)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def find(self, names: Iterable[Hashable]) -> list[int | None]:
        """The page of each name, None where it has none; counts as a use of each page."""
        pages = list(map(self._held.get, names))
        uses = self._uses
        for page in set(pages):
            if page is not None and uses[page] < _MOST_USES:
                uses[page] += 1
        return pages

    def place(self, names: Collection[Hashable], *, ahead: bool = False) -> list[int]:
        """A page for each of ``names``, which had none; those that had these pages have none any more.

        With more names than pages, pages repeat: the last name to get one has it. ``ahead``: nobody has asked for
        these names yet, so that the first time somebody does is not yet the second.
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
        """Take a page from whoever deserves it least."""
        while True:
            new = len(self._new) > self._room_for_new or not self._main
            name = (self._new if new else self._main).popleft()
            page = self._held[name]
            if self._uses[page] <= 0:
                break
            self._uses[page] = 0 if new else self._uses[page] - 1
            self._main.append(name)
        if new:
            self._remember(name)
        return self._held.pop(name)

    def _remember(self, name: Hashable) -> None:
        self._left[name] = None
        if len(self._left) > self.pages:
            del self._left[next(iter(self._left))]
