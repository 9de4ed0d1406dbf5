"""The contract of a vector index: landmarks of blocks, searched by inner product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SearchResult(NamedTuple):
    """The best blocks for each query, best first; where fewer than ``k`` blocks exist, ids of -1 and scores of -inf."""

    scores: Tensor
    """``[H, T, k]`` float32: inner product of the query with the best key of the block."""
    ids: Tensor
    """``[H, T, k]`` int64 block ids."""
    offsets: Tensor
    """``[H, T, k]`` int64: which of the block's keys matched best."""

    @classmethod
    def of_heads(cls, heads: Sequence[SearchResult], queries: Tensor) -> SearchResult:
        """One result of those of each key head, ``[R, k]``, for the queries ``[H, T, D]`` and on their device."""
        shape = (*queries.shape[:2], heads[0].scores.shape[1])
        return cls(*(torch.stack(parts).reshape(shape).to(queries.device) for parts in zip(*heads, strict=True)))


@dataclass(frozen=True, kw_only=True)
class IndexCapabilities:
    """What an index can do beyond the contract."""

    exact: bool
    """Search returns the true top k."""
    dense: bool
    """``score`` is available."""
    routes: bool = False
    """``route`` is available, and takes less than scoring every block."""
    devices: bool = False
    """It can lie on an accelerator, and is searched there."""


class VectorIndex(ABC):
    """Blocks of keys, each block with ``P`` keys for each of ``G`` heads.

    Always rebuildable from the store, which is the single source of truth. A block added is searchable at once. Where
    ``capabilities.exact`` is False a search may miss blocks, but every block it returns is there, is allowed, and has
    its true score.
    """

    capabilities: IndexCapabilities

    @abstractmethod
    def __init__(
        self,
        key_heads: int,
        key_dim: int,
        keys_per_block: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        settings: str = "",
    ) -> None:
        """An empty index for ``key_heads`` G, ``keys_per_block`` P and ``key_dim`` D.

        Keys come as ``dtype`` can hold them without loss. ``settings`` is what follows the colon in the name of the
        index. Raises ``InvalidArgument``, also where a library is missing.
        """

    @abstractmethod
    def add(self, ids: Tensor, keys: Tensor) -> None:
        """Add blocks ``ids [n]`` (int64, new, ascending) with floating-point ``keys [n, G, P, D]``.

        Raises ``InvalidArgument`` for other shapes and types, for numbers that are not finite or larger than 1e15, and
        for ids that are in the index.
        """

    @abstractmethod
    def remove(self, ids: Tensor) -> None:
        """Remove blocks ``ids [n]`` (int64, ascending).

        Raises ``InvalidArgument``, with nothing removed, where one is not in the index.
        """

    @abstractmethod
    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        """Top ``k`` blocks for each of ``queries [H, T, D]``, by the inner product with their best key.

        Queries are floating-point. Query head ``h`` is compared with key head ``h // (H // G)``. Only ids in
        ``allowed`` (a range or int64 ids ``[n]``) are found; None allows all. Raises ``InvalidArgument``.
        """

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score of every block: ``([H, T, N] float32, ids [N])``. Only where ``capabilities.dense``."""
        raise NotImplementedError(f"{type(self).__name__} cannot score every block; use search()")

    def route(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The best blocks for the query tokens ``[T, D]`` together, by late interaction: ``(scores [k], ids [k])``.

        Best first, fewer where there are fewer. Only where ``capabilities.routes``.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot route; use score()")

    def finish(self) -> None:  # noqa: B027 - most indexes have nothing to do
        """Do now, and wait for, what the index would do beside the next searches (training, rebuilding)."""

    def facts(self) -> Mapping[str, Any]:
        """What ``memstore stats`` tells of the index: JSON values, among them ``"kind"``."""
        return {"kind": type(self).__name__}

    def close(self) -> None:  # noqa: B027 - most indexes hold nothing
        """Release what garbage collection would not: threads, connections. The index is not used afterwards."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held by the keys."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the index to the file ``path``, replacing it at once or not at all."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Replace the content by what ``save`` wrote. Raises ``NotFound`` or ``DamagedError``, with nothing changed."""
