"""``memstore stats``: how much a memory holds and takes."""

from __future__ import annotations

import memstore
from memstore.tools.options import Index, MemoryUrl
from memstore.tools.output import Page, Report, flattened


def stats(memory: MemoryUrl, *, index: Index = "exact") -> Report:
    """Tell how much a memory holds, and how many bytes that takes.

    Example:

        memstore stats notes.mem

    In Python: memstore.Memory.stats.
    """
    with memstore.open(memory, mode="r", index=index) as opened:
        numbers = opened.stats()

    def text(page: Page) -> None:
        # Always 0 here: an index is built at the first search, and tiers count what this process has read.
        hidden = ("index_bytes", "indexes", "tiers")
        facts = dict(flattened({name: value for name, value in numbers.items() if name not in hidden}))
        facts["rules pinned"] = ", ".join(numbers["rules"]["pinned"]) or None
        del facts["rules evicted"], facts["rules expired"]  # since it was opened: always 0 here
        for kept in numbers["indexes"]:
            recall = f"recall {kept['recall']:.3f}" if "recall" in kept else "recall not measured"
            why = f", {kept['why']}" if "why" in kept else ""
            picked = f" ({kept['picked']})" if "picked" in kept else ""
            facts[f"index {kept['document']} layer {kept['layer']} {kept['index']}"] = (
                f"{kept['blocks']:,} blocks{picked}, {recall}{why}"
            )
        page.facts(facts)

    return Report(data=numbers, text=text)
