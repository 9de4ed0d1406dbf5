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


def is_wrong(encoded: bytes | bytearray, key: Key = KEY) -> bool:
    return not ValueReader(LAYOUTS).sums(memoryview(encoded), key)


def test_roundtrip() -> None:
    encoded = encode_value(KEY, records())
    decoded, end = decode_value(memoryview(encoded), 0, KEY)
    assert end == len(encoded) == 2 * (HEADER_BYTES + ALIGNMENT)
    assert [record.layout for record in decoded] == list(LAYOUTS)
    assert all((a.payload == b.payload).all() for a, b in zip(decoded, records(), strict=True))


def test_reader_sees_the_same() -> None:
    encoded, reader = encode_value(KEY, records()), ValueReader(LAYOUTS)
    assert reader.size == len(encoded)
    values = np.frombuffer(2 * encoded, np.uint8).reshape(2, -1)
    assert reader.sums(memoryview(encoded), KEY)
    for payloads, record in zip(reader.payloads(values), records(), strict=True):
        assert (payloads == record.payload).all()


def test_payloads_are_aligned() -> None:
    encoded = encode_value(KEY, records())
    assert len(encoded) % ALIGNMENT == 0
    assert HEADER_BYTES % ALIGNMENT == 0


def test_every_flipped_bit_is_found() -> None:
    """All of them: header, payload and padding, by the general decoder and by the fast reader."""
    encoded = bytearray(encode_value(KEY, records()))
    for bit in range(8 * len(encoded)):
        encoded[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError, match="layer 2, block 1099511627793 is damaged"):
            decode_value(memoryview(encoded), 0, KEY)
        assert is_wrong(encoded)
        encoded[bit // 8] ^= 1 << bit % 8
    decode_value(memoryview(encoded), 0, KEY)


def test_every_truncation_is_found() -> None:
    encoded = encode_value(KEY, records())
    for length in range(len(encoded)):
        with pytest.raises(DamagedError):
            decode_value(memoryview(encoded)[:length], 0, KEY)


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
    encoded = encode_value(KEY, records())
    with pytest.raises(DamagedError, match="wrong address"):
        decode_value(memoryview(encoded), 0, other)
    assert is_wrong(encoded, other)


def test_records_in_another_order_are_found() -> None:
    encoded = encode_value(KEY, records())
    middle = len(encoded) // 2
    with pytest.raises(DamagedError, match="wrong address: in place of record 0 there is record 1"):
        decode_value(memoryview(encoded[middle:] + encoded[:middle]), 0, KEY)


@pytest.mark.parametrize(("offset", "what"), [(4, "format 2"), (6, "codec 1"), (7, "dtype 9")])
def test_a_newer_header_is_foreign_not_damaged(offset: int, what: str) -> None:
    encoded = bytearray(encode_value(KEY, records()))
    encoded[offset] = int(what.split()[1])
    encoded[88:96] = xxh3_64_intdigest(encoded[:88]).to_bytes(8, "little")
    with pytest.raises(ForeignMemory, match=f"written by a newer memstore .*{what}.*upgrade"):
        decode_value(memoryview(encoded), 0, KEY)
