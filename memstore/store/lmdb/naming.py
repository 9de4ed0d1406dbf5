"""Keys of LMDB: the key of a value, and behind it a check of what was written there last.

Checksums in a value find flipped bits, and another key's value. They do not find an older value of the same key, which
is whole: a disk that loses a write, or an image of one that is rolled back, leaves it where the newer one should be. So
what a value must be is said where it is looked for, in its key, and the store's facts have the sum of all these checks
and the number of the commit: an older page of the tree changes the sum. Memories of format 1 have neither.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memstore.store.contract import MAX_DOCUMENT, Key, Table

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
