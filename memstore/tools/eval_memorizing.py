"""What ``memstore eval`` measures of a Memorizing Transformer: perplexity by size of its memory, and lookups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.readers.kinds import encode, quiet_transformers, require_transformers
from memstore.tools.files import read_documents, read_text
from memstore.tools.models import check_device
from memstore.tools.verb import Device, Json, Page, Report, Threads, cell, token_counts, tokens_of, use_threads

MemorySizes = Annotated[
    str | None,
    typer.Option(
        help="Of a Memorizing Transformer: tokens that can be found, such as 0,8K. Without it: 0,512,1536,8K,64K,256K, "
        "as far as the text goes."
    ),
]

Text = Annotated[
    str, typer.Option(help="A text file, read as one document, or - for standard input.", show_default=False)
]
Model = Annotated[
    Path,
    typer.Option(help="Folder of the Memorizing Transformer, or of a stock model with a memory.", show_default=False),
]
MemorySize = Annotated[
    str | None,
    typer.Option(help="Tokens that can be found, such as 8K. Without it: what the model was trained with."),
]
Examples = Annotated[int, typer.Option(min=0, help="Words to show with what was retrieved for them.")]


def lookup(
    *,
    model: Model,
    text: Text,
    memory_size: MemorySize = None,
    examples: Examples = 5,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
) -> Report:
    """Tell what a memory is looked up for: names that were read far back.

    Every word is sorted by where the text had it last: out of reach of all windows, or of a segment of a stock model
    (far), within it (near), or never (new). Each kind is scored with and without the memory. For the far words that
    gain most, the tokens that were retrieved are shown.

    Example:

        memstore eval lookup --model remembers --text book3.txt

    In Python: memstore.eval.lookup.lookup.
    """
    from memstore.eval.lookup import lookup as look_up
    from memstore.progress import progress_bar
    from memstore.readers.kinds import KNN, MEMORIZING, load_folder, model_folder

    require_transformers()
    size = tokens_of("--memory-size", memory_size, least=1)
    written = read_text(text)
    use_threads(threads)
    check_device(device)
    with quiet_transformers():
        loaded, tokenizer = load_folder(model_folder(model), device, only=(MEMORIZING, KNN))
    total = (3 if examples else 2) * len(encode(tokenizer, written))
    with progress_bar("lookup", 0, total, not json and sys.stderr.isatty()) as advance:
        found = look_up(loaded, tokenizer, written, memory_size=size, examples=examples, advance=advance)
    data = {"task": "lookup", "model": model.name, **found.to_dict()}
    return Report(data=data, text=lambda page: _show_lookup(page, data))


def by_memory_size(text: str, folder: Path, *, memory_sizes: str | None = None, device: str, json: bool) -> Report:
    """The table of the model in ``folder`` for a text, or the texts of a folder, each read as a document."""
    import torch

    from memstore.eval import memorizing
    from memstore.eval.memorizing import SIZES, fitting
    from memstore.progress import progress_bar
    from memstore.readers.kinds import load_folder

    texts = read_documents(text)
    chosen = None
    if memory_sizes is not None:
        chosen = token_counts("--memory-sizes", memory_sizes, least=0, such_as="0,512,8K", what="size")
    with quiet_transformers():
        model, tokenizer = load_folder(folder, device)
    documents = [torch.tensor(encode(tokenizer, text), dtype=torch.int64) for text in texts]
    total = sum(map(len, documents))
    if chosen is None:
        chosen = [0] if getattr(model.config, "memory_layer", 0) is None else fitting(SIZES, max(map(len, documents)))
    with progress_bar("perplexity", 0, len(chosen) * total, not json and sys.stderr.isatty()) as advance:
        rows = [row.to_dict() for row in memorizing.by_memory_size(model, documents, chosen, advance=advance)]
    data = {"task": "perplexity", "model": folder.name, "documents": len(documents), "tokens": total, "rows": rows}
    return Report(data=data, text=lambda page: _show(page, rows))


def _show(page: Page, rows: list[dict[str, Any]]) -> None:
    page.line("Perplexity by size of the memory, of all tokens and of those from one position to another")
    columns = ["memory", "all", *rows[0]["by_position"]]
    page.table(columns, [[row["memory_size"], row["perplexity"], *row["by_position"].values()] for row in rows])
    for row in rows[1:]:
        error = "" if row["standard_error"] is None else f", standard error {row['standard_error']:.4f}"
        page.line(f"A memory of {row['memory_size']:,} changes the loss by {row['change']:+.4f}{error}")


def _show_lookup(page: Page, data: dict[str, Any]) -> None:
    page.line(
        f"Perplexity by where the text had a word last; far: more than {data['reach']:,} tokens back, which only the "
        f"memory of {data['memory_size']:,} tokens can know"
    )
    rows = [[kind["kind"], kind["tokens"], kind["without"], kind["with_memory"]] for kind in data["kinds"]]
    page.table(["words", "tokens", "without memory", "with memory"], rows)
    if not any(kind["kind"] == "far" for kind in data["kinds"]):
        page.line("No word is far: a longer text is needed to see what the memory is looked up for")
    for example in data["examples"]:
        page.line()
        page.line(cell(f"…{example['text']}"))
        page.line(
            f"  {example['word']!r} was last read {example['last_read']:,} tokens back; loss "
            f"{example['loss_without']:.2f} without memory, {example['loss_with']:.2f} with it"
        )
        for found in example["retrieved"]:
            page.line(cell(f"  {found['weight']:.3f}  token {found['number']:,}: …{found['text']}…"))
