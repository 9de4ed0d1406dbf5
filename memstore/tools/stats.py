"""``memstore stats``: how much a memory holds and takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import memstore
from memstore.tools.options import Index, MemoryUrl
from memstore.tools.output import Page, Report


def stats(memory: MemoryUrl, *, index: Index = "exact") -> Report:
    """Tell how much a memory holds, and how many bytes that takes.

    Example:

        memstore stats notes.mem
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
            facts[f"index {kept['document']} layer {kept['layer']}"] = (
                f"{kept.get('picked', kept['kind'])}, {kept['blocks']:,} blocks, {recall}{why}"
            )
        page.facts(facts)

    return Report(data=numbers, text=text)


def flattened(numbers: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as one: ``{"bytes": {"blocks": 1}}`` gives ``"bytes blocks", 1``."""
    for name, value in numbers.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flattened(value, f"{label} ")
        else:
            yield label, value
