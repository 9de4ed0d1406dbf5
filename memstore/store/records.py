"""Typed records under ordered keys, in batches; and the byte format of one record, version 1.

A record is a header of 96 bytes, the payload, and zero bytes up to a multiple of 16. All numbers are little-endian;
``docs/format.md`` has the table of offsets. The address (table, document, layer, item, number of the record) is part of
the header, and the header has its own checksum. So a value under a wrong key is detected just like a flipped bit. Every
bit of a value is covered by a check.

The magic, the version and the checksum over the first 88 bytes stay where they are in every later version. So a whole
but newer header can be told from a damaged one.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as checksum

from memstore import json_checks
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotFound

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "json": 1}
"""Size of one element of each dtype that a record can have, in bytes. ``json`` is UTF-8 text."""

MAX_DIMENSIONS = 8
MAX_DOCUMENT = 2**32 - 2  # the next number is the store's own, see ``lmdb/values.py``
MAX_LAYER = 2**32 - 1
MAX_ITEM = 2**32 - 1


class Table(IntEnum):
    """The seven tables of a memory."""

    META = 0
    DOCUMENTS = 1
    TOKENS = 2
    BLOCKS = 3
    LANDMARKS = 4
    HISTORY = 5
    RECURRENT = 6


_KEY = struct.Struct(">BIII")
_ITEM_BYTES = 4


class Key(NamedTuple):
    """Address of one value. Values are ordered by table, document, layer, item."""

    table: Table
    document: int = 0
    layer: int = 0
    item: int = 0
    """Block, run of blocks, or number of an entry, depending on the table."""

    def to_bytes(self) -> bytes:
        """Return 13 big-endian bytes, which sort as keys do."""
        return _KEY.pack(*self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Key:
        """Invert ``to_bytes``. Raises ``ValueError`` or ``struct.error``."""
        table, *numbers = _KEY.unpack(raw)
        return cls(Table(table), *numbers)


def describe(key: Key) -> str:
    """Name a value in words, for messages."""
    place = f"table {Table(key.table).name.lower()}, document {key.document}, layer {key.layer}"
    return f"{place}, {'block' if key.table in (Table.BLOCKS, Table.TOKENS) else 'item'} {key.item}"


class BlockKeys(Sequence[Key]):
    """Keys of states, each made on demand: finding values needs only the bytes of their keys."""

    def __init__(self, layers: Sequence[int], owners: Sequence[int], blocks: Sequence[int]) -> None:
        """Make the keys of ``blocks``, with their layers and the document numbers under which they are stored."""
        self._layers, self._owners, self._blocks = layers, owners, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, place: int) -> Key: ...

    @overload
    def __getitem__(self, place: slice) -> BlockKeys: ...

    def __getitem__(self, place: int | slice) -> Key | BlockKeys:
        if isinstance(place, slice):
            return BlockKeys(self._layers[place], self._owners[place], self._blocks[place])
        return Key(Table.BLOCKS, self._owners[place], self._layers[place], self._blocks[place])

    def __iter__(self) -> Iterator[Key]:
        return map(Key, repeat(Table.BLOCKS), self._owners, self._layers, self._blocks)

    def to_bytes(self) -> list[bytes]:
        """Return ``Key.to_bytes`` of each key."""
        places = list(zip(self._owners, self._layers, strict=True))
        first = {place: _KEY.pack(Table.BLOCKS, *place, 0)[:-_ITEM_BYTES] for place in set(places)}
        return [first[place] + block.to_bytes(_ITEM_BYTES) for place, block in zip(places, self._blocks, strict=True)]


class Layout(NamedTuple):
    """Element type and shape of one record."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the payload length in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Record(NamedTuple):
    """One typed array as stored: its layout and its raw little-endian bytes."""

    layout: Layout
    payload: Bytes

    @classmethod
    def from_json(cls, value: Any) -> Record:
        """Wrap a JSON-serialisable value."""
        payload = np.frombuffer(json.dumps(value, sort_keys=True).encode(), np.uint8)
        return cls(Layout("json", (payload.size,)), payload)

    def to_json(self) -> Any:
        """Unwrap a value made by ``from_json``. Raises ``DamagedError`` if it is not JSON, or far too large."""
        return json_checks.parse(self.payload.tobytes(), "a stored JSON value")


