import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from memstore.errors import DamagedError, ForeignMemory
from memstore.store import Key, Layout, Record, Table
from memstore.store.records import ALIGNMENT, HEADER_BYTES, ValueReader, decode_value, encode_value

KEY = Key(Table.BLOCKS, 3, 2, 2**40 + 17)
LAYOUTS = (Layout("bfloat16", (2, 3)), Layout("uint8", (5,)))


def records() -> tuple[Record, ...]:
    random = np.random.default_rng(0)
    return tuple(Record(layout, random.integers(0, 256, layout.nbytes, np.uint8)) for layout in LAYOUTS)


def rows() -> list[memoryview]:
    return [memoryview(bytearray(layout.nbytes)) for layout in LAYOUTS]


def test_roundtrip() -> None:
    encoded = encode_value(KEY, records())
    decoded, end = decode_value(memoryview(encoded), 0, KEY)
    assert end == len(encoded) == 2 * (HEADER_BYTES + ALIGNMENT)
    assert [record.layout for record in decoded] == list(LAYOUTS)
    assert all((a.payload == b.payload).all() for a, b in zip(decoded, records(), strict=True))


def test_reader_copies_the_same() -> None:
    encoded, out = encode_value(KEY, records()), rows()
    reader = ValueReader(Table.BLOCKS, LAYOUTS)
    assert reader.size == len(encoded)
    assert reader.copy(memoryview(encoded), 0, KEY, out) == len(encoded)
    assert [bytes(row) for row in out] == [record.payload.tobytes() for record in records()]


def test_payloads_are_aligned() -> None:
    encoded = encode_value(KEY, records())
    assert len(encoded) % ALIGNMENT == 0
    assert HEADER_BYTES % ALIGNMENT == 0


def test_every_flipped_bit_is_found() -> None:
    """All of them: header, payload and padding, by the general decoder and by the fast reader."""
    encoded = bytearray(encode_value(KEY, records()))
    reader = ValueReader(Table.BLOCKS, LAYOUTS)
    for bit in range(8 * len(encoded)):
        encoded[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError, match="layer 2, block 1099511627793 is damaged"):
            decode_value(memoryview(encoded), 0, KEY)
        with pytest.raises(DamagedError, match="document 3"):
            reader.copy(memoryview(encoded), 0, KEY, rows())
        encoded[bit // 8] ^= 1 << bit % 8
    decode_value(memoryview(encoded), 0, KEY)


def test_every_truncation_is_found() -> None:
    encoded = encode_value(KEY, records())
    reader = ValueReader(Table.BLOCKS, LAYOUTS)
    for length in range(len(encoded)):
        with pytest.raises(DamagedError):
            decode_value(memoryview(encoded)[:length], 0, KEY)
        with pytest.raises(DamagedError):
            reader.copy(memoryview(encoded)[:length], 0, KEY, rows())


@pytest.mark.parametrize(
    "other",
    [
        Key(Table.LANDMARKS, 3, 2, KEY.item),
        Key(Table.BLOCKS, 4, 2, KEY.item),
        Key(Table.BLOCKS, 3, 1, KEY.item),
        Key(Table.BLOCKS, 3, 2, 17),
    ],
)
def test_a_value_elsewhere_is_a_wrong_address(other: Key) -> None:
    encoded = memoryview(encode_value(KEY, records()))
    with pytest.raises(DamagedError, match="wrong address"):
        decode_value(encoded, 0, other)
    with pytest.raises(DamagedError, match="wrong address"):
        ValueReader(other.table, LAYOUTS).copy(encoded, 0, other, rows())


def test_records_in_another_order_are_found() -> None:
    encoded = encode_value(KEY, records())
    middle = len(encoded) // 2
    with pytest.raises(DamagedError, match="wrong address: where record 0 should be lies record 1"):
        decode_value(memoryview(encoded[middle:] + encoded[:middle]), 0, KEY)


@pytest.mark.parametrize(("offset", "what"), [(4, "format 2"), (6, "codec 1"), (7, "dtype 9")])
def test_a_newer_header_is_foreign_not_damaged(offset: int, what: str) -> None:
    encoded = bytearray(encode_value(KEY, records()))
    encoded[offset] = int(what.split()[1])
    encoded[88:96] = xxh3_64_intdigest(encoded[:88]).to_bytes(8, "little")
    with pytest.raises(ForeignMemory, match=f"written by a newer memstore .*{what}.*upgrade"):
        decode_value(memoryview(encoded), 0, KEY)
