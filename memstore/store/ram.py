"""A store in host memory: for tests, for short-lived memories, and as the plainest implementation of the contract."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from memstore.errors import InvalidArgument, NotFound
from memstore.store.contract import BlockStore, Capabilities, evict
from memstore.store.records import (
    Batch,
    Bytes,
    Key,
    Layout,
    Numbers,
    Record,
    ScannedValue,
    check_batch,
    check_layouts,
    check_out,
    check_range,
    describe,
    fill_row,
)


class RamStore(BlockStore):
    """A dict with sorted keys. All values are copied on the way in and out."""

    capabilities = Capabilities(durable=False, reads_rows=True)

    def __init__(self) -> None:
        self.read_only = False
        self._values: dict[Key, tuple[Record, ...]] = {}
        self._sorted: list[Key] = []
        self._version = 0
        self._closed = False
        self._lock = threading.RLock()

    def write(self, batch: Batch) -> None:
        check_batch(batch)
        puts = {key: tuple(_copy(record) for record in records) for key, records in batch.puts}
        with self._locked():
            for first, last in batch.deletes:
                for key in self.keys(first, last):
                    del self._values[key]
                self._sorted = sorted(self._values)
            self._values.update(puts)
            self._sorted = sorted(self._values)
            self._version += 1

    def write_within(self, batch: Batch, max_bytes: int, evictions: Iterable[Batch]) -> int:
        with self._locked():
            before = dict(self._values), self._sorted
            try:
                self.write(batch)
                return evict(evictions, max_bytes, self.size_bytes, self.write)
            except BaseException:
                self._values, self._sorted = before
                raise

    def read(self, keys: Sequence[Key], layouts: Sequence[Layout], out: Sequence[Bytes]) -> None:
        check_out(keys, layouts, out)
        with self._locked():
            for row, key in enumerate(keys):
                fill_row(out, row, key, self._values.get(key), layouts)

    def rows(self, keys: Sequence[Key], layout: Layout, which: Numbers, rows: Numbers) -> Bytes:
        out = np.empty((len(rows), layout.nbytes // layout.shape[0]), np.uint8)
        ends = np.searchsorted(which, np.arange(len(keys)), side="right").tolist()
        with self._locked():
            for key, start, end in zip(keys, [0, *ends], ends, strict=False):
                records = self._values.get(key)
                if records is None:
                    raise NotFound(f"there is no {describe(key)}")
                check_layouts(key, records, [layout])
                records[0].payload.reshape(layout.shape[0], -1).take(rows[start:end], 0, out[start:end], "clip")
        return out

    def get(self, key: Key) -> tuple[Record, ...] | None:
        with self._locked():
            records = self._values.get(key)
        return None if records is None else tuple(_copy(record) for record in records)

    def keys(self, first: Key, last: Key) -> list[Key]:
        check_range(first, last)
        with self._locked():
            return self._sorted[bisect_left(self._sorted, first) : bisect_right(self._sorted, last)]

    def scan(self) -> Iterator[ScannedValue]:
        with self._locked():
            snapshot = [(key, self._values[key]) for key in self._sorted]
        return (ScannedValue(key, tuple(_copy(record) for record in records), None) for key, records in snapshot)

    def size_bytes(self) -> int:
        with self._locked():
            return sum(record.payload.nbytes for records in self._values.values() for record in records)

    def version(self) -> int:
        with self._locked():
            return self._version

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values, self._sorted = {}, []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise InvalidArgument("this store is closed; open the memory again")
            yield


def _copy(record: Record) -> Record:
    return record._replace(payload=record.payload.reshape(-1).copy())
