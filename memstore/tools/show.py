"""``memstore show``: one block, down to its text, its tokens, and the norms of its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import NotFound
from memstore.tools.models import name_model, tokenizer_of
from memstore.tools.verb import MemoryUrl, ModelThatRead, Page, Report

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.memory import Document, Memory

DocumentName = Annotated[str, typer.Argument(metavar="DOCUMENT", help="Name of the document.", show_default=False)]
Block = Annotated[int, typer.Argument(metavar="BLOCK", help="Number of the block.", show_default=False)]


def show(memory: MemoryUrl, document: DocumentName, block: Block, *, model: ModelThatRead = None) -> Report:
    """Show a block: its text, its tokens, its norms.

    The norms are those of the states and landmarks, in every layer.

    The text is there if the tokenizer of the model that read the document can be loaded.

    Example:

        memstore show notes.mem moby-dick 17

    In Python: memstore.Document.tokens, memstore.memory.LayerView.gather and memstore.memory.LayerView.landmarks.
    """
    with memstore.open(memory, mode="r") as opened:
        name_model(opened, model)
        data = describe(opened, document, block)

    def text(page: Page) -> None:
        page.facts({key: data[key] for key in ("document", "block", "first_token", "tokens", "full")})
        page.line()
        page.line(data["text"] if data["text"] is not None else f"(no text: {data['text_missing']})")
        page.line()
        page.line("token ids: " + " ".join(map(str, data["token_ids"])))
        page.line()
        page.table(("layer", "what", "vectors", "min norm", "mean norm", "max norm"), _rows(data["layers"]))

    return Report(data=data, text=text)


def describe(memory: Memory, name: str, block: int) -> dict[str, Any]:
    """Everything about one block of the document ``name``, ready for JSON."""
    document = memory.document(name)
    if block not in document.blocks:
        live = document.blocks
        have = f"it has blocks {live.start:,} to {live.stop - 1:,}" if live else "it has no blocks"
        raise NotFound(f"no block {block:,} in document {name!r}: {have}.")
    ids: list[int] = document.tokens(block).tolist()
    text, text_missing = decode(memory, ids)
    return {
        "document": name,
        "block": block,
        "first_token": block * memory.spec.block_size,
        "tokens": len(ids),
        "full": block in document.complete_blocks,
        "text": text,
        "text_missing": text_missing,
        "token_ids": ids,
        "layers": [_layer(memory, document, layer, block, len(ids)) for layer in range(memory.spec.layers)],
    }


def decode(memory: Memory, ids: Sequence[int]) -> tuple[str | None, str | None]:
    """The text of ``ids``, or None and the reason why there is none."""
    tokenizer, missing = tokenizer_of(memory)
    return (None, missing) if tokenizer is None else (str(tokenizer.decode(list(ids))), None)


def _layer(memory: Memory, document: Document, layer: int, block: int, tokens: int) -> dict[str, Any]:
    view = document.layer(layer)
    vectors = {name: states[0] for name, states in view.gather([block]).items()}
    block_size = memory.spec.block_size
    norms = {name: norm_summary(filled(states, tokens, block_size)) for name, states in vectors.items()}
    if layer in memory.spec.index_layers:
        landmarks = view.landmarks(range(block, block + 1))[0]
        norms["landmarks"] = norm_summary(filled(landmarks, tokens, block_size))
    return {"layer": layer, "norms": norms}


def filled(states: Tensor, tokens: int, block_size: int) -> Tensor:
    """``states`` without the padding of a block that is not full, if their second dimension from the end is tokens."""
    is_per_token = states.dim() >= 2 and states.shape[-2] == block_size
    return states[..., :tokens, :] if is_per_token else states


def norm_summary(vectors: Tensor) -> dict[str, float]:
    """How many vectors the last dimension makes, and the range of their Euclidean norms."""
    norms = vectors.float().norm(dim=-1)
    return {
        "vectors": norms.numel(),
        "min": norms.min().item(),
        "mean": norms.mean().item(),
        "max": norms.max().item(),
    }


def _rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (layer["layer"], what, norm["vectors"], norm["min"], norm["mean"], norm["max"])
        for layer in layers
        for what, norm in layer["norms"].items()
    ]
