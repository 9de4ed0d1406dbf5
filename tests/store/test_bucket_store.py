"""The contract of a store, with its shards in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.store import BlockStore, ZarrStore
from memstore.store.zarr.objects import from_url
from memstore.testing.stores import StoreTests
from tests.store.buckets import BUCKET, bucket


@pytest.fixture(scope="module", autouse=True)
def _way() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, bucket(patch):
        yield


class TestZarrStoreInABucket(StoreTests):
    def open_store(self, path: Path) -> BlockStore:
        made = (path / "tail" / "data.mdb").exists()
        shards = from_url(f"s3://{BUCKET}/{path.parent.name}/{path.name}")
        return (ZarrStore.open if made else ZarrStore.create)(path, shards=shards, shard_bytes=300)
