"""A store that encrypts every record of another store: AES-256-GCM, under the key of the record's owner.

A record in the store below is bytes: a nonce of 12, the ciphertext, a tag of 16, and the unencrypted layout of the
record. The tag also covers the layout and facts that are not stored: the memory, the key (table, owner, layer, item),
and the number of the record. So a ciphertext at another place is refused. The store below has checksums of the
ciphertext, so they can be verified without a key.

Nonces are random (``os.urandom``, from the system, not from the state of a process). None follows from the content of
the disk or of memory, so no crash, rollback or fork repeats one. Two of the 2**32 records that one key may encrypt have
the same nonce with a chance of one in 2**33. So many records need a document of more blocks than can be numbered.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from memstore.errors import DamagedError, MemstoreError, ReadOnlyMemory
from memstore.store.contract import BlockStore, Compaction, Progress
from memstore.store.encryption_keys import KeyTable, lacks_key
from memstore.store.records import (
    DTYPES,
    MAX_DIMENSIONS,
    MAX_DOCUMENT,
    MAX_ITEM,
    MAX_LAYER,
    Batch,
    BlockKeys,
    Bytes,
    Key,
    Layout,
    Record,
    ScannedValue,
    Table,
    check_batch,
    check_layouts,
    check_out,
    damaged,
)

NONCE, TAG = 12, 16
OVERHEAD = NONCE + TAG + 2 + 4 * MAX_DIMENSIONS
"""The most bytes that a record takes in addition to its payload."""
_KIND = struct.Struct("<BB")  # dtype and number of dimensions, after the dimensions
# The table with the fewest keys first.
_SEARCHED = (
    Table.DOCUMENTS, Table.META, Table.RECURRENT, Table.HISTORY, Table.LANDMARKS, Table.TOKENS, Table.BLOCKS,
)  # fmt: skip

logger = logging.getLogger(__name__)


class EncryptedStore(BlockStore):
    """The values of ``inner``, encrypted under the keys of ``table``.

    When the last value of a number is deleted, its key is destroyed: older copies of its values become unreadable.
    """

    def __init__(self, inner: BlockStore, table: KeyTable) -> None:
        self.capabilities = replace(inner.capabilities, reads_rows=False)
        self.read_only = inner.read_only
        self.table = table
        self._inner = inner
        self._swept = False

    def write(self, batch: Batch) -> None:
        """See ``BlockStore``.

        Keys of new numbers are on disk before it; keys of numbers without values are destroyed after it.
        """
        self._check(batch)
        self._inner.write(sealed(batch, self.table))
        self._release(batch)

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        self._check(batch)
        taken: list[Batch] = []

        def sealed_evictions() -> Iterator[Batch]:
            for eviction in evictions:
                taken.append(eviction)
                yield sealed(eviction, self.table)

        evicted = self._inner.write_within(sealed(batch, self.table), max_bytes, sealed_evictions())
        self._release(batch, *taken)
        return evicted

    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        check_out(keys, layouts, out)
        rows = self._inner.gather(keys, [sealed_layout(layout) for layout in layouts])
        names = keys.to_bytes() if isinstance(keys, BlockKeys) else [key.to_bytes() for key in keys]
        for number, (layout, ciphertexts, payloads) in enumerate(zip(layouts, rows, out, strict=True)):
            told, end = _told(layout), NONCE + layout.nbytes + TAG
            for row, name in enumerate(names):
                place = _place(self.table.identity, name, number, len(layouts), told)
                raw, payload = ciphertexts[row].data, payloads[row].data
                try:  # inlined: calling ``_open`` for each would take a tenth of a gather
                    cipher = self.table.cipher(int.from_bytes(name[1:5], "big"))
                    cipher.decrypt_into(bytes(raw[:NONCE]), raw[NONCE:end], place, payload)
                except self.table.failed:
                    found = Record(sealed_layout(layout), ciphertexts[row])
                    check_layouts(keys[row], [Record(_layout(keys[row], found), found.payload)], [layout])
                    self._open(keys[row], number, len(layouts), layout, found.payload, payloads[row])

    def get(self, key: Key) -> tuple[Record, ...] | None:
        records = self._inner.get(key)
        return None if records is None else self._unless_forgotten(key, records)

    def keys(self, first: Key, last: Key) -> list[Key]:
        return self._inner.keys(first, last)

    def walk(self, first: Key, last: Key) -> Iterator[tuple[Key, tuple[Record, ...]]]:
        for key, records in self._inner.walk(first, last):
            if opened := self._unless_forgotten(key, records):
                yield key, opened

    def scan(self) -> Iterator[ScannedValue]:
        for scanned in self._inner.scan():
            if scanned.damage:
                yield scanned
                continue
            try:
                if opened := self._unless_forgotten(scanned.key, scanned.records):
                    yield ScannedValue(scanned.key, opened, None)
            except DamagedError as error:
                yield ScannedValue(scanned.key, (), error)

    def sync(self) -> None:
        self._inner.sync()

    def size_bytes(self) -> int:
        return self._inner.size_bytes()

    def used_bytes(self) -> int:
        return self._inner.used_bytes()

    def compact(self, progress: Progress | None = None) -> Compaction:
        if not self.read_only:
            self._sweep()
        return self._inner.compact(progress)

    def version(self) -> int:
        return self._inner.version()

    def close(self) -> None:
        self._inner.close()

    def _check(self, batch: Batch) -> None:
        """Raise the errors that ``batch`` would meet, before a key is made for it."""
        if self.read_only:
            raise ReadOnlyMemory("this store is open for reading; open it with mode='a' to write")
        check_batch(batch)
        self._inner.version()  # raises if the store is closed
        for owner in {key.document for key, _ in batch.puts}:
            if owner not in self.table and self._has_values(owner):  # a new key would hide that they need theirs
                raise lacks_key(owner)

    def _unless_forgotten(self, key: Key, records: Sequence[Record]) -> tuple[Record, ...] | None:
        """Decrypt a value; None if a writer has deleted it and its key since it was read. Raises ``DamagedError``."""
        try:
            return self._opened(key, records)
        except DamagedError:
            if key.document in self.table or self._inner.get(key):
                raise
            return None

    def _opened(self, key: Key, records: Sequence[Record]) -> tuple[Record, ...]:
        found = []
        for number, record in enumerate(records):
            layout = _layout(key, record)
            payload = np.empty(layout.nbytes, np.uint8)
            self._open(key, number, len(records), layout, record.payload, payload)
            found.append(Record(layout, payload))
        return tuple(found)

    def _open(self, key: Key, number: int, count: int, layout: Layout, ciphertext: Bytes, out: Bytes) -> None:
        """Decrypt one record into ``out [layout.nbytes]``. Raises ``DamagedError``."""
        told, end = _told(layout), NONCE + layout.nbytes + TAG
        place = _place(self.table.identity, key.to_bytes(), number, count, told)
        nonce, body = ciphertext[:NONCE].tobytes(), ciphertext[NONCE:end].data
        try:
            self.table.cipher(key.document).decrypt_into(nonce, body, place, out.data)
        except self.table.failed:
            if self.read_only and self.table.renewed(key.document):
                self._open(key, number, count, layout, ciphertext, out)
                return
            raise damaged(
                key, "its ciphertext was moved here from another place, or encrypted with another key"
            ) from None

    def _release(self, *batches: Batch) -> None:
        """Destroy the keys of the numbers whose last values the batches have deleted.

        The batches are committed, so errors are logged, and the next write tries again.
        """
        ends = {(first.document, last.document) for batch in batches for first, last in batch.deletes}
        try:
            if not self._swept:
                self._sweep()
            elif ends:
                known = self.table.owners()
                touched = {low for low, high in ends if low == high} & known
                touched |= {owner for low, high in ends if low < high for owner in known if low <= owner <= high}
                self._destroy(touched)
        except MemstoreError as error:
            self._swept = False
            logger.warning("the keys of deleted values were not destroyed; the next write tries again: %s", error)

    def _sweep(self) -> None:
        """Destroy the keys that a killed writer could not destroy.

        Not when the memory is opened: its data file may be an older copy, put here by mistake.
        """
        documents = {key.document for key in self._inner.keys(Key(Table.DOCUMENTS), _last(Table.DOCUMENTS))}
        self._destroy(self.table.owners() - documents)
        self._swept = True

    def _destroy(self, owners: Iterable[int]) -> None:
        self.table.destroy(owner for owner in owners if owner and not self._has_values(owner))

    def _has_values(self, owner: int) -> bool:
        return any(self._inner.keys(Key(table, owner), _last(table, owner)) for table in _SEARCHED)


def sealed(batch: Batch, table: KeyTable) -> Batch:
    """Encrypt the records of ``batch``; new numbers get keys, which are then on disk."""
    table.add(key.document for key, _ in batch.puts)
    nonces = os.urandom(NONCE * sum(len(records) for _, records in batch.puts))
    parts = iter(range(0, len(nonces), NONCE))
    puts = []
    for key, records in batch.puts:
        cipher = table.cipher(key.document)
        ciphertexts = []
        for number, record in enumerate(records):
            start, layout = next(parts), sealed_layout(record.layout)
            told, end = _told(record.layout), NONCE + record.layout.nbytes + TAG
            nonce, payload = nonces[start : start + NONCE], np.empty(layout.nbytes, np.uint8)
            payload[:NONCE] = np.frombuffer(nonce, np.uint8)
            plain = np.ascontiguousarray(record.payload).reshape(-1).view(np.uint8)
            place = _place(table.identity, key.to_bytes(), number, len(records), told)
            cipher.encrypt_into(nonce, plain.data, place, payload[NONCE:end].data)
            payload[end:] = np.frombuffer(told, np.uint8)
            ciphertexts.append(Record(layout, payload))
        puts.append((key, tuple(ciphertexts)))
    return Batch(deletes=list(batch.deletes), puts=puts)


@lru_cache(maxsize=1024)
def sealed_layout(layout: Layout) -> Layout:
    """Return the layout of a record of ``layout`` in the store below."""
    return Layout("uint8", (NONCE + layout.nbytes + TAG + len(_told(layout)),))


@lru_cache(maxsize=1024)
def _told(layout: Layout) -> bytes:
    """Encode a layout as it stands after the tag: dimensions, dtype, number of dimensions."""
    sizes = struct.pack(f"<{len(layout.shape)}I", *layout.shape)
    return sizes + _KIND.pack(DTYPES.index(layout.dtype), len(layout.shape))


def _layout(key: Key, record: Record) -> Layout:
    """Return the layout stated in an encrypted record. Raises ``DamagedError``."""
    raw = record.payload[-OVERHEAD:].tobytes()
    if record.layout.dtype == "uint8" and len(raw) >= NONCE + TAG + _KIND.size:
        dtype, dimensions = _KIND.unpack_from(raw, len(raw) - _KIND.size)
        start = len(raw) - _KIND.size - 4 * dimensions
        if dtype < len(DTYPES) and dimensions <= MAX_DIMENSIONS and start >= 0:
            layout = Layout(DTYPES[dtype], struct.unpack_from(f"<{dimensions}I", raw, start))
            if sealed_layout(layout).nbytes == record.payload.nbytes:
                return layout
    raise damaged(key, "it is not an encrypted record")


def _place(identity: bytes, name: bytes, number: int, count: int, told: bytes) -> bytes:
    """Return what the tag of a record covers in addition to its ciphertext; ``name`` is the record's key."""
    return b"".join((identity, name, bytes((number, count)), told))


def _last(table: Table, owner: int = MAX_DOCUMENT) -> Key:
    return Key(table, owner, MAX_LAYER, MAX_ITEM)
