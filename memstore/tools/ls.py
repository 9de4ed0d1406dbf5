"""``memstore ls``: the documents of a memory."""

from __future__ import annotations

import memstore
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Page, Report

COLUMNS = ("document", "tokens", "blocks", "searchable")


def ls(memory: MemoryUrl) -> Report:
    """List the documents of a memory.

    Searchable are the blocks that are complete; the last tokens of a document wait for theirs.

    Example:

        memstore ls notes.mem
    """
    with memstore.open(memory, mode="r") as opened:
        documents = [
            {
                "document": document.name,
                "tokens": len(document),
                "blocks": len(document.blocks),
                "searchable": sum(map(len, document.present(document.complete_blocks))),
            }
            for document in opened.documents()
        ]

    def text(page: Page) -> None:
        if documents:
            page.table(COLUMNS, [[document[column] for column in COLUMNS] for document in documents])
        else:
            page.line("no documents yet. Add one with: memstore read TEXT MEMORY")

    return Report(data={"memory": memory, "documents": documents}, text=text)
