"""Erasing takes all that was deleted from LMDB's pages, and nothing else."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb
import numpy as np
import pytest

from benchmarks.torture.processes import run
from memstore.errors import DamagedError, MemoryInUse, ReadOnlyMemory
from memstore.store import Batch, Layout, LmdbStore, Record
from memstore.store.lmdb import pages
from memstore.store.lmdb import store as lmdb_store
from memstore.store.lmdb.values import KEY_BYTES
from memstore.testing.stores import BLOCKS, block, put_blocks, same, value
from tests.faults.read_only import NOBODY

Fill = Callable[[lmdb.Environment], None]


def put(env: lmdb.Environment, items: range, nbytes: int) -> None:
    with env.begin(write=True) as txn:
        for item in items:
            txn.put(item.to_bytes(KEY_BYTES, "big"), item.to_bytes(4, "big") * (nbytes // 4))


def delete(env: lmdb.Environment, items: range) -> None:
    with env.begin(write=True) as txn:
        for item in items:
            txn.delete(item.to_bytes(KEY_BYTES, "big"))


def one_value(env: lmdb.Environment) -> None:
    put(env, range(1), 100)


def deep_tree(env: lmdb.Environment) -> None:
    put(env, range(12_000), 200)


def many_overflow_pages(env: lmdb.Environment) -> None:
    put(env, range(300), 50_000)
    put(env, range(300, 400), 3_000)


def long_free_list(env: lmdb.Environment) -> None:
    put(env, range(2_000), 20_000)
    put(env, range(2_000, 2_010), 20_000)
    delete(env, range(0, 2_000, 2))
    delete(env, range(1, 1_000, 2))


def all_but_one_deleted(env: lmdb.Environment) -> None:
    put(env, range(500), 9_000)
    delete(env, range(1, 500))


def random_changes(env: lmdb.Environment) -> None:
    choose = random.Random(3)
    for _ in range(60):
        start = choose.randrange(400)
        items = range(start, start + choose.randrange(1, 60))
        if choose.random() < 0.4:
            delete(env, items)
        else:
            put(env, items, choose.choice([8, 200, 1_900, 2_500, 4_080, 30_000]))


FILLS = [one_value, deep_tree, many_overflow_pages, long_free_list, all_but_one_deleted, random_changes]


def open_data(folder: Path) -> int:
    return os.open(folder / "data.mdb", os.O_RDWR)


def last_commit(folder: Path) -> int:
    with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as txn:
        return txn.id()


def erase(file: int, commit: int) -> None:
    pages.erase_unused(file, commit, 4096, KEY_BYTES)


def pages_with_remains(data: Path) -> int:
    """Count pages of trees with bytes that are not zero and belong to no node."""
    raw, found = data.read_bytes(), 0
    for number in range(2, len(raw) // 4096):
        page = raw[number * 4096 : (number + 1) * 4096]
        own, _, kind, lower, upper = pages.PAGE.unpack_from(page)
        if own == number and kind in (pages.BRANCH, pages.LEAF):
            found += lower != upper and any(page[lower:upper])
    return found


@pytest.mark.parametrize("fill", FILLS)
def test_erasing_keeps_every_value_and_the_environment_goes_on(tmp_path: Path, fill: Fill) -> None:
    env = lmdb.open(str(tmp_path), map_size=1 << 30)
    fill(env)
    with env.begin() as txn:
        before = list(txn.cursor())
    file = open_data(tmp_path)
    with env.begin(write=True) as txn:
        erase(file, txn.id() - 1)
        assert not pages_with_remains(tmp_path / "data.mdb")
    with env.begin() as txn:
        assert list(txn.cursor()) == before
    put(env, range(1_000), 700)
    delete(env, range(500))
    with env.begin(write=True) as txn:
        erase(file, txn.id() - 1)
    os.close(file)
    with env.begin() as txn:
        found = dict(txn.cursor())
    expected = {key: kept for key, kept in before if int.from_bytes(key, "big") >= 500}
    assert found.keys() >= expected.keys()
    assert all(int.from_bytes(key, "big") < 1_000 or found[key] == kept for key, kept in expected.items())
    env.close()


@pytest.mark.parametrize("place", [10, 16, 40 + 8, 88 + 6, 88 + 8, 88 + 32, 88 + 40, 40, 138])
def test_a_meta_page_that_is_not_as_expected_is_refused(tmp_path: Path, place: int) -> None:
    env = lmdb.open(str(tmp_path), map_size=1 << 30)
    random_changes(env)
    env.close()
    file, commit = open_data(tmp_path), last_commit(tmp_path)
    for number in (0, 1):
        at = number * 4096 + place
        os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 8]), at)
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(DamagedError, match="Nothing was changed"):
        erase(file, commit)
    assert (tmp_path / "data.mdb").read_bytes() == before
    os.close(file)


def test_with_a_damaged_page_nothing_is_erased(tmp_path: Path) -> None:
    """A flipped bit in the header of a page that one of the last two commits uses."""
    env = lmdb.open(str(tmp_path), map_size=1 << 30)
    random_changes(env)
    env.close()
    file, commit = open_data(tmp_path), last_commit(tmp_path)
    whole = (tmp_path / "data.mdb").read_bytes()
    erase(file, commit)
    kept = (tmp_path / "data.mdb").read_bytes()
    choose = random.Random(5)
    starts = {page: kept[page * 4096 : page * 4096 + 12] for page in range(2, len(kept) // 4096)}
    headers = [
        page for page, start in starts.items() if start[:8] == page.to_bytes(8, "little") and start[10] in (1, 2)
    ]
    os.pwrite(file, whole, 0)
    for _ in range(150):
        at = choose.choice(headers) * 4096 + choose.choice([0, 1, 10, 12, 13, 14, 15, 16, 17])
        os.pwrite(file, bytes([whole[at] ^ 1 << choose.randrange(8)]), at)
        damaged = (tmp_path / "data.mdb").read_bytes()
        with pytest.raises(DamagedError):
            erase(file, commit)
        assert (tmp_path / "data.mdb").read_bytes() == damaged
        os.pwrite(file, whole[at : at + 1], at)
    os.close(file)


def large_values(folder: Path) -> list[bytes]:
    env = lmdb.open(str(folder), readonly=True, lock=False)
    with env.begin() as txn:
        values = [bytes(txn.get(item.to_bytes(KEY_BYTES, "big"), b"")) for item in range(6)]
    env.close()
    return values


def test_a_wrong_length_in_the_older_commit_erases_nothing_of_the_newest(tmp_path: Path) -> None:
    """A large value that both commits have: the newest one knows where it ends."""
    env = lmdb.open(str(tmp_path), map_size=1 << 30)
    for round_ in range(3):  # the last two commits have leaves of their own, with the same large values
        with env.begin(write=True) as txn:
            if not round_:
                for item in range(6):
                    txn.put(item.to_bytes(KEY_BYTES, "big"), bytes([item + 1]) * 49_440)
            txn.put((9).to_bytes(KEY_BYTES, "big"), bytes([round_ + 1]))
    env.close()
    file, commit = open_data(tmp_path), last_commit(tmp_path)
    whole = (tmp_path / "data.mdb").read_bytes()
    entry = (49_440).to_bytes(4, "little") + (1).to_bytes(2, "little") + KEY_BYTES.to_bytes(2, "little")
    places = [found.start() for found in re.finditer(re.escape(entry), whole)]
    assert len(places) >= 12, "six values in the leaves of two commits"
    values = large_values(tmp_path)
    assert values == [bytes([item + 1]) * 49_440 for item in range(6)]
    erased = 0
    for place in places:
        os.pwrite(file, whole, 0)
        os.pwrite(file, (16_672).to_bytes(4, "little"), place)
        if large_values(tmp_path) != values:
            continue  # the entry of the newest commit, whose word on a length counts
        with suppress(DamagedError):
            erase(file, commit)
            erased += 1
            assert large_values(tmp_path) == values
    assert erased
    os.close(file)


def test_without_holes_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_punch", lambda file, start, nbytes: False)
    env = lmdb.open(str(tmp_path), map_size=1 << 30)
    put(env, range(100), 9_000)
    delete(env, range(50))
    put(env, range(200, 202), 8)
    put(env, range(202, 204), 8)
    file = open_data(tmp_path)
    with env.begin(write=True) as txn:
        erase(file, txn.id() - 1)
    data = (tmp_path / "data.mdb").read_bytes()
    assert not any(item.to_bytes(4, "big") * 3 in data for item in range(1, 50))
    assert all(item.to_bytes(4, "big") * 3 in data for item in range(50, 100))
    os.close(file)
    env.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m"


def secret(size: int) -> Record:
    """Bytes that nothing else in the file has: a word, over and over."""
    return Record(Layout("uint8", (size,)), np.frombuffer((b"Leviathan" * (size // 9 + 1))[:size], np.uint8))


@pytest.mark.parametrize("blocks_per_value", [1, 8])
def test_what_was_deleted_is_gone_from_the_file(path: Path, blocks_per_value: int) -> None:
    """Also from the ends of pages that others use now: values of all sizes, small ones lie on pages with others."""
    store = LmdbStore.create(path, blocks_per_value=blocks_per_value)
    sizes = [20, 300, 1_500, 2_100, 3_900, 4_500, 30_000]
    for item in range(60):
        store.write(Batch(puts=[(block(item), (secret(sizes[item % 7]),)), (block(item, document=2), value(item))]))
    assert b"Leviathan" in (path / "data.mdb").read_bytes()
    store.delete(1)
    put_blocks(store, range(60, 100), document=2)
    store.write(Batch(puts=[(block(0, document=3), (Record(Layout("uint8", (2_500,)), np.ones(2_500, np.uint8)),))]))
    before = store.size_bytes()
    told: list[tuple[int, int]] = []
    done = store.compact(lambda done, total: told.append((done, total)))
    assert (done.before, done.after) == (before, store.size_bytes())
    assert done.after < before
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)
    data = (path / "data.mdb").read_bytes()
    assert b"Leviathan" not in data
    assert b"hanLevi" not in data
    assert not any(scanned.damage for scanned in store.scan())
    put_blocks(store, range(100, 200), document=2)
    store.close()
    store = LmdbStore.open(path)
    assert all(same(store.get(block(item, document=2)), value(item)) for item in range(200))
    store.close()


def test_compacting_again_and_again_takes_nothing(path: Path) -> None:
    store = LmdbStore.create(path)
    for item in range(40):
        put_blocks(store, range(item, item + 20))
        store.write(Batch(deletes=[(block(item), block(item))]))
        store.compact()
        assert [key.item for key in store.keys(*BLOCKS)] == list(range(item + 1, item + 20))
        assert all(same(store.get(key), value(key.item)) for key in store.keys(*BLOCKS))
    sizes = [store.compact().after for _ in range(3)]
    assert len(set(sizes)) == 1
    store.close()


def test_a_reader_of_an_older_commit_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_store, "READER_PATIENCE", 0.05)
    store = LmdbStore.create(path)
    put_blocks(store, range(50))
    scan = store.scan()
    next(scan)
    store.delete(1)
    with pytest.raises(MemoryInUse, match=f"nothing was erased: process {os.getpid()}"):
        store.compact()
    assert len([scanned for scanned in scan if scanned.damage is None]) == 49
    store.compact()
    store.close()


def test_a_reader_cannot_compact(path: Path) -> None:
    LmdbStore.create(path).close()
    store = LmdbStore.open(path, read_only=True)
    with pytest.raises(ReadOnlyMemory):
        store.compact()
    store.close()


READER = """
import sys
from memstore.store import LmdbStore
from memstore.testing.stores import BLOCKS, same, value
store = LmdbStore.open(sys.argv[1], read_only=True)
print("ready", flush=True)
reads = 0
while True:
    keys = store.keys(*BLOCKS)
    for key in keys:
        found = store.get(key)
        assert found is None or same(found, value(key.item)), key
    reads += 1
    if store.get(BLOCKS[0]._replace(document=9)) is not None:
        break
