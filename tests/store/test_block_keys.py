"""Keys of blocks that are made when they are asked for are the keys that they stand for."""

from __future__ import annotations

from memstore.store import Key, Table
from memstore.store.records import BlockKeys

LAYERS, OWNERS, BLOCKS = [5, 5, 6, 0], [7, 7, 3, 2**32 - 1], [0, 255, 256, 2**32 - 1]
KEYS = [Key(Table.BLOCKS, *place) for place in zip(OWNERS, LAYERS, BLOCKS, strict=True)]


def test_they_are_those_of_their_blocks() -> None:
    keys = BlockKeys(LAYERS, OWNERS, BLOCKS)
    assert list(keys) == [keys[place] for place in range(len(keys))] == KEYS
    assert [type(key) for key in keys] == [Key] * 4
    assert list(keys[1:3]) == KEYS[1:3]
    assert keys[-1] == KEYS[-1]
    assert KEYS[2] in keys


def test_their_bytes_are_those_of_keys() -> None:
    assert BlockKeys(LAYERS, OWNERS, BLOCKS).to_bytes() == [key.to_bytes() for key in KEYS]
    assert BlockKeys([], [], []).to_bytes() == []
