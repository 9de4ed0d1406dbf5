"""What one LMDB transaction shows: values found, copied and verified, or walked over.

Consecutive items of a table share an LMDB value, see ``runs.py``. What changes values is in ``lmdb_changes.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import DamagedError, NotFound
from memstore.store import paging, runs
from memstore.store.checks import MAX_DOCUMENT
from memstore.store.contract import BlockKeys, Bytes, Key, Record, Scanned, Table
from memstore.store.records import ValueReader, damaged, decode_value, describe

STORE_KEY = Key(Table.META, MAX_DOCUMENT + 1)
"""Where the store keeps its own facts, as JSON: out of reach of callers, for no document can have this number."""

KEY = struct.Struct(">BIIQ")  # table, document, layer, item; big-endian: bytes sort as keys do
_MOST_SUMS = 1 << 16  # remembered: about 10 MB
Transaction = Any  # lmdb.Transaction[memoryview]: generic in the stubs only


class Values:
    """Reads in transactions of the LMDB environment in the folder ``path``.

    ``lengths`` are the items per LMDB value, by table: a list that its owner may change.
    """

    def __init__(self, path: Path, lengths: Sequence[int]) -> None:
        self._path = path
        self._lengths = lengths
        # Checksums of whole values that were verified, headers and all, by reader and key: what has the same is the
        # same, and one checksum in place of four and two comparisons of headers is a seventh of a gather.
        self._sums: dict[ValueReader, dict[bytes, int]] = {}

    def run(self, key: Key) -> Key:
        """The key of the LMDB value that ``key`` lies in."""
        return runs.run_start(key, self._lengths[key.table])

    def take(self, txn: Transaction, keys: Sequence[Key], reader: ValueReader, *, waits: bool) -> Bytes:
        """Copies of values, one to each row ``[len(keys), reader.size]``, verified.

        ``waits`` says that the disk will have to be waited for. Raises ``NotFound`` or ``DamagedError``.
        """
        values = np.empty((len(keys), reader.size), np.uint8)
        names = keys.to_bytes() if isinstance(keys, BlockKeys) else [KEY.pack(*key) for key in keys]
        places = names if max(self._lengths) == 1 else [pack(self.run(key)) for key in keys]
        if waits:
            self._fetch(txn, dict(sorted(zip(places, keys, strict=True))))
        known = self._sums.setdefault(reader, {}).get
        flat, size = values.reshape(-1).data, reader.size
        with txn.cursor() as cursor:  # its ``get`` leaves the pages to whoever copies them, a transaction's touches all
            find = cursor.get
            for start, name, place in zip(range(0, len(flat), size), names, places, strict=True):
                view = find(place)
                if view is None or len(view) != size:
                    view = self._part(view, keys[start // size], reader)
                copy = flat[start : start + size]
                copy[:] = view
                if checksum(copy) != known(name):
                    self._verify(txn, copy, keys[start // size], reader)
        return values

    def _verify(self, txn: Transaction, copy: memoryview, key: Key, reader: ValueReader) -> None:
        """Raise the error for a copy that is not, to the last bit, a value of ``key``; remember it if it is one."""
        if not reader.holds(copy, key):
            reader.explain(self._part(txn.get(pack(self.run(key))), key, reader), 0, key)
        sums = self._sums.setdefault(reader, {})
        if len(sums) >= _MOST_SUMS:
            sums.clear()
        sums[pack(key)] = checksum(copy)

    def _part(self, view: memoryview | None, key: Key, reader: ValueReader) -> memoryview:
        """What the LMDB value ``view`` has of ``key``: as many bytes as there should be, yet to be verified."""
        length = self._lengths[key.table]
        start: int | None = 0
        if view is not None and length > 1:
            start = runs.find(view, key, runs.run_start(key, length), length, reader)
        if view is None or start is None:
            raise NotFound(f"there is no {describe(key)} in memory {self._path}")
        if len(view) < start + reader.size or (length == 1 and len(view) > reader.size):
            reader.explain(view, start, key)
        return view[start : start + reader.size]

    def _fetch(self, txn: Transaction, values: Mapping[bytes, Key]) -> None:
        """Let the disk bring all values at once; read one after the other, each would wait for the one before it.

        Also turns an I/O error into one of ours: met in the map, it would end the process.
        """
        with txn.cursor() as cursor:
            # Unlike a transaction's ``get``, a cursor does not touch the pages of what it finds.
            places = [(values[bytes(raw)], *_place(value)) for raw, value in cursor.getmulti(values)]
        for _, address, length in places:
            paging.will_need(address, length)
        for key, address, length in places:
            if not paging.bring(address, length):
                raise damaged(key, "the disk failed to read it (I/O error)")

    def get(self, value: bytes, key: Key) -> tuple[Record, ...] | None:
        """The verified records of ``key``, copied from the LMDB value that it lies in; None where it does not."""
        view = memoryview(value)
        start = next((entry.start for entry in self._entries(view, self.run(key)) if entry.key == key), None)
        return None if start is None else decode_value(view, start, key)[0]

    def checksums(self, txn: Transaction, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        """See ``BlockStore``: those of the headers, which are verified; the payloads are not read."""
        found: dict[Key, tuple[int, ...]] = {}
        for run in dict.fromkeys(map(self.run, keys)):
            value = txn.get(pack(run))
            if value is not None:
                found |= runs.checksums(memoryview(value), run, self._lengths[run.table])
        if missing := [key for key in keys if key not in found]:
            raise NotFound(f"there is no {describe(missing[0])}")
        return [found[key] for key in keys]

    def keys(self, txn: Transaction, first: Key, last: Key) -> list[Key]:
        """Existing keys from ``first`` to ``last``, in order. Raises ``DamagedError``."""
        found: list[Key] = []
        with txn.cursor() as cursor:
            valid = cursor.set_range(pack(self.run(first)))
            while valid and (run := _unpack(cursor.key())) <= last:
                found += [run] if self._lengths[run.table] == 1 else self._items(cursor.value(), run)
                valid = cursor.next()
        return [key for key in found if first <= key <= last]

    def scan(self, txn: Transaction) -> Iterator[Scanned]:
        """Every value, in order, verified, but for the store's own facts; damaged ones are reported, not raised.

        The walk goes from leaf to leaf, a read goes down from the root: a value that a read would not find is damaged
        too. Damage of the tree as a whole is reported under ``STORE_KEY``.
        """
        run, before, met = Key(Table.META), b"", 0
        try:
            with txn.cursor() as cursor:
                for raw, value in cursor:
                    run = _unpack(raw)
                    lost = _lost(txn, before, bytes(raw), value)
                    before, met = bytes(raw), met + 1
                    for scanned in runs.scan(value, run, self._lengths[run.table]):
                        if lost:
                            yield Scanned(scanned.key, (), scanned.damage or damaged(scanned.key, lost))
                        elif scanned.key != STORE_KEY or scanned.damage:
                            yield scanned
                if met != (entries := txn.stat()["entries"]):
                    what = f"the tree of memory {self._path} is damaged: {met} of its {entries} values can be reached"
                    yield Scanned(STORE_KEY, (), DamagedError(what))
        except (lmdb.Error, struct.error, ValueError) as error:
            yield Scanned(run, (), damaged(run, f"behind it the tree cannot be walked: {error}"))

    def _entries(self, view: memoryview, run: Key) -> Iterator[runs.Entry]:
        return runs.entries(view, run, self._lengths[run.table])

    def _items(self, view: memoryview, run: Key) -> list[Key]:
        return [entry.key for entry in self._entries(view, run)]


def pack(key: Key) -> bytes:
    """The key as LMDB has it."""
    return KEY.pack(*key)


def used_bytes(txn: Transaction) -> int:
    """Bytes of the pages of the tree of values, as this transaction sees it."""
    stat = txn.stat()
    return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))


def _unpack(raw: memoryview) -> Key:
    table, document, layer, item = KEY.unpack(raw)
    return Key(Table(table), document, layer, item)


def _lost(txn: Transaction, before: bytes, raw: bytes, value: memoryview) -> str | None:
    """Why reads will not find the value that a walk met at key ``raw``, after key ``before``; None if they will."""
    if raw <= before:
        return "its key is out of order"
    found = txn.get(raw)
    # Both views are of the map, so the same place is the same bytes.
    return None if found is not None and _place(found) == _place(value) else "the tree does not lead to it"


def _place(view: memoryview) -> tuple[int, int]:
    """Address and length in bytes."""
    return np.asarray(view).__array_interface__["data"][0], view.nbytes
