"""What a memory holds: its documents, its numbers, its indexes."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unicodedata import normalize

import memstore
from memstore.tools.verb import Index, Json, MemoryUrl, Page, Report, bar, facts_of, flattened, time_of

_DOCUMENT = ("document", "tokens", "blocks", "full")
_WHERE_ANY = ("pinned", "expires", "changed", "meta")


def ls(memory: MemoryUrl) -> Report:
    """List the documents of a memory.

    Full are the blocks that have all their tokens; a document's last block, where it is not full, is found by stock
    models alone. Which documents are pinned, when they expire, when their files have changed last, and what was noted
    of them, is told where there is any. With --json also of which file a document is, the digest of its text and when
    it was read.

    Example:

        memstore ls notes.mem

    In Python: memstore.Memory.documents.
    """
    with memstore.open(memory, mode="r") as opened:
        rules = opened.stats()["rules"]
        files = facts_of(opened)
        documents = [
            {
                "document": document.name,
                "tokens": len(document),
                "blocks": len(document.blocks),
                "full": sum(map(len, document.present(document.complete_blocks))),
                "pinned": document.name in rules["pinned"],
                "expires": rules["expires"].get(document.name),
                "changed": None if (when := time_of(files[document.name])) is None else f"{when:%Y-%m-%d %H:%M}",
                "meta": files[document.name].get("meta", {}),
                **{key: files[document.name].get(key) for key in ("path", "digest", "read")},
            }
            for document in opened.documents()
        ]

    def text(page: Page) -> None:
        columns = [*_DOCUMENT, *(column for column in _WHERE_ANY if any(document[column] for document in documents))]
        rows = [[_told(document[column]) for column in columns] for document in documents]
        alike = Counter(normalize("NFC", str(document["document"])) for document in documents)
        for row in rows:
            if alike[normalize("NFC", str(row[0]))] > 1:  # two names that look the same, in other code points
                row[0] = page.brief(f"{row[0]} ({str(row[0]).encode('unicode_escape').decode()})", row[0])
        page.table(columns, rows, empty="no documents yet. Add one with: memstore read TEXT MEMORY")

    return Report(data={"memory": memory, "documents": documents}, text=text)


def _told(value: object) -> object:
    """What was noted as it was given; other values as they are."""
    return ", ".join(f"{key}={each}" for key, each in value.items()) or None if isinstance(value, dict) else value


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
    return Report(data=data, text=lambda page: _show_indexes(page, kept))


def _show_indexes(page: Page, kept: list[dict[str, Any]]) -> None:
    if not kept:
        page.line("the memory has no landmarks yet, so there is nothing to index")
        return
    rows = [
        (each["document"], each["layer"], each.get("picked", each["kind"]), each["blocks"], each.get("recall"))
        for each in kept
    ]
    page.table(("document", "layer", "index", "blocks", "recall"), rows)
