"""Layouts of the values of a memory, all of which follow from its spec."""

from __future__ import annotations

from memstore.memory.spec import MemorySpec
from memstore.store.contract import Layout

RUN_BYTES = 64 * 1024
"""Landmarks are stored in runs of consecutive blocks of about this size, so that opening a memory reads few values."""


def block_layouts(spec: MemorySpec) -> list[Layout]:
    """Layouts of a complete block of one layer, in the order of the records: what the codec stores of each field."""
    if spec.codec == "none":
        return plain_layouts(spec)
    from memstore.store.codecs import codec_named  # which needs torch, and a check of a memory should not

    codec = codec_named(spec.codec)
    return [layout for shape in spec.fields.values() for layout in codec.layouts(spec.dtype, shape)]


def plain_layouts(spec: MemorySpec) -> list[Layout]:
    """Layouts of an incomplete last block, which no codec touches: each field as it is."""
    return [Layout(spec.dtype, shape) for shape in spec.fields.values()]


def token_layout(tokens: int) -> Layout:
    """Layout of the token ids of a block that holds ``tokens``."""
    return Layout("int32", (tokens,))


def run_layout(spec: MemorySpec, blocks: int) -> Layout:
    """Layout of a run of ``blocks`` blocks: ``[blocks, G, P, D]``, or ``[blocks, G, P, D/8]`` uint8 for bits."""
    bits = spec.key_dtype == "bit"
    numbers = spec.key_dim // 8 if bits else spec.key_dim
    return Layout("uint8" if bits else spec.key_dtype, (blocks, spec.key_heads, spec.keys_per_block, numbers))


def blocks_per_run(spec: MemorySpec) -> int:
    """Blocks whose landmarks are stored together; a new memory writes the number down."""
    return max(1, RUN_BYTES // run_layout(spec, 1).nbytes)
