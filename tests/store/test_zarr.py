from __future__ import annotations

from pathlib import Path

from memstore.store import BlockStore, ZarrStore
from memstore.testing.stores import StoreTests

SMALL = 160  # bytes: shards of four blocks of the suite's 40 bytes


def open_zarr(path: Path, shard_bytes: int = SMALL) -> ZarrStore:
    if (path / "tail" / "data.mdb").exists():
        return ZarrStore.open(path, shard_bytes=shard_bytes)
    return ZarrStore.create(path, shard_bytes=shard_bytes)


class TestZarrStore(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return open_zarr(path)


class TestZarrStoreThatSealsNothing(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return open_zarr(path, 1 << 20)
