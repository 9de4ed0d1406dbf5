"""Views of a memory: its documents, its blocks down to tokens and norms, its numbers, its indexes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import normalize

import typer

import memstore
from memstore.errors import NotFound
from memstore.report import Page, Report, flattened
from memstore.tools.models import name_model, tokenizer_of
from memstore.tools.verb import DocumentArgument, Index, Json, MemoryUrl, ModelThatRead, bar, facts_of, time_of

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.memory import Document, Memory

Block = Annotated[int, typer.Argument(metavar="BLOCK", help="Number of the block.", show_default=False)]

_DOCUMENT = ("document", "tokens", "blocks", "full")
_WHERE_ANY = ("unfinished", "pinned", "expires", "changed", "meta")


def ls(memory: MemoryUrl) -> Report:
    """List the documents of a memory.

    A full block has all its tokens. If a document's last block is not full, only stock models find it. Unfinished means
    that reading was interrupted: the same memstore read continues it. If known, the list also shows pins, expiry, the
    last change of each file, and labels. Times are local, but in UTC with --json and --csv. With --json you also see
    each document's file, the digest of its text and the time of reading.

    Example:

        memstore ls notes.mem

    In Python: memstore.Memory.documents.
    """
    with memstore.open(memory, mode="r") as opened:
        rules = opened.stats()["rules"]
        files = facts_of(opened)
        documents: list[dict[str, Any]] = []
        for document in opened.documents():
            fact = files.get(document.name, {})
            with suppress(NotFound):  # another process has forgotten it
                listed = {
                    "document": document.name,
                    "tokens": len(document),
                    "blocks": len(document.blocks),
                    "full": sum(map(len, document.present(document.complete_blocks))),
                    "unfinished": fact.get("whole") is False and bool(fact.get("path")),
                    "pinned": document.name in rules["pinned"],
                    "expires": rules["expires"].get(document.name),
                    "changed": None if (when := time_of(fact)) is None else when.isoformat(timespec="seconds"),
                    "meta": fact.get("meta", {}),
                    **{key: fact.get(key) for key in ("path", "digest", "read")},
                }
                documents.append(listed)

    def text(page: Page) -> None:
        columns = [*_DOCUMENT, *(column for column in _WHERE_ANY if any(document[column] for document in documents))]
        rows = [[_cell(page, column, document[column]) for column in columns] for document in documents]
        alike = Counter(normalize("NFC", str(document["document"])) for document in documents)
        for row in rows:
            if alike[normalize("NFC", str(row[0]))] > 1:  # two names that look the same, in other code points
                row[0] = page.brief(f"{row[0]} ({str(row[0]).encode('unicode_escape').decode()})", row[0])
        page.table(columns, rows, empty="no documents yet. Add one with: memstore read TEXT MEMORY")

    return Report(data={"memory": memory, "documents": documents}, text=text)


def _cell(page: Page, column: str, value: Any) -> object:
    """Return notes as they were given, a time as local time for people, and other values unchanged."""
    if column == "meta":
        return ", ".join(f"{key}={each}" for key, each in value.items()) or None
    if column in ("expires", "changed") and value is not None:
        with suppress(OverflowError):  # the maker of the memory may have stored the end of the year 9999
            return page.brief(f"{datetime.fromisoformat(value).astimezone():%Y-%m-%d %H:%M}", value)
    return value


def show(memory: MemoryUrl, document: DocumentArgument, block: Block, *, model: ModelThatRead = None) -> Report:
    """Show a block: its text, its tokens, its norms.

    The norms cover the states and landmarks in every layer.

    The text is shown if the tokenizer of the model that read the document can be loaded.

    Example:

        memstore show notes.mem moby-dick 17

    In Python: memstore.Document.tokens, memstore.memory.LayerView.gather and memstore.memory.LayerView.landmarks.
    """
    with memstore.open(memory, mode="r") as opened:
        name_model(opened, model)
        data = _described(opened, document, block)

    rows = [
        (layer["layer"], what, norm["vectors"], norm["min"], norm["mean"], norm["max"])
        for layer in data["layers"]
        for what, norm in layer["norms"].items()
    ]

    def text(page: Page) -> None:
        page.facts({key: data[key] for key in ("document", "block", "first_token", "tokens", "full")})
        page.line()
        page.line(data["text"] if data["text"] is not None else f"(no text: {data['text_missing']})")
        page.line()
        page.line("token ids: " + " ".join(map(str, data["token_ids"])))
        page.line()
        page.table(("layer", "what", "vectors", "min norm", "mean norm", "max norm"), rows)

    return Report(data=data, text=text)


def _described(memory: Memory, name: str, block: int) -> dict[str, Any]:
    """Return all facts about one block of the document ``name``, ready for JSON."""
    document = memory.document(name)
    if block not in document.blocks:
        live = document.blocks
        have = f"it has blocks {live.start:,} to {live.stop - 1:,}" if live else "it has no blocks"
        raise NotFound(f"document {name!r} has no block {block:,}: {have}.")
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
    """Return the text of ``ids``, or None and the reason why it is missing."""
    tokenizer, missing = tokenizer_of(memory)
    return (None, missing) if tokenizer is None else (str(tokenizer.decode(list(ids))), None)


def _layer(memory: Memory, document: Document, layer: int, block: int, tokens: int) -> dict[str, Any]:
    norms = norms_of(document, layer, block, tokens)
    if layer in memory.spec.index_layers:
        landmarks = document.layer(layer).landmarks(range(block, block + 1))[0]
        norms["landmarks"] = norm_summary(filled(landmarks, tokens, memory.spec.block_size))
    return {"layer": layer, "norms": norms}


def norms_of(document: Document, layer: int, block: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return the ``norm_summary`` of each field of a block that has so many ``tokens``."""
    size = document.memory.spec.block_size
    states = document.layer(layer).gather([block])
    return {name: norm_summary(filled(each[0], tokens, size)) for name, each in states.items()}


