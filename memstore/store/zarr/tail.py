"""The LMDB part of a Zarr memory: the small tables, the blocks that are not sealed yet, and the manifest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memstore.errors import DamagedError, ReadOnlyMemory
from memstore.store.lmdb.store import TAIL_FORMATS, LmdbStore
from memstore.store.lmdb.values import used_bytes
from memstore.store.records import MAX_LAYER, Key, Layout, Record, ScannedValue, damaged, decode_value, value_reader
from memstore.store.zarr.extents import COUNTERS, COUNTERS_VALUE, STORE, Extent, Series, from_record
from memstore.stored import fit

_CACHED_SHARDS = 1024  # whose checksums are kept: 8 bytes for each block and field

Sums = npt.NDArray[np.uint64]
Deletes = list[tuple[Key, Key]]
Puts = list[tuple[Key, tuple[Record, ...]]]

CHECKSUM_ROOM = 1000
"""Blocks of a layer that are believed without a look at the size of the tail."""
_SUM_BYTES = 8


class Tail(LmdbStore):
    """An ``LmdbStore`` that also knows which blocks are sealed. Its format number keeps it from being opened alone."""

    _formats = TAIL_FORMATS

    @classmethod
    def _url(cls, folder: Path) -> str:
        return f"zarr:{folder.parent}"

    def commit(self, deletes: Deletes, puts: Puts, then: Callable[[Any], None] | None = None) -> None:
        """``write`` for checked changes, those of the manifest among them; ``then`` may refuse or do more."""
        self._commit(deletes, puts, then)

    def apply(self, txn: Any, deletes: Deletes, puts: Puts) -> None:
        """More changes of the same kind, in a transaction that ``then`` was called with."""
        self._changes.apply(txn, deletes, puts)

    def check_writable(self) -> None:
        """Raise ``InvalidArgument`` for a closed store, ``ReadOnlyMemory`` for one that only reads."""
        self._check_open()
        if self.read_only:
            raise ReadOnlyMemory.opened(self.path.parent)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """One state of the tail and its manifest, whatever is written meanwhile."""
        with self._reading() as txn:
            yield Snapshot(self, txn)


class ManifestCache:
    """What was read of a manifest before: extents while their value is the same, checksums for good."""

    def __init__(self) -> None:
        self.extents: dict[Series, tuple[bytes, tuple[Extent, ...]]] = {}
        self.sums: OrderedDict[tuple[int, int], Sums] = OrderedDict()


class Snapshot:
    """Reads of one transaction."""

    def __init__(self, tail: Tail, txn: Any) -> None:
        self._tail = tail
        self._txn = txn

    def extents(self, series: Series, cache: ManifestCache) -> tuple[Extent, ...]:
        """What is sealed of one layer of a document. Raises ``DamagedError``."""
        raw = self._raw(series.manifest)
        if raw is None:
            cache.extents.pop(series, None)
            return ()
        known = cache.extents.get(series)
        if known is None or known[0] != raw:
            records, _ = decode_value(memoryview(raw), 0, series.manifest)
            extents = from_record(series, records[0])
            # Each block has checksums here: what says that there are more blocks is not to be counted through.
            blocks = sum(stop - start for extent in extents for start, stop in extent.live)
            if blocks > CHECKSUM_ROOM and blocks * _SUM_BYTES > used_bytes(self._txn):
                raise DamagedError(
                    f"the list of shards of document {series.document}, layer {series.layer} is damaged: {blocks:,} "
                    "blocks are more than there are checksums; restore it from a copy",
                    remedy="restore",
                )
            known = cache.extents[series] = (raw, extents)
        return known[1]

    def sums(self, extent: Extent, shard: int, cache: ManifestCache) -> Sums:
        """Checksums of the blocks of a shard, ``[shard_blocks, fields]``. Raises ``DamagedError``."""
        name = (extent.number, shard)
        if (sums := cache.sums.get(name)) is None:
            key = extent.sums(shard)
            records, _ = decode_value(memoryview(self._raw(key) or b""), 0, key)
            if records[0].payload.size != _SUM_BYTES * extent.shard_blocks * len(extent.layouts):
                raise damaged(key, "it has not as many checksums as its shard has blocks")
            sums = records[0].payload.view("<u8").reshape(extent.shard_blocks, len(extent.layouts))
            cache.sums[name] = sums
            if len(cache.sums) > _CACHED_SHARDS:
                cache.sums.popitem(last=False)
        return sums

    def series(self, first: Series, last: Series) -> list[Series]:
        """The layers that have something sealed, from ``first`` to ``last`` (included), in order."""
        keys = self._tail.values.keys(self._txn, first.manifest, last.manifest)
        return [Series(key.layer, key.item) for key in keys]

    def all_series(self) -> list[Series]:
        """Every layer of every document that has something sealed."""
        return self.series(Series(0, 0), Series(STORE, MAX_LAYER))

    def counters(self) -> dict[str, Any]:
        """The next number of an extent, the bytes of all shards, and the owner of shards that lie elsewhere."""
        raw = self._raw(COUNTERS)
        if raw is None:
            return {"next_extent": 1, "bytes": 0}
        counters = decode_value(memoryview(raw), 0, COUNTERS)[0][0].to_json()
        return fit(counters, COUNTERS_VALUE, "the value that counts shards")  # type: ignore[no-any-return]

    def keys(self, first: Key, last: Key) -> list[Key]:
        """Keys in the tail, in order. Raises ``DamagedError``."""
        return self._tail.values.keys(self._txn, first, last)

    def scan(self) -> Iterator[ScannedValue]:
        """Every value of the tail; of the manifest's own only damaged ones."""
        return (entry for entry in self._tail.values.scan(self._txn) if entry.key.document != STORE or entry.damage)

    def read(self, keys: Mapping[int, Key], layouts: tuple[Layout, ...], rows: Sequence[Sequence[memoryview]]) -> None:
        """Fill ``rows[i]`` with the value of ``keys[i]``, verified. Raises ``NotFound`` or ``DamagedError``."""
        reader = value_reader(layouts)
        values = self._tail.values.take(self._txn, list(keys.values()), reader, waits=self._tail._waits)
        for row, *payloads in zip(keys, *reader.payloads(values), strict=True):
            for target, payload in zip(rows[row], payloads, strict=True):
                target[:] = payload.data

    def _raw(self, key: Key) -> bytes | None:
        view = self._tail.values.value(self._txn, key)
        return None if view is None else bytes(view)
