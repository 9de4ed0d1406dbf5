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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.memory.spec import MemorySpec, plain_layouts
from memstore.store.cache import as_tensor, empty_rows
from memstore.store.codecs import LOSSY
from memstore.store.contract import BlockStore
from memstore.store.records import Bytes, Key, Layout, Record


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
    if spec.codec == "none":
        return [states[name] for name in spec.fields]
    return [stored for name in spec.fields for stored in LOSSY[spec.codec].encode(states[name])]


def decode_block_rows(spec: MemorySpec, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """What is stored of ``n`` complete blocks, ``[n, ...]`` for each of ``block_layouts`` -> states ``[n, *shape]``."""
    if spec.codec == "none":  # nothing to decode, and gathers are fast enough to feel it
        return dict(zip(spec.fields, rows, strict=True))
    codec, dtype = LOSSY[spec.codec], TORCH_DTYPES[spec.dtype]
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
