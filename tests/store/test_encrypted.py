"""Encrypted stores: the contract of all stores, and what a ciphertext is bound to."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from memstore.errors import DamagedError, ReadOnlyMemory, WrongKey
from memstore.store import Batch, BlockStore, Key, LmdbStore, RamStore, Record, Table, ZarrStore
from memstore.store.contract import document_ranges
from memstore.store.encrypted import NONCE, EncryptedStore
from memstore.store.encryption_keys import KEYS_NAME, KeyTable, MasterKey, owners_told
from memstore.testing.stores import StoreTests, block, put_blocks, same, value

KEY = MasterKey(bytes(range(32)))


def open_encrypted(path: Path, kind: type[LmdbStore] | type[ZarrStore] = LmdbStore) -> EncryptedStore:
    made = path.exists()
    store: BlockStore
    if kind is ZarrStore:
        store = (ZarrStore.open if made else ZarrStore.create)(path, shard_bytes=300)
    else:
        store = LmdbStore.open(path) if made else LmdbStore.create(path, blocks_per_value=3)
    return EncryptedStore(store, (KeyTable.open if made else KeyTable.create)(path, KEY))


class EncryptedStoreTests(StoreTests):
    def test_scan_is_a_snapshot(self, store: BlockStore) -> None:
        """Without the values of a document that was deleted since: its key is destroyed."""
        for document in (1, 2):
            put_blocks(store, range(3), document=document)
        scan = store.scan()
        next(scan)
        put_blocks(store, range(3, 6), document=2)
        store.delete(1)
        assert [(scanned.key.document, scanned.key.item) for scanned in scan] == [(2, item) for item in range(3)]


class TestEncryptedRamStore(EncryptedStoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return EncryptedStore(RamStore(), KeyTable.create(None, KEY))


class TestEncryptedLmdbStore(EncryptedStoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return open_encrypted(path)


class TestEncryptedZarrStore(EncryptedStoreTests):
    def open_store(self, path: Path) -> BlockStore:
        return open_encrypted(path, ZarrStore)


@pytest.mark.parametrize(
    "other",
    [
        block(1),
        block(0, document=2),
        block(0, layer=1),
        Key(Table.LANDMARKS, 1, 0, 0),
    ],
)
def test_a_ciphertext_is_refused_in_another_place(other: Key) -> None:
    inner = RamStore()
    store = EncryptedStore(inner, KeyTable.create(None, KEY))
    store.write(Batch(puts=[(block(0), value(0)), (other, value(1))]))
    first, second = inner.get(block(0)), inner.get(other)
    assert first
    assert second
    inner.write(Batch(puts=[(block(0), second), (other, first)]))  # the store below writes right checksums
    for key in (block(0), other):
        with pytest.raises(DamagedError, match="was moved here from another place"):
            store.get(key)
    assert [scanned.damage is None for scanned in store.scan()] == [False, False]


def test_the_records_of_a_value_cannot_be_exchanged_shortened_or_told_otherwise() -> None:
    inner = RamStore()
    store = EncryptedStore(inner, KeyTable.create(None, KEY))
    alike = value(0)[0], value(1)[0]
    store.write(Batch(puts=[(block(0), alike)]))
    a, b = inner.get(block(0)) or ()
    flat = a.payload.copy()
    flat[-3] ^= 1  # of the layout, which lies in the open
    for records in ((b, a), (a,), (a._replace(payload=flat), b)):
        inner.write(Batch(puts=[(block(0), records)]))
        with pytest.raises(DamagedError):
            store.get(block(0))
    inner.write(Batch(puts=[(block(0), (a, b))]))
    assert same(store.get(block(0)), alike)


def test_ciphertext_of_another_memory_is_refused() -> None:
    stores = [RamStore(), RamStore()]
    one, other = (EncryptedStore(inner, KeyTable.create(None, KEY)) for inner in stores)
    put_blocks(one, range(1))
    put_blocks(other, range(1))
    stores[1].write(Batch(puts=[(block(0), stores[0].get(block(0)) or ())]))
    with pytest.raises(DamagedError, match="was moved here from another place"):
        other.get(block(0))


def nonces(path: Path) -> list[bytes]:
    store = LmdbStore.open(path, read_only=True)
    found = [each.payload[:NONCE].tobytes() for scanned in store.scan() for each in scanned.records]
    store.close()
    return found


def test_no_nonce_comes_again_after_a_rollback(tmp_path: Path) -> None:
    """The same values are written twice from the same files: nothing in the files says which nonce is next."""
    store = open_encrypted(tmp_path / "m")
    put_blocks(store, range(20))
    store.close()
    shutil.copytree(tmp_path / "m", tmp_path / "earlier")
    for path in (tmp_path / "m", tmp_path / "earlier"):
        store = open_encrypted(path)
        put_blocks(store, range(20, 40))
        store.close()
    later, again = nonces(tmp_path / "m"), nonces(tmp_path / "earlier")
    assert len(set(later)) == len(later) == 80
    assert len(set(later) & set(again)) == 40  # those of the 20 blocks of before
    assert len(set(again)) == 80


def test_a_number_without_values_has_no_key(tmp_path: Path) -> None:
    """Its older values, put back below, cannot be read any more; a new value under the number has a new key."""
    store = open_encrypted(tmp_path / "m")
    put_blocks(store, range(4), document=1)
    put_blocks(store, range(4), document=2)
    store.close()
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    store = open_encrypted(tmp_path / "m")
    store.write(Batch(deletes=document_ranges(1)))
    assert store.table.owners() == {2}
    store.close()
    entry = (tmp_path / "copy" / KEYS_NAME).read_bytes()[64:128]
    assert entry not in (tmp_path / "m" / KEYS_NAME).read_bytes()
    shutil.copy(tmp_path / "m" / KEYS_NAME, tmp_path / "copy" / KEYS_NAME)
    old = open_encrypted(tmp_path / "copy")
    with pytest.raises(DamagedError, match="the wrapped key of number 1 is missing or damaged"):
        old.get(block(0, document=1))
    assert same(old.get(block(0, document=2)), value(0))
    old.close()


def test_a_key_that_a_kill_left_goes_with_the_next_write(tmp_path: Path) -> None:
    """Not with the next opening: the data file may be an older copy, which does not show what has keys."""
    store = open_encrypted(tmp_path / "m")
    put_blocks(store, range(2), document=1)
    store.table.add([7])  # a writer was killed before its commit
    store.close()
    again = open_encrypted(tmp_path / "m")
    assert again.table.owners() == {1, 7}
    put_blocks(again, range(2, 3), document=1)
    assert again.table.owners() == {1}
    put_blocks(again, range(1), document=8)  # takes its place
    again.close()
    assert owners_told(tmp_path / "m") == {1, 8}
    assert (tmp_path / "m" / KEYS_NAME).stat().st_size == 3 * 64


def test_values_whose_key_is_lost_get_no_new_one(tmp_path: Path) -> None:
    """Else a copy of the file of keys would not bring them back."""
    store = open_encrypted(tmp_path / "m")
    put_blocks(store, range(2), document=1)
    store.close()
    keys = tmp_path / "m" / KEYS_NAME
    whole = keys.read_bytes()
    keys.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    store = open_encrypted(tmp_path / "m")
    with pytest.raises(DamagedError, match="Restore keys from a copy"):
        put_blocks(store, range(2, 3), document=1)
    store.close()
    keys.write_bytes(whole)
    assert same(open_and_get(tmp_path / "m", block(1, document=1)), value(1))


def test_a_deletion_whose_key_cannot_be_destroyed_is_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_encrypted(tmp_path / "m")
    for document in (1, 2):
        put_blocks(store, range(2), document=document)
    (tmp_path / "other").hardlink_to(tmp_path / "m" / KEYS_NAME)
    store.write(Batch(deletes=document_ranges(1)))
    assert "the keys of deleted values were not destroyed" in caplog.text
    assert store.get(block(0, document=1)) is None
    with pytest.raises(ReadOnlyMemory, match="hard links"):
        store.compact()
    (tmp_path / "other").unlink()
    store.write(Batch())
    assert store.table.owners() == {2}
    store.close()


def test_an_entry_that_was_half_written_is_none(tmp_path: Path) -> None:
    store = open_encrypted(tmp_path / "m")
    put_blocks(store, range(2), document=1)
    store.table.add([2])
    store.close()
    keys = tmp_path / "m" / KEYS_NAME
    whole = keys.read_bytes()
    for left in range(128, 192):
        keys.write_bytes(whole[:left])
        again = open_encrypted(tmp_path / "m")
        assert again.table.owners() == {1}
        again.write(Batch(deletes=document_ranges(2)))  # those of the round before
        put_blocks(again, range(2), document=2)
        again.close()
        assert owners_told(tmp_path / "m") == {1, 2}
        assert same(open_and_get(tmp_path / "m", block(1, document=2)), value(1))


def open_and_get(path: Path, key: Key) -> tuple[Record, ...] | None:
    store = open_encrypted(path)
    try:
        return store.get(key)
    finally:
        store.close()


def test_the_key_is_changed_and_no_value_is_written(tmp_path: Path) -> None:
    store = open_encrypted(tmp_path / "m")
    put_blocks(store, range(10))
    data = (tmp_path / "m" / "data.mdb").read_bytes()
    other = MasterKey(bytes(32))
    store.table.change_key(other)
    assert (tmp_path / "m" / "data.mdb").read_bytes() == data
    put_blocks(store, range(10, 20), document=3)
    store.close()
    with pytest.raises(WrongKey):
        KeyTable.open(tmp_path / "m", KEY)
    again = EncryptedStore(LmdbStore.open(tmp_path / "m"), KeyTable.open(tmp_path / "m", other))
    assert same(again.get(block(3)), value(3))
    assert same(again.get(block(13, document=3)), value(13))
    again.close()


def test_reading_into_rows_with_gaps_gives_the_bytes_that_were_written() -> None:
    store = EncryptedStore(RamStore(), KeyTable.create(None, KEY))
    put_blocks(store, range(5))
    layouts = [record.layout for record in value(0)]
    wide = [np.zeros((5, layout.nbytes + 7), np.uint8) for layout in layouts]
    store.read([block(item) for item in range(5)], layouts, [each[:, 3:-4] for each in wide])
    for item in range(5):
        assert [each[item, 3:-4].tobytes() for each in wide] == [record.payload.tobytes() for record in value(item)]
        assert not any(each[item, :3].any() or each[item, -4:].any() for each in wide)
