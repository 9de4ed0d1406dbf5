"""The manifest of a Zarr memory: which blocks are sealed, in which shards, and the checksums of all of them.

An *extent* is a row of shards of one layer of one document: its slot ``i`` is block ``first + i``. Extents only grow at
their end, and their blocks are only deleted. The number of an extent is never used twice, and a slot is never written
twice. So the content of a path in the manifest never changes while it may be read. After a truncation, or before blocks
of another layout, a new extent begins.

A shard holds the states of consecutive blocks of one layer and one field, unchanged and one after the other. At its end
is the index of the ``sharding_indexed`` codec (Zarr format 3). All blocks have the same length, so the index is known
before writing, and blocks are found without reading it. In a bucket all fields of a block lie side by side in one
array, because each range of an object is a request. This module does no input or output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from memstore.errors import DamagedError, InvalidArgument
from memstore.json_checks import UnfitValue, anything, array, fit, ranges, table, whole
from memstore.store.records import ITEM_BYTES, MAX_DIMENSIONS, MAX_DOCUMENT, Bytes, Key, Layout, Record, Table

STORE = MAX_DOCUMENT + 1
"""The document number under which the manifest lies in the tail; callers cannot reach it."""

OBJECT = re.compile(r"blocks/(\d+\.\d+\.\d+/(\d+/)?)?(\.(zarr\.json|c\.[\d.]+)\.part|zarr\.json|c\.[\d.]+)")
"""Names of the objects of extents, including half-written ones. We delete nothing else below ``blocks``."""

COUNTERS = Key(Table.META, STORE, 0, 1)
"""JSON ``{"next_extent": n, "bytes": n}``: the next number, which is never used twice, and the bytes of all named
shards.

