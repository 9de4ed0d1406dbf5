"""``memstore compact``: erase what was forgotten, and give its space back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import memstore
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Json, Report

if TYPE_CHECKING:
    from memstore.store.contract import Progress


def compact(memory: MemoryUrl, *, json: Json = False) -> Report:
    """Erase what was forgotten from the file, and give its space back to the disk.

    Works in place and beside readers. It can be interrupted at any moment and run again.

    Example:

        memstore compact notes.mem

    In Python: memstore.Memory.compact.
    """
    with memstore.open(memory) as opened, _bar(not json) as progress:
        done = opened.compact(progress)
    data = {"memory": memory, "disk_bytes_before": done.before, "disk_bytes": done.after}
    freed = max(0, done.before - done.after)
    told = f"what was forgotten is erased; {freed:,} bytes went back to the disk, {done.after:,} are taken"
    return Report(data=data, text=lambda page: page.line(told))


@contextmanager
def _bar(show: bool) -> Iterator[Progress]:
    """A progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as bar:
        task = bar.add_task("compacting", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
