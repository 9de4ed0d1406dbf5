"""How values lie in LMDB: in runs, the values of several consecutive items one after the other, and under which keys.

LMDB rounds a value up to pages of 4 KiB, so blocks smaller than a few pages are stored in runs. A run has no header: it
is the concatenation of its blocks' values in order of their items, each with headers and checksums of its own. A table
that is not packed has runs of one item.

Behind the key of a run is a check of what was written there last. Checksums in a value find flipped bits, and another
key's value. They do not find an older value of the same key, which is whole: a disk that loses a write, or an image of
one that is rolled back, leaves it where the newer one should be. So what a value must be is said where it is looked
for, in its key, and the store's facts have the sum of all these checks and the number of the commit: an older page of
the tree changes the sum. Memories of format 1 have neither.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from memstore.errors import DamagedError, ForeignMemory
from memstore.store.contract import MAX_DOCUMENT, Key, ScannedValue, Table
from memstore.store.records import (
    ALIGNMENT,
    HEADER_BYTES,
    MAGIC,
    RecordHeader,
    ValueReader,
    as_damage,
    check_payload,
    damaged,
    decode_header,
    encode_value,
    misplaced,
    padding,
    scan_value,
)

if TYPE_CHECKING:
    import lmdb


STORE_KEY = Key(Table.META, MAX_DOCUMENT + 1)
"""Where the store keeps its own facts, as JSON: out of reach of callers, for no document can have this number."""

KEY_BYTES = 17
"""A key (``Key.to_bytes``, 13 bytes) and a check of 4; in format 1 the item has 8 bytes, and there is no check."""

_STORE_NAME = STORE_KEY.to_bytes()
_NAME_BYTES = len(_STORE_NAME)
_ITEM_AT = 9
_ZEROS = bytes(KEY_BYTES - _NAME_BYTES)
_FORMAT_1 = struct.Struct(">BIIQ")


class Naming:
    """How the values of one environment are shared out and named: what the store's facts say."""

    def __init__(self) -> None:
        self.lengths = [1] * len(Table)
        """Items per LMDB value, by table."""
        self.checked = True
        """Whether keys have a check: from format 2 on."""

    def find(self, cursor: lmdb.Cursor, name: bytes) -> bytes | None:
        """The whole key of the value ``name``, on which ``cursor`` is then; None where there is none."""
        first = self.first(name)
        if not cursor.set_range(first):
            return None
        raw = bytes(cursor.key())
        return raw if raw.startswith(first) else None

    def first(self, name: bytes) -> bytes:
        """What every whole key of ``name`` begins with; so no smaller one has it."""
        return name if self.checked else name[:_ITEM_AT] + _ZEROS + name[_ITEM_AT:]

    def last(self, name: bytes) -> bytes:
        """No larger key has this ``name``."""
        return self.first(name).ljust(KEY_BYTES, b"\xff")

    def whole(self, name: bytes, sums: Iterable[int]) -> bytes:
        """The whole key of a value whose headers have the checksums ``sums``.

        The store's facts are put without any, under the same key in every format: this is how an older memstore finds
        the number of a newer one.
        """
        return name + check_of(sums) if self.checked else self.first(name)

    def key(self, raw: bytes) -> Key:
        """The key without its check. Raises ``ValueError`` for a table that there is not."""
        if self.checked:
            return Key.from_bytes(raw[:_NAME_BYTES])
        table, *numbers = _FORMAT_1.unpack(raw)
        return Key(Table(table), *numbers)

    def check(self, raw: bytes) -> int:
        """What a whole key adds to the sum of all checks."""
        return int.from_bytes(raw[_NAME_BYTES:], "big") if self.checked else 0

    def holds(self, raw: bytes, sums: Iterable[int]) -> bool:
        """Whether a value whose headers have the checksums ``sums`` is the one that was written last under ``raw``."""
        return not self.checked or raw[_NAME_BYTES:] == check_of(sums) or raw.startswith(_STORE_NAME)


def check_of(sums: Iterable[int]) -> bytes:
    """The check in a key: the lowest 32 bits of the sum of all header checksums, and so of all that the value says."""
    return (sum(sums) & 0xFFFFFFFF).to_bytes(4, "big")


class Entry(NamedTuple):
    """One item's value inside a run: bytes ``start`` to ``end``, and the headers of its records."""

    key: Key
    start: int
    end: int
    headers: list[RecordHeader]


def run_start(key: Key, length: int) -> Key:
    """The key of the run of ``length`` items that ``key`` belongs to."""
    return Key(key.table, key.document, key.layer, key.item - key.item % length) if length > 1 else key


