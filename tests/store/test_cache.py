"""Blocks in memory above a store: what stays, what is counted, and that bytes are those of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from memstore.errors import DamagedError, NotFound
from memstore.store import Batch, Key, Layout, RamStore, Record, Table
from memstore.store.cache import BOOKKEEPING_BYTES, BlockCache, BlockRefs, PagePool, S3Fifo, StaleBlocks, _HostSlab
from memstore.store.records import Bytes

LAYOUTS = [Layout("uint8", (40,)), Layout("int32", (6,))]
PAGE = sum(layout.nbytes for layout in LAYOUTS) + BOOKKEEPING_BYTES
CPU = torch.device("cpu")


def payload(block: int, layout: Layout) -> Bytes:
    return np.full(layout.nbytes, block % 251, np.uint8)


class WatchedStore(RamStore):
    """Remembers what was read; ``gate`` holds reads back, ``failing`` blocks cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing: set[int] = set()

    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        self.reads.append([key.item for key in keys])
        assert self.gate.wait(60)
        if any(key.item in self.failing for key in keys):
            raise DamagedError("it was a test")
        super().read(keys, layouts, out)


@pytest.fixture
def store() -> WatchedStore:
    store, batch = WatchedStore(), Batch()
    for block in range(400):
        batch.put(Key(Table.BLOCKS, 1, 0, block), *[Record(layout, payload(block, layout)) for layout in LAYOUTS])
    store.write(batch)
    return store


