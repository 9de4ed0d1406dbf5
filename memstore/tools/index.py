"""``memstore index``: build the vector indexes of a memory, measure them, and keep them beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import memstore
from memstore.tools.options import Index, MemoryUrl
from memstore.tools.output import Json, Page, Report

if TYPE_CHECKING:
    from memstore.store.contract import Progress


def index(memory: MemoryUrl, *, index: Index = "exact", json: Json = False) -> Report:
    """Build the vector indexes of a memory, and keep them beside it.

    Whoever opens the memory with the same --index then searches at once. The recall of an approximate index is measured
    against every stored landmark. It can be interrupted and run again: an index that is not kept is built when needed.

    Example:

        memstore index notes.mem --index auto

    In Python: memstore.Memory.build_indexes.
    """
    with memstore.open(memory, index=index) as opened:
        with _bar(not json) as progress:
            opened.build_indexes(progress)
        kept = opened.stats()["indexes"]
    data = {"memory": memory, "index": index, "indexes": kept}
    return Report(data=data, text=lambda page: _show(page, kept))


def _show(page: Page, kept: list[dict[str, Any]]) -> None:
    if not kept:
        page.line("the memory has no landmarks yet, so there is nothing to index")
        return
    rows = [
        (each["document"], each["layer"], each.get("picked", each["kind"]), each["blocks"], each.get("recall"))
        for each in kept
    ]
    page.table(("document", "layer", "index", "blocks", "recall"), rows)


@contextmanager
def _bar(show: bool) -> Iterator[Progress]:
    """A progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as bar:
        task = bar.add_task("layers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
