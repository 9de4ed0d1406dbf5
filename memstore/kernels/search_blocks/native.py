"""The search for blocks in ``native.c``: one pass over the keys, whose products never leave the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from memstore.kernels.native import Library, address, parallel, structure, vectors

LARGEST_K = 256
"""Most wanted blocks for which this pays: found blocks are kept in order, one by one."""
Settle = Literal["no", "vectors", "in order"]
SETTLE: tuple[Settle, ...] = get_args(Settle)
PRODUCTS_PER_THREAD = 1 << 21
"""Products from which another thread pays."""


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


_Keys = structure(pointers="keys ids wanted", numbers="blocks place")
_Sizes = structure(numbers="size dim rows k half settle")
_Best = structure(pointers="scores ids offsets", numbers="")
_library = Library(__file__, lambda source: parallel(source, vectors()))
problem = _library.problem


def search_chunks(
    chunks: Sequence[KeyChunk], queries: Tensor, k: int, *, settle: Settle = "vectors"
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best blocks of all ``chunks`` for ``queries [R, D]``: scores, ids and matching keys, ``[R, k]`` each.

    Best first; among equal blocks, the smaller id first. Missing ones are -inf, -1 and -1. Scores are float32.
    Everything is on the CPU.

    Scores are made a second time with ``settle``, by sums in ``"vectors"`` or of numbers ``"in order"``, so they do not
    depend on how many queries there are. With ``"no"`` the places of blocks are returned instead of matching keys.
    """
    rows, dim = queries.shape
    queries = queries.float().contiguous()
    numbers = sum(chunk.keys.numel() for chunk in chunks)
    threads = min(torch.get_num_threads(), 1 + rows * numbers // PRODUCTS_PER_THREAD)
    scores, ids, offsets = results = _nothing(threads * rows, k)
    if chunks:
        keys = chunks[0].keys
        there = (_Keys * len(chunks))(
            *(_Keys(*map(address, chunk[:3]), len(chunk.keys), chunk.place) for chunk in chunks)
        )
        sizes = _Sizes(keys.shape[1], dim, rows, k, keys.dtype == torch.bfloat16, SETTLE.index(settle))
        best = _Best(*map(address, results))
        if _library.call("memstore_search", there, len(chunks), sizes, queries, best, threads):
            raise MemoryError(f"no memory for {rows} queries of {dim} numbers.")
    return results if threads == 1 else (scores[:rows], ids[:rows], offsets[:rows])


class KeyLists:
    """Lists of keys that never move; each query searches some of them."""

    def __init__(self, lists: Sequence[tuple[int, int, int]], dim: int) -> None:
        """Store each list's addresses of keys ``[m, dim]`` (float32) and ids ``[m]`` (int64), and its length."""
        self._lists = (_Keys * len(lists))(*(_Keys(keys, ids, None, count, 0) for keys, ids, count in lists))
        self._dim = dim

    def search(self, queries: Tensor, k: int, lists: Tensor, allowed: range | Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and ids ``[R, k]`` of the best keys in ``lists [R, n]`` for ``queries [R, dim]``.

        They are ordered as in ``search_chunks``. Only ``allowed`` ids are found: a range with step 1, or bool for each
        id.
        """
        rows, wanted = len(queries), allowed.contiguous() if isinstance(allowed, Tensor) else None
        queries, lists = queries.float().contiguous(), lists.contiguous()
        scores, ids, _ = results = _nothing(rows, k)
        sizes = _Sizes(1, self._dim, rows, k, False, SETTLE.index("vectors"))
        best = _Best(*map(address, results))
        span = allowed if isinstance(allowed, range) else range(len(allowed))
        threads = max(1, min(rows, torch.get_num_threads()))
        sought = (self._lists, lists, lists.shape[1], span.start, span.stop, wanted)
        _library.call("memstore_search_lists", *sought, sizes, queries, best, threads)
        return scores, ids


def search_blocks(queries: Tensor, landmarks: Tensor, k: int, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take ``queries [H, T, D]``, ``landmarks [G, N, P, D]``, ``wanted [N]``: see the public function."""
    by_head = queries.reshape(len(landmarks), -1, queries.shape[2])
    found = [
        search_chunks([KeyChunk(keys.contiguous(), None, None if wanted is None else wanted.contiguous())], rows, k)
        for keys, rows in zip(landmarks, by_head, strict=True)
    ]
    scores, ids, _ = (torch.stack(each).view(*queries.shape[:2], k) for each in zip(*found, strict=True))
    return scores, ids


def _nothing(rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make scores, ids and offsets for C to fill; their types must not depend on PyTorch's defaults."""
    scores = torch.full((rows, k), -torch.inf, dtype=torch.float32, device="cpu")
    ids, offsets = torch.full((2, rows, k), -1, dtype=torch.int64, device="cpu")
    return scores, ids, offsets