@pytest.fixture
def make_cache(store: WatchedStore) -> Iterator[Callable[..., BlockCache]]:
    made: list[BlockCache] = []

    def make(pages: int, **options: object) -> BlockCache:
        made.append(BlockCache(store, LAYOUTS, host_bytes=pages * PAGE, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def blocks_of(*blocks: int, edits: int = 0, stop: int = 1 << 40) -> BlockRefs:
    return BlockRefs(1, edits, [0] * len(blocks), list(blocks), [1] * len(blocks), stop)


def yes() -> bool:
    return True


def check(cache: BlockCache, *blocks: int, device: torch.device | None = None) -> None:
    """What is read is what the store holds."""
    for rows, layout in zip(cache.read(blocks_of(*blocks), yes, device), LAYOUTS, strict=True):
        assert rows.shape == (len(blocks), *layout.shape)
        assert np.array_equal(rows.contiguous().view(torch.uint8).numpy(), [payload(block, layout) for block in blocks])


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen in a minute")


def test_pages_made_in_inference_mode_are_filled_by_other_threads(make_cache: Callable[..., BlockCache]) -> None:
    """PyTorch forbids changing such tensors outside of that mode, where the thread that reads ahead is."""
    cache = make_cache(100)
    with torch.inference_mode():
        check(cache, 1, 2, 3)
    cache.prefetch(blocks_of(*range(10, 20)), yes)
    wait_for(lambda: cache.stats()["host"]["prefetched"] == 10)
    with torch.inference_mode():
        check(cache, *range(20))
    check(cache, *range(20))


def test_pages_that_could_not_be_filled_are_not_served(
    make_cache: Callable[..., BlockCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(100)
    check(cache, *range(10))

    def fail(*_: object) -> None:
        raise RuntimeError("it was a test")

    with monkeypatch.context() as patch:
        patch.setattr(_HostSlab, "fill", fail)
        with pytest.raises(RuntimeError):
            check(cache, *range(5, 30))
        cache.prefetch(blocks_of(*range(40, 50)), yes)
    check(cache, *range(60))


# What stays


def test_a_scan_does_not_evict_what_is_asked_for_often() -> None:
    kept = S3Fifo(100)

    def ask(name: int) -> bool:
        if kept.find([name]) != [None]:
            return True
        kept.place([name])
        return False

    hot = range(50)
    for _ in range(3):
        for name in hot:
            ask(name)
    for name in range(1000, 6000):
        assert not ask(name)
    assert sum(ask(name) for name in hot) == len(hot)


def test_what_comes_back_soon_after_it_left_is_kept() -> None:
    kept = S3Fifo(20)
    for name in range(22):
        kept.place([name])
    assert kept.find([0]) == [None]
    kept.place([0])
    for name in range(100, 300):
        kept.place([name])
    assert kept.find([0]) != [None]


@pytest.mark.parametrize("pages", [1, 2, 9, 10, 64])
def test_every_name_has_a_page_of_its_own_whatever_is_asked(pages: int) -> None:
    kept, random = S3Fifo(pages), np.random.default_rng(pages)
    for _ in range(3000):
        name = int(random.zipf(1.3)) % 500
        (page,) = kept.find([name])
        if page is None:
            (page,) = kept.place([name])
        assert 0 <= page < pages
        assert len(kept) <= pages
    held = [page for page in kept.find(range(500)) if page is not None]
    assert len(held) == len(set(held)) == len(kept)


def test_a_first_use_of_what_was_brought_ahead_is_a_first_use() -> None:
    kept = S3Fifo(100)
    kept.place(range(50))
    kept.find(range(50))
    for name in range(1000, 3000):  # a scan that is read ahead, then asked for once
        kept.place([name], ahead=True)
        kept.find([name])
    assert None not in kept.find(range(50))


# Reading


@pytest.mark.parametrize("pages", [0, 1, 5, 400])
def test_bytes_are_those_of_the_store_whatever_is_kept(make_cache: Callable[..., BlockCache], pages: int) -> None:
    cache = make_cache(pages)
    for blocks in ([3, 1, 2], [2, 9, 9, 3], list(range(30)), [29], [0, 31, 5, 32]):
        check(cache, *blocks)
        check(cache, *blocks)


def test_blocks_that_are_there_are_not_read_again(make_cache: Callable[..., BlockCache], store: WatchedStore) -> None:
    cache = make_cache(50)
    check(cache, 1, 2, 3)
    check(cache, 4, 3, 5, 2)
    check(cache, 5, 4)
    assert store.reads == [[1, 2, 3], [4, 5]]
    counts = cache.stats()
    size = sum(layout.nbytes for layout in LAYOUTS)
    assert (counts["host"]["hits"], counts["host"]["misses"], counts["host"]["bytes"]) == (4, 5, 4 * size)
    assert counts["host"]["held_bytes"] == counts["disk"]["bytes"] == 5 * size
    assert counts["disk"]["hits"] == 5
    assert counts["disk"]["microseconds"] > 0


def test_the_device_pool_is_asked_first_and_filled_from_below(
    make_cache: Callable[..., BlockCache], store: WatchedStore
) -> None:
    cache = make_cache(50, device_bytes=3 * PAGE, device=CPU)
    check(cache, 1, 2, device=CPU)
    check(cache, 2, 1, device=CPU)
    check(cache, 3, 4, 5, 6, device=CPU)
    check(cache, 1, 2, 3, 4, 5, 6, device=CPU)
    assert store.reads == [[1, 2], [3, 4, 5, 6]]
    assert cache.stats()["device"]["hits"] >= 2
    assert cache.stats()["device"]["held_bytes"] == 3 * (PAGE - BOOKKEEPING_BYTES)


def test_other_edits_are_other_blocks_and_incomplete_ones_are_not_kept(
    make_cache: Callable[..., BlockCache], store: WatchedStore
) -> None:
    cache = make_cache(50)
    for edits, stop in ((0, 8), (1, 8), (1, 7), (1, 7)):
        cache.read(blocks_of(7, edits=edits, stop=stop), yes, None)
    assert len(store.reads) == 4


def test_blocks_that_differ_in_anything_have_names_of_their_own() -> None:
    most = 2**32 - 2
    documents = [(document, edits) for document in (1, 2, most) for edits in (0, 1, most)]
    layers, blocks = [layer for layer in (0, 1, most) for _ in range(3)], [0, 1, 2**63 - 1] * 3
    names = [name for each in documents for name in BlockRefs(*each, layers, blocks, [1] * 9, 2**63).names]
    assert len(set(names)) == len(names) == len(documents) * len(blocks)


def test_what_changed_while_it_was_read_is_not_kept(make_cache: Callable[..., BlockCache], store: WatchedStore) -> None:
    cache = make_cache(50)
    with pytest.raises(StaleBlocks):
        cache.read(blocks_of(7), lambda: False, None)
    check(cache, 7)
    assert len(store.reads) == 2


def test_a_pool_takes_no_more_than_its_budget() -> None:
    pool = PagePool(10 * PAGE + 1, LAYOUTS, CPU)
    for start in range(0, 100, 7):
        blocks = range(start, start + 7)
        rows = [torch.zeros(7, *layout.shape, dtype=getattr(torch, layout.dtype)) for layout in LAYOUTS]
        pool.put(blocks_of(*blocks).names, rows)
        assert pool.nbytes + pool.capacity * BOOKKEEPING_BYTES <= 10 * PAGE
    assert pool.capacity == 10


def test_an_error_reaches_the_caller_and_is_counted(make_cache: Callable[..., BlockCache]) -> None:
    cache = make_cache(50)
    with pytest.raises(NotFound):
        cache.read(blocks_of(1, 4000), yes, None)
    assert cache.stats()["disk"]["misses"] == 1


# Reading ahead


def test_what_was_brought_ahead_is_there(make_cache: Callable[..., BlockCache], store: WatchedStore) -> None:
    cache = make_cache(50)
    cache.prefetch(blocks_of(5, 6, 5), yes)
    wait_for(lambda: cache.stats()["host"]["prefetched"] == 2)
    check(cache, 6, 5)
    cache.prefetch(blocks_of(5, 6), yes)
    assert store.reads == [[5, 6]]


def test_a_block_on_its_way_is_waited_for_and_not_read_twice(
    make_cache: Callable[..., BlockCache], store: WatchedStore
) -> None:
    cache = make_cache(50)
    store.gate.clear()
    cache.prefetch(blocks_of(5, 6), yes)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(check, cache, 6)
        wait_for(lambda: len(store.reads) == 1)
        assert not reading.done()
        store.gate.set()
        reading.result(60)
    assert store.reads == [[5, 6]]


def test_an_error_of_the_thread_is_met_by_whoever_wants_the_block(
    make_cache: Callable[..., BlockCache], store: WatchedStore
) -> None:
    cache = make_cache(50)
    store.failing = {6}
    cache.prefetch(blocks_of(5, 6), yes)
    check(cache, 5)
    with pytest.raises(DamagedError, match="it was a test"):
        cache.read(blocks_of(6), yes, None)
    store.failing = set()
    check(cache, 6)


def test_closing_ends_the_thread_and_drops_what_it_had_not_begun(
    make_cache: Callable[..., BlockCache], store: WatchedStore
) -> None:
    before = threading.active_count()
    cache = make_cache(400)
    store.gate.clear()
    cache.prefetch(blocks_of(5), yes)
    wait_for(lambda: len(store.reads) == 1)
    cache.prefetch(blocks_of(6), yes)
    threading.Timer(0.05, store.gate.set).start()
    cache.close()
    assert store.reads == [[5]]
    wait_for(lambda: threading.active_count() == before)
    cache.prefetch(blocks_of(7), yes)
    assert threading.active_count() == before


def test_closing_drops_the_blocks_in_memory(make_cache: Callable[..., BlockCache]) -> None:
    cache = make_cache(30)
    check(cache, 1, 2, 3)
    assert cache.stats()["host"]["held_bytes"]
    cache.close()
    assert cache.stats()["host"]["held_bytes"] == 0
    assert cache._host._slab is None
    check(cache, 1, 2)  # as a read under way does
    assert cache._host._slab is None


def test_many_threads_read_right_bytes_beside_each_other(make_cache: Callable[..., BlockCache]) -> None:
    cache = make_cache(30, device_bytes=10 * PAGE, device=CPU)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            blocks = (random.zipf(1.3, 8) % 100).tolist()
            cache.prefetch(blocks_of(*(random.integers(0, 100, 8).tolist())), yes)
            check(cache, *blocks, device=CPU if seed % 2 else None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
