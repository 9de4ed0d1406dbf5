"""Put a memory into a stock Hugging Face causal LM, and take it out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import ForeignMemory, InvalidArgument, NotFound

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from memstore.memory import Fingerprint, Memory, MemorySpec
    from memstore.memory.retrieval import Retrieval
    from memstore.readers.stock.attached import Attached

__all__ = ["attach"]


def attach(
    model: PreTrainedModel,
    memory_or_url: Memory | str | Path | Sequence[Memory | str | Path],
    *,
    document: str | Sequence[str] | None = None,
    retrieval: Retrieval | None = None,
    window: int = 256,
    sink: int = 64,
    segment: int = 256,
    block_size: int = 64,
    codec: str = "none",
    routing_layers: tuple[int, ...] | None = None,
    tokenizer: Any = None,
    index: str = "exact",
) -> Attached:
    """Attach a memory to a stock causal LM, for the length of a ``with`` block.

    Inside the block ``attached.read(token_ids)`` reads a text into the memory, and ``model(...)`` and
    ``model.generate(...)`` see it: the first ``sink`` tokens, the last ``window`` tokens, and the blocks retrieved for
    what is asked. On leaving the block, also by an exception, the model is what it was before.

    Args:
        model: a causal LM of transformers whose attention goes through the attention interface.
        memory_or_url: an open memory, several of them, or the path of one, which is opened (and made, if it is not
            there) for the length of the block.
        document: the document, or documents, that calls see; the last one is the one they continue. All by default.
        retrieval: how blocks are chosen; ``Retrieval()`` by default.
        window: tokens before a segment or prompt that are attended to directly; a multiple of the block size.
        sink: tokens at the beginning of the document that are always attended to; a multiple of the block size.
        segment: tokens read in one forward pass and stored in one transaction; a multiple of the block size.
        block_size: tokens per block of a memory that is made here.
        codec: how a memory that is made here stores complete blocks: "none" (as they are), "int8", "fp8" or "int4".
            Then what is read is the same however it was interrupted between segments; a text that is read in pieces
            that end within a segment has states that differ by what the codec loses.
        routing_layers: layers of a memory made here whose hidden states are landmarks, with ``share="model"``.
        tokenizer: if given, it must be the one the memory was made with, and general text is used to fit the router.
        index: the vector index of memories that are opened here, see ``memstore.open``.

    Raises:
        UnsupportedModel: the model cannot be attached; the message says why.
        ForeignMemory: the memory was made by another model, tokenizer, precision or kind of retrieval.
        InvalidArgument: sizes that do not fit.
    """
    from memstore.memory import Memory, Retrieval
    from memstore.readers.stock.architecture import examine
    from memstore.readers.stock.attached import Attached
    from memstore.readers.stock.identity import fingerprint_of, spec_for

    retrieval = Retrieval() if retrieval is None else retrieval
    if not retrieval.share_tokens or retrieval.threshold is not None:
        raise InvalidArgument(
            "Retrieval.share_tokens=False and Retrieval.threshold are for landmark models; leave them out here"
        )
    wanted = _wanted(memory_or_url)
    sizes = [each.spec.block_size if isinstance(each, Memory) else _existing_block_size(each) for each in wanted]
    block_size = next((size for size in sizes if size is not None), block_size)
    _check_sizes(block_size, window=window, sink=sink, segment=segment)
    architecture = examine(model)
    fingerprint = fingerprint_of(model, architecture, tokenizer, block_size)
    owned: list[Memory] = []
    memories: list[Memory] = []
    try:
        for each in wanted:
            if isinstance(each, Memory):
                memories.append(each)
                continue
            owned.append(
                _open(each, index, lambda: spec_for(architecture, fingerprint, retrieval, routing_layers, codec))
            )
            memories.append(owned[-1])
        for memory in memories:
            _check_memory(memory, fingerprint, retrieval, memories[0].spec.index_layers)
        return Attached(
            model,
            architecture,
            memories,
            document=document,
            retrieval=retrieval,
            window=window,
            sink=sink,
            segment=segment,
            tokenizer=tokenizer,
            owned=owned,
        )
    except BaseException:
        for memory in owned:
            memory.close()
        raise


def _wanted(memory_or_url: object) -> list[Memory | str | Path]:
    from memstore.memory import Memory

    given = list(memory_or_url) if isinstance(memory_or_url, (list, tuple)) else [memory_or_url]
    wanted = [each for each in given if isinstance(each, (str, Path, Memory))]
    if not wanted or len(wanted) < len(given):
        raise InvalidArgument(f"attach needs a memory, the path of one, or several of them, got {memory_or_url!r}")
    return wanted


def _existing_block_size(url: str | Path) -> int | None:
    from memstore.memory import open_memory

    try:
        with open_memory(url, mode="r") as memory:
            return memory.spec.block_size
    except NotFound:
        return None


def _open(url: str | Path, index: str, spec: Callable[[], MemorySpec]) -> Memory:
    """The memory at ``url``; made with the spec that ``spec()`` gives if there is none."""
    from memstore.memory import open_memory

    try:
        return open_memory(url, index=index)
    except NotFound:
        return open_memory(url, index=index, spec=spec())


def _check_sizes(block_size: int, **sizes: int) -> None:
    if not isinstance(block_size, int) or block_size < 1:
        raise InvalidArgument(f"block_size must be a whole number of at least 1, got {block_size!r}")
    for name, value in sizes.items():
        least = 0 if name == "sink" else block_size
        if not isinstance(value, int) or value < least or value % block_size:
            raise InvalidArgument(
                f"{name} must be a multiple of the block size {block_size}, at least {least}, got {value!r}"
            )


def _check_memory(
    memory: Memory, fingerprint: Fingerprint, retrieval: Retrieval, index_layers: tuple[int, ...]
) -> None:
    from memstore.memory.layer_index import cannot_score

    differences = fingerprint.differences(memory.spec.fingerprint)
    if differences:
        raise ForeignMemory(
            f"the memory {memory.url} was not made by this model ({'; '.join(differences)}): attach the model it was "
            "made by, or read the text into a new memory"
        )
    if not memory.index_capabilities.dense:
        raise InvalidArgument(cannot_score(memory.index))
    routes = memory.spec.key_dtype == "bit"
    if routes != (retrieval.share == "model"):
        has = "one router for all layers" if routes else "landmarks of every layer"
        raise ForeignMemory(
            f"the memory {memory.url} has {has}, which Retrieval(share={retrieval.share!r}) cannot use: "
            f"use share={'model' if routes else 'group'!r}, or read the text into a new memory"
        )
    if memory.spec.index_layers != index_layers:
        raise ForeignMemory(
            f"the memory {memory.url} chooses blocks in the layers {memory.spec.index_layers}, the first one attached "
            f"in {index_layers}: attach them one at a time"
        )
