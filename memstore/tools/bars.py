"""A progress bar for what a memory does with its own files; ``memory.ingest`` has the one that counts tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstore.store.contract import Progress


@contextmanager
def bar(what: str, *, show: bool, in_bytes: bool = False) -> Iterator[Progress]:
    """A bar on standard error that is told how much of how much is done, and goes away; none where no terminal is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def waiting(what: str, *, show: bool) -> Iterator[None]:
    """A bar on standard error for work that cannot tell how far it is: it moves, and tells for how long already."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as shown:
        shown.add_task(what, total=None)
        yield


@contextmanager
def index_bar() -> Iterator[None]:
    """A bar for indexes that searches have to build from the store first; none while there is nothing to build."""
    from memstore.memory.layer_index import watched

    with ExitStack() as stack:
        progress: Progress | None = None

        def told(done: int, total: int) -> None:
            nonlocal progress
            progress = progress or stack.enter_context(bar("blocks indexed", show=True))
            progress(done, total)

        with watched(told):
            yield
