"""The conformance suite of block stores. A new back end proves itself by subclassing.

    class TestMyStore(StoreTests):
        def open_store(self, path): return MyStore(path)

    class MyMachine(StoreMachine):
        def open_store(self, path): return MyStore(path)

    TestMyMachine = MyMachine.TestCase

``open_store`` opens the store at ``path``, or makes it if it does not exist. Every test gets a store of its own. The
machine checks it against a dict: Hypothesis finds short sequences of changes after which the two disagree.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memstore.errors import DamagedError, InvalidArgument, NotFound, StoreFull
from memstore.store.contract import BlockStore, document_ranges
from memstore.store.records import MAX_DOCUMENT, MAX_ITEM, MAX_LAYER, Batch, Key, Layout, Record, Table

LAYOUTS = (Layout("float32", (2, 5)), Layout("bfloat16", (3,)))
"""Two records per value: 40 bytes, and 6 bytes, which fit no alignment."""

LARGE = 1 << 19

BLOCKS = (Key(Table.BLOCKS), Key(Table.BLOCKS, 2**32 - 2, 2**32 - 1, 2**32 - 1))
"""The range of all keys of the table of blocks."""


def block(item: int, *, document: int = 1, layer: int = 0) -> Key:
    """Return the key of a block."""
    return Key(Table.BLOCKS, document, layer, item)


def value(seed: int) -> tuple[Record, ...]:
    """Return records of ``LAYOUTS`` with bytes that follow from ``seed``."""
    random = np.random.default_rng(seed)
    return tuple(Record(layout, random.integers(0, 256, layout.nbytes, np.uint8)) for layout in LAYOUTS)


def rows(count: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """Make rows for ``count`` values, filled with a pattern that no test stores."""
    return [np.full((count, layout.nbytes), 0xA5, np.uint8) for layout in LAYOUTS]


def put_blocks(store: BlockStore, items: range, **where: int) -> None:
    """Write blocks whose contents follow from their items."""
    batch = Batch()
    for item in items:
        batch.put(block(item, **where), *value(item))
    store.write(batch)


def large(document: int) -> Batch:
    """Make a block of ``LARGE`` bytes, more than a store needs beside its values."""
    payload = np.full(LARGE, document, np.uint8)
    return Batch(puts=[(block(0, document=document), (Record(Layout("uint8", (LARGE,)), payload),))])


def evictions(documents: Iterable[int]) -> Iterator[Batch]:
    """Yield batches that delete documents, one after the other."""
    return (Batch(deletes=document_ranges(document)) for document in documents)


def same(found: tuple[Record, ...] | None, expected: tuple[Record, ...]) -> bool:
    """Check whether two values have equal layouts and bytes."""
    return found is not None and [(record.layout, record.payload.tobytes()) for record in found] == [
        (record.layout, record.payload.tobytes()) for record in expected
    ]


class StoreTests(ABC):
    """The contract of every block store."""

    @abstractmethod
    def open_store(self, path: Path) -> BlockStore:
        """Open the store at ``path``, or make it if it does not exist."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[BlockStore]:
        store = self.open_store(tmp_path / "store")
        yield store
        store.close()

    def test_roundtrip(self, store: BlockStore) -> None:
        for number, dtype in enumerate(("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")):
            for shape in ((), (0,), (7,), (2, 3, 4), (1, 2, 1, 2, 1, 2, 1, 2)):
                layout = Layout(dtype, shape)
                record = Record(layout, np.arange(layout.nbytes, dtype=np.uint8))
                key = Key(Table.LANDMARKS, number, 0, len(shape))
                store.write(Batch(puts=[(key, (record,))]))
                assert same(store.get(key), (record,))

    def test_checksums_tell_values_apart(self, store: BlockStore) -> None:
        """They are equal if the records are, for any key, and different if one bit is."""
        keys = [Key(Table.BLOCKS, document, 0, item) for document in (1, 2) for item in range(5)]
        batch = Batch()
        for key in keys:
            batch.put(key, *value(key.item))
        store.write(batch)
        sums = store.checksums(keys)
        assert sums[:5] == sums[5:]
        assert len(set(sums)) == 5
        assert store.checksums(keys[3:1:-1]) == sums[3:1:-1]
        with pytest.raises(NotFound):
            store.checksums([*keys, Key(Table.BLOCKS, 3, 0, 0)])

    def test_json(self, store: BlockStore) -> None:
        facts = {"name": "Moby-Dick — é", "tokens": 3, "list": [1, None, True]}
        store.write(Batch(puts=[(Key(Table.META), (Record.from_json(facts),))]))
        records = store.get(Key(Table.META))
        assert records is not None
        assert records[0].to_json() == facts

    def test_read_fills_rows_in_the_order_asked(self, store: BlockStore) -> None:
        """Rows follow the given keys, not the order on disk. A key may occur twice."""
        put_blocks(store, range(20))
        wanted = [17, 3, 3, 0, 19]
        out = rows(len(wanted))
        store.read([block(item) for item in wanted], LAYOUTS, out)
        for row, item in enumerate(wanted):
            assert [rows[row].tobytes() for rows in out] == [record.payload.tobytes() for record in value(item)]

    def test_rows_are_those_of_the_values(self, store: BlockStore) -> None:
        layout, random = Layout("float32", (7, 3)), np.random.default_rng(0)
        whole = random.integers(0, 256, (5, 7, 12), np.uint8)
        batch = Batch()
        for item, payload in enumerate(whole):
            batch.put(block(item), Record(layout, payload.reshape(-1)))
        store.write(batch)
        which, places = np.array([0, 0, 1, 2, 2, 2]), np.array([6, 0, 3, 1, 1, 5])
        keys = [block(item) for item in (4, 0, 2)]
        for _ in range(2):
            assert np.array_equal(store.rows(keys, layout, which, places), whole[[4, 0, 2]][which, places])
        store.write(Batch(puts=[(block(0), (Record(layout, whole[1].reshape(-1)),))]))
        assert np.array_equal(store.rows(keys, layout, which, places), whole[[4, 1, 2]][which, places])
        with pytest.raises(NotFound):
            store.rows([block(9)], layout, which[:2], places[:2])
        with pytest.raises(DamagedError):
            store.rows([block(0)], Layout("float32", (7, 4)), which[:2], places[:2])

    def test_read_of_nothing(self, store: BlockStore) -> None:
        store.read([], LAYOUTS, rows(0))

    def test_keys_are_ordered_as_numbers(self, store: BlockStore) -> None:
        keys = [block(i, document=d, layer=n) for d in (1, 256, 70000) for n in (0, 255, 256) for i in (0, 255, 256)]
        store.write(Batch(puts=[(key, value(0)) for key in reversed(keys)]))
        assert store.keys(*BLOCKS) == keys
        assert store.keys(keys[4], keys[9]) == keys[4:10]
        assert store.keys(block(1, layer=255), block(254, layer=255)) == []

    def test_a_range_that_ends_before_it_begins_is_empty(self, store: BlockStore) -> None:
        put_blocks(store, range(6))
        put_blocks(store, range(6), layer=1)
        there = store.keys(*BLOCKS)
        store.write(Batch(deletes=[(block(0, layer=1), block(3)), (block(4), block(1))]))
        assert store.keys(*BLOCKS) == there
        assert store.keys(block(4), block(1)) == []
        assert same(store.get(block(2)), value(2))

    def test_tables_are_apart(self, store: BlockStore) -> None:
        for table in Table:
            store.write(Batch(puts=[(Key(table, 1, 2, 3), value(table))]))
        for table in Table:
            assert same(store.get(Key(table, 1, 2, 3)), value(table))

    def test_largest_key(self, store: BlockStore) -> None:
        """Documents and layers have 32 bits, items 64. The last document belongs to the store."""
        store.write(Batch(puts=[(BLOCKS[1], value(1))]))
        assert same(store.get(BLOCKS[1]), value(1))
        with pytest.raises(InvalidArgument, match="does not fit"):
            store.write(Batch(puts=[(Key(Table.BLOCKS, 2**32), value(1))]))

    def test_missing_keys(self, store: BlockStore) -> None:
        put_blocks(store, range(3))
        assert store.get(block(3)) is None
        with pytest.raises(NotFound, match="block 7"):
            store.read([block(1), block(7)], LAYOUTS, rows(2))

    def test_wrong_layout(self, store: BlockStore) -> None:
        put_blocks(store, range(1))
        store.read([block(0)], LAYOUTS, rows(1))
        wrong = [
            (Layout("float32", (5, 2)), LAYOUTS[1]),
            (LAYOUTS[0], Layout("float16", (3,))),
            (LAYOUTS[0],),
            (*LAYOUTS, Layout("uint8", (1,))),
        ]
        for layouts in wrong:
            out = [np.zeros((1, layout.nbytes), np.uint8) for layout in layouts]
            with pytest.raises(DamagedError, match="block 0"):
                store.read([block(0)], layouts, out)

    def test_wrong_rows(self, store: BlockStore) -> None:
        put_blocks(store, range(1))
        with pytest.raises(InvalidArgument, match="out must be"):
            store.read([block(0)], LAYOUTS, rows(2))

    def test_a_batch_is_all_or_nothing(self, store: BlockStore) -> None:
        put_blocks(store, range(5))
        before = store.version()
        bad = Record(LAYOUTS[0], np.zeros(3, np.uint8))
        batch = Batch()
        batch.delete(block(0), block(2))
        batch.put(block(9), *value(9))
        batch.put(block(10), bad)
        with pytest.raises(InvalidArgument, match="block 10"):
            store.write(batch)
        assert store.keys(*BLOCKS) == [block(item) for item in range(5)]
        assert store.version() == before

    def test_deletes_come_before_puts(self, store: BlockStore) -> None:
        """This holds in one batch, in any order of filling. The later of two puts wins."""
        put_blocks(store, range(4))
        batch = Batch()
        batch.put(block(2), *value(100))
        batch.put(block(2), *value(101))
        batch.delete(block(0), block(3))
        store.write(batch)
        assert store.keys(*BLOCKS) == [block(2)]
        assert same(store.get(block(2)), value(101))

    @pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 3), (5, 18), (0, 7), (8, 15), (13, 40), (7, 8), (9, 4)])
    def test_range_deletes_keep_the_rest(self, store: BlockStore, first: int, last: int) -> None:
        """This also holds if the ends of the range lie among blocks that are stored together."""
        put_blocks(store, range(21))
        put_blocks(store, range(21), layer=1)
        store.write(Batch(deletes=[(block(first), block(last))]))
        kept = [item for item in range(21) if not first <= item <= last]
        assert store.keys(block(0), block(99)) == [block(item) for item in kept]
        assert all(same(store.get(block(item)), value(item)) for item in kept)
        assert len(store.keys(block(0, layer=1), block(99, layer=1))) == 21

    def test_a_range_across_layers(self, store: BlockStore) -> None:
        for layer in range(3):
            put_blocks(store, range(10), layer=layer)
        store.write(Batch(deletes=[(block(7, layer=0), block(2, layer=2))]))
        kept = [block(item, layer=0) for item in range(7)] + [block(item, layer=2) for item in range(3, 10)]
        assert store.keys(*BLOCKS) == kept

    def test_a_range_lies_in_one_table(self, store: BlockStore) -> None:
        with pytest.raises(InvalidArgument, match="one table"):
            store.write(Batch(deletes=[(block(0), Key(Table.TOKENS, 1))]))

    def test_replacing_changes_the_layout_too(self, store: BlockStore) -> None:
        put_blocks(store, range(5))
        other = Record(Layout("uint8", (1000,)), np.arange(1000, dtype=np.uint8))
        store.write(Batch(puts=[(block(2), (other,))]))
        assert same(store.get(block(2)), (other,))
        out = rows(2)
        store.read([block(1), block(3)], LAYOUTS, out)
        assert out[0][1].tobytes() == value(3)[0].payload.tobytes()

    def test_copies_do_not_alias(self, store: BlockStore) -> None:
        """Neither the records of a put nor those of a read share the store's memory."""
        records = value(1)
        store.write(Batch(puts=[(block(0), records)]))
        records[0].payload[:] = 0
        first = store.get(block(0))
        assert same(first, value(1))
        assert first is not None
        first[0].payload[:] = 0
        assert same(store.get(block(0)), value(1))

    def test_scan_meets_every_value_once_in_order(self, store: BlockStore) -> None:
        put_blocks(store, range(10))
        store.write(Batch(puts=[(Key(table, 1), value(table)) for table in Table if table != Table.BLOCKS]))
        found = list(store.scan())
        expected = [Key(table, 1) for table in (Table.META, Table.DOCUMENTS, Table.TOKENS)]
        expected += [block(item) for item in range(10)]
        expected += [Key(table, 1) for table in (Table.LANDMARKS, Table.HISTORY, Table.RECURRENT)]
        assert [scanned.key for scanned in found] == expected
        assert not any(scanned.damage for scanned in found)
        assert same(found[4].records, value(1))

    def test_a_walk_meets_what_keys_names(self, store: BlockStore) -> None:
        """It meets keys and records of a range, also of one that cuts through blocks stored together."""
        for layer in (0, 1, 2):
            put_blocks(store, range(12), layer=layer)
        for first, last in [(0, 9), (2, 5), (7, 20)]:
            ends = block(first), block(last, layer=1)
            found = list(store.walk(*ends))
            assert [key for key, _ in found] == store.keys(*ends)
            for key, records in found:
                assert same(store.get(key), records)

    def test_scan_is_a_snapshot(self, store: BlockStore) -> None:
        put_blocks(store, range(10))
        scan = store.scan()
        next(scan)
        put_blocks(store, range(10, 20))
        store.delete(1)
        assert [scanned.key.item for scanned in scan] == list(range(1, 10))

    def test_delete_takes_a_document_and_nothing_else(self, store: BlockStore) -> None:
        for document in (0, 1, 2):
            for table in Table:
                store.write(Batch(puts=[(Key(table, document, 1, 5), value(document))]))
        store.delete(0)
        store.delete(1)
        left = [scanned.key for scanned in store.scan()]
        assert left == [Key(Table.META, d, 1, 5) for d in (0, 1, 2)] + [Key(t, 2, 1, 5) for t in Table if t]

    def test_version_grows_with_every_commit(self, store: BlockStore) -> None:
        versions = [store.version()]
        for item in range(3):
            put_blocks(store, range(item, item + 1))
            versions.append(store.version())
        store.get(block(0))
        assert versions == sorted(set(versions))
        assert store.version() == versions[-1]

    def test_size_grows(self, store: BlockStore) -> None:
        before = store.size_bytes()
        payload = np.ones(1 << 20, np.uint8)
        store.write(Batch(puts=[(block(0), (Record(Layout("uint8", (payload.size,)), payload),))]))
        assert store.size_bytes() >= before + payload.size

    def test_what_is_deleted_is_not_counted_as_used(self, store: BlockStore) -> None:
        """A limit on bytes uses this number.

        Otherwise everything would be evicted, and there would still be no room.
        """
        empty = store.used_bytes()
        store.write(large(0))
        assert store.used_bytes() >= empty + LARGE
        store.delete(0)
        assert store.used_bytes() < empty + LARGE // 2

    def test_no_more_is_evicted_for_a_batch_than_is_needed(self, store: BlockStore) -> None:
        for document in range(4):
            store.write(large(document))
        limit = store.used_bytes() + LARGE // 2
        assert store.write_within(large(4), limit, evictions(range(4))) == 1
        assert store.used_bytes() <= limit
        assert [document for document in range(5) if store.get(block(0, document=document))] == [1, 2, 3, 4]
        assert store.write_within(Batch(), limit, evictions(range(1, 4))) == 0

    def test_a_batch_that_a_limit_has_no_room_for_is_not_there(self, store: BlockStore) -> None:
        """This holds whatever is evicted, and if nothing may be. The store continues to work."""
        store.write(large(0))
        for limit, victims in ((store.used_bytes() + LARGE // 2, range(0)), (LARGE // 2, range(1))):
            with pytest.raises(StoreFull, match="has no room"):
                store.write_within(large(1), limit, evictions(victims))
            assert store.get(block(0, document=1)) is None
            assert not any(scanned.damage for scanned in store.scan())
        put_blocks(store, range(3), document=2)
        assert same(store.get(block(2, document=2)), value(2))

    def test_reads_see_whole_batches(self, store: BlockStore) -> None:
        """One thread writes, others read: all rows of one read are from the same batch."""
        keys = [block(item) for item in (0, 9, 30)]
        store.write(Batch(puts=[(key, value(0)) for key in keys]))
        torn: list[bytes] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                out = rows(len(keys))
                store.read(keys, LAYOUTS, out)
                torn.extend(row.tobytes() for row in out[0] if row.tobytes() != out[0][0].tobytes())

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for seed in range(30):
            store.write(Batch(puts=[(key, value(seed)) for key in keys]))
        done.set()
        for reader in readers:
            reader.join()
        assert torn == []

    def test_reopening_keeps_everything(self, store: BlockStore, tmp_path: Path) -> None:
        if not store.capabilities.durable:
            pytest.skip("the store is not durable, and says so")
        put_blocks(store, range(30))
        version = store.version()
        store.sync()
        store.close()
        again = self.open_store(tmp_path / "store")
        assert again.keys(*BLOCKS) == [block(item) for item in range(30)]
        assert same(again.get(block(29)), value(29))
        assert again.version() == version
        again.close()

    def test_a_close_that_meets_reads_ends_them(self, store: BlockStore) -> None:
        """Each of them has its values, or raises ``InvalidArgument``."""
        put_blocks(store, range(50))
        keys, begun = [block(item) for item in range(50)], threading.Barrier(4)

        def look(read: Callable[[], object]) -> None:
            begun.wait()
            with pytest.raises(InvalidArgument, match="closed"):  # noqa: PT012
                while True:
                    read()

        reads = (lambda: store.gather(keys, LAYOUTS), lambda: store.get(keys[7]), lambda: [*store.walk(*BLOCKS)])
        with ThreadPoolExecutor() as pool:
            looking = [pool.submit(look, read) for read in reads]
            begun.wait()
            time.sleep(0.05)
            store.close()
        for each in looking:
            each.result()

    def test_closing_twice(self, store: BlockStore) -> None:
        """The second time nothing happens. Using a closed store raises an error that says so."""
        store.close()
        store.close()
        with pytest.raises(InvalidArgument, match="closed"):
            store.get(block(0))
        with pytest.raises(InvalidArgument, match="closed"):
            store.write(Batch())


ITEMS = 24
OTHER = (Layout("uint8", (7,)),)
"""Layout that sometimes replaces a value of ``LAYOUTS``."""

documents = st.integers(1, 2)
layers = st.integers(0, 1)
items = st.integers(0, ITEMS - 1)
seeds = st.integers(0, 2**16)
tables = st.sampled_from([Table.BLOCKS, Table.BLOCKS, Table.TOKENS])
keys = st.builds(Key, tables, documents, layers, items)


class StoreMachine(RuleBasedStateMachine):
    """Puts, deletions, reads, reopening and crashes, in any order."""

    def open_store(self, path: Path) -> BlockStore:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="memstore-machine-"))
        self.path = self.folder / "0"
        self.expected: dict[Key, tuple[Record, ...]] = {}
        self.store: BlockStore | None = None

    @initialize()
    def make(self) -> None:
        self.store = self.open_store(self.path)

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.folder)

    @property
    def opened(self) -> BlockStore:
        assert self.store is not None
        return self.store

    @property
    def durable(self) -> bool:
        """Whether closing loses nothing."""
        return self.store is not None and self.store.capabilities.durable

    @rule(key=keys, count=st.integers(1, 6), seed=seeds)
    def put(self, key: Key, count: int, seed: int) -> None:
        """Put consecutive items at any place."""
        self._write(
            Batch(puts=[(key._replace(item=key.item + number), value(seed + number)) for number in range(count)])
        )

    @rule(document=documents, layer=layers, count=st.integers(1, 9), seed=seeds)
    def append(self, document: int, layer: int, count: int, seed: int) -> None:
        """Append blocks after the last one, as a document grows; the last one is written again."""
        there = [key.item for key in self.expected if key[:3] == (Table.BLOCKS, document, layer)]
        self.put(Key(Table.BLOCKS, document, layer, max(there, default=0)), count, seed)

    @rule(key=keys, seed=st.integers(0, 255))
    def put_another_layout(self, key: Key, seed: int) -> None:
        payload = value(seed)[0].payload[:7]
        self._write(Batch(puts=[(key, (Record(OTHER[0], payload),))]))

    @rule(first=keys, last=keys)
    def delete_a_range(self, first: Key, last: Key) -> None:
        self._write(Batch(deletes=[(first, last._replace(table=first.table))]))

    @rule(document=documents, layer=layers, item=items, count=st.integers(0, 9), seed=seeds)
    def truncate_and_append(self, document: int, layer: int, item: int, count: int, seed: int) -> None:
        """Replace the end of a layer by other blocks, in one batch."""
        first = Key(Table.BLOCKS, document, layer, item)
        batch = Batch(deletes=[(first, first._replace(item=MAX_ITEM))])
        for number in range(count):
            batch.put(first._replace(item=item + number), *value(seed + number))
        self._write(batch)

    @rule(document=documents, layer=layers, item=items)
    def leave(self, document: int, layer: int, item: int) -> None:
        """Delete the oldest blocks, as when a document has reached its capacity."""
        last = Key(Table.BLOCKS, document, layer, item)
        self._write(Batch(deletes=[(last._replace(item=0), last)]))

    @rule(document=documents)
    def delete_a_document(self, document: int) -> None:
        self.opened.delete(document)
        self._expect(Batch(deletes=document_ranges(document)))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Read any keys of one kind, in any order, possibly twice."""
        there = sorted(key for key, records in self.expected.items() if len(records) == len(LAYOUTS))
        if not there:
            return
        wanted = data.draw(st.lists(st.sampled_from(there), max_size=12))
        out = rows(len(wanted))
        self.opened.read(wanted, LAYOUTS, out)
        for row, key in enumerate(wanted):
            found = [field[row].tobytes() for field in out]
            assert found == [record.payload.tobytes() for record in self.expected[key]], key

    @rule(key=keys)
    def get(self, key: Key) -> None:
        """Get one value, or None; reading a missing key is an error."""
        found = self.opened.get(key)
        if key in self.expected:
            assert same(found, self.expected[key]), key
            return
        assert found is None, key
        try:
            self.opened.read([key], LAYOUTS, rows(1))
        except NotFound:
            return
        raise AssertionError(f"{key} was read, but it does not exist")

    @rule(first=keys, last=keys)
    def list_keys(self, first: Key, last: Key) -> None:
        last = last._replace(table=first.table)
        assert self.opened.keys(first, last) == sorted(key for key in self.expected if first <= key <= last)

    @precondition(lambda self: self.durable)
    @rule()
    def reopen(self) -> None:
        self.opened.close()
        self.store = self.open_store(self.path)

    @precondition(lambda self: self.durable)
    @rule()
    def crash(self) -> None:
        """Continue with a copy of the files as they are now: the state after a process is killed."""
        after = self.path.with_name(str(int(self.path.name) + 1))
        if self.path.is_dir():
            shutil.copytree(self.path, after)
        else:
            shutil.copy(self.path, after)
        self.opened.close()
        self.path = after
        self.store = self.open_store(after)

    @invariant()
    def everything_is_there(self) -> None:
        if self.store is None:
            return
        found = list(self.opened.scan())
        assert [scanned.key for scanned in found] == sorted(self.expected)
        for scanned in found:
            assert scanned.damage is None, scanned.damage
            assert same(scanned.records, self.expected[scanned.key]), scanned.key
        ends = Key(Table.BLOCKS), Key(Table.BLOCKS, MAX_DOCUMENT, MAX_LAYER, MAX_ITEM)
        assert self.opened.keys(*ends) == sorted(key for key in self.expected if key.table == Table.BLOCKS)

    def _write(self, batch: Batch) -> None:
        before, held = self.opened.version(), dict(self.expected)
        self.opened.write(batch)
        self._expect(batch)
        # A batch that changes nothing need not count.
        assert self.opened.version() > before or self.expected == held

    def _expect(self, batch: Batch) -> None:
        for first, last in batch.deletes:
            for key in [key for key in self.expected if first <= key <= last]:
                del self.expected[key]
        self.expected.update(batch.puts)
