"""The contract of a vector index: landmarks of blocks, searched by inner product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


class Found(NamedTuple):
    """Result of a search, best first; -1 ids (and -inf scores) where fewer than ``k`` blocks exist."""

    scores: Tensor
    """``[H, T, k]`` float32: inner product of the query with the best key of the block."""
    ids: Tensor
    """``[H, T, k]`` int64 block ids."""
    offsets: Tensor
    """``[H, T, k]`` int64: which of the block's keys matched best."""


@dataclass(frozen=True, kw_only=True)
class IndexCapabilities:
    """What an index can do beyond the contract."""

    exact: bool
    """Search returns the true top k."""
    dense: bool
    """``score`` is available."""


class VectorIndex(ABC):
    """Blocks of keys, each block with ``P`` keys for each of ``H`` heads.

    Always rebuildable from the store, which is the single source of truth. A block added is searchable at once.
    """

    capabilities: IndexCapabilities

    @abstractmethod
    def add(self, ids: Tensor, keys: Tensor) -> None:
        """Add blocks ``ids [n]`` (int64, new, ascending) with ``keys [n, H, P, D]``."""

    @abstractmethod
    def remove(self, ids: Tensor) -> None:
        """Remove blocks ``ids [n]``; ids that are not there are an error."""

    @abstractmethod
    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> Found:
        """Top ``k`` blocks for each of ``queries [H, T, D]``, among the ids in ``allowed`` (a range or int64 ids)."""

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score of every block: ``([H, T, N] float32, ids [N])``. Only where ``capabilities.dense``."""
        raise NotImplementedError(f"{type(self).__name__} cannot score every block; use search()")

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held by the keys."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the index to the file ``path``."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Replace the content by what ``save`` wrote."""
