"""``memstore fork``: a document that begins like another one, without copying it."""

from __future__ import annotations

from typing import Annotated

import typer

import memstore
from memstore.tools.options import DocumentArgument, MemoryUrl, existing
from memstore.tools.output import Report, counted

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new document.", show_default=False)]
Blocks = Annotated[
    int | None, typer.Option(min=0, help="Only the first so many blocks. Without it: all that the document holds now.")
]


def fork(memory: MemoryUrl, document: DocumentArgument, name: Name, *, blocks: Blocks = None) -> Report:
    """Begin a new document with what another one holds.

    Whole blocks are shared, so it takes the same moment at any size. From then on the two are independent; a pin or
    a time to live stays with the old one.

    Example:

        memstore fork notes.mem moby-dick another-end

    In Python: memstore.Document.fork.
    """
    with memstore.open(memory) as opened:
        made = existing(opened, document).fork(name, blocks)
        tokens, count = len(made), len(made.blocks)
    data = {"memory": memory, "document": document, "fork": name, "tokens": tokens, "blocks": count}
    told = f"{name!r} begins with {counted(tokens, 'token')} of {document!r}"
    return Report(data=data, text=lambda page: page.line(told))
