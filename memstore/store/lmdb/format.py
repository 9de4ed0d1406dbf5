"""The pages of a data file of LMDB, which are private to it: the one place here that knows how they are laid out.

Two read them: ``tree.py`` looks at every page of the tree at each opening, with array operations; ``erasing.py`` goes
through both commits page by page. One reader for both would be slower in the first, or blind in the second.

A page, in the data format of LMDB 0.9 on a 64-bit little-endian machine (bytes, kind, meaning):

    page    0 u64 own number   8 u16 -   10 u16 flags   12 u16 lower   14 u16 upper (overflow: 12 u32 number of pages)
            16 ... lower: u16 places of nodes;  lower ... upper: unused;  upper ...: nodes
    node    0 u32 size of the value   4 u16 flags   6 u16 size of the key   8 key, then the value
            or, with flag 1, the u64 number of the first overflow page of the value
            in a branch page: 0 u48 number of the page below   6 u16 size of the key   8 key
    meta   16 u32 magic   20 u32 version   24 u64 address   32 u64 size of the map   40 free list, 88 values: two trees
           136 u64 last page   144 u64 commit
    tree    0 u32 -   4 u16 flags   6 u16 depth   8 u64 branch pages, leaf pages, overflow pages, values, root
"""

from __future__ import annotations

import struct

import lmdb

BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # flags of a page
LARGE = 1  # flag of a node: its value has pages of its own
HEADER_BYTES = 16  # of a page, before the places of its nodes
NODE_BYTES = 8  # of a node, before its key
NO_PAGE = 2**64 - 1  # root of an empty tree
MAGIC, FORMAT = 0xBEEFC0DE, 1
META_BYTES = 152
PAGE = struct.Struct("<QHHHH")
NODE = struct.Struct("<IHH")
METAS = struct.Struct("<IIQQ" + "IHHQQQQQ" * 2 + "QQ")  # behind the header of a meta page
UNWRITTEN_BYTES = 1 << 20  # LMDB may leave its last pages unwritten where they hold nothing

_KNOWN = (0, 9)


def is_known() -> bool:
    """Whether the LMDB in use lays pages out like this. Only its number tells: the format in its files stays at 1."""
    return lmdb.version()[:2] == _KNOWN


def version() -> str:
    """That of the LMDB in use."""
    return ".".join(map(str, lmdb.version()))
