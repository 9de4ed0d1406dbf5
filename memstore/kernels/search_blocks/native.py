"""The search for blocks in ``native.c``: one pass over the keys, whose products never leave the processor's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from memstore.kernels.best_products import native as best_products
from memstore.kernels.native import Library, address, parallel, structure, vectors

LARGEST_K = 256
"""Most wanted blocks for which this pays: found blocks are kept in order, one by one."""
PRODUCTS_PER_THREAD = 1 << 21
"""Products from which another thread pays."""
_CPU = torch.device("cpu")
Settle = Literal["no", "vectors", "in order"]
SETTLE: tuple[Settle, ...] = get_args(Settle)


class KeyCodes(NamedTuple):
    """Codes of 8 bits of the first groups of blocks of a chunk, and what they lose: see ``memstore.index.sieve``."""

    values: Tensor
    """``[groups, keys of a group, D]`` int8"""
    scales: Tensor
    """``[groups]`` float32, as the next two"""
    lost: Tensor
    longest: Tensor


class KeyFrame(NamedTuple):
    """The coordinates of all codes of a key head."""

    centre: Tensor
    """``[D]`` float32"""
    back: Tensor
    """``[D, D]`` float64, or empty"""
    group_blocks: int
    share: int
    """If more than one group in so many is left for a query, all keys are read."""
    reach: float
    """Length of the longest code and of the longest difference to a key, together."""
    apart: float
    """The same outside of the frame."""


class KeyChunk(NamedTuple):
    """Keys of one key head, side by side in memory."""

    keys: Tensor
    """``[n, P, D]`` float32 or bfloat16, all chunks in one type"""
    ids: Tensor | None
    """``[n]`` int64: ids of the blocks. None: their rows"""
    wanted: Tensor | None
    """``[n]`` bool: the blocks that may be found. None: all"""
    place: int = 0
    """The place of the first block; the others follow."""
    codes: KeyCodes | None = None


_Keys = structure(pointers="keys ids wanted values scales lost longest", numbers="blocks place groups")
_Sizes = structure(numbers="size dim rows k half settle paying")
_Best = structure(pointers="scores ids offsets", numbers="")
_Frame = structure(pointers="centre back products", numbers="matrices of_group share", factors="reach apart")
_Search = structure(
    pointers="parts frames queries scores ids offsets",
    numbers="heads count size dim rows k half settle paying threads",
    factors="largest",
)
_library = Library(__file__, lambda source: parallel(source, vectors()))
problem = _library.problem


class KeyChunks:
    """All chunks of all key heads, for many searches. They must not move or change meanwhile."""

    def __init__(self, heads: Sequence[Sequence[KeyChunk]], frames: Sequence[KeyFrame] = (), blocks: int = 0) -> None:
        """Store the chunks of each head; ``frames`` of all heads if the chunks have codes.

        ``blocks`` is how many there are, for the caller.
        """
        self.blocks = blocks
        self._held, first = (heads, frames), heads[0]
        self._parts = (_Keys * (len(heads) * len(first)))(*(_keys(chunk) for chunks in heads for chunk in chunks))
        self._frames = (_Frame * len(frames))(*map(_frame, frames))
        keys = first[0].keys if first else torch.empty(0, 1, 1)
        self._sizes = (len(heads), len(first), keys.shape[1])
        self._half = keys.dtype == torch.bfloat16
        self._addresses = [ctypes.addressof(each) for each in (self._parts, self._frames)]
        self.groups = sum(0 if chunk.codes is None else len(chunk.codes.scales) for chunk in first)
        """Groups of blocks that have codes."""

    def search(
        self, queries: Tensor, k: int, *, settle: Settle = "vectors", coded: bool = False, largest: float = 0
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Find the best blocks for ``queries [H, T, D]``: scores, ids and matching keys, ``[H, T, k]`` each.

        Best first; among equal blocks, the smaller id first. Missing ones are -inf, -1 and -1. Scores are float32.
        Everything is on the CPU. Query head ``h`` looks into key head ``h // (H // G)``; ``coded``: by codes first.

        Scores are made a second time with ``settle``, by sums in ``"vectors"`` or of numbers ``"in order"``, so they do
        not depend on how many queries there are. With ``"no"`` the places of blocks are returned instead of matching
        keys.

        Returns None if ``largest`` is not 0 and a query has a number beyond it, or NaN.
        """
        if queries.dtype != torch.float32 or not queries.is_contiguous():
            queries = queries.to(torch.float32).contiguous()
        heads, tokens, dim = queries.shape
        results = _empty((heads, tokens, k))
        parts, frames = self._addresses
        pointers = (parts, frames if coded else None, *(each.data_ptr() for each in (queries, *results)))
        rows, how = heads * tokens // self._sizes[0], SETTLE.index(settle)
        threads = (PRODUCTS_PER_THREAD, torch.get_num_threads())
        numbers = (*self._sizes, dim, rows, k, self._half, how, *threads)
        match _library.call("memstore_search", _Search(*pointers, *numbers, largest)):
            case -1:
                raise MemoryError(f"no memory for {rows} queries of {dim} numbers.")
            case -2:
                return None
        return results


