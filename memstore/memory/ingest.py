"""What everything that reads long inputs into a memory shares: a thread that commits, and a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def progress_bar(
    name: str, done: int, total: int | None, show: bool, verb: str = "reading"
) -> Iterator[Callable[[int], None]]:
    """A progress bar, which is told how many tokens more are done. ``total``: None if nobody knows."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    of = "" if total is None else f" of {total:,}"
    columns = (
        TextColumn(f"{verb} {{task.description}}", markup=False),  # names may have brackets in them
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f}{task.fields[of]} tokens, {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    begun = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        completed, of = (done, "") if total is None else (min(done, total), f" of {total:,}")
        shown = name if name.isprintable() else repr(name)  # nor is a terminal to obey them
        task = bar.add_task(shown, total=total, completed=completed, of=of, speed=0.0)
        read = 0

        def advance(tokens: int) -> None:
            nonlocal read
            read += tokens
            bar.update(task, advance=tokens, speed=read / (time.perf_counter() - begun))

        yield advance


def background_workers(count: int) -> ThreadPoolExecutor:
    """Threads that work beside the model, such as one that commits; each computes with one thread of torch.

    Torch would give each of them as many OpenMP workers as the model has. With more workers than cores they sleep after
    every operation instead of waiting for the next, and the model takes twice as long; so these get none.
    """
    threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(count, "memstore", initializer=_work_alone)
    for started in [workers.submit(time.sleep, 0.001) for _ in range(count)]:
        started.result()
    torch.set_num_threads(threads)  # the workers have set the default of threads yet to come as well
    return workers


def _work_alone() -> None:
    torch.get_num_threads()  # reads the default, which would else be read later and undo the next line
    torch.set_num_threads(1)
