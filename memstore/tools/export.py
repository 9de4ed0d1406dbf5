"""``memstore export`` and ``memstore import``: a memory as files that anything can read, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import memstore
from memstore.report import Page, Report, counted
from memstore.tools.listing import decode
from memstore.tools.verb import Interruption, MemoryUrl, argument

if TYPE_CHECKING:
    from memstore.memory import Memory

Out = Annotated[Path, argument("OUT", "Folder or .parquet file to write.")]
Documents = Annotated[list[str] | None, typer.Option("--document", help="Export only this document. May be repeated.")]
Format = Annotated[
    Literal["safetensors", "parquet"],
    typer.Option(
        "--format",
        help="Write safetensors (a folder with everything) or parquet (a table with one row per block, "
        "without states).",
    ),
]
Folder = Annotated[Path, argument("FOLDER", "Folder that memstore export wrote.")]
Target = Annotated[str, argument("MEMORY", "Memory to import into. Created if it does not exist.", memory=True)]


def export(memory: MemoryUrl, out: Out, *, document: Documents = None, format: Format = "safetensors") -> Report:  # noqa: A002 - the option's name
    """Write a memory to files that can be read without memstore.

    States, tokens and landmarks are written as safetensors files of at most 64 MiB each, or larger if a single block is
    larger. Everything else, also pins and times to live, is written to manifest.json, with the SHA-256 of every file.
    Every value is verified on the way. The folder appears only when it is complete.

    With --format parquet, one table is written. It has the text, the tokens and the norms of each block.

    Example:

        memstore export notes.mem notes-export
        memstore export notes.mem notes.parquet --format parquet

    In Python: memstore.memory.export.export_memory and memstore.memory.export.export_table.
    """
    try:
        with memstore.open(memory, mode="r") as opened:
            return _table(opened, out, document) if format == "parquet" else _files(opened, out, document)
    except KeyboardInterrupt:
        raise Interruption(
            f"interrupted; the unfinished export {out} was removed. Run the same command again"
        ) from None


def _files(memory: Memory, out: Path, documents: list[str] | None) -> Report:
    from memstore.memory.export import export_memory

    result = export_memory(memory, out, documents=documents or None, progress=True)
    told = (
        f"exported {counted(result.documents, 'document')}, {counted(result.tokens, 'token')}, to "
        f"{counted(result.files, 'file')} of {result.nbytes:,} bytes"
    )

    def text(page: Page) -> None:
        page.line(told)
        page.line(f"to import it again: memstore import {quote(str(out))} MEMORY")

    return Report(data={"memory": memory.url, "out": str(out), **asdict(result)}, text=text)


def _table(memory: Memory, out: Path, documents: list[str] | None) -> Report:
    from memstore.memory.export import export_table

    _, why = decode(memory, [])
    to_text = None if why else lambda ids: decode(memory, ids)[0] or ""
    rows = export_table(memory, out, documents=documents or None, decode=to_text, progress=True)

    def text(page: Page) -> None:
        page.line(f"wrote {counted(rows, 'row')}, one per block, to {out}")
        if why:
            page.line(f"(no text: {why})")

    return Report(data={"memory": memory.url, "out": str(out), "rows": rows, "text_missing": why}, text=text)


def import_(folder: Folder, memory: Target) -> Report:
    """Make a memory from an export, with the same bits.

    Every file is compared with its SHA-256 first. A document is called NAME (unfinished import) until it is complete.
    Documents that the memory already has stay as they are, so after an interruption you run the same command again. New
    documents keep their pins and times to live, and a new memory keeps the limit too.

    Example:

        memstore import notes-export again.mem

    In Python: memstore.memory.export.import_memory.
    """
    from memstore.memory.export import import_memory

    try:
        result = import_memory(folder, memory, progress=True)
    except KeyboardInterrupt:
        raise Interruption("interrupted; the imported part is intact. Run the same command again to continue") from None
    told = (
        f"imported {counted(result.imported_tokens, 'token')}; {memory} now has all "
        f"{counted(result.documents, 'document')} of {folder}"
    )
    return Report(data={"folder": str(folder), "memory": memory, **asdict(result)}, text=lambda page: page.line(told))
