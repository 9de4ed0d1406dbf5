"""Landmarks in the store: runs of consecutive blocks, of which only the last one is ever rewritten."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memstore.errors import DamagedError
from memstore.memory.landmarks import decode, encode
from memstore.memory.layouts import run_layout
from memstore.memory.spec import MemorySpec
from memstore.memory.state import LAST_ITEM, Address
from memstore.memory.tensors import TORCH_DTYPES, from_record, to_record
from memstore.store.contract import Batch, BlockStore, Key


class LandmarkRuns:
    """Landmarks of one layer of one document: run ``r`` holds blocks ``r * length`` up to its last one.

    A run always starts at its first block, also where that block has left the memory: a row that was never written
    is zeros, and no live block ever reads it.
    """

    def __init__(self, store: BlockStore, spec: MemorySpec, address: Address, layer: int, length: int) -> None:
        self._store = store
        self._spec = spec
        self._address = address
        self._layer = layer
        self._length = length

    def read(self, blocks: range) -> Iterator[tuple[range, Tensor]]:
        """Pieces of ``blocks`` with their landmarks ``[n, G, P, D]`` float32. Raises ``DamagedError``."""
        for run in range(blocks.start // self._length, -(-blocks.stop // self._length)):
            start = run * self._length
            piece = range(max(start, blocks.start), min(start + self._length, blocks.stop))
            stored = self._stored(run, piece.stop - start)[piece.start - start :]
            yield piece, decode(stored, self._spec.key_dtype)

    def write(self, batch: Batch, first_block: int, landmarks: Tensor, first_live: int) -> None:
        """Put ``landmarks [n, G, P, D]`` of blocks ``first_block ...``, and whatever shares a run with them.

        Runs whose blocks are all before ``first_live`` are left out. Raises ``DamagedError``.
        """
        rows = encode(landmarks, self._spec.key_dtype)
        run, offset = divmod(first_block, self._length)
        if offset:
            rows = torch.cat([self._head(run, offset, first_live), rows])
        for start in range(0, len(rows), self._length):
            number = run + start // self._length
            if (number + 1) * self._length > first_live:
                batch.put(self._key(number), to_record(rows[start : start + self._length]))

    def cut(self, batch: Batch, blocks: int, first_live: int) -> None:
        """Drop everything from block ``blocks`` on. Raises ``DamagedError``."""
        run, rows = divmod(blocks, self._length)
        if rows and blocks > first_live:
            batch.put(self._key(run), to_record(self._stored(run, rows)))
            run += 1
        batch.delete(self._key(run), self._last())

    def leave(self, batch: Batch, before: range) -> None:
        """Delete the runs of which every block is below ``before.stop``, from that of ``before.start`` on."""
        first, stop = before.start // self._length, before.stop // self._length
        if stop > first:
            batch.delete(self._key(first), self._key(stop - 1))

    def _head(self, run: int, rows: int, first_live: int) -> Tensor:
        """The first ``rows`` of a run, as stored; zeros where all of them have left the memory."""
        if run * self._length + rows <= first_live:
            layout = run_layout(self._spec, rows)
            return torch.zeros(layout.shape, dtype=TORCH_DTYPES[layout.dtype])
        return self._stored(run, rows)

    def _stored(self, run: int, rows: int) -> Tensor:
        records = self._store.get(self._key(run))
        expected = run_layout(self._spec, rows)
        layouts = [record.layout for record in records or ()]
        good = len(layouts) == 1 and layouts[0].dtype == expected.dtype and layouts[0].shape[1:] == expected.shape[1:]
        if not records or not good or layouts[0].shape[0] < rows:
            found = f"{layouts} lies there" if layouts else "there is nothing"
            raise DamagedError(
                f"landmarks of document {self._address.id}, layer {self._layer}, run {run}: "
                f"expected {expected}, {found}; run verify"
            )
        return from_record(records[0])[:rows]

    def _key(self, run: int) -> Key:
        return self._address.run(self._layer, run)

    def _last(self) -> Key:
        return self._key(LAST_ITEM)
