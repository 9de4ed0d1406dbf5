"""``memstore verify``: read everything a memory holds and check it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import memstore
from memstore.errors import DamagedError
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
    findings, documents, tokens, dropped = _checked(memory)

    def text(page: Page) -> None:
        if findings:
            page.table(COLUMNS, [[finding[column] for column in COLUMNS] for finding in findings])
        else:
            page.line(f"clean: {counted(documents, 'document')}, {counted(tokens, 'token')}")
        for name, blocks in dropped.items():
            page.line(f"document {name!r} lacks blocks that a repair has dropped: {_in_words(blocks)}")

    data = {"memory": memory, "clean": not findings, "tokens": tokens, "findings": findings, "dropped": dropped}
    return Report(data=data, text=text, exit_code=DAMAGED if findings else OK)


Dropped = dict[str, list[tuple[int, int]]]


def _checked(memory: str) -> tuple[list[dict[str, Any]], int, int, Dropped]:
    """Findings, how many documents and tokens there are, and of which documents blocks are dropped: first and last."""
    try:
        with memstore.open(memory, mode="r") as opened:
            findings = [asdict(finding) for finding in opened.verify()]
            documents = opened.documents()
            dropped = {each.name: [(part[0], part[-1]) for part in each.dropped] for each in documents if each.dropped}
            return findings, len(documents), sum(map(len, documents)), dropped
    except DamagedError as error:
        from memstore.memory.urls import is_path
        from memstore.memory.verify import in_child

        if not is_path(memory):
            raise
        # It cannot be opened to be used, but something of it may still be read and named.
        findings = [asdict(finding) for finding in in_child(memory)]
        if [finding["message"] for finding in findings] in ([], [str(error)]):
            raise
        return findings, 0, 0, {}


def _in_words(blocks: list[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in blocks)