def entries(view: memoryview, run: Key, length: int) -> Iterator[Entry]:
    """Walk the values of a run, in order. Verifies headers and addresses, not payloads. Raises ``DamagedError``."""
    start, following = 0, run.item
    while start < len(view):
        entry = _entry(view, start, run._replace(item=following))
        if not following <= entry.key.item < run.item + length or entry.key._replace(item=run.item) != run:
            raise misplaced(run, f"{entry.key} lies in it at offset {start}")
        yield entry
        start, following = entry.end, entry.key.item + 1


def _entry(view: memoryview, start: int, expected: Key) -> Entry:
    """The extent of the value that starts at byte ``start``, from the headers of its records."""
    first = decode_header(view, start, expected)
    end, headers = start, [first]
    for number in range(first.records):
        if number:
            headers.append(decode_header(view, end, first.key))
        header = headers[number]
        if header[:3] != (first.key, number, first.records):
            raise misplaced(expected, f"record {header.record} of {header.key} at offset {end}")
        end += HEADER_BYTES + header.nbytes + padding(header.nbytes)
        if end > len(view):
            raise damaged(expected, f"record {number} is truncated")
    return Entry(first.key, start, end, headers)


def checksums(view: memoryview, run: Key, length: int) -> dict[Key, tuple[int, ...]]:
    """The checksums over the payloads of every value of a run, as its verified headers have them."""
    return {entry.key: tuple(header.payload_sum for header in entry.headers) for entry in entries(view, run, length)}


def find(view: memoryview, key: Key, run: Key, length: int, reader: ValueReader) -> int | None:
    """The byte at which the value of ``key`` starts, or None. The value itself is yet to be verified.

    Blocks of one size lie at multiples of it, so the place is guessed first and only walked to if the guess is wrong.
    """
    guess = (key.item - _first_item(view, run)) * reader.size
    if guess >= 0 and reader.fits(view, guess, key):
        return guess
    return next((entry.start for entry in entries(view, run, length) if entry.key == key), None)


def _first_item(view: memoryview, run: Key) -> int:
    """Item of the first value as its header has it, unverified; the start of the run if there is no header."""
    return int.from_bytes(view[24:32], "little") if len(view) >= HEADER_BYTES else run.item


def split(view: memoryview, run: Key, length: int, without: Container[int] = ()) -> dict[int, memoryview]:
    """Item -> bytes of its value, copied and verified, for the items of a run that are not in ``without``."""
    copy = memoryview(bytes(view))  # of all at once: every append to a run comes here
    kept = [entry for entry in entries(copy, run, length) if entry.key.item not in without]
    return {entry.key.item: _verified(copy, entry) for entry in kept}


def _verified(view: memoryview, entry: Entry) -> memoryview:
    """The bytes of a value whose headers are verified. Raises ``DamagedError`` for one of its payloads."""
    start = entry.start
    for header in entry.headers:
        start = check_payload(view, start + HEADER_BYTES, header)
    return view[entry.start : entry.end]


def outside(view: memoryview, run: Key, length: int, first: Key, last: Key) -> Mapping[int, bytes | memoryview]:
    """Item -> bytes of its value, copied and verified, for the items of a run that are not from ``first`` to ``last``.

    Where the range goes on to the end of the run, nothing from ``first`` on is looked at: it may be damaged.
    """
    kept: dict[int, memoryview] = {}
    copy, to_the_end = memoryview(bytes(view)), last.item >= run.item + length - 1
    try:
        for entry in entries(copy, run, length):
            if not first <= entry.key <= last:
                kept[entry.key.item] = _verified(copy, entry)
            if to_the_end and entry.key.item + 1 >= first.item:
                break
    except DamagedError:  # perhaps of a value that goes
        return _around_damage(copy, run, length, first, last)
    return kept


def _around_damage(view: memoryview, run: Key, length: int, first: Key, last: Key) -> dict[int, bytes]:
    """``outside``, where values from ``first`` to ``last`` cannot be walked over."""
    kept = [found for found in scan(view, run, length) if not first <= found.key <= last]
    for found in kept:
        if found.damage is not None:
            raise found.damage
    return {found.key.item: encode_value(found.key, found.records) for found in kept}


def scan(view: memoryview, run: Key, length: int) -> Iterator[ScannedValue]:
    """Every value of a run, verified. What is damaged is reported under its key, and the rest is still found."""
    start, following = 0, run.item
    while start < len(view) or following == run.item:
        expected = run._replace(item=min(following, run.item + length - 1))
        try:
            entry = next(entries(view[start:], run._replace(item=expected.item), run.item + length - expected.item))
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
    """The next byte at which a whole value of this run starts, or the end: how a scan passes a damaged header."""
    for position in range(start, len(view), ALIGNMENT):
        if view[position : position + 4] == MAGIC:
            try:
                header = decode_header(view, position, run)
            except (DamagedError, ForeignMemory):
                continue
            if header.record == 0 and header.key._replace(item=run.item) == run:
                return position
    return len(view)
