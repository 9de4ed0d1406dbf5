"""The bytes of a memory's Zarr arrays: whole shards, and the ``zarr.json`` beside them (Zarr format 3).

A shard holds the states of consecutive blocks of one layer and one field: the blocks as they are, one after the other,
then the index that the ``sharding_indexed`` codec puts at the end. All blocks have the same length, so the index is
known before anything is written, and a block is found without reading it. Nothing here does input or output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from memstore.errors import InvalidArgument
from memstore.store.contract import Bytes, Layout

SHARD_BYTES = 8 << 20
"""How long the shards of the largest field are, about: the others are shorter."""

_ZARR_TYPES = {"bfloat16": "uint16", "json": "uint8"}  # what Zarr has no type for is stored as its bits


def blocks_per_shard(layouts: Sequence[Layout], shard_bytes: int) -> int:
    """How many blocks make a shard; 0 where blocks cannot be sealed, because a field of them is empty."""
    sizes = [layout.nbytes for layout in layouts]
    return max(1, shard_bytes // max(sizes)) if min(sizes) else 0


def shard_object(payloads: Sequence[Bytes]) -> list[memoryview | bytes]:
    """The parts of a shard of blocks ``payloads`` (uint8, of one length), to be written one after the other."""
    return [*(payload.data for payload in payloads), shard_index(len(payloads), payloads[0].nbytes)]


@lru_cache(maxsize=64)
def shard_index(blocks: int, block_bytes: int) -> bytes:
    """Offset and length of each block, 64 bits each, then their CRC-32C: ``16 * blocks + 4`` bytes."""
    try:
        import google_crc32c
    except ImportError:
        raise InvalidArgument("memories in Zarr need 'pip install torch-memstore[zarr]'.") from None
    pairs = np.empty((blocks, 2), "<u8")
    pairs[:, 0] = np.arange(blocks, dtype=np.uint64) * np.uint64(block_bytes)
    pairs[:, 1] = block_bytes
    raw = pairs.tobytes()
    return raw + int(google_crc32c.value(raw)).to_bytes(4, "little")


def array_json(layout: Layout, blocks: int, shard_blocks: int, facts: dict[str, Any]) -> bytes:
    """``zarr.json`` of an array of ``blocks`` blocks of one field: ``[blocks, *layout.shape]``."""
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
    """``zarr.json`` of a group, which is what makes folders visible to Zarr tools."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}, indent=2).encode()


def shard_name(shard: int, layout: Layout) -> str:
    """Name of the object of a shard, in the folder of its array."""
    return ".".join(["c", str(shard), *["0"] * len(layout.shape)])
