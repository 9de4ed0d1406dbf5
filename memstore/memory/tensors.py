"""Between tensors and what a store keeps: bytes, encoded blocks, and runs of short rows.

Blocks are encoded once, when they are complete. An incomplete last block is stored as it is, whatever the codec, and
read again when it grows. So no state is ever encoded twice, and errors do not add up. Which of the two a block is
follows from the entry of its document.

Landmarks and the hashes of histories are short rows, one per block, in runs of consecutive blocks, of which only the
last is ever rewritten. Landmarks are stored as they are, in bfloat16, or as signs of one bit each: 1 means that a
number is not negative. Bit 0 of byte 0 belongs to the first number (little-endian). It is decoded to +1 and -1, so that
an inner product with a query counts agreeing signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.memory.entry import HASH_BYTES, HASHES_PER_RUN
from memstore.memory.places import Places
from memstore.memory.spec import MemorySpec, plain_layouts, run_layout
from memstore.store.cache import as_tensor, empty_rows
from memstore.store.codecs import codec_named
from memstore.store.contract import Batch, BlockStore, Bytes, Key, Layout, Record, Table


@contextmanager
def own_types() -> Iterator[None]:
    """Inside, operations of this thread compute in the types of their tensors."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""The dtypes that a store knows, as torch calls them."""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def byte_rows(tensor: Tensor) -> Bytes:
    """``[n, ...]`` -> uint8 ``[n, bytes]``; a view where the tensor is contiguous and on the CPU."""
    rows = tensor.detach().cpu().contiguous()
    if not rows.numel():
        return np.empty((len(rows), 0), np.uint8)
    array: Bytes = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
    return array


def to_record(tensor: Tensor) -> Record:
    """The tensor as a record. Raises ``InvalidArgument`` for a dtype that a store does not know."""
    if tensor.dtype not in _NAMES:
        raise InvalidArgument(
            f"a memory keeps {', '.join(TORCH_DTYPES)}, not {tensor.dtype}; convert the tensor first."
        )
    return Record(Layout(_NAMES[tensor.dtype], tuple(tensor.shape)), byte_rows(tensor.reshape(1, -1))[0])


def from_record(record: Record) -> Tensor:
    """The tensor in a record, whose bytes it shares."""
    dtype = TORCH_DTYPES[record.layout.dtype]
    if not record.payload.size:
        return torch.empty(record.layout.shape, dtype=dtype)
    return torch.from_numpy(record.payload.reshape(-1)).view(dtype).reshape(record.layout.shape)


def read_rows(store: BlockStore, keys: Sequence[Key], layouts: Sequence[Layout]) -> list[Tensor]:
    """The values under ``keys``, verified: ``[len(keys), *shape]`` for each of ``layouts``.

    Raises ``NotFound`` or ``DamagedError``, which names the key.
    """
    return list(map(as_tensor, store.gather(keys, layouts), layouts))


def encode_landmarks(landmarks: Tensor, key_dtype: str) -> Tensor:
    """``[n, G, P, D]`` floating point -> as stored."""
    if key_dtype != "bit":
        return landmarks.to(TORCH_DTYPES[key_dtype])
    signs = (landmarks >= 0).cpu().numpy()
    return torch.from_numpy(np.packbits(signs, axis=-1, bitorder="little"))


def decode_landmarks(stored: Tensor, key_dtype: str) -> Tensor:
    """As stored -> ``[n, G, P, D]`` float32."""
    if key_dtype != "bit":
        return stored.float()
    bits = torch.from_numpy(np.unpackbits(stored.numpy(), axis=-1, bitorder="little"))
    return bits.float().mul_(2).sub_(1)


def index_dtype(key_dtype: str) -> torch.dtype:
    """What an index should keep of landmarks: +1 and -1 are exact in bfloat16."""
    return torch.float32 if key_dtype == "float32" else torch.bfloat16


def finite(tensor: Tensor) -> bool:
    """Whether all numbers are numbers: no NaN, no infinity."""
    # A sum takes a twentieth of ``isfinite`` and has whatever is none; it may also overflow by itself, which is rare.
    return math.isfinite(float(tensor.sum())) or all(math.isfinite(float(end)) for end in tensor.aminmax())


def encode_blocks(spec: MemorySpec, states: Mapping[str, Tensor]) -> list[Tensor]:
    """Finite states ``[n, *shape]`` of every field -> what is stored, ``[n, ...]`` for each of ``block_layouts``."""
    codec = codec_named(spec.codec)
    return [stored for name in spec.fields for stored in codec.encode(states[name])]


