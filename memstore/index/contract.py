"""The contract of a vector index - landmarks of blocks, searched by inner product - and the common checks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.json_checks import check_whole

LARGEST_ID = (1 << 63) - 1
LARGEST = 1e15
"""Largest number in a key or a query, so that products, squares and their sums stay within float32.

Then no score is infinite or NaN. FAISS ends the process for clusters of keys whose squares overflow.
"""


class SearchResult(NamedTuple):
    """The best blocks for each query, best first; if fewer than ``k`` exist, ids are -1 and scores -inf."""

    scores: Tensor
    """``[H, T, k]`` float32: inner product of the query with the best key of the block."""
    ids: Tensor
    """``[H, T, k]`` int64 block ids."""
    offsets: Tensor
    """``[H, T, k]`` int64: the key of the block that matched best."""

    @classmethod
    def of_heads(cls, heads: Sequence[SearchResult], queries: Tensor) -> SearchResult:
        """Join the results ``[R, k]`` of all key heads for the queries ``[H, T, D]``, on their device."""
        shape = (*queries.shape[:2], heads[0].scores.shape[1])
        joined = heads[0] if len(heads) == 1 else map(torch.stack, zip(*heads, strict=True))
        return cls(*(part.reshape(shape).to(queries.device) for part in joined))


@dataclass(frozen=True, kw_only=True)
class IndexCapabilities:
    """What an index can do beyond the contract."""

    exact: bool
    """Search returns the true top k."""
    dense: bool
    """``score`` is available."""
    devices: bool = False
    """The index can be on an accelerator, and is searched there."""


class VectorIndex(ABC):
    """Blocks of keys, each block with ``P`` keys for each of ``G`` heads.

    The index can always be rebuilt from the store, the single source of truth. Added blocks are searchable at once. A
    search during an addition in another thread is not safe; the memory holds a lock. If ``capabilities.exact`` is
    False, a search may miss blocks, but every returned block exists, is allowed, and has its true score.
    """

    capabilities: IndexCapabilities
    kind = ""
    """The kind in its facts and files; empty: the name of its class."""
    typed = False
    """Whether its files hold keys in ``dtype``."""

    def __init__(
        self,
        key_heads: int,
        key_dim: int,
        keys_per_block: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        settings: str = "",
    ) -> None:
        """Make an empty index for ``key_heads`` G, ``keys_per_block`` P and ``key_dim`` D.

        ``dtype`` must hold the keys without loss. ``settings`` is the part of the index's name after the colon. Raises
        ``InvalidArgument``, also if a library is missing.
        """
        check_sizes(key_heads, key_dim, keys_per_block)
        self.key_heads, self.key_dim, self.keys_per_block = key_heads, key_dim, keys_per_block
        self.dtype, self.device = dtype, torch.device(device)
        self._prepare(settings)

    def _prepare(self, settings: str) -> None:
        """Make an empty index of the known sizes. Raises ``InvalidArgument``."""
        self._refuse(settings)

    def _refuse(self, settings: str = "") -> None:
        """Raise ``InvalidArgument`` for any settings, and for a device that the index does not support."""
        kind = type(self).__name__
        if settings:
            raise InvalidArgument(f"{kind} has no settings: leave out ':{settings}'.")
        if self.device.type != "cpu" and not self.capabilities.devices:
            raise InvalidArgument(f"{kind} searches on the CPU, not on {self.device}; use 'exact' there.")

    def _check_blocks(self, ids: Tensor, keys: Tensor) -> None:
        """Raise ``InvalidArgument`` for shapes, types and numbers that ``add`` does not take."""
        check_ids(ids)
        check_keys(keys, (ids.numel(), self.key_heads, self.keys_per_block, self.key_dim))

    def _grouped(self, queries: Tensor, *, wait: bool = True) -> Tensor:
        """Check ``queries [H, T, D]``; return ``[G, R, D]`` float32: the query heads of a key head are more rows."""
        check_queries(queries, self.key_heads, self.key_dim, wait=wait)
        return queries.to(self.device).reshape(self.key_heads, -1, self.key_dim).float()

    @property
    def _about(self) -> dict[str, Any]:
        """The facts that a file of the index must match; see ``files.load``."""
        sizes = {name: getattr(self, name) for name in ("key_heads", "keys_per_block", "key_dim")}
        return {"index": self.kind, **sizes} | ({"dtype": str(self.dtype).removeprefix("torch.")} if self.typed else {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} blocks, {self.key_heads}x{self.keys_per_block}x{self.key_dim})"

    @abstractmethod
    def add(self, ids: Tensor, keys: Tensor) -> None:
        """Add blocks ``ids [n]`` (int64, new, ascending) with floating-point ``keys [n, G, P, D]``.

        Raises ``InvalidArgument`` for other shapes and types, for numbers that are not finite or larger than 1e15, and
        for ids that the index has already.
        """

    @abstractmethod
    def remove(self, ids: Tensor) -> None:
        """Remove blocks ``ids [n]`` (int64, ascending).

        Raises ``InvalidArgument``, and removes nothing, if one is not in the index.
        """

    @abstractmethod
    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        """Return the top ``k`` blocks for each of ``queries [H, T, D]``, by the inner product with their best key.

        Queries are floating-point. Query head ``h`` is compared with key head ``h // (H // G)``. Only ids in
        ``allowed`` (a range or int64 ids ``[n]``) are found; None allows all. Raises ``InvalidArgument``.
        """

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the score of every block: ``([H, T, N] float32, ids [N])``. Only with ``capabilities.dense``."""
        raise NotImplementedError(f"{type(self).__name__} cannot score every block; call search()")

    def finish(self) -> None:  # noqa: B027 - most indexes have nothing to do
        """Finish the work that would run beside the next searches (training, rebuilding), and wait for it."""

    def facts(self) -> Mapping[str, Any]:
        """Return the facts for ``memstore stats``: JSON values, including ``"kind"``."""
        return {"kind": self.kind or type(self).__name__}

    def close(self) -> None:  # noqa: B027 - most indexes hold nothing
        """Release threads and connections, which garbage collection would not. Do not use the index afterwards."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held by the keys."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the index to the file ``path``; replace the file as a whole or not at all."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Replace the content by a file of ``save``.

        Raises ``NotFound`` or ``DamagedError``, and then changes nothing.
        """


