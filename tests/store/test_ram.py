from pathlib import Path

from memstore.store import BlockStore, RamStore
from memstore.testing.stores import StoreTests


class TestRamStore(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return RamStore()
