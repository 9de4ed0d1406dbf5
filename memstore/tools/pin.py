"""``memstore pin`` and ``memstore unpin``: which documents no rule may forget."""

from __future__ import annotations

import memstore
from memstore.tools.options import DocumentArgument, MemoryUrl, existing
from memstore.tools.output import Report


def pin(memory: MemoryUrl, document: DocumentArgument) -> Report:
    """Keep a document, whatever limit or time to live there is.

    memstore forget still deletes it.

    Example:

        memstore pin notes.mem moby-dick

    In Python: memstore.Document.pin.
    """
    return _set(memory, document, pinned=True)


def unpin(memory: MemoryUrl, document: DocumentArgument) -> Report:
    """Let the memory's rules hold for a document again.

    Example:

        memstore unpin notes.mem moby-dick

    In Python: memstore.Document.unpin.
    """
    return _set(memory, document, pinned=False)


def _set(memory: str, name: str, *, pinned: bool) -> Report:
    with memstore.open(memory) as opened:
        document = existing(opened, name)
        if pinned:
            document.pin()
        else:
            document.unpin()
    words = "pinned: only forget deletes it" if pinned else "no longer pinned"
    data = {"memory": memory, "document": name, "pinned": pinned}
    return Report(data=data, text=lambda page: page.line(f"{name!r} is {words}"))