def check_sizes(key_heads: int, key_dim: int, keys_per_block: int) -> None:
    """Check that an index has at least one key head, one number in a key, and one key in a block."""
    for name, size in (("key_heads", key_heads), ("key_dim", key_dim), ("keys_per_block", keys_per_block)):
        if size < 1:
            raise InvalidArgument(f"{name} must be at least 1, not {size}.")


def check_ids(ids: Tensor) -> None:
    """Check that ``ids`` are ``[n]`` int64, ascending, not negative."""
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise InvalidArgument(f"ids must be int64 of shape [n], not {_describe(ids)}.")
    if ids.numel() and int(ids[0]) < 0:
        raise InvalidArgument(f"ids must not be negative; the first is {int(ids[0])}.")
    if bool((ids[1:] <= ids[:-1]).any()):
        raise InvalidArgument("ids must be strictly ascending; sort them and drop duplicates.")


def check_new(held: Tensor, ids: Tensor) -> None:
    """Check that none of ``ids [n]`` is in the index; ``held [n]`` bool says which are."""
    _check_each(~held, ids, "already in the index; remove them first")


def check_held(held: Tensor, ids: Tensor) -> None:
    """Check that all of ``ids [n]`` are in the index; ``held [n]`` bool says which are."""
    _check_each(held, ids, "not in the index")


def _check_each(good: Tensor, ids: Tensor, problem: str) -> None:
    if not bool(good.all()):
        bad = ids[~good].tolist()
        raise InvalidArgument(f"Blocks {bad[:5]}{' and more' if len(bad) > 5 else ''} are {problem}.")