def filled(states: Tensor, tokens: int, block_size: int) -> Tensor:
    """Return ``states`` without the padding of a partial block, if their second-to-last dimension counts tokens."""
    is_per_token = states.dim() >= 2 and states.shape[-2] == block_size
    return states[..., :tokens, :] if is_per_token else states


def norm_summary(vectors: Tensor) -> dict[str, float]:
    """Return the number of vectors along the last dimension, and the range of their Euclidean norms."""
    norms = vectors.float().norm(dim=-1)
    return {"vectors": norms.numel(), "min": norms.min().item(), "mean": norms.mean().item(), "max": norms.max().item()}


def stats(memory: MemoryUrl, *, index: Index = "exact") -> Report:
    """Show how many documents, tokens and bytes a memory holds.

    Example:

        memstore stats notes.mem

    In Python: memstore.Memory.stats.
    """
    with memstore.open(memory, mode="r", index=index) as opened:
        numbers = opened.stats()
    numbers = {"memory": numbers.pop("url"), **numbers}

    def text(page: Page) -> None:
        # Always 0 here: an index is built at the first search, and tiers count the reads of this process.
        hidden = ("index_bytes", "indexes", "tiers")
        facts = dict(flattened({name: value for name, value in numbers.items() if name not in hidden}))
        facts["rules pinned"] = ", ".join(numbers["rules"]["pinned"]) or None
        del facts["rules evicted"], facts["rules expired"]  # since opening: always 0 here
        for kept in numbers["indexes"]:
            recall = f"recall {kept['recall']:.3f}" if "recall" in kept else "recall not measured"
            why = f", {kept['why']}" if "why" in kept else ""
            picked = f" ({kept['picked']})" if "picked" in kept else ""
            facts[f"index {kept['document']} layer {kept['layer']} {kept['index']}"] = (
                f"{kept['blocks']:,} blocks{picked}, {recall}{why}"
            )
        page.facts(facts)

    return Report(data=numbers, text=text)


def index(memory: MemoryUrl, *, index: Index = "exact", json: Json = False) -> Report:
    """Build the vector indexes of a memory, and keep them beside it.

    If you then open the memory with the same --index, searches start at once. The recall of an approximate index is
    measured against every stored landmark. You can interrupt the command and run it again. An index that is not kept is
    built when needed.

    Example:

        memstore index notes.mem --index auto

    In Python: memstore.Memory.build_indexes.
    """
    with memstore.open(memory, index=index) as opened:
        with bar("layers", show=not json) as progress:
            opened.build_indexes(progress)
        kept = [each for each in opened.stats()["indexes"] if each["index"] == index]
    data = {"memory": memory, "index": index, "indexes": kept}
    return Report(data=data, text=lambda page: _show_indexes(page, kept))


def _show_indexes(page: Page, kept: list[dict[str, Any]]) -> None:
    if not kept:
        page.line("the memory has no landmarks yet, so there is nothing to index")
        return
    rows = [
        (each["document"], each["layer"], each.get("picked", each["kind"]), each["blocks"], each.get("recall"))
        for each in kept
    ]
    page.table(("document", "layer", "index", "blocks", "recall"), rows)