print(reads)
"""


def test_readers_in_other_processes_read_on_while_the_file_is_compacted(path: Path) -> None:
    store = LmdbStore.create(path)
    put_blocks(store, range(200))
    command = [sys.executable, "-c", READER, str(path)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for reader in readers:
        assert reader.stdout
        assert reader.stdout.readline() == "ready\n"
    for turn in range(30):
        store.write(Batch(deletes=[(block(turn * 3), block(turn * 3 + 2))]))
        put_blocks(store, range(200 + turn * 3, 203 + turn * 3))
        store.compact()
    store.write(Batch(puts=[(BLOCKS[0]._replace(document=9), value(0))]))
    for reader in readers:
        out, errors = reader.communicate(timeout=60)
        assert reader.returncode == 0, errors
        assert int(out) > 0
    store.close()


def test_a_writer_that_has_lost_its_rights_cannot_erase_and_says_so(path: Path) -> None:
    """What it has open it may write; erasing opens the file once more."""
    for folder in path.parents[:4]:
        folder.chmod(folder.stat().st_mode | 0o755)

    def without_rights(say: Callable[[str], None]) -> None:
        if not os.getuid():
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        store = LmdbStore.create(path / "m")
        put_blocks(store, range(20))
        store.write(Batch(deletes=[(block(0), block(9))]))
        (path / "m" / "data.mdb").chmod(0o444)
        with pytest.raises(ReadOnlyMemory, match="Restore the permission, then compact again"):
            store.compact()
        assert store.get(block(12)) is not None
        (path / "m" / "data.mdb").chmod(0o644)
        store.compact()
        store.close()
        say("erased")

    path.mkdir()
    path.chmod(0o777)
    assert run(without_rights).lines == ["erased"]