@dataclass
class Batch:
    """Changes that become visible together or not at all. Deletions come first, then puts, in order."""

    deletes: list[tuple[Key, Key]] = field(default_factory=list)
    puts: list[tuple[Key, tuple[Record, ...]]] = field(default_factory=list)

    def put(self, key: Key, *records: Record) -> None:
        """Write a value of one or several records; it replaces any value under ``key``."""
        self.puts.append((key, records))

    def delete(self, first: Key, last: Key | None = None) -> None:
        """Delete every value from ``first`` to ``last``, both included. Both must be of one table."""
        self.deletes.append((first, first if last is None else last))


class ScannedValue(NamedTuple):
    """One value found by ``scan``: its records, or an error."""

    key: Key
    records: tuple[Record, ...]
    damage: DamagedError | None


def check_key(key: Key) -> None:
    """Raise ``InvalidArgument`` for a key whose numbers are out of range."""
    if not (0 <= key.document <= MAX_DOCUMENT and 0 <= key.layer <= MAX_LAYER and 0 <= key.item <= MAX_ITEM):
        raise InvalidArgument(f"document, layer and item must be 32-bit numbers; {key} does not fit")


def check_range(first: Key, last: Key) -> None:
    """Raise ``InvalidArgument`` unless both ends are keys of one table."""
    check_key(first)
    check_key(last)
    if first.table != last.table:
        raise InvalidArgument(f"a range must stay in one table; {describe(first)} and {describe(last)} do not")


def check_batch(batch: Batch) -> None:
    """Raise ``InvalidArgument`` if anything in a batch cannot be stored."""
    for first, last in batch.deletes:
        check_range(first, last)
    good: dict[int, int] = {}  # layouts already checked, by identity, because records of one kind share their layout
    for key, records in batch.puts:
        check_key(key)
        if not 0 < len(records) < 256:
            raise InvalidArgument(f"a value must have 1 to 255 records; {describe(key)} has {len(records)}")
        for record in records:
            if good.get(id(record.layout)) != record.payload.nbytes:
                _check_record(key, record)
                good[id(record.layout)] = record.payload.nbytes


def _check_record(key: Key, record: Record) -> None:
    layout = record.layout
    if layout.dtype not in ITEM_BYTES or len(layout.shape) > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"a record must be one of {list(ITEM_BYTES)} with at most {MAX_DIMENSIONS} dimensions, not {layout}"
        )
    if any(not 0 <= size < 2**32 for size in layout.shape):
        raise InvalidArgument(f"{describe(key)}: a dimension must be a 32-bit number; {layout} does not fit")
    if record.payload.nbytes != layout.nbytes:
        raise InvalidArgument(
            f"{describe(key)}: {layout} needs {layout.nbytes} bytes, but the payload has {record.payload.nbytes}"
        )


