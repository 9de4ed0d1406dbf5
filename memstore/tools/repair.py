"""``memstore repair``: put right what verify finds."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote
from typing import Annotated

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.tools.bars import waiting
from memstore.tools.failures import DAMAGED, OK
from memstore.tools.options import MemoryUrl, lasting
from memstore.tools.output import Json, Page, Report

DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; tell what would be done first.")]
DropBlocks = Annotated[
    bool,
    typer.Option(
        "--drop-blocks", help="Take the damaged blocks out of a document and keep those behind, instead of cutting it."
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        metavar="NEW",
        help="Leave MEMORY as it is, and save what can be read of it into a new memory: for one that cannot be opened.",
        callback=lambda url: None if url is None else lasting(url),
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it nothing is changed.")]


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
    refers to are removed. Nothing is guessed. Without --yes nothing is changed and you see what would be done. The exit
    code is 4 if anything is still wrong, or lost with --to.

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
    steps, left = [asdict(step) for step in done.steps], [asdict(finding) for finding in done.left]

    def text(page: Page) -> None:
        for step in done.steps:
            page.line(("would do: " if plan else "") + step.message)
        if not left:
            page.line("the memory is sound")
        elif plan and steps:
            how = "--drop-blocks --yes" if drop_blocks else "--yes"
            page.line(f"nothing was changed; to do it: memstore repair {quote(memory)} {how}")
            if not drop_blocks and any(step.tokens_lost for step in done.steps):
                page.line("to keep what lies behind the damaged blocks, add --drop-blocks")
        else:
            for finding in done.left:
                page.line(f"left as it is: {finding.message}")

    data = {"memory": memory, "dry_run": plan, "clean": not left, "steps": steps, "left": left}
    return Report(data=data, text=text, exit_code=DAMAGED if left else OK)


def _salvaged(memory: str, target: str, *, show: bool) -> Report:
    from memstore.memory.salvage import salvage

    with waiting("saving what can be read", show=show):
        saved = salvage(memory, target)
    lost = any(each.tokens_lost or not each.document for each in saved)

    def text(page: Page) -> None:
        for each in saved:
            page.line(each.message)
        page.line(f"{target} is a sound memory now; {memory} was not changed")

    data = {"memory": memory, "to": target, "documents": [asdict(each) for each in saved]}
    return Report(data=data, text=text, exit_code=DAMAGED if lost else OK)
