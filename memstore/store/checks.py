"""Checks of arguments that every store makes before it touches anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from memstore.errors import InvalidArgument, StoreFull
from memstore.store.contract import ITEM_BYTES, Batch, Bytes, Key, Layout, Record, Table
from memstore.store.records import MAX_DIMENSIONS, describe

MAX_DOCUMENT = 2**32 - 2  # the number after it is the store's own, see ``lmdb.py``
MAX_LAYER = 2**32 - 1
MAX_ITEM = 2**32 - 1


@contextmanager
def translated(*, closed: type[Exception], full: type[Exception]) -> Iterator[None]:
    """Errors of the library below a store as those of the contract.

    ``closed`` is what it raises after it was closed, ``full`` what it raises where it cannot store something.
    """
    try:
        yield
    except closed as error:
        raise InvalidArgument(f"this store is closed; open the memory again ({error})") from None
    except full as error:
        raise StoreFull(f"nothing of this batch was stored ({error}), what was committed before stands") from error


def check_key(key: Key) -> None:
    """Raise ``InvalidArgument`` for a key whose numbers are out of range."""
    if not (0 <= key.document <= MAX_DOCUMENT and 0 <= key.layer <= MAX_LAYER and 0 <= key.item <= MAX_ITEM):
        raise InvalidArgument(f"document, layer and item are numbers of 32 bits; {key} does not fit")


def check_range(first: Key, last: Key) -> None:
    """Raise ``InvalidArgument`` unless both ends are keys of one table."""
    check_key(first)
    check_key(last)
    if first.table != last.table:
        raise InvalidArgument(f"a range lies in one table; {describe(first)} and {describe(last)} do not")


def check_batch(batch: Batch) -> None:
    """Raise ``InvalidArgument`` for anything in a batch that cannot be stored."""
    for first, last in batch.deletes:
        check_range(first, last)
    good: dict[int, int] = {}  # records of one kind share their layout: checked once, by identity
    for key, records in batch.puts:
        check_key(key)
        if not 0 < len(records) < 256:
            raise InvalidArgument(f"a value has 1 to 255 records; {describe(key)} was given {len(records)}")
        for record in records:
            if good.get(id(record.layout)) != record.payload.nbytes:
                _check_record(key, record)
                good[id(record.layout)] = record.payload.nbytes


def _check_record(key: Key, record: Record) -> None:
    layout = record.layout
    if layout.dtype not in ITEM_BYTES or len(layout.shape) > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"a record is one of {list(ITEM_BYTES)} of up to {MAX_DIMENSIONS} dimensions, not {layout}"
        )
    if any(not 0 <= size < 2**32 for size in layout.shape):
        raise InvalidArgument(f"{describe(key)}: a dimension has 32 bits; {layout} does not fit")
    if record.payload.nbytes != layout.nbytes:
        raise InvalidArgument(
            f"{describe(key)}: {layout} takes {layout.nbytes} bytes, the payload has {record.payload.nbytes}"
        )


def check_out(keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
    """Raise ``InvalidArgument`` unless ``out`` has a row of the right length for each key and layout."""
    expected = [(len(keys), layout.nbytes) for layout in layouts]
    found = [rows.shape for rows in out]
    if found != expected or any(rows.dtype != np.uint8 or rows.strides[1] != 1 for rows in out if rows.size):
        raise InvalidArgument(f"out must be uint8 arrays of shapes {expected} with contiguous rows, not {found}")


def document_ranges(document: int) -> list[tuple[Key, Key]]:
    """The ranges of keys that belong to one document. META belongs to the memory, so it is not among them."""
    tables = [table for table in Table if table != Table.META]
    return [(Key(table, document), Key(table, document, MAX_LAYER, MAX_ITEM)) for table in tables]
