"""What a trace is made of: what one layer retrieved at one step, and how a step's looks lie in a file.

A step is one compressed value: a count, the lists of documents, a head of fixed length for each look, then the arrays
field by field, so that the same lists of blocks in many layers lie near each other and take hardly any space. Weights
are kept in float16, which rounds a sum of weights by less than 0.0005.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from memstore.errors import DamagedError
from memstore.stored import array, fit, parse, text

MOST_BYTES = 256 * 1024 * 1024
"""Of what is recorded of one step, unpacked."""

Array = npt.NDArray[Any]

TIERS = ("device", "host", "disk", "own")
"""Where states were when they were asked for; "own" are tensors of the call itself, which were never stored."""

_COUNTS = struct.Struct("<II")  # looks, bytes of JSON
_HEAD = struct.Struct("<IIHIHI?ff")  # layer, row, number of its documents, R, H, K, offsets?, search, gather
_FIELDS = {"document": "<i2", "blocks": "<i8", "offsets": "<i8", "scores": "<f4", "weights": "<f2", "tiers": "i1"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """What one layer retrieved at one step, for one row of the batch: ``R`` lists of ``K``, for ``H`` query heads."""

    layer: int
    row: int
    documents: Sequence[str]
    """Names that ``document`` points into."""
    document: Array
    """``[R, K]`` int16: index into ``documents``, -1 for none. Query head ``h`` uses list ``h * R // H``."""
    blocks: Array
    """``[R, K]`` int64: block ids, best score first; -1 where there are fewer."""
    offsets: Array | None = None
    """``[R, K]`` int64: the token within the block, where single tokens are retrieved."""
    scores: Array
    """``[R, K]`` float32: comparable within a list; NaN where nobody had to choose."""
    weights: Array
    """``[H, K]`` float32: the part of the layer's attention that each entry carried for the step's last token, after
    local attention was merged in; for grouped cross attention the weights of the blocks. NaN where unknown."""
    tiers: Array
    """``[R, K]`` int8: index into ``TIERS``, where the states were when they were asked for; -1 for none."""
    search_us: float = 0.0
    """Microseconds of searching; 0 where another layer or an earlier step had searched."""
    gather_us: float = 0.0
    """Microseconds of gathering; 0 where the states were there from an earlier step."""

    def by_list(self, head: int | None = None) -> tuple[Array, Array]:
        """Lists ``[n]``, and the weights ``[n, K]`` that all query heads of each give it, or ``head`` alone.

        What is unknown counts as nothing. There is no list for a head that the layer does not have.
        """
        weights, of_head = np.nan_to_num(self.weights), self.by_head()
        if head is not None:
            return of_head[head : head + 1], weights[head : head + 1]
        lists = np.arange(len(self.blocks))
        return lists, np.add.reduceat(weights, np.searchsorted(of_head, lists), axis=0)

    def by_head(self) -> Array:
        """``[H]``: the list that each query head uses."""
        heads = len(self.weights)
        lists: Array = np.arange(heads) * len(self.blocks) // max(1, heads)
        return lists


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass: what was retrieved for it, and the token that it chose."""

    number: int
    """0 is the pass over the prompt, which chose the first token."""
    token: int | None
    """Id of the token that this step chose for the first row; None if nothing went on from it."""
    seconds: float
    """Since the trace began."""
    looks: Sequence[Look]
    """Empty where nothing was retrieved, and where they had to leave for later ones."""


def encode(looks: Sequence[Look]) -> bytes:
    """The bytes that ``decode`` reads."""
    lists = {tuple(look.documents): None for look in looks}
    places = {names: place for place, names in enumerate(lists)}
    names = json.dumps(list(lists)).encode()
    heads = [_head(look, places[tuple(look.documents)]) for look in looks]
    arrays = [
        np.ascontiguousarray(array, dtype).tobytes()
        for field, dtype in _FIELDS.items()
        for look in looks
        if (array := getattr(look, field)) is not None
    ]
    return zlib.compress(b"".join([_COUNTS.pack(len(looks), len(names)), names, *heads, *arrays]), 1)


def decode(data: bytes) -> list[Look]:
    """The looks in ``data``. Raises ``ValueError`` for what ``encode`` has not written."""
    try:
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(data, MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise ValueError("it is far larger than any step")
        return _decode(plain)
    except (zlib.error, struct.error, LookupError, TypeError, DamagedError) as error:
        raise ValueError(str(error)) from error


def _head(look: Look, documents: int) -> bytes:
    (lists, entries), heads = look.blocks.shape, len(look.weights)
    has_offsets = look.offsets is not None
    return _HEAD.pack(
        look.layer, look.row, documents, lists, heads, entries, has_offsets, look.search_us, look.gather_us
    )


def _decode(data: bytes) -> list[Look]:
    count, length = _COUNTS.unpack_from(data)
    at = _COUNTS.size + length
    lists = fit(parse(data[_COUNTS.size : at], "a step"), array(array(text(511), 2**20), 2**20), "a step")
    heads = [_HEAD.unpack_from(data, at + n * _HEAD.size) for n in range(count)]
    at += count * _HEAD.size
    arrays: list[dict[str, Array | None]] = [dict.fromkeys(_FIELDS) for _ in heads]
    for field, dtype in _FIELDS.items():
        for head, found in zip(heads, arrays, strict=True):
            _, _, _, rows, query_heads, entries, has_offsets, _, _ = head
            if field == "offsets" and not has_offsets:
                continue
            shape = (query_heads if field == "weights" else rows, entries)
            found[field] = np.frombuffer(data, dtype, shape[0] * shape[1], at).reshape(shape)
            at += shape[0] * shape[1] * np.dtype(dtype).itemsize
    return [_look(head, lists, found) for head, found in zip(heads, arrays, strict=True)]


def _look(head: tuple[Any, ...], lists: list[list[str]], arrays: dict[str, Any]) -> Look:
    layer, row, documents, _, _, _, _, search_us, gather_us = head
    arrays["weights"] = arrays["weights"].astype(np.float32)
    return Look(layer=layer, row=row, documents=lists[documents], search_us=search_us, gather_us=gather_us, **arrays)


assert set(_FIELDS) <= {field.name for field in fields(Look)}
