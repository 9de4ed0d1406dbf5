"""Shared parts of indexes that are rebuilt during use: a constant base, and a thread that makes the next one.

Approximate structures are slow to make and hard to change. So such an index has a *base*: a structure over the blocks
of one moment, some of them perhaps removed since. Blocks added since form the *tail*, which is searched exactly. When
the tail has become long, a thread makes the next base while searches use this one. A later call adopts it, without the
blocks removed meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index.contract import allows


def library() -> ModuleType:
    """Import FAISS. Raises ``InvalidArgument`` if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise InvalidArgument(
            f"this index needs FAISS ({error}). Install it: pip install 'torch-memstore[faiss]'. Or use index='exact'"
        ) from error
    return faiss


@dataclass(eq=False, repr=False)
class BaseBlocks:
    """The blocks of a base: ``ids [n]`` int64, in any order."""

    ids: Tensor

    def __post_init__(self) -> None:
        self.alive = torch.ones(len(self.ids), dtype=torch.bool)
        """``[n]``: the blocks that were not removed."""
        self.removed = 0
        """The number of removed blocks."""
        self._by_id = self.ids.argsort()

    def __len__(self) -> int:
        return len(self.ids) - self.removed

    def holds(self, ids: Tensor) -> Tensor:
        """Return which of ``ids [n]`` are in the base, ``[n]`` bool."""
        rows, same = self._find(ids)
        return same & self.alive[rows]

    def drop(self, ids: Tensor) -> Tensor:
        """Remove all of ``ids [n]`` (distinct) that are in the base, and return their rows."""
        rows, same = self._find(ids)
        rows = rows[same]
        rows = rows[self.alive[rows]]
        self.alive[rows] = False
        self.removed += len(rows)
        return rows

    def wanted(self, allowed: range | Tensor | None) -> Tensor:
        """Return which rows ``[n]`` may be found."""
        return self.alive if allowed is None else self.alive & allows(allowed, self.ids)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows ``[n]`` of ``ids [n]``, and which of them are right; the other ids are not in the base."""
        if not len(self.ids):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        places = torch.searchsorted(self.ids, ids, sorter=self._by_id).clamp(max=len(self.ids) - 1)
        rows = self._by_id[places]
        return rows, self.ids[rows] == ids


T = TypeVar("T", bound=BaseBlocks)


class Rebuild(Generic[T]):
    """Makes one base at a time, in a thread."""

    def __init__(self) -> None:
        self._coming: Future[T] | None = None
        self._removed: list[Tensor] = []

    @property
    def running(self) -> bool:
        """Return whether a base is being made, or waits to be taken."""
        return self._coming is not None

    def begin(self, make: Callable[[], T]) -> None:
        """Let a thread make the next base; ``running`` must be False."""
        self._coming, self._removed = Future(), []
        # A new thread each time, not a pool: nothing is left over if an index is dropped, or forked.
        threading.Thread(target=_fulfil, args=(self._coming, make), name="memstore-index").start()

    def note_removed(self, ids: Tensor) -> None:
        """Note that blocks ``ids [n]`` were removed: the base in progress still has them."""
        if self._coming is not None:
            self._removed.append(ids)

    def take(self, *, wait: bool = False) -> T | None:
        """Return the base, once, without the blocks removed meanwhile; None if it is not ready.

        ``wait``: until it is ready. Raises the error of making it.
        """
        if self._coming is None or not (wait or self._coming.done()):
            return None
        coming, self._coming = self._coming, None
        base = coming.result()
        # Blocks that were removed and added again lie in the tail.
        base.drop(torch.cat([torch.empty(0, dtype=torch.int64), *self._removed]).unique())
        return base

    def wait(self) -> None:
        if self._coming is not None:
            self._coming.exception()


def _fulfil(coming: Future[T], make: Callable[[], T]) -> None:
    try:
        coming.set_result(make())
    except BaseException as error:  # noqa: BLE001 - raised where the base is taken
        coming.set_exception(error)
