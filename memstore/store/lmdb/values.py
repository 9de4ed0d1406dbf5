"""The place and the keys of values in LMDB, with their reads and changes in a transaction.

LMDB rounds a value up to pages of 4 KiB, so blocks smaller than a few pages are stored in runs. A run has the values of
several consecutive items in order, each with its own headers and checksums. A run has no header. A table that is not
packed has runs of one item.

The key of a run ends with a check of its last written value. Checksums in a value detect flipped bits, and another
key's value. They do not detect an older value of the same key, which is whole. A disk that loses a write, or a disk
image that is rolled back, leaves such a value in place of the newer one. So the key itself states which value must
follow. The store's facts have the sum of all these checks and the number of the commit: an older page of the tree
changes the sum. Memories of format 1 have neither.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from memstore.errors import DamagedError, ForeignMemory, NotFound
from memstore.store.lmdb import pages as layout
from memstore.store.lmdb.environment import bring, will_need
from memstore.store.records import (
    ALIGNMENT,
    HEADER_BYTES,
    MAGIC,
    MAX_DOCUMENT,
    BlockKeys,
    Bytes,
    Key,
    Numbers,
    Record,
    RecordHeader,
    ScannedValue,
    Table,
    Unreadable,
    ValueReader,
    as_damage,
    check_payload,
    damaged,
    decode_header,
    decode_value,
    describe,
    encode_value,
    encode_with_sums,
    header_sums,
    misplaced,
    padding,
    scan_value,
)

STORE_KEY = Key(Table.META, MAX_DOCUMENT + 1)
"""The key of the store's own facts, as JSON. Callers cannot reach it, because no document can have this number."""

KEY_BYTES = 17
"""A key (``Key.to_bytes``, 13 bytes) and a check of 4 bytes. In format 1 the item has 8 bytes, without a check."""

_STORE_NAME = STORE_KEY.to_bytes()
_NAME_BYTES = len(_STORE_NAME)
_ITEM_AT = 9
_ZEROS = bytes(KEY_BYTES - _NAME_BYTES)
_FORMAT_1 = struct.Struct(">BIIQ")

_MOST_KNOWN = 1 << 16  # remembered values, and header checksums of runs: about 16 MB and 6 MB
_MOST_SEEN = 1 << 19  # remembered verified values whose rows were read: about 50 MB
_MOST_WRITTEN = 1 << 12  # runs whose last state is remembered: under 1 MB
_UNKNOWN = (b"", 0)
_HEAD = 64  # bytes that identify a value: the header of its first record
_MOST_PAGES = 1 << 48
_BEHIND_ALL = b"\xff" * KEY_BYTES  # no table has this number
OLDER = "it is older than the value written last (a write was lost, or rolled back)"
Cursor = Any  # lmdb.Cursor[memoryview]
Transaction = Any  # lmdb.Transaction[memoryview]: generic in the stubs only


class Naming:
    """How the values of one environment are grouped and named, according to the store's facts."""

    def __init__(self) -> None:
        self.lengths = [1] * len(Table)
        """Items per LMDB value, by table."""
        self.checked = True
        """Whether keys have a check: from format 2 on."""

    def run(self, key: Key) -> Key:
        """Return the key of the LMDB value that contains ``key``."""
        length = self.lengths[key.table]
        return Key(key.table, key.document, key.layer, key.item - key.item % length) if length > 1 else key

    def find(self, cursor: Cursor, name: bytes) -> bytes | None:
        """Return the whole key of the value ``name``, and move ``cursor`` to it; None if it is missing."""
        first = self.first(name)
        if not cursor.set_range(first):
            return None
        raw = bytes(cursor.key())
        return raw if raw.startswith(first) else None

    def first(self, name: bytes) -> bytes:
        """Return the common prefix of all whole keys of ``name``; none of them is smaller."""
        return name if self.checked else name[:_ITEM_AT] + _ZEROS + name[_ITEM_AT:]

    def last(self, name: bytes) -> bytes:
        """Return the upper bound of whole keys of ``name``."""
        return self.first(name).ljust(KEY_BYTES, b"\xff")

    def whole(self, name: bytes, sums: Iterable[int]) -> bytes:
        """Return the whole key of a value whose headers have the checksums ``sums``.

        The store's facts have no check, so their key is the same in every format: an older memstore can read the number
        of a newer format.
        """
        return name + check_of(sums) if self.checked else self.first(name)

    def key(self, raw: bytes) -> Key:
        """Return the key without its check. Raises ``ValueError`` for an unknown table."""
        if self.checked:
            return Key.from_bytes(raw[:_NAME_BYTES])
        table, *numbers = _FORMAT_1.unpack(raw)
        return Key(Table(table), *numbers)

    def check(self, raw: bytes) -> int:
        """Return what a whole key adds to the sum of all checks."""
        return int.from_bytes(raw[_NAME_BYTES:], "big") if self.checked else 0

    def holds(self, raw: bytes, sums: Iterable[int]) -> bool:
        """Return whether a value with the header checksums ``sums`` was written last under ``raw``."""
        return not self.checked or raw[_NAME_BYTES:] == check_of(sums) or raw.startswith(_STORE_NAME)

    def checked_value(self, raw: bytes, view: memoryview, run: Key) -> memoryview:
        """Return ``view``, found for ``run`` under ``raw``. Raises ``DamagedError`` if it was not written last."""
        if not self.holds(raw, header_sums(view)):
            for _ in _in_run(view, run, self.lengths[run.table]):  # reports damage in better words
                pass
            raise damaged(run, OLDER)
        return view