def _keys(chunk: KeyChunk) -> Any:
    keys, ids, wanted, place, codes = chunk
    groups = 0 if codes is None else len(codes.scales)
    return _Keys(*map(address, (keys, ids, wanted, *(codes or (None,) * 4))), len(keys), place, groups)


def _frame(frame: KeyFrame) -> Any:
    centre, back, *numbers = frame
    products, matrices = best_products.in_c(), best_products.has_matrices()
    return _Frame(address(centre), address(back) if back.numel() else None, products, matrices, *numbers)


class KeyLists:
    """Lists of keys that never move; each query searches some of them."""

    def __init__(self, lists: Sequence[tuple[int, int, int]], dim: int) -> None:
        """Store each list's addresses of keys ``[m, dim]`` (float32) and ids ``[m]`` (int64), and its length."""
        self._lists = (_Keys * len(lists))(*(_Keys(keys=keys, ids=ids, blocks=count) for keys, ids, count in lists))
        self._dim = dim

    def search(self, queries: Tensor, k: int, lists: Tensor, allowed: range | Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and ids ``[R, k]`` of the best keys in ``lists [R, n]`` for ``queries [R, dim]``.

        They are ordered as in ``KeyChunks.search``. Only ``allowed`` ids are found: a range with step 1, or bool for
        each id.
        """
        rows, wanted = len(queries), allowed.contiguous() if isinstance(allowed, Tensor) else None
        queries, lists = queries.float().contiguous(), lists.contiguous()
        scores, ids, _ = results = _empty((rows, k))
        sizes = _Sizes(1, self._dim, rows, k, False, SETTLE.index("vectors"), PRODUCTS_PER_THREAD)
        best = _Best(*map(address, results))
        span = allowed if isinstance(allowed, range) else range(len(allowed))
        threads = max(1, min(rows, torch.get_num_threads()))
        sought = (self._lists, lists, lists.shape[1], span.start, span.stop, wanted)
        _library.call("memstore_search_lists", *sought, sizes, queries, best, threads)
        return scores, ids


def search_blocks(queries: Tensor, landmarks: Tensor, k: int, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take ``queries [H, T, D]``, ``landmarks [G, N, P, D]``, ``wanted [N]``: see the public function."""
    there = None if wanted is None else wanted.contiguous()
    found = KeyChunks([[KeyChunk(keys.contiguous(), None, there)] for keys in landmarks]).search(queries, k)
    assert found is not None
    return found[:2]


def _empty(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Make scores, ids and offsets for C to fill; their types must not depend on PyTorch's defaults."""
    ids = torch.empty(shape, dtype=torch.int64, device=_CPU)
    return torch.empty(shape, dtype=torch.float32, device=_CPU), ids, torch.empty_like(ids)
