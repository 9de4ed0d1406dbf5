"""``memstore verify``: read everything a memory holds and check it."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote
from typing import Any

import memstore
from memstore.errors import DamagedError
from memstore.tools.bars import waiting
from memstore.tools.failures import DAMAGED, OK
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Json, Page, Report, counted

ONLY_A_COPY = "estore it from a copy"
"""In the message of what nothing else helps against."""
COLUMNS = ("kind", "document", "layer", "block", "tokens", "message")


def verify(memory: MemoryUrl, *, json: Json = False) -> Report:
    """Check every stored value of a memory.

    The exit code is 4 if anything is damaged. The scan runs in a process of its own, so that it survives what it
    finds. Nothing is changed.

    Example:

        memstore verify notes.mem

    In Python: memstore.Memory.verify.
    """
    with waiting("checking every value", show=not json):
        opens, findings, documents, tokens, dropped = _checked(memory)

    def text(page: Page) -> None:
        clean = f"clean: {counted(documents, 'document')}, {counted(tokens, 'token')}"
        page.table(COLUMNS, [_row(finding) for finding in findings], empty=clean)
        if findings:
            if opens and all(finding["kind"] != "crash" for finding in findings):
                page.line(f"to see what can be put right: memstore repair {quote(memory)}")
            elif not any(ONLY_A_COPY in finding["message"] for finding in findings):
                page.line(f"to save what can be read: memstore repair {quote(memory)} --to NEW")
        for name, blocks in dropped.items():
            page.line(f"document {name!r} lacks blocks that a repair has dropped: {_in_words(blocks)}")

    data = {"memory": memory, "clean": not findings, "tokens": tokens, "findings": findings, "dropped": dropped}
    return Report(data=data, text=text, exit_code=DAMAGED if findings else OK)


Dropped = dict[str, list[tuple[int, int]]]


def _checked(memory: str) -> tuple[bool, list[dict[str, Any]], int, int, Dropped]:
    """What there is to tell of a memory.

    Whether it can be opened, findings, how many documents and tokens there are, and which blocks documents lack: first
    and last.
    """
    try:
        opened = memstore.open(memory, mode="r")
    except DamagedError as error:
        from memstore.memory.urls import on_disk
        from memstore.memory.verify import in_child

        if not on_disk(memory):
            raise
        # It cannot be opened to be used, but something of it may still be read and named.
        findings = [asdict(finding) for finding in in_child(memory)]
        if [finding["message"] for finding in findings] in ([], [str(error)]):
            raise
        return False, findings, 0, 0, {}
    with opened:
        findings = [asdict(finding) for finding in opened.verify()]
        try:
            documents = opened.documents()
            tokens = sum(map(len, documents))
        except DamagedError:  # which is among the findings
            return True, findings, 0, 0, {}
        dropped = {each.name: [(part[0], part[-1]) for part in each.dropped] for each in documents if each.dropped}
        return True, findings, len(documents), tokens, dropped


def _row(finding: dict[str, Any]) -> list[object]:
    """A finding as a row of the table, with the positions of its first and last token."""
    tokens = finding["tokens"]
    told = finding | {"tokens": None if tokens is None else f"{tokens[0]:,} to {tokens[1]:,}"}
    return [told[column] for column in COLUMNS]


def _in_words(blocks: list[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in blocks)