def check_of(sums: Iterable[int]) -> bytes:
    """Return the check in a key: the low 32 bits of the sum of all header checksums, which cover the whole value."""
    return (sum(sums) & 0xFFFFFFFF).to_bytes(4, "big")


class Values:
    """Reads in transactions of the LMDB environment in the folder ``path``; its owner may change the ``naming``."""

    def __init__(self, path: Path, naming: Naming) -> None:
        self._path = path
        self._naming = naming
        # Whole keys of verified values, and the checksum of all their bytes with headers, by reader and name. Equal
        # checksums mean equal values: one checksum replaces four and two header comparisons, which saves a seventh of a
        # gather. The whole key says which value it was: another version has another key.
        self._known: dict[ValueReader, dict[bytes, tuple[bytes, int]]] = {}
        self._runs: dict[bytes, frozenset[int]] = {}
        """Header checksums of whole runs that match their keys."""
        self._seen: dict[ValueReader, set[bytes]] = {}
        """Whole keys of verified values whose rows were read."""
        self._run_sums = 0
        """The number of header checksums: runs of small values have hundreds."""

    def take(self, txn: Transaction, keys: Sequence[Key], reader: ValueReader, *, waits: bool) -> Bytes:
        """Return verified copies of values, one in each row ``[len(keys), reader.size]``.

        ``waits`` says that the values must be read from disk first. Raises ``NotFound`` or ``DamagedError``.
        """
        values = np.empty((len(keys), reader.size), np.uint8)
        names = keys.to_bytes() if isinstance(keys, BlockKeys) else [key.to_bytes() for key in keys]
        known = self._known.setdefault(reader, {}).get
        flat, size = values.reshape(-1).data, reader.size
        with txn.cursor() as cursor:  # its ``get`` does not touch the pages, a transaction's touches all
            # Through the map: reading through the file descriptor takes 1.5 times as long if all is in memory.
            if waits:
                self._fetch(cursor, {self._naming.run(key): key for key in sorted(keys, reverse=True)})
            find = cursor.get
            for start, name in zip(range(0, len(flat), size), names, strict=True):
                copy = flat[start : start + size]
                place, total = known(name, _UNKNOWN)
                if place and (view := find(place)) is not None:
                    copy[:] = view if len(view) == size else self._part(view, keys[start // size], reader)
                    if checksum(copy) == total:
                        continue
                self._verify(cursor, copy, name, keys[start // size], reader)
        return values

    def rows(
        self, txn: Transaction, keys: Sequence[Key], reader: ValueReader, which: Numbers, rows: Numbers, *, waits: bool
    ) -> Bytes:
        layout = reader.layouts[0]
        nbytes = layout.nbytes // layout.shape[0]
        out = np.empty((len(rows), nbytes), np.uint8)
        ends = np.searchsorted(which, np.arange(len(keys)), side="right").tolist()
        body = slice(HEADER_BYTES, HEADER_BYTES + layout.nbytes)
        self._known.setdefault(reader, {})
        seen = self._seen.setdefault(reader, set())
        with txn.cursor() as cursor:
            if waits:
                self._fetch(cursor, {key: key for key in keys})
            for number, name in enumerate(keys.to_bytes() if isinstance(keys, BlockKeys) else map(Key.to_bytes, keys)):
                start, end = ends[number - 1] if number else 0, ends[number]
                place = self._naming.find(cursor, name)
                if place is None:
                    raise self._lacks(keys[number])
                if place in seen:
                    view = cursor.value()
                else:
                    copy = memoryview(bytearray(reader.size))
                    self._verify(cursor, copy, name, keys[number], reader)
                    if len(seen) >= _MOST_SEEN:
                        seen.clear()
                    seen.add(place)
                    view = copy
                whole = np.frombuffer(view[body], np.uint8).reshape(-1, nbytes)
                whole.take(rows[start:end], 0, out[start:end], "clip")  # otherwise NumPy makes another copy
        return out

    def _verify(self, cursor: Cursor, copy: memoryview, name: bytes, key: Key, reader: ValueReader) -> None:
        """Copy the value of ``key``; remember it if every bit matches the last written value."""
        place, view = self._place(cursor, key)
        copy[:] = self._part(view, key, reader)
        sums = reader.sums(copy, key)
        if sums is None:
            reader.explain(self._part(view, key, reader), 0, key)
        if not self._is_last(place, view, sums):
            raise damaged(key, OLDER)
        known = self._known[reader]
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[name] = place, checksum(copy)

    def _place(self, cursor: Cursor, key: Key) -> tuple[bytes, memoryview]:
        """Return the whole key and the content of the LMDB value that has ``key``. Raises ``NotFound``."""
        place = self._naming.find(cursor, self._naming.run(key).to_bytes())
        if place is None:
            raise self._lacks(key)
        return place, cursor.value()

    def _lacks(self, key: Key) -> NotFound:
        return NotFound(f"there is no {describe(key)} in memory {self._path}")

    def _is_last(self, place: bytes, view: memoryview, sums: list[int]) -> bool:
        """Return whether headers with the checksums ``sums`` belong to the value last written under ``place``."""
        if self._naming.lengths[place[0]] == 1:
            return self._naming.holds(place, sums)
        known = self._runs.get(place, frozenset())
        if not known.issuperset(sums):  # read once, not again for each of its items
            all_sums = header_sums(view)
            if not self._naming.holds(place, all_sums):
                return False
            if self._run_sums + len(all_sums) > _MOST_KNOWN:
                self._runs.clear()
                self._run_sums = 0
            known = self._runs[place] = frozenset(all_sums)
            self._run_sums += len(all_sums)
        return known.issuperset(sums)

    def _part(self, view: memoryview, key: Key, reader: ValueReader) -> memoryview:
        """Return the expected number of bytes of ``key`` in the LMDB value ``view``, not yet verified."""
        length = self._naming.lengths[key.table]
        start: int | None = 0
        if length > 1:
            start = _find_in_run(view, key, self._naming.run(key), length, reader)
        if start is None:
            raise self._lacks(key)
        if len(view) < start + reader.size or (length == 1 and len(view) > reader.size):
            reader.explain(view, start, key)
        return view[start : start + reader.size]

    def _fetch(self, cursor: Cursor, values: Mapping[Key, Key]) -> None:
        """Read all values from disk at once; one after the other, each would wait for the one before it.

        This also turns an I/O error into one of ours; in the map, it would end the process.
        """
        # Pages of the tree, and pages evicted during warm reads, are not requested: an I/O error there still ends the
        # process.
        places = []
        for run, key in sorted(values.items()):
            # Unlike a transaction's ``get``, a cursor does not touch the pages of a value it finds.
            if (raw := self._naming.find(cursor, run.to_bytes())) and (view := cursor.get(raw)) is not None:
                places.append((key, *_place(view)))
        for _, address, length in places:
            will_need(address, length)
        for key, address, length in places:
            if not bring(address, length):
                raise damaged(key, Unreadable("the disk failed to read it (I/O error)"))

    def value(self, txn: Transaction, run: Key) -> memoryview | None:
        """Return the LMDB value ``run`` as last written; its records are not yet verified. Raises ``DamagedError``."""
        with txn.cursor() as cursor:
            raw = self._naming.find(cursor, run.to_bytes())
            return None if raw is None else self._naming.checked_value(raw, cursor.value(), run)

    def get(self, txn: Transaction, key: Key) -> tuple[Record, ...] | None:
        run = self._naming.run(key)
        view = self.value(txn, run)
        if view is None:
            return None
        if self._naming.lengths[key.table] == 1:
            return _decode(view, key)
        start = next((entry.start for entry in self._entries(view, run) if entry.key == key), None)
        return None if start is None else decode_value(view, start, key)[0]

    def walk(self, txn: Transaction, first: Key, last: Key) -> Iterator[tuple[Key, tuple[Record, ...]]]:
        with txn.cursor() as cursor:
            cursor.set_range(self._naming.first(self._naming.run(first).to_bytes()))
            for raw, view in cursor.iternext() if cursor.key() else ():
                whole = bytes(raw)
                run = self._naming.key(whole)
                if run > last:
                    return
                self._naming.checked_value(whole, view, run)
                if self._naming.lengths[run.table] == 1:
                    yield run, _decode(view, run)
                else:
                    kept = (entry for entry in self._entries(view, run) if first <= entry.key <= last)
                    yield from ((entry.key, decode_value(view, entry.start, entry.key)[0]) for entry in kept)

    def checksums(self, txn: Transaction, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        found: dict[Key, tuple[int, ...]] = {}
        for run in dict.fromkeys(map(self._naming.run, keys)):
            view = self.value(txn, run)
            if view is not None:
                entries = self._entries(view, run)
                found |= {each.key: tuple(header.payload_sum for header in each.headers) for each in entries}
        if missing := [key for key in keys if key not in found]:
            raise NotFound(f"there is no {describe(missing[0])}")
        return [found[key] for key in keys]

    def keys(self, txn: Transaction, first: Key, last: Key) -> list[Key]:
        found: list[Key] = []
        with txn.cursor() as cursor:
            valid = cursor.set_range(self._naming.first(self._naming.run(first).to_bytes()))
            while valid and (run := self._naming.key(bytes(cursor.key()))) <= last:
                single = self._naming.lengths[run.table] == 1
                found += [run] if single else [entry.key for entry in self._entries(cursor.value(), run)]
                valid = cursor.next()
        return [key for key in found if first <= key <= last]

    def scan(self, txn: Transaction) -> Iterator[ScannedValue]:
        """Yield every value in order, verified, except the store's own facts; damage is reported, not raised.

        The walk goes from leaf to leaf, a read goes down from the root: a value that a read would not find is damaged
        too. Damage of the tree as a whole is reported under ``STORE_KEY``.
        """
        run, before, met = Key(Table.META), b"", 0
        try:
            with txn.cursor() as cursor:
                for view, value in cursor:
                    raw = bytes(view)
                    run = self._naming.key(raw)
                    lost = _lost(txn, before, raw, value)
                    if not lost and not self._naming.holds(raw, header_sums(value)):
                        lost = OLDER
                    before, met = raw, met + 1
                    for scanned in _scan_run(value, run, self._naming.lengths[run.table]):
                        if lost:
                            yield ScannedValue(scanned.key, (), scanned.damage or damaged(scanned.key, lost))
                        elif scanned.key != STORE_KEY or scanned.damage:
                            yield scanned
                if met != (entries := txn.stat()["entries"]):
                    what = (
                        f"the tree of memory {self._path} is damaged: only {met} of its {entries} values can be reached"
                    )
                    yield ScannedValue(STORE_KEY, (), DamagedError(what))
        except (lmdb.Error, struct.error, ValueError) as error:
            yield ScannedValue(run, (), damaged(run, f"the tree cannot be read beyond it: {error}"))

    def _entries(self, view: memoryview, run: Key) -> Iterator[_Entry]:
        return _in_run(view, run, self._naming.lengths[run.table])


def _decode(view: memoryview, key: Key) -> tuple[Record, ...]:
    """Return the verified records of a value that fills ``view``, copied. Raises ``DamagedError``."""
    records, end = decode_value(view, 0, key)
    if end < len(view):
        raise damaged(key, f"{len(view) - end} extra bytes follow its records")
    return records


def used_bytes(txn: Transaction) -> int:
    """Return the bytes of the pages of the tree of values, as this transaction sees it."""
    # As LMDB counts them inside the transaction: so a limit is exact after every commit.
    stat = txn.stat()
    return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))


def _lost(txn: Transaction, before: bytes, raw: bytes, value: memoryview) -> str | None:
    """Return why reads will miss the value that a walk met at key ``raw``, after ``before``; None if they find it."""
    if raw <= before:
        return "its key is out of order"
    found = txn.get(raw)
    # Both views are in the map, so equal places mean equal bytes.
    return None if found is not None and _place(found) == _place(value) else "the tree does not lead to it"


def _place(view: memoryview) -> tuple[int, int]:
    """Return address and length in bytes."""
    return np.asarray(view).__array_interface__["data"][0], view.nbytes


Deletes = Sequence[tuple[Key, Key]]
Puts = Sequence[tuple[Key, tuple[Record, ...]]]


class Heads:
    """First pages of large values, checked before LMDB frees the page range that they state."""

    def __init__(self, data: int, page_bytes: int, damage: Callable[[], DamagedError | None]) -> None:
        """Check pages in the data file, whose descriptor is ``data``.

        ``damage`` returns the error if one of the first pages of the last commit is wrong; it reads them all.
        """
        self._data = data
        self._page_bytes = page_bytes
        self._damage = damage
        # As in LMDB: two nodes must fit a page.
        self._small = ((page_bytes - layout.HEADER_BYTES) // 2 & -2) - 2 - layout.NODE_BYTES - KEY_BYTES
        self._known = layout.is_known()
        self.checked = False
        """Whether all pages were checked in this transaction; reset when one begins."""

    def check(self, value: memoryview) -> None:
        """Raise ``DamagedError`` unless the pages of ``value``, in this transaction, can be freed."""
        if len(value) <= self._small or self.checked or not self._known:
            return
        head = ctypes.string_at(_place(value)[0] - layout.HEADER_BYTES, layout.HEADER_BYTES)
        own, _, flags, pages = struct.unpack("<QHHI", head)
        needed = (layout.HEADER_BYTES - 1 + len(value)) // self._page_bytes + 1
        if (flags, pages) == (layout.OVERFLOW, needed) and self._at(own, len(head) + _HEAD) == head + value[:_HEAD]:
            return
        # Values written in this transaction are not in the file yet, and some have more pages than they need.
        if error := self._damage():
            raise error
        self.checked = True

    def _at(self, page: int, nbytes: int) -> bytes:
        return os.pread(self._data, nbytes, page * self._page_bytes) if page < _MOST_PAGES else b""


class _Run(NamedTuple):
    """A run as last written here: the checksum of its bytes, the sum of its header checksums, its last item."""

    all_bytes: int
    header_sums: int
    last: int


class Changes:
    """Writes in transactions; the owner of ``naming`` may change it."""

    def __init__(self, naming: Naming, heads: Heads) -> None:
        self._naming = naming
        self._heads = heads
        # Failed transactions included: equal checksums and keys mean equal values.
        self._written: dict[bytes, _Run] = {}
        self.added = 0
        """The change of the sum of all checks in this transaction."""

    def begin(self) -> None:
        """Reset the state; call this in each transaction."""
        self.added, self._heads.checked = 0, False

    def apply(self, txn: Transaction, deletes: Deletes, puts: Puts) -> None:
        """Apply deletions first, then puts. Raises ``DamagedError`` if a changed run has damaged values."""
        single: dict[Key, tuple[Record, ...]] = {}
        shared: dict[Key, dict[int, tuple[Key, tuple[Record, ...]]]] = {}
        for key, records in puts:
            if self._naming.lengths[key.table] == 1:
                single[key] = records
            else:
                shared.setdefault(self._naming.run(key), {})[key.item] = (key, records)
        with txn.cursor() as cursor:
            for first, last in deletes:
                self._delete_range(cursor, first, last)
            ahead = b""
            for key in sorted(single):
                ahead = self._put(cursor, key, *encode_with_sums(key, single[key]), ahead)
            for run in sorted(shared):
                self._put_run(cursor, run, shared[run])

    def _put(self, cursor: Cursor, key: Key, value: bytes, sums: list[int], ahead: bytes = b"") -> bytes:
        """Replace the value of ``name``, which has another whole key.

        ``ahead`` is the key after the previous put in this order, or empty; return the one after this put.
        """
        name = key.to_bytes()
        first, whole = self._naming.first(name), self._naming.whole(name, sums)
        # Otherwise ``name`` is new: blocks are appended in rows, and one lookup is enough.
        if ahead[: len(first)] <= first:
            ahead = bytes(cursor.key()) if cursor.set_range(first) else _BEHIND_ALL
        same = ahead == whole
        if ahead.startswith(first) and not same:
            self._delete(cursor)
            ahead = b""
        if same:
            self._heads.check(cursor.value())
        self.added += 0 if same else self._naming.check(whole)
        cursor.put(whole, value)
        return ahead

    def _delete(self, cursor: Cursor) -> None:
        """Delete the value at ``cursor``, which moves to the next one. Raises ``DamagedError``."""
        self._heads.check(cursor.value())
        self.added -= self._naming.check(bytes(cursor.key()))
        cursor.delete()

    def _put_run(self, cursor: Cursor, run: Key, changes: dict[int, tuple[Key, tuple[Record, ...]]]) -> None:
        """Write values of one run, and keep its other items. Raises ``DamagedError`` if one of these is damaged."""
        name = run.to_bytes()
        found = self._naming.find(cursor, name)
        values, total, last = self._kept(cursor, name, found, run, changes) if found else ({}, 0, -1)
        for item, change in changes.items():
            values[item], sums = encode_with_sums(*change)
            total += sum(sums)
        value = b"".join([values[item] for item in sorted(values)])
        self._put(cursor, run, value, [total])
        if len(self._written) >= _MOST_WRITTEN:
            self._written.clear()
        self._written[name] = _Run(checksum(value), total, max(last, *changes))

    def _kept(
        self, cursor: Cursor, name: bytes, found: bytes, run: Key, without: Collection[int]
    ) -> tuple[dict[int, bytes | memoryview], int, int]:
        """Return the kept values of the run at ``cursor``, the sum of its header checksums, and its last item.

        The values are mapped from their first items. Most runs are extended by their writer, and are unchanged since.
        """
        known = self._written.get(name)
        if known and known.last < min(without):
            copy = bytes(cursor.value())
            if checksum(copy) == known.all_bytes and self._naming.holds(found, [known.header_sums]):
                return {run.item: copy}, known.header_sums, known.last
        old = self._naming.checked_value(found, cursor.value(), run)
        kept = _split_run(old, run, self._naming.lengths[run.table], without=without)
        return dict(kept), sum(sum(header_sums(value)) for value in kept.values()), max(kept, default=-1)

    def _delete_range(self, cursor: Cursor, first: Key, last: Key) -> None:
        """Delete the runs inside the range; if its ends cut through a run, keep the rest of it."""
        if first > last:
            return  # the range is empty, and a run that both ends cut through must keep the items outside
        length, end = self._naming.lengths[first.table], self._naming.run(last)
        runs = {self._naming.run(first), end}
        cut = {run for run in runs if run < first or run._replace(item=run.item + length - 1) > last}
        for run in cut:
            self._trim(cursor, run, first, last)
        whole = end not in cut
        stop = self._naming.last(end.to_bytes()) if whole else self._naming.first(end.to_bytes())
        cursor.set_range(self._naming.first(first.to_bytes()))
        while (raw := bytes(cursor.key())) and (raw < stop or (raw == stop and whole)):
            self._delete(cursor)

    def _trim(self, cursor: Cursor, run: Key, first: Key, last: Key) -> None:
        """Delete the items of one run that are in the range."""
        if (found := self._naming.find(cursor, run.to_bytes())) is None:
            return
        old = self._naming.checked_value(found, cursor.value(), run)
        kept = _outside(old, run, self._naming.lengths[run.table], first, last)
        if kept:
            value = b"".join(kept[item] for item in sorted(kept))
            self._put(cursor, run, value, header_sums(value))
        else:
            self._delete(cursor)


class _Entry(NamedTuple):
    """One item's value inside a run: bytes ``start`` to ``end``, and the headers of its records."""

    key: Key
    start: int
    end: int
    headers: list[RecordHeader]


def _in_run(view: memoryview, run: Key, length: int) -> Iterator[_Entry]:
    """Yield the values of a run, in order. Verifies headers and addresses, not payloads. Raises ``DamagedError``."""
    start, following = 0, run.item
    while start < len(view):
        entry = _entry(view, start, run._replace(item=following))
        if not following <= entry.key.item < run.item + length or entry.key._replace(item=run.item) != run:
            raise misplaced(run, f"it contains {entry.key} at offset {start}")
        yield entry
        start, following = entry.end, entry.key.item + 1


def _entry(view: memoryview, start: int, expected: Key) -> _Entry:
    """Return the extent of the value that starts at byte ``start``, from the headers of its records."""
    first = decode_header(view, start, expected)
    end, headers = start, [first]
    for number in range(first.records):
        if number:
            headers.append(decode_header(view, end, first.key))
        header = headers[number]
        if header[:3] != (first.key, number, first.records):
            raise misplaced(expected, f"found record {header.record} of {header.key} at offset {end}")
        end += HEADER_BYTES + header.nbytes + padding(header.nbytes)
        if end > len(view):
            raise damaged(expected, f"record {number} is truncated")
    return _Entry(first.key, start, end, headers)


def _find_in_run(view: memoryview, key: Key, run: Key, length: int, reader: ValueReader) -> int | None:
    """Return the byte at which the value of ``key`` starts, or None. The value itself is not yet verified.

    Blocks of one size lie at multiples of it, so the place is guessed first. Only if the guess is wrong, the run is
    walked.
    """
    guess = (key.item - _first_item(view, run)) * reader.size
    if guess >= 0 and reader.fits(view, guess, key):
        return guess
    return next((entry.start for entry in _in_run(view, run, length) if entry.key == key), None)


def _first_item(view: memoryview, run: Key) -> int:
    """Return the item in the first value's header, unverified; the start of the run if it has no header."""
    return int.from_bytes(view[24:32], "little") if len(view) >= HEADER_BYTES else run.item


def _split_run(view: memoryview, run: Key, length: int, without: Container[int] = ()) -> dict[int, memoryview]:
    """Return item -> bytes of its value, copied and verified, for items of a run that are not in ``without``."""
    copy = memoryview(bytes(view))  # all values at once: every append to a run comes here
    kept = [entry for entry in _in_run(copy, run, length) if entry.key.item not in without]
    return {entry.key.item: _verified(copy, entry) for entry in kept}


def _verified(view: memoryview, entry: _Entry) -> memoryview:
    """Return the bytes of a value whose headers are verified. Raises ``DamagedError`` for one of its payloads."""
    start = entry.start
    for header in entry.headers:
        start = check_payload(view, start + HEADER_BYTES, header)
    return view[entry.start : entry.end]


def _outside(view: memoryview, run: Key, length: int, first: Key, last: Key) -> Mapping[int, bytes | memoryview]:
    """Return item -> bytes of its value, copied and verified, for items of a run outside ``first`` to ``last``.

    If the range reaches the end of the run, nothing from ``first`` on is read: it may be damaged.
    """
    kept: dict[int, memoryview] = {}
    copy, to_the_end = memoryview(bytes(view)), last.item >= run.item + length - 1
    try:
        for entry in _in_run(copy, run, length):
            if not first <= entry.key <= last:
                kept[entry.key.item] = _verified(copy, entry)
            if to_the_end and entry.key.item + 1 >= first.item:
                break
    except DamagedError:  # perhaps in a value to be deleted
        return _around_damage(copy, run, length, first, last)
    return kept


def _around_damage(view: memoryview, run: Key, length: int, first: Key, last: Key) -> dict[int, bytes]:
    """Do the work of ``_outside`` if the values from ``first`` to ``last`` cannot be walked."""
    kept = [found for found in _scan_run(view, run, length) if not first <= found.key <= last]
    for found in kept:
        if found.damage is not None:
            raise found.damage
    return {found.key.item: encode_value(found.key, found.records) for found in kept}


def _scan_run(view: memoryview, run: Key, length: int) -> Iterator[ScannedValue]:
    """Yield every value of a run, verified. Damage is reported under its key, and the rest is still found."""
    start, following = 0, run.item
    while start < len(view) or following == run.item:
        expected = run._replace(item=min(following, run.item + length - 1))
        try:
            entry = next(_in_run(view[start:], run._replace(item=expected.item), run.item + length - expected.item))
        except (DamagedError, ForeignMemory) as error:
            yield ScannedValue(expected, (), as_damage(error))
            start, following = _resume(view, start + ALIGNMENT, run), expected.item + 1
            continue
        except StopIteration:
            yield ScannedValue(run, (), damaged(run, "it is empty"))
            return
        yield scan_value(view[start + entry.start : start + entry.end], entry.key)
        start, following = start + entry.end, entry.key.item + 1


def _resume(view: memoryview, start: int, run: Key) -> int:
    """Return the next byte at which a whole value of this run starts, or the end, to pass a damaged header."""
    for position in range(start, len(view), ALIGNMENT):
        if view[position : position + 4] == MAGIC:
            try:
                header = decode_header(view, position, run)
            except (DamagedError, ForeignMemory):
                continue
            if header.record == 0 and header.key._replace(item=run.item) == run:
                return position
    return len(view)
