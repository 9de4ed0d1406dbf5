"""Damage and its repair: `memstore verify` and `memstore repair`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import DamagedError, InvalidArgument, WrongKey
from memstore.report import Page, Report, counted
from memstore.tools.verb import DAMAGED, FACT, KEY_VARIABLE, OK, Json, MemoryUrl, fact_of, lasting, waiting

if TYPE_CHECKING:
    from memstore.memory.verify import Finding

_FINDING = ("kind", "document", "layer", "block", "tokens", "message")


def verify(memory: MemoryUrl, *, json: Json = False) -> Report:
    """Check every stored value of a memory.

    The exit code is 4 if anything is damaged. The scan runs in a process of its own, so damage cannot crash the
    command. Nothing is changed. Without its key, only the checksums of an encrypted memory are checked.

    Example:

        memstore verify notes.mem

    In Python: memstore.Memory.verify.
    """
    with waiting("checking every value", show=not json):
        opens, findings, documents, tokens, dropped = _checked(memory)

    def text(page: Page) -> None:
        clean = "clean as far as checksums show; with --key-file, everything is checked"
        if documents is not None and tokens is not None:
            clean = f"clean: {counted(documents, 'document')}, {counted(tokens, 'token')}"
        page.table(_FINDING, [_row(finding) for finding in findings], empty=clean)
        if findings:
            remedies = {finding["remedy"] for finding in findings}
            if opens and not remedies & {"verify", "restore"} and all(each["kind"] != "crash" for each in findings):
                page.line(f"to see what a repair would do: memstore repair {quote(memory)}")
            elif remedies == {None}:  # otherwise the findings name their own remedy
                page.line(f"to save the readable part: memstore repair {quote(memory)} --to NEW")
        for name, blocks in dropped.items():
            words = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in blocks)
            page.line(f"document {name!r} lacks blocks that a repair removed: {words}")

    data = {"memory": memory, "clean": not findings, "tokens": tokens, "findings": findings, "dropped": dropped}
    return Report(data=data, text=text, exit_code=DAMAGED if findings else OK)


Dropped = dict[str, list[tuple[int, int]]]


def _checked(memory: str) -> tuple[bool, list[dict[str, Any]], int | None, int | None, Dropped]:
    """Check a memory.

    Return whether it can be opened, the findings, and its numbers of documents and tokens (None if the key is missing).
    Also return the first and last blocks of the gaps in documents.
    """
    from memstore.memory.urls import on_disk
    from memstore.memory.verify import in_child

    try:
        opened = memstore.open(memory, mode="r")
    except WrongKey:
        if os.environ.get(KEY_VARIABLE):
            raise
        return True, [asdict(finding) for finding in in_child(memory)], None, None, {}
    except DamagedError as error:
        if not on_disk(memory):
            raise
        # It cannot be opened for use, but parts of it may still be read and named.
        found = in_child(memory)
        if all(_is_of(finding, error) for finding in found):
            raise
        return False, [asdict(finding) for finding in found], 0, 0, {}
    with opened:
        findings = [asdict(finding) for finding in opened.verify()]
        try:
            documents = opened.documents()
            tokens = sum(map(len, documents))
        except DamagedError:  # already among the findings
            return True, findings, 0, 0, {}
        dropped = {each.name: [(part[0], part[-1]) for part in each.dropped] for each in documents if each.dropped}
        return True, findings, len(documents), tokens, dropped


def _is_of(finding: Finding, error: DamagedError) -> bool:
    """Check whether a finding only repeats the error of opening: it concerns no value, and has the same remedy."""
    of_none = finding.document is None and finding.layer is None and finding.table is None
    return of_none and finding.kind == error.code and finding.remedy == error.remedy is not None


def _row(finding: dict[str, Any]) -> list[object]:
    """Return a finding as a row of the table, with the positions of its first and last token."""
    tokens = finding["tokens"]
    told = finding | {"tokens": None if tokens is None else f"{tokens[0]:,} to {tokens[1]:,}"}
    return [told[column] for column in _FINDING]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]
DropBlocks = Annotated[
    bool,
    typer.Option(
        "--drop-blocks", help="Remove the damaged blocks of a document and keep the later ones, instead of cutting it."
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        metavar="NEW",
        help="Leave MEMORY unchanged, and save its readable part into a new memory. Also works if MEMORY cannot be "
        "opened.",
        callback=lasting,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Make the changes. Without it, nothing is changed.")]


def repair(
    memory: MemoryUrl,
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    drop_blocks: DropBlocks = False,
    to: To = None,
    json: Json = False,
) -> Report:
    """Make a damaged memory sound again.

    A document with damaged values keeps its longest sound prefix; the rest of it can be read again. Values that nothing
    refers to are removed. Nothing is guessed. Without --yes nothing is changed; you see the planned repairs. The exit
    code is 4 if damage remains, or if --to lost anything.

    Example:

        memstore repair notes.mem --yes
        memstore repair notes.mem --to saved.mem

    In Python: memstore.Memory.repair and memstore.memory.salvage.salvage.
    """
    if to is not None:
        if dry_run or yes or drop_blocks:
            raise InvalidArgument("--to only reads MEMORY: leave out --dry-run, --yes and --drop-blocks")
        return _salvaged(memory, to, show=not json)
    plan = dry_run or not yes
    with memstore.open(memory) as opened, waiting("checking every value", show=not json):
        done = opened.repair(dry_run=plan, drop_blocks=drop_blocks)
        if not plan and not drop_blocks:  # dropped blocks were given up on purpose
            _read_again(opened, [step.document for step in done.steps if step.document and step.tokens_lost])
    steps, left = [asdict(step) for step in done.steps], [asdict(finding) for finding in done.left]

    def text(page: Page) -> None:
        for step in done.steps:
            page.line(("would do: " if plan else "") + step.message)
        if not left:
            page.line("the memory is intact")
        elif plan and steps:
            how = "--drop-blocks --yes" if drop_blocks else "--yes"
            page.line(f"nothing was changed yet; to do it: memstore repair {quote(memory)} {how}")
            if not drop_blocks and any(step.tokens_lost for step in done.steps):
                page.line("to keep the blocks after the damaged ones, add --drop-blocks")
        else:
            for finding in done.left:
                page.line(f"not repaired: {finding.message}")

    data = {"memory": memory, "dry_run": plan, "clean": not left, "steps": steps, "left": left}
    return Report(data=data, text=text, exit_code=DAMAGED if left else OK)


def _read_again(memory: memstore.Memory, names: Sequence[str]) -> None:
    """Let ``memstore read`` complete the documents ``names``: their files were read whole, and part of it is lost."""
    for name in names:
        if (fact := fact_of(memory, name)).get("whole"):
            memory.put_info(FACT + name, {**fact, "whole": False})


def _salvaged(memory: str, target: str, *, show: bool) -> Report:
    from memstore.memory.salvage import salvage

    with waiting("saving the readable part", show=show):
        saved = salvage(memory, target)
    lost = any(each.tokens_lost or not each.document for each in saved)

    def text(page: Page) -> None:
        for each in saved:
            page.line(each.message)
        page.line(f"{target} is now an intact memory; {memory} was not changed")

    data = {"memory": memory, "to": target, "documents": [asdict(each) for each in saved]}
    return Report(data=data, text=text, exit_code=DAMAGED if lost else OK)
