"""``memstore index``: build the vector indexes of a memory, measure them, and keep them beside it."""

from __future__ import annotations

from typing import Any

import memstore
from memstore.tools.bars import bar
from memstore.tools.options import Index, MemoryUrl
from memstore.tools.output import Json, Page, Report


def index(memory: MemoryUrl, *, index: Index = "exact", json: Json = False) -> Report:
    """Build the vector indexes of a memory, and keep them beside it.

    Whoever opens the memory with the same --index then searches at once. The recall of an approximate index is measured
    against every stored landmark. It can be interrupted and run again: an index that is not kept is built when needed.

    Example:

        memstore index notes.mem --index auto

    In Python: memstore.Memory.build_indexes.
    """
    with memstore.open(memory, index=index) as opened:
        with bar("layers", show=not json) as progress:
            opened.build_indexes(progress)
        kept = [each for each in opened.stats()["indexes"] if each["index"] == index]
    data = {"memory": memory, "index": index, "indexes": kept}
    return Report(data=data, text=lambda page: _show(page, kept))


def _show(page: Page, kept: list[dict[str, Any]]) -> None:
    if not kept:
        page.line("the memory has no landmarks yet, so there is nothing to index")
        return
    rows = [
        (each["document"], each["layer"], each.get("picked", each["kind"]), each["blocks"], each.get("recall"))
        for each in kept
    ]
    page.table(("document", "layer", "index", "blocks", "recall"), rows)
