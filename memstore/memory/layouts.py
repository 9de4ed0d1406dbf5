"""Layouts of the values of a memory, all of which follow from its spec."""

from __future__ import annotations

from memstore.memory.spec import MemorySpec
from memstore.memory.state import DocumentState
from memstore.store.contract import BlockStore, Layout

BELIEVED_BYTES = 1024 * 1024
"""What a document may say that it takes before that is compared with the size of the store."""
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


def fits_in(store: BlockStore, spec: MemorySpec, state: DocumentState) -> bool:
    """Whether a store is large enough for what an entry says that a document has, each block of which lies in it once.

    Otherwise whoever counts to the entry's numbers, or makes room for its blocks, could be kept busy for ever. Raises
    ``DamagedError`` for an entry that contradicts itself.
    """
    if not store.capabilities.durable:  # then this very process wrote it
        return True
    state.check()
    complete = len(state.complete(spec.block_size)) - sum(stop - start for start, stop in state.dropped)
    blocks = max(complete, len(state.live()) - len(state.complete(spec.block_size)))
    needed = blocks * spec.layers * sum(layout.nbytes for layout in block_layouts(spec))
    return needed <= BELIEVED_BYTES or needed <= store.used_bytes()


def blocks_per_run(spec: MemorySpec) -> int:
    """Blocks whose landmarks are stored together; a new memory writes the number down."""
    return max(1, RUN_BYTES // run_layout(spec, 1).nbytes)
