"""``memstore forget``: delete a document."""

from __future__ import annotations

from shlex import quote

import memstore
from memstore.tools.options import DocumentArgument, MemoryUrl, existing
from memstore.tools.output import Report, counted


def forget(memory: MemoryUrl, document: DocumentArgument) -> Report:
    """Delete a document and everything of it.

    Its bytes stay in the file until others are written over them, or until memstore compact.

    Example:

        memstore forget notes.mem moby-dick

    In Python: memstore.Memory.forget.
    """
    with memstore.open(memory) as opened:
        tokens = len(existing(opened, document))
        opened.forget(document)
    data = {"memory": memory, "document": document, "tokens": tokens}
    told = (
        f"forgot {document!r}, {counted(tokens, 'token')}. To erase it from the disk: memstore compact {quote(memory)}"
    )
    return Report(data=data, text=lambda page: page.line(told))