If the shards are not beside the tail, it also has ``"owner"``, a random name; the shards have an object of that name.
"""


HEXADECIMAL = re.compile("[0-9a-f]{32}")


def hexadecimal(value: Any, at: str) -> None:
    """Check a name that becomes part of a path."""
    if not isinstance(value, str) or not HEXADECIMAL.fullmatch(value):
        raise UnfitValue(f"{at} must be 32 hexadecimal digits")


COUNTERS_VALUE = table({"owner": hexadecimal}, next_extent=whole(0, 2**53), bytes=whole())


class Series(NamedTuple):
    """One layer of one document."""

    document: int
    layer: int

    @property
    def manifest(self) -> Key:
        """Return the key under which the extents of this layer are listed."""
        return Key(Table.DOCUMENTS, STORE, self.document, self.layer)

    def block(self, item: int) -> Key:
        """Return the key of a block."""
        return Key(Table.BLOCKS, self.document, self.layer, item)


class Place(NamedTuple):
    """The place of a sealed block."""

    extent: Extent
    shard: int
    slot: int
    """The position in the shard."""


@dataclass(frozen=True)
class Extent:
    """A row of shards and their living blocks."""

    number: int
    series: Series
    first: int
    """The block in slot 0."""
    shard_blocks: int
    """Blocks in a shard."""
    shards: int
    """Number of shards ever sealed. Shards without living blocks are deleted."""
    layouts: tuple[Layout, ...]
    """One for each field."""
    live: tuple[tuple[int, int], ...]
    """Ranges of blocks that exist, ``[start, stop)`` each, in order."""
    joined: bool = False
    """Whether all fields of a block lie in one array."""

    @cached_property
    def arrays(self) -> tuple[Layout, ...]:
        """Return the content of a block in each array: one of its fields, or all of them."""
        return (joined_layout(self.layouts),) if self.joined else self.layouts

    @property
    def stop(self) -> int:
        """Return the block after the last slot."""
        return self.first + self.shards * self.shard_blocks

    @cached_property
    def folder(self) -> str:
        """Return the folder of its arrays."""
        return f"blocks/{self.series.document}.{self.series.layer}.{self.number}"

    @property
    def shard_bytes(self) -> int:
        """Return the length of all objects of one shard together."""
        return sum(
            self.shard_blocks * layout.nbytes + len(shard_index(self.shard_blocks, layout.nbytes))
            for layout in self.arrays
        )

    def shard_path(self, record: int, shard: int) -> str:
        """Return the object that holds one field of one shard, or all of its fields."""
        array = 0 if self.joined else record
        return f"{self.folder}/{array}/{shard_name(shard, self.arrays[array])}"

    def parts(self, values: Sequence[Sequence[Bytes]]) -> Iterator[list[Bytes]]:
        """Yield the content of each array's shard, for blocks with the fields ``values``: uint8, in order."""
        if self.joined:
            yield [payload for value in values for payload in value]
        else:
            yield from map(list, zip(*values, strict=True))

    def sums(self, shard: int) -> Key:
        """Return the key of a shard's checksums: ``[shard_blocks, fields]`` int64, XXH3 of each block's bytes."""
        return Key(Table.META, STORE, self.number, shard)

    def place(self, block: int) -> Place | None:
        """Return the place of a block, or None if it does not live here."""
        for start, stop in self.live:
            if start <= block < stop:
                return Place(self, *divmod(block - self.first, self.shard_blocks))
        return None

    def live_shards(self) -> set[int]:
        """Return the shards that have living blocks."""
        found: set[int] = set()
        for start, stop in self.live:
            found.update(
                range((start - self.first) // self.shard_blocks, (stop - 1 - self.first) // self.shard_blocks + 1)
            )
        return found

    def blocks(self) -> int:
        """Return the slots up to the last living block, which is the length of the arrays."""
        return self.live[-1][1] - self.first

    def without(self, first: int, last: int) -> Extent:
        """Return the extent without blocks ``first`` to ``last`` (included)."""
        parts = [((start, min(stop, first)), (max(start, last + 1), stop)) for start, stop in self.live]
        return replace(self, live=tuple(part for pair in parts for part in pair if part[0] < part[1]))

    def grown(self) -> Extent:
        """Return the extent with one more shard, fully alive."""
        grown = replace(self, shards=self.shards + 1)
        start = self.stop
        if self.live and self.live[-1][1] == start:
            return replace(grown, live=(*self.live[:-1], (self.live[-1][0], grown.stop)))
        return replace(grown, live=(*self.live, (start, grown.stop)))

    def facts(self, record: int) -> dict[str, Any]:
        """Return the attributes of a field's array, for readers that do not know the manifest."""
        return {
            "document": self.series.document,
            "layer": self.series.layer,
            "record": record,
            "first_block": self.first,
            "live": [list(part) for part in self.live],
        }


def find_place(extents: Sequence[Extent], block: int) -> Place | None:
    """Return the place of a sealed block, or None: then it can only be in the tail."""
    for extent in extents:
        if extent.first <= block < extent.stop and (place := extent.place(block)):
            return place
    return None


_ITEM = whole(0, 2**32 - 1)


def yes(value: Any, at: str) -> None:
    """Check a fact that is true whenever it is stated."""
    if value is not True:
        raise UnfitValue(f"{at} must be true")


def _layout(value: Any, at: str) -> None:
    row_of = array(anything, MAX_DIMENSIONS + 1)
    row_of(value, at)
    if not value or value[0] not in ITEM_BYTES:
        raise UnfitValue(f"{at} must be an element type and a shape")
    array(whole(0, 2**31), MAX_DIMENSIONS)(value[1:], at)
    if Layout(value[0], tuple(value[1:])).nbytes > 2**32:
        raise UnfitValue(f"{at} is larger than any value")


EXTENTS = array(
    table(
        {"joined": yes},
        extent=whole(0, 2**53),
        first=_ITEM,
        shard_blocks=whole(1, 2**24),
        shards=whole(1, 2**31),
        layouts=array(_layout, 255),
        live=ranges(2**32),
    ),
    2**20,
)


def to_record(extents: Sequence[Extent]) -> Record:
    """Encode the extents of one layer as stored."""
    return Record.from_json(
        [
            {
                "extent": extent.number,
                "first": extent.first,
                "shard_blocks": extent.shard_blocks,
                "shards": extent.shards,
                "layouts": [[layout.dtype, *layout.shape] for layout in extent.layouts],
                "live": extent.live,
            }
            | ({"joined": True} if extent.joined else {})
            for extent in extents
        ]
    )


def from_record(series: Series, record: Record) -> tuple[Extent, ...]:
    """Invert ``to_record``. Raises ``DamagedError``."""
    what = f"the list of shards of document {series.document}, layer {series.layer}"
    extents = fit(record.to_json(), EXTENTS, what)
    for values in extents:
        end = values["first"] + values["shards"] * values["shard_blocks"]
        if any(not values["first"] <= start < stop <= end for start, stop in values["live"]):
            raise DamagedError(f"{what} is damaged: it places blocks outside their shards")
    return tuple(
        Extent(
            values["extent"],
            series,
            values["first"],
            values["shard_blocks"],
            values["shards"],
            tuple(Layout(dtype, tuple(shape)) for dtype, *shape in values["layouts"]),
            tuple((start, stop) for start, stop in values["live"]),
            values.get("joined", False),
        )
        for values in extents
    )


SHARD_BYTES = 8 << 20
"""Approximate length of the shards of the largest field; other shards are shorter."""

_ZARR_TYPES = {"bfloat16": "uint16", "json": "uint8"}  # types that Zarr lacks are stored as their bits


def blocks_per_shard(layouts: Sequence[Layout], shard_bytes: int, *, joined: bool) -> int:
    """Return the number of blocks in a shard; 0 if blocks cannot be sealed, because a field is empty."""
    sizes = [layout.nbytes for layout in layouts]
    return max(1, shard_bytes // (sum(sizes) if joined else max(sizes))) if min(sizes) else 0


# Not by the Zarr library, which does not store a block of zeros, and does not sync.
def shard_object(payloads: Sequence[Bytes], blocks: int, block_bytes: int) -> list[memoryview | bytes]:
    """Return the parts of a shard of ``blocks`` blocks in writing order; ``payloads`` (uint8) are its bytes."""
    return [*(payload.data for payload in payloads), shard_index(blocks, block_bytes)]


def joined_layout(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of fields side by side: along a first dimension if they are alike, else as bytes."""
    if len(set(layouts)) == 1 and len(layouts[0].shape) < MAX_DIMENSIONS:
        return Layout(layouts[0].dtype, (len(layouts), *layouts[0].shape))
    return Layout("uint8", (sum(layout.nbytes for layout in layouts),))


@lru_cache(maxsize=64)
def shard_index(blocks: int, block_bytes: int) -> bytes:
    """Return offset and length of each block, 64 bits each, then their CRC-32C: ``16 * blocks + 4`` bytes."""
    try:
        import google_crc32c
    except ImportError:
        raise InvalidArgument("memories in Zarr need a package: pip install 'torch-memstore[zarr]'") from None
    pairs = np.empty((blocks, 2), "<u8")
    pairs[:, 0] = np.arange(blocks, dtype=np.uint64) * np.uint64(block_bytes)
    pairs[:, 1] = block_bytes
    raw = pairs.tobytes()
    return raw + int(google_crc32c.value(raw)).to_bytes(4, "little")


def array_json(layout: Layout, blocks: int, shard_blocks: int, facts: dict[str, Any]) -> bytes:
    """Return ``zarr.json`` of an array of ``blocks`` blocks of one field: ``[blocks, *layout.shape]``."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [1, *layout.shape],
        "codecs": [little],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    values = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [blocks, *layout.shape],
        "data_type": _ZARR_TYPES.get(layout.dtype, layout.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_blocks, *layout.shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"memstore": {**facts, "dtype": layout.dtype}},
    }
    return json.dumps(values, indent=2).encode()


def group_json() -> bytes:
    """Return ``zarr.json`` of a group, which makes folders visible to Zarr tools."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}, indent=2).encode()


def shard_name(shard: int, layout: Layout) -> str:
    """Return the name of a shard's object, in the folder of its array."""
    return ".".join(["c", str(shard), *["0"] * len(layout.shape)])
