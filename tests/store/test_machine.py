"""The state machine against the stores that memstore brings."""

from pathlib import Path

from hypothesis import settings

from memstore.store import BlockStore, LmdbStore, RamStore, ZarrStore
from memstore.testing.stores import StoreMachine

PATIENCE = settings(max_examples=12, stateful_step_count=20)  # every step on a disk waits for it


class RamMachine(StoreMachine):
    def open_store(self, path: Path) -> BlockStore:
        return RamStore()


class LmdbMachine(StoreMachine):
    def open_store(self, path: Path) -> BlockStore:
        return LmdbStore.open(path) if path.exists() else LmdbStore.create(path, blocks_per_value=4)


class ZarrMachine(StoreMachine):
    shard_bytes = 120  # three blocks

    def open_store(self, path: Path) -> BlockStore:
        if path.exists():
            return ZarrStore.open(path, shard_bytes=self.shard_bytes)
        return ZarrStore.create(path, shard_bytes=self.shard_bytes)


class ZarrMachineOfOneBlockShards(ZarrMachine):
    shard_bytes = 1


TestRamMachine = RamMachine.TestCase
TestRamMachine.settings = settings(max_examples=30, stateful_step_count=20)
TestLmdbMachine = LmdbMachine.TestCase
TestLmdbMachine.settings = PATIENCE
TestZarrMachine = ZarrMachine.TestCase
TestZarrMachine.settings = PATIENCE
TestZarrMachineOfOneBlockShards = ZarrMachineOfOneBlockShards.TestCase
TestZarrMachineOfOneBlockShards.settings = PATIENCE
