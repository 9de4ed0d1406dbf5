"""An older value is never taken for the one that was written last: who reads meets an error, and a scan names it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from memstore.errors import DamagedError, ForeignMemory
from memstore.store import Batch, BlockStore, Layout, LmdbStore, Record, Table, ZarrStore
from memstore.store.records import encode_value
from memstore.store.zarr.tail import Tail
from memstore.testing.stores import LAYOUTS, block, put_blocks, rows, value

PAGE = 4096  # bytes
GENERATIONS = 4  # a page is written anew after two
SIZES = {"on a page of the tree": 100, "on pages of their own": 9_000}


def content(number: int, nbytes: int) -> tuple[Record, ...]:
    return (Record(Layout("uint8", (nbytes,)), np.full(nbytes, number, np.uint8)),)


def put(store: BlockStore, generation: int, nbytes: int, items: Iterable[int] = range(8)) -> None:
    store.write(Batch(puts=[(block(item), content(10 * item + generation, nbytes)) for item in items]))


def roll_back(path: Path, older: bytes, page: int) -> bool:
    """Give back the content that a page had before; False where it is the same."""
    span = slice(page * PAGE, (page + 1) * PAGE)
    with (path / "data.mdb").open("r+b") as file:
        file.seek(span.start)
        changed = file.read(PAGE) != older[span]
        file.seek(span.start)
        file.write(older[span])
    return changed


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_no_page_that_is_rolled_back_brings_an_older_value(tmp_path: Path, nbytes: int, length: int) -> None:
    """Each page alone, to what it held one, two, ... commits ago."""
    path, older = tmp_path / "m", []
    with closing(LmdbStore.create(path, blocks_per_value=length)) as store:
        for generation in range(GENERATIONS):
            put(store, generation, nbytes)
            older.append((path / "data.mdb").read_bytes())
    now = older.pop()
    expected = [content(10 * item + GENERATIONS - 1, nbytes)[0].payload.tobytes() for item in range(8)]
    found = 0
    for data in older:
        for page in range(2, len(data) // PAGE):
            if not roll_back(path, data, page):
                continue
            try:
                with closing(LmdbStore.open(path, read_only=True)) as store:
                    damaged = {scanned.key for scanned in store.scan() if scanned.damage}
                    for item in range(8):
                        try:
                            records = store.get(block(item))
                        except DamagedError:
                            assert block(item) in damaged
                        else:
                            assert records is not None
                            assert records[0].payload.tobytes() == expected[item]
                    found += bool(damaged)
            except DamagedError:
                found += 1
            (path / "data.mdb").write_bytes(now)
    assert found > 4


def test_an_older_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with closing(LmdbStore.create(path)) as store:
        put(store, 0, 9_000)
        older = [bytes(each or b"") for _, each in store._env.begin().cursor()]
        put(store, 1, 9_000)
    data = (path / "data.mdb").read_bytes()
    newer = content(31, 9_000)[0].payload.tobytes()
    place = data.index(newer, data.index(newer[:1] * 9_000)) - 96
    with (path / "data.mdb").open("r+b") as file:  # block 3 as it was before, where its value lies now
        file.seek(place)
        file.write(next(each for each in older if each[96:].startswith(content(30, 9_000)[0].payload.tobytes())))
    with closing(LmdbStore.open(path)) as store:
        words = "block 3 is damaged: it is older than the value written last"
        layouts = (Layout("uint8", (9_000,)),)
        for read in (
            lambda: store.get(block(3)),
            lambda: store.gather([block(3)], layouts),
            lambda: store.checksums([block(3)]),
        ):
            with pytest.raises(DamagedError, match=words):
                read()
        assert store.get(block(2)) is not None
        (damage,) = [scanned for scanned in store.scan() if scanned.damage]
        assert damage.key == block(3)
        put(store, 2, 9_000, [3])
        assert all(scanned.damage is None for scanned in store.scan())


@pytest.mark.parametrize("length", [1, 8])
def test_what_was_verified_once_is_not_taken_for_its_successor(tmp_path: Path, length: int) -> None:
    """The bytes are known to be whole from the first reading, and not current any more."""
    path = tmp_path / "m"
    with closing(LmdbStore.create(path, blocks_per_value=length)) as store:
        put_blocks(store, range(4))
        keys = [block(item) for item in range(4)]
        store.read(keys, LAYOUTS, rows(4))
        store.write(Batch(puts=[(block(2), value(102))]))
        with store._env.begin(write=True, buffers=True) as txn:
            place = store.values._naming.find(txn.cursor(), store.values._naming.run(block(2)).to_bytes())
            assert place is not None
            whole = bytes(txn.get(place) or b"")
            older = whole.replace(_written(value(102), 2), _written(value(2), 2))
            assert older != whole
            txn.put(place, older)
        with pytest.raises(DamagedError, match="older than the value"):
            store.read(keys, LAYOUTS, rows(4))


def _written(records: tuple[Record, ...], item: int) -> bytes:
    return encode_value(block(item), records)


def test_a_commit_that_others_made_behind_its_back_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with closing(LmdbStore.create(path)) as store:
        put_blocks(store, range(3))
        with store._env.begin(write=True) as txn:
            key = next(key for key in txn.cursor().iternext(values=False) if key[0] == Table.BLOCKS)
            txn.delete(key)
    with pytest.raises(DamagedError, match="other values than the last commit wrote"):
        LmdbStore.open(path)


def test_a_copy_that_lmdb_has_compacted_is_sound(tmp_path: Path) -> None:
    with closing(LmdbStore.create(tmp_path / "m")) as store:
        for item in range(5):
            put_blocks(store, range(item + 1))
        (tmp_path / "copy").mkdir()
        store._env.copy(str(tmp_path / "copy"), compact=True)
    for count in (5, 6):
        with closing(LmdbStore.open(tmp_path / "copy")) as store:
            assert len(store.keys(block(0), block(100))) == count
            assert all(scanned.damage is None for scanned in store.scan())
            put_blocks(store, range(6))


@pytest.mark.parametrize("kind", [LmdbStore, ZarrStore])
def test_memories_of_format_1_go_on_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[LmdbStore | ZarrStore]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(LmdbStore, "_formats", (1,))
        patched.setattr(Tail, "_formats", (1001,))
        with closing(kind.create(tmp_path / "m", blocks_per_value=4)) as store:
            put_blocks(store, range(6))
    with closing(kind.open(tmp_path / "m")) as store:
        put_blocks(store, range(4, 12))
        store.write(Batch(deletes=[(block(1), block(2))]))
        store.compact()
        assert [key.item for key in store.keys(block(0), block(100))] == [0, *range(3, 12)]
        assert all(scanned.damage is None for scanned in store.scan())
    monkeypatch.setattr(LmdbStore, "_formats", (1,))  # which is all that an older memstore knows
    monkeypatch.setattr(Tail, "_formats", (1001,))
    with closing(kind.open(tmp_path / "m", read_only=True)) as store:
        found = rows(8)
        store.read([block(item) for item in range(4, 12)], LAYOUTS, found)
        assert [row.tobytes() for row in found[0]] == [value(item)[0].payload.tobytes() for item in range(4, 12)]


def test_an_older_memstore_says_that_a_newer_one_wrote_a_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(LmdbStore.create(tmp_path / "m")) as store:
        put_blocks(store, range(300))
    monkeypatch.setattr(LmdbStore, "_formats", (1,))
    with pytest.raises(ForeignMemory, match=r"newer memstore \(format 3\); upgrade"):
        LmdbStore.open(tmp_path / "m")