def decode_block_rows(spec: MemorySpec, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """What is stored of ``n`` complete blocks, ``[n, ...]`` for each of ``block_layouts`` -> states ``[n, *shape]``."""
    if spec.codec == "none":  # nothing to decode, and gathers are fast enough to feel it
        return dict(zip(spec.fields, rows, strict=True))
    codec, dtype = codec_named(spec.codec), TORCH_DTYPES[spec.dtype]
    each = len(rows) // len(spec.fields)
    return {
        name: codec.decode(rows[number * each : (number + 1) * each], dtype, shape)
        for number, (name, shape) in enumerate(spec.fields.items())
    }


def as_stored(spec: MemorySpec, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """States ``[n, *shape]`` of complete blocks as the memory will give them back."""
    return decode_block_rows(spec, encode_blocks(spec, states))


def no_states(spec: MemorySpec) -> dict[str, Tensor]:
    """The fields of no block at all: ``[0, *shape]`` each."""
    return dict(zip(spec.fields, empty_rows(plain_layouts(spec)), strict=True))


def read_last_block(store: BlockStore, spec: MemorySpec, key: Key) -> dict[str, Tensor]:
    """The fields of an incomplete last block, ``[1, *shape]`` each. Raises ``NotFound`` or ``DamagedError``."""
    return dict(zip(spec.fields, read_rows(store, [key], plain_layouts(spec)), strict=True))


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
        keys = [self._key(owner, number) for number in range(run, run + -(-rows // self._length))]
        whole = rows // self._length
        parts = [self._whole(keys[:whole])] if whole else []
        parts += [self._stored(key, rows % self._length) for key in keys[whole:]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _whole(self, keys: Sequence[Key]) -> Tensor:
        try:
            return read_rows(self._store, keys, [self._layout(self._length)])[0].flatten(0, 1)
        except (DamagedError, NotFound):  # one by one, to find the words for the first that is not as it should be
            return torch.cat([self._stored(key, self._length) for key in keys])

    def write(self, batch: Batch, places: Places, first_block: int, rows: Tensor, first_live: int) -> None:
        """Put ``rows [n, ...]`` of blocks ``first_block ...``, which lie at home, and what shares a run with them.

        Runs whose blocks are all before ``first_live`` are left out. Raises ``DamagedError``.
        """
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
            batch.put(key, to_record(self._stored(key, rows)))

    def _head(self, key: Key, begin: int, rows: int, first: int) -> Tensor:
        """The first ``rows`` of a run, block ``begin`` on; zeros for those before ``first`` that are not there."""
        if begin + rows > first:
            return self._stored(key, rows)
        records = self._store.get(key)
        there = 0 if records is None else min(rows, records[0].layout.shape[0])
        layout = self._layout(rows - there)
        zeros = torch.zeros(layout.shape, dtype=TORCH_DTYPES[layout.dtype])
        return torch.cat([self._stored(key, there), zeros]) if there else zeros

    def _stored(self, key: Key, rows: int) -> Tensor:
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


class HistoryRuns(Runs):
    """The hashes of the histories of documents: uint8 ``[n, HASH_BYTES]``."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store, Table.HISTORY, 0, HASHES_PER_RUN, lambda rows: Layout("uint8", (rows, HASH_BYTES)))


class LandmarkRuns(Runs):
    """The landmarks of one layer."""

    def __init__(self, store: BlockStore, spec: MemorySpec, layer: int, length: int) -> None:
        super().__init__(store, Table.LANDMARKS, layer, length, lambda rows: run_layout(spec, rows))
        self._key_dtype = spec.key_dtype

    def read(self, places: Places, blocks: range) -> Iterator[tuple[range, Tensor]]:
        """Pieces of ``blocks`` with their landmarks ``[n, G, P, D]`` float32. Raises ``DamagedError``."""
        for piece, rows in super().read(places, blocks):
            yield piece, decode_landmarks(rows, self._key_dtype)

    def write(self, batch: Batch, places: Places, first_block: int, rows: Tensor, first_live: int) -> None:
        """Put landmarks ``rows [n, G, P, D]``; see ``Runs.write``."""
        super().write(batch, places, first_block, encode_landmarks(rows, self._key_dtype), first_live)
