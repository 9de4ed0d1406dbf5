"""A state machine that checks a block store against a dict; it needs Hypothesis.

    class MyMachine(StoreMachine):
        def open_store(self, path): return MyStore(path)

    TestMyMachine = MyMachine.TestCase

``open_store`` makes the store at ``path`` or opens the one that is there, as in ``StoreTests``. Hypothesis finds short
sequences of changes after which the store and the dict disagree.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memstore.errors import NotFound
from memstore.store import Batch, BlockStore, Key, Layout, Record, Table
from memstore.store.contract import document_ranges
from memstore.store.records import MAX_DOCUMENT, MAX_ITEM, MAX_LAYER
from memstore.testing.stores import LAYOUTS, rows, same, value

ITEMS = 24
OTHER = (Layout("uint8", (7,)),)
"""Layout of what is now and then put in the place of a value of ``LAYOUTS``."""

documents = st.integers(1, 2)
layers = st.integers(0, 1)
items = st.integers(0, ITEMS - 1)
seeds = st.integers(0, 2**16)
tables = st.sampled_from([Table.BLOCKS, Table.BLOCKS, Table.TOKENS])
keys = st.builds(Key, tables, documents, layers, items)


class StoreMachine(RuleBasedStateMachine):
    """Puts, deletions, reads, reopening and crashes, in any order."""

    def open_store(self, path: Path) -> BlockStore:
        """Make the store at ``path`` or open the one that is there. Subclasses say how."""
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
        """Consecutive items, wherever they lie."""
        self._write(
            Batch(puts=[(key._replace(item=key.item + number), value(seed + number)) for number in range(count)])
        )

    @rule(document=documents, layer=layers, count=st.integers(1, 9), seed=seeds)
    def append(self, document: int, layer: int, count: int, seed: int) -> None:
        """Blocks after the last one, as a document grows; the last one is written again."""
        there = [key.item for key in self.expected if key[:3] == (Table.BLOCKS, document, layer)]
        start = max(there, default=0)
        self._write(
            Batch(puts=[(Key(Table.BLOCKS, document, layer, start + n), value(seed + n)) for n in range(count)])
        )

    @rule(key=keys, seed=st.integers(0, 255))
    def put_another_layout(self, key: Key, seed: int) -> None:
        payload = value(seed)[0].payload[:7]
        self._write(Batch(puts=[(key, (Record(OTHER[0], payload),))]))

    @rule(first=keys, last=keys)
    def delete_a_range(self, first: Key, last: Key) -> None:
        """From one key to another of the same table; nothing if they are the wrong way round."""
        self._write(Batch(deletes=[(first, last._replace(table=first.table))]))

    @rule(document=documents, layer=layers, item=items, count=st.integers(0, 9), seed=seeds)
    def truncate_and_append(self, document: int, layer: int, item: int, count: int, seed: int) -> None:
        """In one batch: the end of a layer goes, and other blocks take its place."""
        first = Key(Table.BLOCKS, document, layer, item)
        batch = Batch(deletes=[(first, first._replace(item=MAX_ITEM))])
        for number in range(count):
            batch.put(first._replace(item=item + number), *value(seed + number))
        self._write(batch)

    @rule(document=documents, layer=layers, item=items)
    def leave(self, document: int, layer: int, item: int) -> None:
        """The oldest blocks go, as when a document has reached its capacity."""
        last = Key(Table.BLOCKS, document, layer, item)
        self._write(Batch(deletes=[(last._replace(item=0), last)]))

    @rule(document=documents)
    def delete_a_document(self, document: int) -> None:
        self.opened.delete(document)
        self._expect(Batch(deletes=document_ranges(document)))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Any keys of one kind, in any order, twice if need be."""
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
        """One value, or None; to read what is not there is an error."""
        found = self.opened.get(key)
        if key in self.expected:
            assert same(found, self.expected[key]), key
            return
        assert found is None, key
        try:
            self.opened.read([key], LAYOUTS, rows(1))
        except NotFound:
            return
        raise AssertionError(f"{key} was read and does not exist")

    @rule(first=keys, last=keys)
    def list_keys(self, first: Key, last: Key) -> None:
        """A range of keys, in order."""
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
        """Go on with the files as they are now, which is what a process that is killed now leaves behind."""
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