def check_out(keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
    """Raise ``InvalidArgument`` unless ``out`` has a row of the right length for each key and layout."""
    expected = [(len(keys), layout.nbytes) for layout in layouts]
    found = [rows.shape for rows in out]
    if found != expected or any(rows.dtype != np.uint8 or rows.strides[1] != 1 for rows in out if rows.size):
        raise InvalidArgument(f"out must be uint8 arrays of shapes {expected} with contiguous rows, not {found}")


MAGIC = b"MSTR"
VERSION = 1
NO_CODEC = 0
HEADER_BYTES = 96
ALIGNMENT = 16  # bytes; LMDB starts large values at such an address, so payloads are aligned in the map as well
DTYPES = tuple(ITEM_BYTES)
"""The header stores the position of a dtype in this tuple. Only append."""

_KIND = struct.Struct("<4sHBBBBBB")  # magic, version, codec, dtype, table, record, records, dimensions: 12 bytes
_ADDRESS = struct.Struct("<IIIQ")  # document, layer, reserved, item: 20 bytes
_EXTENT = struct.Struct("<8IQQ")  # shape, payload length in bytes, reserved: 48 bytes
_HEADER = struct.Struct("<12sIIIQ48sQQ")  # the whole header; its first part and its last but one are not decoded
_LENGTH_AND_SUM = struct.Struct("<Q16xQ")  # payload length in bytes; checksum of the header, after the bytes it covers
_SUMS = struct.Struct("<QQ")  # checksum of the payload, checksum of the 88 bytes before this one
_ZEROS = bytes(ALIGNMENT)
_ADDRESS_AT, _EXTENT_AT, _LENGTH_AT, _SUMS_AT, _HEADER_SUM_AT = 12, 32, 64, 80, 88


class RecordHeader(NamedTuple):
    """The content of a verified header.

    ``records`` is the number of records in the value, ``nbytes`` the payload length.
    """

    key: Key
    record: int
    records: int
    layout: Layout
    nbytes: int
    payload_sum: int


class Unreadable(str):
    """Why bytes cannot be read now. They may be intact, so this is not damage."""

    __slots__ = ()


def damaged(key: Key, what: str) -> DamagedError:
    """Return the error for a value that fails a check, or is ``Unreadable``."""
    if isinstance(what, Unreadable):
        return DamagedError(f"{describe(key)} cannot be read now: {what}. It may be intact: try again", remedy="verify")
    return DamagedError(f"{describe(key)} is damaged: {what}; it was not used")


class MisplacedValue(DamagedError):
    """A value is whole, but belongs to another key."""


def misplaced(key: Key, found: str) -> MisplacedValue:
    """Return the error for a value under ``key`` whose header names another key."""
    return MisplacedValue(f"{describe(key)} is damaged: wrong address: {found}; it was not used")


def padding(nbytes: int) -> int:
    """Return the number of zero bytes after a payload of ``nbytes``."""
    return -nbytes % ALIGNMENT


def encode_value(key: Key, records: Sequence[Record]) -> bytes:
    """Encode one value: each record's header, payload and padding. ``check_batch`` has the preconditions."""
    return encode_with_sums(key, records)[0]


def encode_with_sums(key: Key, records: Sequence[Record]) -> tuple[bytes, list[int]]:
    """Return ``encode_value``, and the header checksum of each record."""
    parts: list[bytes | memoryview] = []
    sums: list[int] = []
    table, document, layer, item = key
    count, place = len(records), item.to_bytes(8, "little")
    for number, record in enumerate(records):
        payload = _raw(record.payload)
        before, after = _around_item(table, document, layer, number, count, record.layout)
        start = before + place + after + checksum(payload).to_bytes(8, "little")
        sums.append(checksum(start))
        parts += (start, sums[-1].to_bytes(8, "little"), payload)
        if rest := payload.nbytes % ALIGNMENT:
            parts.append(_ZEROS[rest:])
    return b"".join(parts), sums


def header_sums(value: bytes | memoryview) -> list[int]:
    """Return the header checksum of each record of a value, or of all values of a run, unverified."""
    sums, start = list[int](), 0
    while start + HEADER_BYTES <= len(value):
        nbytes, header_sum = _LENGTH_AND_SUM.unpack_from(value, start + _LENGTH_AT)
        sums.append(header_sum)
        start += HEADER_BYTES + nbytes + padding(nbytes)
    return sums


def _raw(payload: Bytes) -> memoryview:
    if payload.ndim == 1 and payload.dtype == np.uint8 and payload.flags.c_contiguous:
        return payload.data
    return np.ascontiguousarray(payload).reshape(-1).view(np.uint8).data


@lru_cache(maxsize=1024)
def _around_item(
    table: Table, document: int, layer: int, number: int, count: int, layout: Layout
) -> tuple[bytes, bytes]:
    """Return the header bytes before and after the item, without checksums: the same for all blocks of a layer."""
    return _head(table, number, count, layout) + _ADDRESS.pack(document, layer, 0, 0)[:-8], _extent(layout)


def _head(table: Table, number: int, count: int, layout: Layout) -> bytes:
    return _KIND.pack(
        MAGIC, VERSION, NO_CODEC, DTYPES.index(layout.dtype), table, number, count, len(layout.shape)
    )  # [12 bytes]


@lru_cache(maxsize=256)
def _extent(layout: Layout) -> bytes:
    return _EXTENT.pack(*layout.shape, *(0,) * (MAX_DIMENSIONS - len(layout.shape)), layout.nbytes, 0)  # [48 bytes]


def decode_header(view: memoryview, start: int, key: Key) -> RecordHeader:
    """Verify and parse the header at byte ``start``. ``key`` only names the value in errors.

    Raises ``DamagedError``, or ``ForeignMemory`` for a whole header of a newer format.
    """
    raw = bytes(view[start : start + HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        raise damaged(key, f"it is truncated: {len(raw)} bytes at offset {start}, but a header needs {HEADER_BYTES}")
    payload_sum, header_sum = _SUMS.unpack_from(raw, _SUMS_AT)
    if checksum(raw[:_HEADER_SUM_AT]) != header_sum:
        raise damaged(key, f"the header checksum at offset {start} does not match")
    kind = _kind(raw[:_ADDRESS_AT] + raw[_EXTENT_AT:_SUMS_AT])
    if kind is None:
        _explain_kind(raw, start, key)
    table, record, records, layout, nbytes = kind
    document, layer, _, item = _ADDRESS.unpack_from(raw, _ADDRESS_AT)
    return RecordHeader(Key(table, document, layer, item), record, records, layout, nbytes, payload_sum)


# Most headers differ only in address and checksums.
@lru_cache(maxsize=1024)
def _kind(raw: bytes) -> tuple[Table, int, int, Layout, int] | None:
    """Decode a header without address and sums: table, record, records, layout, payload bytes; None if not ours."""
    magic, version, codec, dtype, table, record, records, dimensions = _KIND.unpack_from(raw)
    if (magic, codec) != (MAGIC, NO_CODEC) or version > VERSION or dtype >= len(DTYPES) or table not in iter(Table):
        return None
    *shape, nbytes, _ = _EXTENT.unpack_from(raw, _KIND.size)
    layout = Layout(DTYPES[dtype], tuple(shape[:dimensions]))
    if dimensions > MAX_DIMENSIONS or record >= records or nbytes != layout.nbytes:
        return None
    if _extent(layout) != raw[_KIND.size :]:  # unused dimensions and reserved bytes are zero
        return None
    return Table(table), record, records, layout, nbytes


def _explain_kind(raw: bytes, start: int, key: Key) -> NoReturn:
    magic, version, codec, dtype, *_ = _KIND.unpack_from(raw)
    if magic != MAGIC:
        raise damaged(key, f"no record starts at offset {start}")
    if version > VERSION or codec != NO_CODEC or dtype >= len(DTYPES):
        raise ForeignMemory(
            f"{describe(key)} was written by a newer memstore (format {version}, codec {codec}, dtype {dtype}); "
            "upgrade memstore"
        )
    raise damaged(key, f"the header at offset {start} contradicts itself")


def check_payload(view: memoryview, body: int, header: RecordHeader, copy: memoryview | None = None) -> int:
    """Verify the payload at byte ``body`` that follows ``header``; return the byte after it and its padding.

    If ``view`` is a map, ``copy`` is a copy of the payload: the returned bytes must be the verified bytes.
    """
    end = body + header.nbytes
    stop = end + padding(header.nbytes)
    if stop > len(view):
        missing = f"record {header.record} is truncated: it has {len(view) - body} of {stop - body} bytes"
        raise damaged(header.key, missing)
    if checksum(view[body:end] if copy is None else copy) != header.payload_sum:
        raise damaged(header.key, f"the payload checksum of record {header.record} does not match")
    if any(view[end:stop]):
        raise damaged(header.key, f"the padding after record {header.record} is not zero")
    return stop


def decode_value(view: memoryview, start: int, key: Key) -> tuple[tuple[Record, ...], int]:
    """Verify and copy the value of ``key`` at byte ``start``; return its records and the byte after them."""
    records: list[Record] = []
    count = 1
    while len(records) < count:
        header, body = decode_header(view, start, key), start + HEADER_BYTES
        if header.key != key or header.record != len(records):
            found = f"record {header.record} of {describe(header.key)}"
            raise misplaced(key, f"in place of record {len(records)} there is {found}")
        if records and header.records != count:
            raise damaged(key, f"its records name different counts: {count} and {header.records}")
        payload = np.frombuffer(view[body : body + header.nbytes], np.uint8).copy()
        start = check_payload(view, body, header, payload.data)
        records.append(Record(header.layout, payload))
        count = header.records
    return tuple(records), start


def scan_value(view: memoryview, key: Key) -> ScannedValue:
    """Return the result of a store's ``scan`` for the value ``view`` of ``key``."""
    try:
        records, _ = decode_value(view, 0, key)
    except (DamagedError, ForeignMemory) as error:
        return ScannedValue(key, (), as_damage(error))
    return ScannedValue(key, records, None)


def as_damage(error: DamagedError | ForeignMemory) -> DamagedError:
    """Return the error as ``scan`` reports it."""
    return error if isinstance(error, DamagedError) else DamagedError(str(error))


class _Plan(NamedTuple):
    """The expected header of one record of a value, and the places of its parts."""

    heads: tuple[bytes, ...]
    """First bytes of a header, by table."""
    extent: bytes
    """The header bytes between the address and the checksums."""
    start: int
    """Byte at which the header begins."""
    body: int
    """Byte at which the payload begins."""
    end: int
    """Byte at which the payload ends."""
    stop: int
    """Byte at which the padding ends."""


class ValueReader:
    """Verifies values of one tuple of layouts, with little work for each.

    Values are copied with their headers, one to each row of an array, and callers get views of the payloads in it. The
    expected headers are known beforehand, except for the checksums, so comparing bytes replaces parsing. If a value
    does not match, ``explain`` raises an error that says why.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = tuple(layouts)
        self.size = 0
        """Bytes of one value."""
        self._plans: list[_Plan] = []
        for number, layout in enumerate(layouts):
            heads = tuple(_head(table, number, len(layouts), layout) for table in Table)
            body = self.size + HEADER_BYTES
            end = body + layout.nbytes
            self._plans.append(_Plan(heads, _extent(layout), self.size, body, end, end + padding(layout.nbytes)))
            self.size = self._plans[-1].stop

    def fits(self, view: memoryview, start: int, key: Key) -> bool:
        """Return whether the first header at byte ``start`` is the expected one of ``key`` (checksums apart)."""
        first = self._plans[0]
        # Inside the header checksum, so a value under a wrong key is damage, not data.
        address = _ADDRESS.pack(key.document, key.layer, 0, key.item)
        return bytes(view[start : start + _SUMS_AT]) == first.heads[key.table] + address + first.extent

    def payloads(self, values: Bytes) -> list[Bytes]:
        """Return the payloads in ``values [n, size]``: for each record a view ``[n, layouts[f].nbytes]``."""
        return [values[:, plan.body : plan.end] for plan in self._plans]

    def sums(self, copy: memoryview, key: Key) -> list[int] | None:
        """Return the header checksums of ``copy``; None unless every bit of it fits a value of ``key``.

        Pass a copy, not a map: the returned bytes must be the verified bytes.
        """
        # Value by value, as a tuple: half the time of comparing all headers as arrays.
        table, document, layer, item = key
        found = []
        for heads, extent, start, body, end, stop in self._plans:
            header_sum = checksum(copy[start : start + _HEADER_SUM_AT])
            expected = heads[table], document, layer, 0, item, extent, checksum(copy[body:end]), header_sum
            if _HEADER.unpack_from(copy, start) != expected or (stop > end and any(copy[end:stop])):
                return None
            found.append(header_sum)
        return found

    def explain(self, view: memoryview, start: int, key: Key) -> NoReturn:
        """Raise the error for a value that is not as expected."""
        records, end = decode_value(view, start, key)
        check_layouts(key, records, self.layouts)
        what = f"{len(view) - end} extra bytes follow its records" if len(view) > end else "it changed during the read"
        raise damaged(key, what)


def fill_row(
    out: Sequence[Bytes], row: int, key: Key, records: Sequence[Record] | None, layouts: Sequence[Layout]
) -> None:
    """Copy the records of ``key`` to row ``row`` of each of ``out``. Raises ``NotFound`` or ``DamagedError``."""
    if records is None:
        raise NotFound(f"there is no {describe(key)}")
    check_layouts(key, records, layouts)
    for rows, record in zip(out, records, strict=True):
        rows[row] = record.payload


@lru_cache(maxsize=64)
def value_reader(layouts: tuple[Layout, ...]) -> ValueReader:
    """Return the reader for values that have these layouts."""
    return ValueReader(layouts)


def check_layouts(key: Key, records: Sequence[Record], layouts: Sequence[Layout]) -> None:
    """Raise ``DamagedError`` unless the records under ``key`` have these layouts."""
    found = [record.layout for record in records]
    if found != list(layouts):
        raise damaged(key, f"it holds {found}, expected {list(layouts)}")
