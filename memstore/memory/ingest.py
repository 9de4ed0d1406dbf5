"""What everything that reads long inputs into a memory shares: threads that compute and commit, and a progress line."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

S = TypeVar("S")
M = TypeVar("M")
TOLD_SECONDS = 0.1
"""Time between two lines of progress."""


@contextmanager
def progress_bar(
    name: str, done: int, total: int | None, show: bool, verb: str = "reading"
) -> Iterator[Callable[[int], None]]:
    """A line on standard error, which is told how many tokens more are done. ``total``: None if nobody knows."""
    shown = name if name.isprintable() else repr(name)  # a terminal is not to obey names
    begun = told = time.perf_counter()
    read = width = 0

    def tell(end: str) -> None:
        nonlocal width
        speed = read / max(time.perf_counter() - begun, 1e-9)
        part, left = "", ""
        if total:
            part = f" of {total:,}"
            left = f", {max(0, total - done - read) / speed:,.0f} s left" if speed else ""
        line = f"{verb} {shown} {done + read:,}{part} tokens, {speed:,.0f} tokens/s{left}"
        sys.stderr.write(line.ljust(width) + end)  # spaces over what is left of a longer line
        sys.stderr.flush()
        width = len(line)

    def advance(tokens: int) -> None:
        nonlocal read, told
        read += tokens
        if show and time.perf_counter() - told > TOLD_SECONDS and sys.stderr.isatty():
            told = time.perf_counter()
            tell("\r")

    try:
        yield advance
    finally:
        if show:
            tell("\n")


def pipelined(
    segments: Iterable[S],
    compute: Callable[[S], M],
    commit: Callable[[M], None],
    *,
    workers: int = 0,
    ahead: bool = True,
) -> Iterator[M]:
    """Compute ``segments`` and commit what they made in order, each in a thread beside the next ones.

    ``workers`` segments are computed side by side in threads; 0: one after the other, in this one. ``ahead=False``
    waits until what was made before is committed, for segments that need to find it. Tells what was made, as it is
    handed over. Where ``segments`` raises, what came before is committed first.
    """
    computing: deque[Future[M]] = deque()
    pending: Future[None] | None = None
    failure: BaseException | None = None
    source = iter(segments)
    with background_workers(1) as writer, background_workers(workers) if workers else nullcontext() as pool:
        try:
            while True:
                try:
                    segment = next(source)
                except StopIteration:
                    break
                except BaseException as error:  # noqa: BLE001 - raised again once what came before it is kept
                    failure = error
                    break
                if pool is None:
                    if pending is not None and not ahead:
                        pending.result()
                    made = compute(segment)
                else:
                    computing.append(pool.submit(compute, segment))
                    if len(computing) <= workers:
                        continue
                    made = computing.popleft().result()
                if pending is not None:
                    pending.result()
                pending = writer.submit(commit, made)
                yield made
            while computing:
                made = computing.popleft().result()
                if pending is not None:
                    pending.result()
                pending = writer.submit(commit, made)
                yield made
            if pending is not None:
                pending.result()
        finally:
            for each in computing:
                each.cancel()
    if failure is not None:
        raise failure


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
