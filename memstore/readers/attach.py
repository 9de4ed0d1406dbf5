"""Put a memory into a model, and take it out again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from memstore.memory import Memory
    from memstore.memory.urls import Mode
    from memstore.readers.reader import Reader
    from memstore.readers.retrieval import Retrieval


def attach(
    model: Any,
    memory: Memory | str | Path | Sequence[Memory | str | Path],
    *,
    document: str | Sequence[str] | None = None,
    retrieval: Retrieval | None = None,
    tokenizer: Any = None,
    index: str = "exact",
    mode: Mode = "a",
    device: str | torch.device | None = None,
    block_size: int | None = None,
    codec: str | None = None,
    window: int | None = None,
    sink: int | None = None,
    segment: int | None = None,
    routing_layers: tuple[int, ...] | None = None,
    router: str | Path | None = None,
    segment_blocks: int | None = None,
    capacity: int | None = None,
    process_group: Any = None,
) -> Reader:
    """Attach a memory to a model, for the length of a ``with`` block.

    Inside the block ``reader.read(text)`` reads a text into the memory, and ``model(...)`` and ``model.generate(...)``
    see it. On leaving the block, also by an exception, the model is what it was before. Nothing is opened, and nobody
    else is kept from writing, before the block is entered.

    Args:
        model: a causal LM of transformers whose attention goes through the attention interface; or a DRT, a landmark
            model or a Memorizing Transformer of memstore.models.
        memory: an open memory, or the path of one, which is opened (and made, if it is not there) for the length of the
            block. Stock models see several, which are searched together.
        document: the document, or of a stock model the documents, that calls see; the last one is the one they
            continue. By default all; for other models the only one.
        retrieval: how blocks are chosen; by default as the kind of model usually does.
        tokenizer: if given, it must be the one the memory was made with; strings are read with it, and general text is
            used to fit the router of a stock model.
        index: the vector index of memories that are opened here, see ``memstore.open``.
        mode: "a" (open, or make), "r" (must exist, only read) or "x" (must not exist), for memories opened here.
        device: where the index of memories that are opened here lies; by default on the model's GPU, if it is on one.
        block_size: tokens per block of a memory that is made here; 64 unless the model was trained with another size.
        codec: how a memory that is made here stores complete blocks: "none" (as they are), "int8", "fp8" or "int4".
            Then what is read is the same however it was interrupted between segments; a text that is read in pieces
            that end within a segment has states that differ by what the codec loses.
        window: tokens before a segment or prompt that are attended to directly; a multiple of the block size, 256.
        sink: tokens at the beginning of the document that are always attended to; a multiple of the block size, 64.
        segment: tokens read in one forward pass and stored in one transaction; a multiple of the block size, 256.
        routing_layers: layers of a memory made here whose hidden states are landmarks, with ``share="model"``.
        router: the file of a router that was trained for the model (``memstore train router``), for a memory made here:
            it is kept in the memory, instead of one that is fitted to the beginning of the text, and says the layer.
        segment_blocks: blocks that a DRT reads and stores together, 512.
        capacity: the last so many blocks of a document that a landmark model can retrieve; older ones leave.
        process_group: ranks of ``torch.distributed`` (or a ``DeviceMesh`` of one dimension) that search and attend to a
            memory together, each to its share of the blocks. All call the model alike. Needs ``mode="r"``.

    Which of ``block_size`` to ``capacity``, and which fields of ``retrieval``, a kind of model takes is in
    docs/models.md; others are refused.

    Raises (the last two on entering the block):
        UnsupportedModel: the model cannot be attached; the message says why.
        InvalidArgument: options that do not fit.
        ForeignMemory: the memory was made by another model, tokenizer, precision or kind of retrieval.
    """
    from memstore.errors import InvalidArgument
    from memstore.readers.kinds import kind_of
    from memstore.readers.retrieval import check_options

    if not hasattr(model, "base_model") or not hasattr(model, "config"):
        raise InvalidArgument(f"attach needs a causal LM of transformers, got {type(model).__name__}")
    kind = kind_of(model)
    given = {
        "block_size": block_size,
        "codec": codec,
        "window": window,
        "sink": sink,
        "segment": segment,
        "routing_layers": routing_layers,
        "router": router,
        "segment_blocks": segment_blocks,
        "capacity": capacity,
        "process_group": process_group,
    }
    check_options(kind, given)
    reader: Reader = kind.reader_class()(
        model,
        memory,
        document,
        retrieval=retrieval,
        tokenizer=tokenizer,
        index=index,
        mode=mode,
        device=device,
        **{name: value for name, value in given.items() if value is not None},
    )
    return reader
