"""``memstore eval perplexity`` of a Memorizing Transformer: by size of the memory, and by position in the document."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.errors import InvalidArgument
from memstore.tools.models import check_device, encode, quiet_transformers
from memstore.tools.options import use_threads
from memstore.tools.output import Page, Report

MemorySizes = Annotated[
    str | None,
    typer.Option(
        help="Of a Memorizing Transformer: tokens that can be found, such as 0,8K. Without it: 0,512,1536,8K,64K,256K, "
        "as far as the text goes."
    ),
]


def memory_table(text: str, folder: Path, sizes: str | None, *, device: str, threads: int | None, json: bool) -> Report:
    """The table of the model in ``folder`` for ``text``, read as one document."""
    import torch

    from memstore.eval.memorizing import SIZES, by_memory_size, fitting
    from memstore.eval.models import load_memorizing
    from memstore.memory.ingest import progress_bar

    chosen = None if sizes is None else parse_sizes(sizes)
    use_threads(threads)
    check_device(device)
    with quiet_transformers():
        model, tokenizer = load_memorizing(folder, device)
    tokens = torch.tensor(encode(tokenizer, text), dtype=torch.int64)
    if chosen is None:
        chosen = [0] if model.config.memory_layer is None else fitting(SIZES, len(tokens))
    with progress_bar("perplexity", 0, len(chosen) * len(tokens), not json and sys.stderr.isatty()) as advance:
        rows = [row.to_dict() for row in by_memory_size(model, tokens, chosen, advance=advance)]
    data = {"task": "perplexity", "model": folder.name, "tokens": len(tokens), "rows": rows}
    return Report(data=data, text=lambda page: _show(page, rows))


def parse_sizes(text: str) -> list[int]:
    """``0,8K`` -> numbers of tokens, in that order. Raises ``InvalidArgument``."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)([kK]?)\s*", part, re.ASCII)
        if match is None:
            raise InvalidArgument(f"--memory-sizes {text!r}: {part!r} is no number of tokens. Write such as 0,512,8K.")
        sizes.append(int(match[1]) << (10 if match[2] else 0))
    if len(set(sizes)) < len(sizes):
        raise InvalidArgument(f"--memory-sizes {text!r} names a size twice")
    return sizes


def _show(page: Page, rows: list[dict[str, Any]]) -> None:
    page.line("Perplexity by size of the memory, of all tokens and of those from one position to another")
    columns = ["memory", "all", *rows[0]["by_position"]]
    page.table(columns, [[row["memory_size"], row["perplexity"], *row["by_position"].values()] for row in rows])
