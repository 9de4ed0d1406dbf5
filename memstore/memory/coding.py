"""Blocks between what a model computes and what a store keeps: encoded once, when they are complete.

An incomplete last block is stored as it is, whatever the codec, and read again when it grows. So no state is ever
encoded twice, and errors do not add up. Which of the two a block is follows from the entry of its document; whoever
may look while another process completes the block goes by the layouts of its records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from memstore.errors import DamagedError, NotFound
from memstore.memory.layouts import block_layouts, plain_layouts
from memstore.memory.spec import MemorySpec
from memstore.memory.tensors import TORCH_DTYPES, from_record
from memstore.store.codecs import codec_named
from memstore.store.contract import BlockStore, Key


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


def read_tail(store: BlockStore, spec: MemorySpec, key: Key) -> dict[str, Tensor]:
    """The block that was incomplete a moment ago: plain, or complete by now and encoded. ``[1, *shape]`` each.

    Raises ``NotFound`` or ``DamagedError``, which names the key.
    """
    records = store.get(key)
    if records is None:
        raise NotFound(f"{key} is gone")
    layouts, stored = [record.layout for record in records], [from_record(record)[None] for record in records]
    if layouts == plain_layouts(spec):
        return dict(zip(spec.fields, stored, strict=True))
    if layouts == block_layouts(spec):
        return decode_block_rows(spec, stored)
    raise DamagedError(f"{key} holds {layouts}, and {plain_layouts(spec)} was expected")
