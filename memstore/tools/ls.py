"""``memstore ls``: the documents of a memory."""

from __future__ import annotations

import memstore
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Page, Report

COLUMNS = ("document", "tokens", "blocks", "searchable")
RULES = ("pinned", "expires")


def ls(memory: MemoryUrl) -> Report:
    """List the documents of a memory.

    Searchable are the blocks that are complete; the last tokens of a document wait for theirs. Which documents are
    pinned, and when they expire, is told where any is or does.

    Example:

        memstore ls notes.mem

    In Python: memstore.Memory.documents.
    """
    with memstore.open(memory, mode="r") as opened:
        rules = opened.stats()["rules"]
        documents = [
            {
                "document": document.name,
                "tokens": len(document),
                "blocks": len(document.blocks),
                "searchable": sum(map(len, document.present(document.complete_blocks))),
                "pinned": document.name in rules["pinned"],
                "expires": rules["expires"].get(document.name),
            }
            for document in opened.documents()
        ]

    def text(page: Page) -> None:
        columns = [*COLUMNS, *(rule for rule in RULES if any(document[rule] for document in documents))]
        rows = [[document[column] for column in columns] for document in documents]
        page.table(columns, rows, empty="no documents yet. Add one with: memstore read TEXT MEMORY")

    return Report(data={"memory": memory, "documents": documents}, text=text)
