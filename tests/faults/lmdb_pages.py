"""Where LMDB keeps what: the places of a data file, by kind of page. Only to choose what to damage."""

from __future__ import annotations

import struct
from pathlib import Path

PAGE = 4096  # bytes
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4  # flags of a page
_BIG = 1  # flag of a node: its value lies in overflow pages

Places = dict[str, list[range]]


def by_kind(file: Path) -> Places:
    """``meta``, ``branch`` and ``leaf`` (headers and nodes; values apart), ``value``, and ``free``: ranges of bytes.

    The first three are what finds the values of the last commit, and the list of free pages; no checksum covers them.
    """
    data = file.read_bytes()
    places: Places = {"meta": [range(16, 152), range(PAGE + 16, PAGE + 152)], "branch": [], "leaf": [], "value": []}
    # magic, version, address, map size: 24 bytes; two trees of 48 bytes (free pages; values); last page; transaction
    live = max((data[start : start + 136] for start in (16, PAGE + 16)), key=lambda meta: _number(meta, 128))
    for root in (_number(live, 64), _number(live, 112)):
        if root != 2**64 - 1:
            _walk(data, root, places)
    return {kind: found for kind, found in places.items() if found}


def kind_of(places: Places, offset: int) -> str:
    """The kind that a byte belongs to; what belongs to none is ``free``."""
    return next((kind for kind, ranges in places.items() if any(offset in each for each in ranges)), "free")


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _walk(data: bytes, number: int, places: Places) -> None:
    start = number * PAGE
    flags, lower = struct.unpack_from("<HH", data, start + 10)
    kind = "branch" if flags & _BRANCH else "leaf"
    places[kind].append(range(start, start + lower))
    for (offset,) in struct.iter_unpack("<H", data[start + 16 : start + lower]):
        low, high, node_flags, key = struct.unpack_from("<HHHH", data, start + offset)
        node = range(start + offset, start + offset + 8 + key)
        places[kind].append(node)
        if kind == "branch":
            _walk(data, low | high << 16 | node_flags << 32, places)
            continue
        size = low | high << 16
        if node_flags & _BIG:
            places[kind].append(range(node.stop, node.stop + 8))
            first = _number(data, node.stop) * PAGE
            places[kind].append(range(first, first + 16))
            places["value"].append(range(first + 16, first + 16 + size))
        else:
            places["value"].append(range(node.stop, node.stop + size))
