"""Rows of blocks that are stored together, in runs: landmarks, and the hashes of a document's history.

The history of a document is a chain of hashes over its tokens, one for each complete block. The hash before the first
block says which model computed the states, and how it read: ``h = H(fingerprint, reading)``. That of a block says
everything up to its end: ``h[i] = H(h[i - 1], tokens of block i)``. So where the hashes of two blocks are equal, their
whole histories are, and with them their states: blocks are found by hash and shared.

What is deleted is known without PyTorch, which is loaded where rows are read or written: the child process of `verify`
starts in a tenth of the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from memstore.errors import DamagedError, NotFound
from memstore.memory.entry import HASH_BYTES, HASHES_PER_RUN, DocumentState, Places
from memstore.memory.spec import Fingerprint, MemorySpec, run_layout
from memstore.store.contract import BlockStore
from memstore.store.records import Batch, Bytes, Key, Layout, Table

if TYPE_CHECKING:
    from torch import Tensor

_PIECE_BYTES = 2 << 20
"""Bytes of rows that are read at a time: they stay in the processor's cache until they are where they belong."""


class Runs:
    """Rows of one table and layer: run ``r`` of an owner holds blocks ``r * length`` up to the last one in use.

    A run starts at its first block, also where that block has left the memory: a row that was never written is zeros,
    and no live block ever reads it. Only the first run of a branch starts at the branch, ``Home.base``: of the blocks
    before it there are many in a chain of forks, and each fork would store zeros for them.
    """

    def __init__(
        self, store: BlockStore, table: Table, layer: int, length: int, layout: Callable[[int], Layout]
    ) -> None:
        """``layout(n)`` is that of ``n`` rows."""
        self._store = store
        self._table = table
        self._layer = layer
        self._length = length
        self._layout = layout

    def read(self, places: Places, blocks: range) -> Iterator[tuple[range, Tensor]]:
        """Pieces of ``blocks`` with their rows ``[n, ...]``. Raises ``DamagedError``."""
        for owner, part in places.pieces(blocks):
            step = self._length * max(1, _PIECE_BYTES // self._layout(self._length).nbytes)
            base, start = places.node.at(part.start).base, part.start - part.start % self._length
            while start < part.stop:
                stop, first = (start + step, start) if base <= start else (start + self._length, base)
                piece = range(max(start, part.start), min(stop, part.stop))
                yield piece, self._rows(owner, start // self._length, piece.stop - first)[piece.start - first :]
                start = stop

    def _rows(self, owner: int, run: int, rows: int) -> Tensor:
        """The first ``rows`` from the start of a run on: whole runs at once, and what is left of the last."""
        import torch

        keys = [self._key(owner, number) for number in range(run, run + -(-rows // self._length))]
        whole = rows // self._length
        parts = [self._whole(keys[:whole])] if whole else []
        parts += [self._stored(key, rows % self._length) for key in keys[whole:]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _whole(self, keys: Sequence[Key]) -> Tensor:
        import torch

        from memstore.memory.tensors import read_rows

        try:
            return read_rows(self._store, keys, [self._layout(self._length)])[0].flatten(0, 1)
        except (DamagedError, NotFound):  # one by one, to find the words for the first that is not as it should be
            return torch.cat([self._stored(key, self._length) for key in keys])

    def write(self, batch: Batch, places: Places, first_block: int, rows: Tensor, first_live: int) -> None:
        """Put ``rows [n, ...]`` of blocks ``first_block ...``, which lie at home, and what shares a run with them.

        Runs whose blocks are all before ``first_live`` are left out. Raises ``DamagedError``.
        """
        import torch

        from memstore.memory.tensors import to_record

        run = first_block // self._length
        begin = max(run * self._length, places.node.base)
        if first_block > begin:
            head = self._head(self._key(places.home, run), begin, first_block - begin, max(first_live, places.whole))
            rows = torch.cat([head, rows])
        end, start = begin + len(rows), begin
        while start < end:
            stop = (run + 1) * self._length
            if stop > first_live:
                batch.put(self._key(places.home, run), to_record(rows[start - begin : stop - begin]))
            start, run = stop, run + 1

    def release(self, batch: Batch, owner: int, base: int, gap: range, used: Sequence[range]) -> None:
        """Delete what nobody uses any more: rows of ``gap``, next to those that are ``used``. Raises ``DamagedError``.

        A run that is used loses the rows behind the last one in use; those before it stay. ``base`` is the owner's.
        """
        first, last = gap.start // self._length, (gap.stop - 1) // self._length
        if stop := self._stop(first, used):
            if stop <= gap.start:
                self._shorten(batch, self._key(owner, first), stop - max(first * self._length, base))
            first += 1
        if last >= first and self._stop(last, used):
            last -= 1
        if last >= first:
            batch.delete(self._key(owner, first), self._key(owner, last))

    def _stop(self, run: int, used: Sequence[range]) -> int:
        """One more than the last block of a run that is in use; 0 where none is."""
        start, stop = run * self._length, (run + 1) * self._length
        return max((min(part.stop, stop) for part in used if part.start < stop and part.stop > start), default=0)

    def _shorten(self, batch: Batch, key: Key, rows: int) -> None:
        records = self._store.get(key)
        if records is not None and records[0].layout.shape[0] > rows:
            from memstore.memory.tensors import to_record

            batch.put(key, to_record(self._stored(key, rows)))

    def _head(self, key: Key, begin: int, rows: int, first: int) -> Tensor:
        """The first ``rows`` of a run, block ``begin`` on; zeros for those before ``first`` that are not there."""
        if begin + rows > first:
            return self._stored(key, rows)
        import torch

        from memstore.memory.tensors import TORCH_DTYPES

        records = self._store.get(key)
        there = 0 if records is None else min(rows, records[0].layout.shape[0])
        layout = self._layout(rows - there)
        zeros = torch.zeros(layout.shape, dtype=TORCH_DTYPES[layout.dtype])
        return torch.cat([self._stored(key, there), zeros]) if there else zeros

    def _stored(self, key: Key, rows: int) -> Tensor:
        from memstore.memory.tensors import from_record

        records = self._store.get(key)
        expected = self._layout(rows)
        layouts = [record.layout for record in records or ()]
        good = len(layouts) == 1 and layouts[0].dtype == expected.dtype and layouts[0].shape[1:] == expected.shape[1:]
        if not records or not good or layouts[0].shape[0] < rows:
            found = f"{layouts} lies there" if layouts else "there is nothing"
            raise DamagedError(
                f"{self._table.name.lower()} of document {key.document}, layer {self._layer}, run {key.item}: "
                f"expected {expected}, {found}; run verify"
            )
        return from_record(records[0])[:rows]

    def _key(self, owner: int, run: int) -> Key:
        return Key(self._table, owner, self._layer, run)


class LandmarkRuns(Runs):
    """The landmarks of one layer."""

    def __init__(self, store: BlockStore, spec: MemorySpec, layer: int, length: int) -> None:
        super().__init__(store, Table.LANDMARKS, layer, length, lambda rows: run_layout(spec, rows))
        self._key_dtype = spec.key_dtype

    def read(self, places: Places, blocks: range) -> Iterator[tuple[range, Tensor]]:
        """Pieces of ``blocks`` with their landmarks ``[n, G, P, D]`` float32. Raises ``DamagedError``."""
        from memstore.memory.tensors import decode_landmarks

        for piece, rows in super().read(places, blocks):
            yield piece, decode_landmarks(rows, self._key_dtype)

    def write(self, batch: Batch, places: Places, first_block: int, rows: Tensor, first_live: int) -> None:
        """Put landmarks ``rows [n, G, P, D]``; see ``Runs.write``."""
        from memstore.memory.tensors import encode_landmarks

        super().write(batch, places, first_block, encode_landmarks(rows, self._key_dtype), first_live)


class HistoryRuns(Runs):
    """The hashes of the histories of documents: uint8 ``[n, HASH_BYTES]``."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store, Table.HISTORY, 0, HASHES_PER_RUN, lambda rows: Layout("uint8", (rows, HASH_BYTES)))

    def hashes(self, places: Places, blocks: range) -> bytes:
        """The stored hashes of ``blocks``, of everything up to the end of each. Raises ``DamagedError``."""
        return b"".join(rows.numpy().tobytes() for _, rows in self.read(places, blocks))

    def digest(self, places: Places, state: DocumentState, block: int, spec: MemorySpec) -> str | None:
        """The digest of a document that is cut before ``block``; None where it is not known (any more).

        Hashes of blocks that have left may be gone with them. Raises ``DamagedError``.
        """
        if state.digest is None or block == state.tokens // spec.block_size:
            return state.digest
        if 0 < block <= state.first:
            return None
        last = range(block - 1, block)
        return (self.hashes(places, last) if block else beginning(spec.fingerprint, state.reading)).hex()


def beginning(fingerprint: Fingerprint, reading: Mapping[str, Any] | None) -> bytes:
    """The hash before the first block."""
    return hashed(json.dumps([fingerprint.to_dict(), reading], sort_keys=True).encode())


def chain(start: bytes, tokens: Bytes) -> Bytes:
    """Hashes uint8 ``[n, HASH_BYTES]`` of complete blocks ``tokens [n, bytes]`` that come after hash ``start``."""
    hashes = bytearray()
    for row in tokens:
        start = hashed(start + row.tobytes())
        hashes += start
    return np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)


def broken(blocks: range, stored: Iterable[bytes], tokens: Bytes, start: bytes | None) -> Iterator[int]:
    """The ``blocks`` of which the stored hash does not follow from the one before it and ``tokens [n, bytes]``.

    ``start`` is the hash before the first of them; None, where it is not known, passes the first block.
    """
    for block, found, row in zip(blocks, stored, tokens, strict=True):
        if start is not None and hashed(start + row.tobytes()) != found:
            yield block
        start = found


def hashed(content: bytes) -> bytes:
    """BLAKE2b of 16 bytes."""
    return blake2b(content, digest_size=HASH_BYTES).digest()
