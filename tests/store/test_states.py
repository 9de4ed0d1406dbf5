"""Random sequences of changes, on a store and on a dict: they must agree after each."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memstore.errors import NotFound
from memstore.store import Batch, BlockStore, Key, LmdbStore, RamStore, Record, Table
from memstore.testing.stores import LAYOUTS, same, value

KEYS = st.builds(
    Key,
    st.sampled_from([Table.META, Table.TOKENS, Table.BLOCKS]),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 20),
)
RANGES = st.tuples(KEYS, KEYS).map(lambda pair: (pair[0], pair[1]._replace(table=pair[0].table)))


class AgainstDict(RuleBasedStateMachine):
    """The rules; subclasses say which store."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.expected: dict[Key, tuple[Record, ...]] = {}
        self.store = self.make()
        self.version = self.store.version()

    def make(self) -> BlockStore:
        raise NotImplementedError

    def reopened(self) -> BlockStore:
        return self.store

    @rule(deletes=st.lists(RANGES, max_size=2), puts=st.lists(st.tuples(KEYS, st.integers(0, 50)), max_size=12))
    def write(self, deletes: list[tuple[Key, Key]], puts: list[tuple[Key, int]]) -> None:
        batch = Batch(deletes=deletes)
        for first, last in deletes:
            self.expected = {key: old for key, old in self.expected.items() if not first <= key <= last}
        for key, seed in puts:
            batch.put(key, *value(seed))
            self.expected[key] = value(seed)
        self.store.write(batch)

    @rule(document=st.integers(0, 2))
    def delete(self, document: int) -> None:
        self.store.delete(document)
        self.expected = {k: old for k, old in self.expected.items() if k.document != document or k.table == Table.META}

    @rule(keys=st.lists(KEYS, min_size=1, max_size=5))
    def read(self, keys: list[Key]) -> None:
        out = [np.zeros((len(keys), layout.nbytes), np.uint8) for layout in LAYOUTS]
        if not all(key in self.expected for key in keys):
            with pytest.raises(NotFound):
                self.store.read(keys, LAYOUTS, out)
            return
        self.store.read(keys, LAYOUTS, out)
        for row, key in enumerate(keys):
            assert out[0][row].tobytes() == self.expected[key][0].payload.tobytes()

    @rule(ends=RANGES)
    def list_keys(self, ends: tuple[Key, Key]) -> None:
        assert self.store.keys(*ends) == sorted(key for key in self.expected if ends[0] <= key <= ends[1])

    @rule()
    def reopen(self) -> None:
        self.store = self.reopened()

    @invariant()
    def holds_the_same(self) -> None:
        found = list(self.store.scan())
        assert [scanned.key for scanned in found] == sorted(self.expected)
        assert all(same(scanned.records, self.expected[scanned.key]) for scanned in found)
        assert self.store.version() >= self.version
        self.version = self.store.version()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


class RamAgainstDict(AgainstDict):
    def make(self) -> BlockStore:
        return RamStore()


class LmdbAgainstDict(AgainstDict):
    length = 1

    def make(self) -> BlockStore:
        return LmdbStore.create(self.folder / "m", blocks_per_value=self.length)

    def reopened(self) -> BlockStore:
        self.store.close()
        return LmdbStore.open(self.folder / "m")


class PackedAgainstDict(LmdbAgainstDict):
    length = 8


# Timings of a shared disk say nothing about the store.
FEW = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

for _machine in (RamAgainstDict, LmdbAgainstDict, PackedAgainstDict):
    _machine.TestCase.settings = FEW
TestRam = RamAgainstDict.TestCase
TestLmdb = LmdbAgainstDict.TestCase
TestPacked = PackedAgainstDict.TestCase
