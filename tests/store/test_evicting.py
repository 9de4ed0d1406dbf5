"""A batch and what is evicted for it are one commit: all of it is there, or none."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore.errors import StoreFull
from memstore.store import Batch, BlockStore, LmdbStore, RamStore, ZarrStore
from memstore.store.contract import document_ranges
from memstore.testing.stores import BLOCKS, block, put_blocks, value

DOCUMENTS = (1, 2, 3)
BLOCKS_EACH = 200
SHARD_BYTES = 160  # four blocks

STORES: dict[str, Callable[[Path], BlockStore]] = {
    "ram": lambda _: RamStore(),
    "lmdb": LmdbStore.create,
    "zarr": lambda path: ZarrStore.create(path, shard_bytes=SHARD_BYTES),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    store = STORES[request.param](tmp_path / "m")
    fill(store)
    yield store
    store.close()


def fill(store: BlockStore) -> None:
    for document in DOCUMENTS:
        put_blocks(store, range(BLOCKS_EACH), document=document)


def appended(blocks: int = BLOCKS_EACH) -> Batch:
    return Batch(puts=[(block(item, document=9), value(item)) for item in range(blocks)])


def evictions() -> Iterator[Batch]:
    return (Batch(deletes=document_ranges(document)) for document in DOCUMENTS)


def documents(store: BlockStore) -> list[int]:
    keys = store.keys(*BLOCKS)
    there = sorted({key.document for key in keys})
    assert keys == [block(item, document=document) for document in there for item in range(BLOCKS_EACH)]
    assert not any(scanned.damage for scanned in store.scan())
    return there


def test_as_many_go_as_are_needed(store: BlockStore) -> None:
    limit = store.used_bytes()
    assert store.write_within(appended(), 2 * limit, evictions()) == 0
    assert documents(store) == [1, 2, 3, 9]
    store.delete(9)
    gone = store.write_within(appended(), limit, evictions())
    assert gone in (1, 2)  # blocks that are not sealed yet take more than those that were
    assert documents(store) == [*DOCUMENTS[gone:], 9]
    assert store.used_bytes() <= limit


def test_where_all_are_not_enough_nobody_goes(store: BlockStore) -> None:
    batch = appended()
    batch.delete(block(0, document=9))  # a batch that deletes is tried again with the reserve of the disk
    with pytest.raises(StoreFull, match="has no room for this batch"):
        store.write_within(batch, store.used_bytes() // 20, evictions())
    assert documents(store) == [1, 2, 3]
    store.write(appended())
    assert documents(store) == [1, 2, 3, 9]


DIES = """
import os, sys
from pathlib import Path
from tests.store.test_evicting import STORES, appended, evictions, fill

def deadly():
    yield next(evictions())
    os.kill(os.getpid(), 9)

store = STORES[sys.argv[1]](Path(sys.argv[2]))
fill(store)
store.write_within(appended(), store.used_bytes() // 2, deadly())
"""


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_killed_between_two_evictions_nobody_has_gone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m"
    done = subprocess.run([sys.executable, "-c", DIES, kind, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store: BlockStore = LmdbStore.open(path) if kind == "lmdb" else ZarrStore.open(path, shard_bytes=SHARD_BYTES)
    assert documents(store) == [1, 2, 3]
    if kind == "zarr":
        assert len(list((path / "blocks").rglob("c.*"))) == 2 * 3 * ((BLOCKS_EACH - 1) // 4)
    store.close()


def test_a_disk_that_is_full_at_first_evicts_no_more_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction is tried again with the room of the reserve, and does then what it would have done at first."""
    store = LmdbStore.create(tmp_path / "m")
    fill(store)
    attempts: list[int] = []
    attempt = store._attempt

    def full_once(deletes: Any, puts: Any, then: Any, needed: int) -> None:
        def full(txn: Any) -> None:
            then(txn)
            attempts.append(1)
            if len(attempts) == 1:
                raise StoreFull("no room")

        attempt(deletes, puts, full, needed)

    monkeypatch.setattr(store, "_attempt", full_once)
    batch = appended()
    batch.delete(block(0, document=8))
    assert store.write_within(batch, store.used_bytes() * 5 // 4, evictions()) == 1
    assert len(attempts) == 2
    assert documents(store) == [2, 3, 9]
    store.close()
