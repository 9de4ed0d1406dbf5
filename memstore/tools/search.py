"""``memstore search``: the blocks of a memory that match a text, another block or a vector."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.lazy import torch
from memstore.report import Page, Report
from memstore.tools.ask import Dtype, search_text
from memstore.tools.files import read_bytes
from memstore.tools.listing import decode
from memstore.tools.verb import MOST_BLOCKS, Device, MemoryUrl, Threads, argument, index_bar, use_threads

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.memory import Document, Memory
    from memstore.memory.search import Match

Words = Annotated[
    str | None, argument("[TEXT]", "Words to search with. The model that read the memory turns them into queries.")
]
Text = Annotated[str | None, typer.Option(help="Words to search with, given as an option.")]
Block = Annotated[str | None, typer.Option(metavar="DOCUMENT:N", help="Search with the landmark of this block.")]
Vector = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.npy",
        help="Search with the queries in this NumPy file ([D], [H, D] or [H, T, D]), or - for standard input.",
    ),
]
DocumentName = Annotated[str | None, typer.Option(help="Search this document. Default: all except chats.")]
Layer = Annotated[
    int | None,
    typer.Option(min=0, help="Use the landmarks or queries of this layer. Default: one that suits the model."),
]
TopK = Annotated[int, typer.Option(min=1, max=MOST_BLOCKS, help="Find this many blocks.")]
Model = Annotated[str | None, typer.Option(help="Search with this model. Default: the model that read the memory.")]


def search(
    memory: MemoryUrl,
    words: Words = None,
    *,
    text: Text = None,
    block: Block = None,
    vector: Vector = None,
    document: DocumentName = None,
    layer: Layer = None,
    top_k: TopK = 8,
    model: Model = None,
    dtype: Dtype = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> Report:
    """Find blocks by a text, by another block, or by a vector.

    A text is searched like a question: the model reads it after the document, and the blocks it would retrieve are
    listed. The score depends on the model. A stock model counts the standard deviations by which a block stands out,
    summed over the words. A DRT gives the score of its retriever. A landmark model gives the block's share of a head's
    attention to landmarks.

    With --block and --vector the score is the mean inner product with the landmarks; no model is needed.

    Example:

        memstore search notes.mem "the name of the white whale"
        memstore search notes.mem --block moby-dick:17 --top-k 3

    In Python: memstore.readers.reader.Reader.search, of what memstore.attach gives;
    memstore.memory.search.search_block and search_vectors.
    """
    from memstore.memory.shared import CHAT

    if words is not None and text is not None:
        raise InvalidArgument("the words were given twice: pass TEXT or --text.")
    text = words if text is None else text
    given = [name for name, value in (("TEXT", text), ("--block", block), ("--vector", vector)) if value is not None]
    if len(given) != 1:
        raise InvalidArgument(
            f"a search needs exactly one of TEXT, --block and --vector. Got {' and '.join(given) or 'none of them'}."
        )
    use_threads(threads)
    with memstore.open(memory, mode="r", device=device) as opened, index_bar():
        there = opened.documents() if document is None else [opened.document(document)]
        documents = [each for each in there if not each.name.startswith(CHAT)] or there
        if text is not None:
            found = search_text(opened, text, documents, model, layer=layer, top_k=top_k, dtype=dtype, device=device)
        elif block is not None:
            found = _by_block(opened, block, documents, layer, top_k)
        else:
            found = _by_vector(opened, str(vector), documents, layer, top_k)
        matches = [described(opened, match) for match in found]

    def show(page: Page) -> None:
        columns = ("document", "block", "score", "text")
        rows = [[*(each[name] for name in columns[:3]), page.excerpt(each["text"] or "")] for each in matches]
        page.table(columns, rows, empty="nothing was found: the memory has no complete block to search")
        if matches and matches[0]["text_missing"]:
            page.line(f"(no text: {matches[0]['text_missing']})")

    asked = {"text": text, "block": block, "vector": vector, "layer": layer}
    return Report(data={"memory": memory, **asked, "matches": matches}, text=show)


def described(memory: Memory, match: Match) -> dict[str, Any]:
    """Return a found block with its text, ready for JSON."""
    from memstore.readers.passages import whole_characters

    text, missing = decode(memory, memory.document(match.document).tokens(match.block).tolist())
    text = None if text is None else whole_characters(text)
    where = {"document": match.document, "block": match.block, "score": match.score}
    return where | {"first_token": match.block * memory.spec.block_size, "text": text, "text_missing": missing}


def _by_block(memory: Memory, block: str, documents: list[Document], layer: int | None, top_k: int) -> list[Match]:
    from memstore.memory.search import check_layer, search_block

    name, colon, number = block.rpartition(":")
    if not colon or not number.isdecimal():
        raise InvalidArgument(f"--block must be DOCUMENT:N, such as moby-dick:17, not {block!r}.")
    source = memory.document(name)
    return search_block(source, int(number), top_k, layer=check_layer(memory, layer), among=documents)


def _by_vector(memory: Memory, file: str, documents: list[Document], layer: int | None, top_k: int) -> list[Match]:
    from memstore.memory.search import check_layer, search_vectors

    queries = _queries(file)
    if queries.dim() == 1:
        queries = queries.expand(memory.spec.key_heads, -1)
    if queries.dim() == 2:
        queries = queries[:, None]
    return search_vectors(documents, queries, top_k, layer=check_layer(memory, layer))


def _queries(file: str) -> Tensor:
    import numpy as np

    raw = read_bytes(file, "a .npy file")
    try:
        return torch.from_numpy(np.load(io.BytesIO(raw), allow_pickle=False).astype(np.float32))
    except (ValueError, TypeError, EOFError, AttributeError):
        raise InvalidArgument(f"{file} is not a .npy file of numbers. Write one with numpy.save.") from None
