"""Threads that compute and commit side by side, for everything that reads long inputs into a memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

S = TypeVar("S")
M = TypeVar("M")


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