def check_keys(keys: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Check that ``keys`` are floating point of ``shape`` ``[n, G, P, D]``, no number beyond ``LARGEST``."""
    if tuple(keys.shape) != shape or not keys.is_floating_point():
        raise InvalidArgument(f"Keys must be a floating-point tensor of shape {list(shape)}, got {_describe(keys)}.")
    check_numbers("keys", keys)


def check_numbers(name: str, numbers: Tensor) -> None:
    """Check that ``numbers`` are finite, and none beyond ``LARGEST``; errors call them ``name``."""
    # One pass over the keys, where isfinite takes four; a minimum keeps NaN.
    most = 0.0
    if numbers.numel():
        least, largest = numbers.detach().aminmax()
        most = float(torch.maximum(-least, largest))  # one wait for a device
    if not math.isfinite(most):
        raise InvalidArgument(f"{name} must be finite; these contain NaN or infinity.")
    if most > LARGEST:
        raise InvalidArgument(f"{name} must lie within {LARGEST:g}; these reach {most:g}, and their products overflow.")


def check_queries(queries: Tensor, key_heads: int, key_dim: int, *, wait: bool = True, numbers: bool = True) -> None:
    """Check that ``queries`` are floating point ``[H, T, D]``, H a multiple of the key heads, within ``LARGEST``.

    Without ``wait`` the numbers are only checked on a CPU, where no device must be waited for; never without
    ``numbers``.
    """
    check_tensor("Queries", queries)
    if queries.dim() != 3 or not queries.is_floating_point() or queries.shape[2] != key_dim:
        raise InvalidArgument(
            f"Queries must be a floating-point tensor of shape [H, T, {key_dim}], got {_describe(queries)}."
        )
    if queries.shape[0] == 0 or queries.shape[0] % key_heads:
        raise InvalidArgument(
            f"queries have {queries.shape[0]} heads; expected a multiple of the index's {key_heads} key heads."
        )
    if numbers and (wait or queries.device.type == "cpu"):
        check_numbers("queries", queries)


def check_tensor(name: str, value: object) -> None:
    """Check that ``value`` is a tensor with numbers in it: not an array, nor a meta or sparse tensor."""
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"{name} must be a torch tensor, not {type(value).__name__}.")
    if value.is_meta or value.layout != torch.strided:
        kind = "a meta tensor" if value.is_meta else f"of layout {value.layout}"
        raise InvalidArgument(f"{name} must be a dense tensor that holds numbers; this one is {kind}.")


def check_top_k(k: int) -> None:
    """Check that at least one block is requested."""
    check_whole("k", k, 1, 2**31 - 1)


def check_allowed(allowed: range | Tensor | None) -> None:
    """Check that ``allowed`` is a range, int64 ids ``[n]`` in any order, or None."""
    if isinstance(allowed, Tensor) and (allowed.dim() != 1 or allowed.dtype != torch.int64):
        raise InvalidArgument(f"allowed must be a range or int64 ids of shape [n], not {_describe(allowed)}.")
    if not isinstance(allowed, range | Tensor | None):
        raise InvalidArgument(f"allowed must be a range, int64 ids or None, not a {type(allowed).__name__}.")
    if isinstance(allowed, range) and max(map(abs, (allowed.start, allowed.stop, allowed.step))) > LARGEST_ID:
        raise InvalidArgument(f"allowed must be int64 block ids, not {allowed}.")


def allows(allowed: range | Tensor, ids: Tensor) -> Tensor:
    """Return which of ``ids [n]`` are ``allowed``, which passed ``check_allowed``. Ranges are never expanded."""
    if isinstance(allowed, Tensor):
        return torch.isin(ids, allowed.to(ids.device))
    rising = allowed if allowed.step > 0 else allowed[::-1]
    inside = (ids >= rising.start) & (ids < rising.stop)
    return inside if rising.step == 1 else inside & (ids % rising.step == rising.start % rising.step)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
