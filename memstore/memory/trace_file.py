"""The parts of a trace's steps, and their form in the file of traces (``traces.py``).

A step is one compressed value: a count, the lists of documents, and a head of fixed length for each look. Then come the
arrays field by field. Equal lists of blocks in many layers then lie near each other and take hardly any space. Weights
are stored in float16, which rounds a sum of weights by less than 0.0005.
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
from memstore.json_checks import array, fit, parse, text

MOST_BYTES = 256 * 1024 * 1024
"""Most bytes of one recorded step, unpacked."""

Array = npt.NDArray[Any]

TIERS = ("device", "host", "disk", "own")
"""The tiers of states at the time of a gather; "own" are tensors of the call itself, which were never stored."""
ELSEWHERE = ("sink", "window", "question", "answer")
"""Targets of attention beside the retrieved blocks; the rest of 1 went to other tokens.

The document has a sink and a window. The call has the tokens of its first forward pass, and the later ones.
"""

_COUNTS = struct.Struct("<II")  # looks, bytes of JSON
_HEAD = struct.Struct("<IIHIHIBff")  # layer, row, number of its documents, R, H, K, which of _OPTIONAL, search, gather
_FIELDS = {
    "document": "<i2",
    "blocks": "<i8",
    "offsets": "<i8",
    "scores": "<f4",
    "weights": "<f2",
    "tiers": "i1",
    "elsewhere": "<f2",
}
_OPTIONAL = ("offsets", "elsewhere")


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """The retrieval of one layer at one step, for one row of the batch: ``R`` lists of ``K``, for ``H`` query heads."""

    layer: int
    row: int
    documents: Sequence[str]
    """Document names that ``document`` indexes."""
    document: Array
    """``[R, K]`` int16: index into ``documents``, -1 for none. Query head ``h`` uses list ``h * R // H``."""
    blocks: Array
    """``[R, K]`` int64: block ids, best score first; -1 for missing entries."""
    offsets: Array | None = None
    """``[R, K]`` int64: the token within the block, if single tokens are retrieved."""
    scores: Array
    """``[R, K]`` float32: comparable within a list; NaN if there was no choice."""
    weights: Array
    """``[H, K]`` float32: each entry's share of the layer's attention, for the step's last token.

    It is measured after local attention was merged in. For grouped cross attention: the weights of the blocks. NaN if
    unknown.
    """
    tiers: Array
    """``[R, K]`` int8: index into ``TIERS`` (device, host, disk, own), the tier of the states when they were gathered.

    -1 for none.
    """
    elsewhere: Array | None = None
    """``[H, 4]`` float32: the share of attention for each of ``ELSEWHERE``: sink, window, question and answer.

    None if unknown.
    """
    search_us: float = 0.0
    """Microseconds of searching; 0 if another layer or an earlier step did the search."""
    gather_us: float = 0.0
    """Microseconds of gathering; 0 if an earlier step has gathered the states."""

    @property
    def fetched(self) -> bool:
        """Whether the states were fetched for this step; an unchanged list keeps them from the step before."""
        return self.gather_us > 0

    def by_list(self, head: int | None = None) -> tuple[Array, Array]:
        """Return lists ``[n]``, and the summed weights ``[n, K]`` of each list's query heads, or those of ``head``.

        Unknown weights count as zero. A head that the layer does not have gives no list.
        """
        weights, of_head = np.nan_to_num(self.weights), self.by_head()
        if head is not None:
            return of_head[head : head + 1], weights[head : head + 1]
        lists = np.arange(len(self.blocks))
        return lists, np.add.reduceat(weights, np.searchsorted(of_head, lists), axis=0)

    def by_head(self) -> Array:
        """Return ``[H]``: the list that each query head uses."""
        heads = len(self.weights)
        lists: Array = np.arange(heads) * len(self.blocks) // max(1, heads)
        return lists


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass: its retrieved blocks, and the token that it chose."""

    number: int
    """0 is the prefill pass, which chose the first token."""
    token: int | None
    """Id of the token that this step chose for the first row; None if no step followed."""
    seconds: float
    """Seconds since the trace began."""
    looks: Sequence[Look]
    """Empty if nothing was retrieved, or if the looks were removed to make room for later ones."""


def encode(looks: Sequence[Look]) -> bytes:
    """Return the bytes for ``decode``."""
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
    """Return the looks in ``data``. Raises ``ValueError`` for bytes that are not from ``encode``."""
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
    has = sum(1 << place for place, field in enumerate(_OPTIONAL) if getattr(look, field) is not None)
    return _HEAD.pack(look.layer, look.row, documents, lists, heads, entries, has, look.search_us, look.gather_us)


def _decode(data: bytes) -> list[Look]:
    count, length = _COUNTS.unpack_from(data)
    at = _COUNTS.size + length
    lists = fit(parse(data[_COUNTS.size : at], "a step"), array(array(text(511), 2**20), 2**20), "a step")
    heads = [_HEAD.unpack_from(data, at + n * _HEAD.size) for n in range(count)]
    at += count * _HEAD.size
    arrays: list[dict[str, Array | None]] = [dict.fromkeys(_FIELDS) for _ in heads]
    for field, dtype in _FIELDS.items():
        for head, found in zip(heads, arrays, strict=True):
            _, _, _, rows, query_heads, entries, has, _, _ = head
            if field in _OPTIONAL and not has & 1 << _OPTIONAL.index(field):
                continue
            shape = (query_heads if field == "weights" else rows, entries)
            if field == "elsewhere":
                shape = (query_heads, len(ELSEWHERE))
            found[field] = np.frombuffer(data, dtype, shape[0] * shape[1], at).reshape(shape)
            at += shape[0] * shape[1] * np.dtype(dtype).itemsize
    return [_look(head, lists, found) for head, found in zip(heads, arrays, strict=True)]


def _look(head: tuple[Any, ...], lists: list[list[str]], arrays: dict[str, Any]) -> Look:
    layer, row, documents, _, _, _, _, search_us, gather_us = head
    for field in ("weights", "elsewhere"):
        if arrays[field] is not None:
            arrays[field] = arrays[field].astype(np.float32)
    return Look(layer=layer, row=row, documents=lists[documents], search_us=search_us, gather_us=gather_us, **arrays)


assert set(_FIELDS) <= {field.name for field in fields(Look)}
