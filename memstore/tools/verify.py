"""``memstore verify``: read everything a memory holds and check it."""

from __future__ import annotations

from dataclasses import asdict

import memstore
from memstore.tools.failures import DAMAGED, OK
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Page, Report, counted

COLUMNS = ("kind", "document", "layer", "block", "message")


def verify(memory: MemoryUrl) -> Report:
    """Check every stored value of a memory.

    The exit code is 4 if anything is damaged. The scan runs in a process of its own, so that it survives what it
    finds. Nothing is changed.

    Example:

        memstore verify notes.mem
    """
    with memstore.open(memory, mode="r") as opened:
        findings = [asdict(finding) for finding in opened.verify()]
        documents = opened.documents()
        tokens = sum(map(len, documents))

    def text(page: Page) -> None:
        if findings:
            page.table(COLUMNS, [[finding[column] for column in COLUMNS] for finding in findings])
        else:
            page.line(f"clean: {counted(len(documents), 'document')}, {counted(tokens, 'token')}")

    data = {"memory": memory, "clean": not findings, "tokens": tokens, "findings": findings}
    return Report(data=data, text=text, exit_code=DAMAGED if findings else OK)
