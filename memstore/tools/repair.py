"""``memstore repair``: put right what verify finds."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote
from typing import Annotated

import typer

import memstore
from memstore.tools.failures import DAMAGED, OK
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Page, Report

DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; tell what would be done first.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it nothing is changed.")]


def repair(memory: MemoryUrl, *, dry_run: DryRun = False, yes: Yes = False) -> Report:
    """Make a damaged memory sound again.

    A document with damaged values keeps its longest sound prefix; the rest of it can be read again. Values that nothing
    refers to are removed. Nothing is guessed. Without --yes nothing is changed and you see what would be done. The exit
    code is 4 if anything is still wrong.

    Example:

        memstore repair notes.mem --yes
    """
    plan = dry_run or not yes
    with memstore.open(memory) as opened:
        done = opened.repair(dry_run=plan)
    steps, left = [asdict(step) for step in done.steps], [asdict(finding) for finding in done.left]

    def text(page: Page) -> None:
        for step in done.steps:
            page.line(("would do: " if plan else "") + step.message)
        if not left:
            page.line("the memory is sound")
        elif plan and steps:
            page.line(f"nothing was changed; to do it: memstore repair {quote(memory)} --yes")
        else:
            for finding in done.left:
                page.line(f"left as it is: {finding.message}")

    data = {"memory": memory, "dry_run": plan, "clean": not left, "steps": steps, "left": left}
    return Report(data=data, text=text, exit_code=DAMAGED if left else OK)
