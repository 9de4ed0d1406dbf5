"""Exact search: the true top k. The default index, and the oracle of all others.

``ExactIndex.search`` chooses one of three ways. On a GPU a kernel scores and chooses in one go. On a CPU one pass in C
does so. If there are many keys, it first reads them in 8 bits (``sieve.py``), which provably rules most of them out,
and scores the rest in float32. Where C cannot be used, a search walks over the keys in tiles whose scores stay in the
processor's cache. Only a few scores are in memory at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import contract, files
from memstore.index.chunks import PLACES, Chunk, Chunks, Tile, held_as
from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex
from memstore.kernels._largest import filled, largest
from memstore.kernels.best_codes import best_codes
from memstore.kernels.search_blocks import LARGEST_K, KeyChunks, fastest, search_blocks
from memstore.kernels.search_blocks.native import Settle

TILE_KEYS = 8192
TILE_QUERIES = 64
TILE_KEYS_OF_FEW = 1 << 15
"""Keys of a tile for queries so few that their scores stay in the cache."""
FEW_QUERIES = 8
SCORES_ON_A_DEVICE = 1 << 28
"""Scores of one product on a GPU, which has no cache to respect and waits between products."""
SCORES_AT_ONCE, TILE_KEYS_AT_ONCE = 1 << 18, 1 << 13
"""If all scores fit the first limit, they are made at once, from tiles with the second number of keys."""
FEWEST_GROUPS = 16
"""Groups for each wanted block from which reading codes first pays."""
PASSED_PRODUCTS = 1 << 23
"""Products up to which C sums the final scores in its own order, else in that of PyTorch."""
LARGEST_PLAIN_DIM = 256
"""Numbers of a key up to which PyTorch adds the products of one key one after the other."""

Way = Literal["kernel", "c", "tiles"]
"""How to search: with a kernel on a GPU, in C, or tile by tile."""


class ExactIndex(VectorIndex):
    """Keys ``[G, D]`` of ``P`` per block. The result is the true top k of the keys in ``dtype``.

    Scores are computed in float32. Blocks with equal scores are ordered by id, the smaller first. Codes in 8 bits are
    stored beside the keys if the processor is faster with them: a quarter of the keys' bytes in float32, half in
    bfloat16.

    ``dtype`` may be ``torch.int8``, for keys that are whole numbers from -127 to 127, and ``torch.bool``, for keys of
    +1 and -1, stored as one bit each. That is for GPUs, where they are searched in this form
    (``memstore.kernels.best_codes``); a CPU is faster with the indexes ``codes`` and ``signs``.
    """

    capabilities = IndexCapabilities(exact=True, dense=True, devices=True)
    kind = "exact"
    typed = True

    def _prepare(self, settings: str) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.int8, torch.bool):
            raise InvalidArgument(
                "dtype of an exact index must be torch.float32 or torch.bfloat16 (for codes torch.int8 or "
                f"torch.bool), not {self.dtype}."
            )
        self._refuse(settings)
        sizes = self.key_heads, self.keys_per_block, self.key_dim
        self._chunks = Chunks(sizes, self.dtype, self.device)
        like = torch.empty(0, self.key_dim, device=self.device)
        self._fastest = fastest(like.float(), like.to(self.dtype), 1)

    def __len__(self) -> int:
        return len(self._chunks)

    def __repr__(self) -> str:
        return f"ExactIndex({len(self)} blocks, {self.key_heads}x{self.keys_per_block}x{self.key_dim} {self.dtype})"

    @property
    def nbytes(self) -> int:
        return self._chunks.nbytes

    def add(self, ids: Tensor, keys: Tensor) -> None:
        self._check_blocks(ids, keys)
        if ids.numel() and int(ids[0]) <= self._chunks.largest_id:
            there = ids.to(self.device)
            contract.check_new(self._chunks.holds(there), there)
        self._chunks.add(ids, keys)

    def remove(self, ids: Tensor) -> None:
        contract.check_ids(ids)
        ids = ids.to(self.device)
        contract.check_held(self._chunks.holds(ids), ids)
        self._chunks.remove(ids)

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        contract.check_top_k(k)
        contract.check_allowed(allowed)
        contract.check_queries(queries, self.key_heads, self.key_dim, numbers=False)
        way = self._way(k)
        if way == "c":
            return self._search_in_c(queries, k, allowed)
        grouped = self._grouped(queries)
        if way == "kernel":
            return SearchResult.of_heads(self._search_in_kernel(grouped, k, allowed), queries)
        scans = self._scans(allowed)
        heads = [self._settle(self._search_rows(scans, rows, head, k), rows, head) for head, rows in enumerate(grouped)]
        return SearchResult.of_heads(heads, queries)

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the score of every block: ``([H, T, N] float32, ids [N] ascending)``.

        Products of bfloat16 keys are rounded to bfloat16, which is several times as fast.
        """
        contract.check_allowed(allowed)
        grouped = self._grouped(queries, wait=False)  # numbers that are not finite show in the scores
        parts: list[Tensor] = []
        ids: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=self.device)]
        tile_keys = TILE_KEYS if self.device.type == "cpu" else SCORES_ON_A_DEVICE // max(1, grouped.shape[1])
        for chunk in self._chunks.by_number.values():
            rows = chunk.run_of(allowed)
            rows = chunk.wanted(allowed).nonzero().squeeze(1) if rows is None else rows
            for tile in chunk.tiles(max(1, tile_keys // self.keys_per_block), rows):
                heads = [_block_scores(tile, grouped[head], head, rounded=True) for head in range(self.key_heads)]
                parts.append(torch.stack(heads))
                ids.append(tile.ids)
        order_of_ids = torch.cat(ids).argsort()
        scores = torch.cat(parts, -1)[..., order_of_ids] if parts else grouped.new_empty((*grouped.shape[:2], 0))
        shape = (*queries.shape[:2], order_of_ids.numel())
        return scores.reshape(shape).to(queries.device), torch.cat(ids)[order_of_ids].to(queries.device)

    def content(self) -> tuple[Tensor, Tensor]:
        """Return ids ``[n]`` in the order of their places, and stored keys ``[G, n, P, D]``, on the CPU."""
        return self._chunks.content()

    def save(self, path: Path) -> None:
        files.save(path, self._about, self._tensors())

    def load(self, path: Path) -> None:
        self.take(files.load(path, self._about))

    def take(self, content: files.Content) -> None:
        """Replace the content by a file of ``save``. Raises ``DamagedError``, and then changes nothing."""
        held, width = held_as(self.dtype, self.key_dim)
        sizes = (self.key_heads, "n", self.keys_per_block, width)
        content.check(ids=(torch.int64, ("n",)), keys=(held, sizes))
        self._chunks.check_codes(content)
        self._take(content.tensors)

    def _tensors(self) -> dict[str, Tensor]:
        return self._chunks.tensors()

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._chunks.replace(tensors)

    def _way(self, k: int) -> Way:
        """Return how to search."""
        if not self.dtype.is_floating_point:
            return "kernel" if self.device.type == "cuda" and self._chunks.ascending else "tiles"
        if self._fastest == "native" and k <= LARGEST_K:
            return "c"
        # The kernel takes the first of equal blocks, which must have the smaller id.
        return "kernel" if self._fastest == "triton" and self._chunks.ascending else "tiles"

    def _search_in_kernel(self, grouped: Tensor, k: int, allowed: range | Tensor | None) -> list[SearchResult]:
        """Search all heads and queries at once, one chunk after the other."""
        best = _nothing(grouped.shape[0] * grouped.shape[1], k, self.device)
        wanted = self._chunks.wanted(allowed)
        for number, chunk in self._chunks.by_number.items():
            search = search_blocks if self.dtype.is_floating_point else _search_codes
            scores, rows = search(grouped, chunk.keys[:, : chunk.used], k, wanted=wanted[number])
            scores, rows = scores.flatten(0, 1), rows.flatten(0, 1)
            ids, places = (x.where(rows >= 0, -1) for x in (chunk.ids[rows.clamp(min=0)], rows + number * PLACES))
            best = merge(best, BestBlocks(scores, ids, places), k)
        heads = zip(*(x.unflatten(0, grouped.shape[:2]) for x in best), strict=True)
        return [self._settle(BestBlocks(*of_head), grouped[head], head) for head, of_head in enumerate(heads)]

    def _search_in_c(self, queries: Tensor, k: int, allowed: range | Tensor | None) -> SearchResult:
        """Search with ``kernels/search_blocks/native.c``, for ``queries [H, T, D]``."""
        here = queries if queries.is_cpu else queries.cpu()
        numbers = here.numel() // self.key_heads
        keys = self._chunks.in_c(allowed, numbers // self.key_dim)
        products = numbers * keys.blocks * self.keys_per_block
        ordered = self.keys_per_block == 1 and self.key_dim <= LARGEST_PLAIN_DIM
        settle: Settle = "vectors" if products <= PASSED_PRODUCTS else "in order" if ordered else "no"
        if settle == "no":
            grouped = self._grouped(here)
            heads = zip(self._best_in_c(keys, grouped, k), grouped, range(self.key_heads), strict=True)
            return SearchResult.of_heads([self._settle(*head) for head in heads], queries)
        coded = keys.groups >= FEWEST_GROUPS * k
        found = keys.search(here, k, settle=settle, coded=coded, largest=contract.LARGEST)
        if found is None:
            contract.check_numbers("queries", queries)
            raise AssertionError("C refused numbers that are right")
        return SearchResult(*(found if queries.is_cpu else (part.to(queries.device) for part in found)))

    def _best_in_c(self, keys: KeyChunks, grouped: Tensor, k: int) -> list[BestBlocks]:
        """Return the best blocks of each key head for ``grouped [G, R, D]``, whose numbers were checked."""
        found = keys.search(grouped, k, settle="no", coded=keys.groups >= FEWEST_GROUPS * k)
        assert found is not None
        return [BestBlocks(*each) for each in zip(*found, strict=True)]

    def _scans(self, allowed: range | Tensor | None, start: int = 0) -> list[_Scan]:
        """Return what to read from place ``start`` on."""
        first, row = divmod(start, PLACES)
        scans = []
        for number, wanted in self._chunks.wanted(allowed, first).items():
            chunk = self._chunks.by_number[number]
            rows = torch.arange(chunk.used, device=self.device) if wanted is None else wanted.nonzero().squeeze(1)
            scans.append(_Scan(number, chunk, rows[rows >= row] if number == first and row else rows))
        return scans

    def _search_rows(self, scans: Sequence[_Scan], queries: Tensor, head: int, k: int) -> BestBlocks:
        """Return the best blocks, for so few queries at a time that a tile's scores stay in the cache."""
        parts = torch.split(queries, TILE_QUERIES)
        bests = [self._scan_rows(scans, part, head, _nothing(len(part), k, self.device)) for part in parts]
        return BestBlocks(*(torch.cat(tensors) for tensors in zip(*bests, strict=True)))

    def _scan_rows(self, scans: Sequence[_Scan], queries: Tensor, head: int, best: BestBlocks) -> BestBlocks:
        k = best.scores.shape[1]
        if len(queries) * sum(scan.rows.numel() for scan in scans) <= SCORES_AT_ONCE:
            return self._choose_at_once(scans, queries, head, best)
        keys = TILE_KEYS if len(queries) > FEW_QUERIES else TILE_KEYS_OF_FEW
        for number, chunk, rows in scans:
            for tile in chunk.tiles(max(1, keys // self.keys_per_block), rows):
                scores = _block_scores(tile, queries, head).contiguous()
                # After the first tiles most queries have better blocks than a whole tile.
                better = (scores.amax(1) >= best.scores.amin(1)).nonzero().squeeze(1)
                if better.numel():
                    old = BestBlocks(*(each[better] for each in best))
                    new = merge(old, choose(scores[better], tile.ids, tile.rows + number * PLACES, k), k)
                    best = BestBlocks(*(each.index_copy(0, better, more) for each, more in zip(best, new, strict=True)))
        return best

    def _choose_at_once(self, scans: Sequence[_Scan], queries: Tensor, head: int, best: BestBlocks) -> BestBlocks:
        """Make all scores first: choosing tile by tile would take longer than the scoring."""
        tiles = [
            (tile, number * PLACES)
            for number, chunk, rows in scans
            for tile in chunk.tiles(max(1, TILE_KEYS_AT_ONCE // self.keys_per_block), rows)
        ]
        if not tiles:
            return best
        scores = torch.cat([_block_scores(tile, queries, head) for tile, _ in tiles], 1)
        ids = torch.cat([tile.ids for tile, _ in tiles])
        places = torch.cat([tile.rows + first for tile, first in tiles])
        k = best.scores.shape[1]
        return merge(best, choose(scores, ids, places, k), k)

    def _settle(self, best: BestBlocks, queries: Tensor, head: int) -> SearchResult:
        """Score the winners again in float32, for any type of keys, and find which of their keys matched."""
        scores, offsets = self._chunks.score(best.places, queries, head)
        columns = order(scores, best.ids)
        return SearchResult(scores.gather(1, columns), best.ids.gather(1, columns), offsets.gather(1, columns))


class _Scan(NamedTuple):
    """The part of one chunk that a search reads."""

    number: int
    chunk: Chunk
    rows: Tensor
    """``[n]``"""


class BestBlocks(NamedTuple):
    """At most ``k`` blocks for each of ``R`` queries, in any order; missing ones have id -1 and score -inf."""

    scores: Tensor
    """``[R, k]`` float32"""
    ids: Tensor
    """``[R, k]``"""
    places: Tensor
    """``[R, k]``: see ``chunks.py``"""


def _nothing(rows: int, k: int, device: torch.device) -> BestBlocks:
    """Return the best blocks before any block was scored."""
    scores = torch.full((rows, k), -torch.inf, dtype=torch.float32, device=device)
    none = torch.full((rows, k), -1, dtype=torch.int64, device=device)
    return BestBlocks(scores, none, none)


def choose(scores: Tensor, ids: Tensor, places: Tensor, k: int) -> BestBlocks:
    """Return the ``k`` best of ``scores [R, n]``, with ``ids`` and ``places`` of ``[n]`` or ``[R, n]``."""
    columns = _top(scores, ids, min(k, scores.shape[1]))
    chosen = (each.expand_as(scores).gather(1, columns) for each in (ids, places))
    return BestBlocks(scores.gather(1, columns), *chosen)


def merge(one: BestBlocks, other: BestBlocks, k: int) -> BestBlocks:
    """Return the ``k`` best blocks of both."""
    scores, ids, places = (torch.cat(pair, 1) for pair in zip(one, other, strict=True))
    columns = order(scores, ids)[:, :k]
    return BestBlocks(scores.gather(1, columns), ids.gather(1, columns), places.gather(1, columns))


def _top(scores: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return columns ``[R, k]`` of the ``k`` largest ``scores [R, n]``; smaller ids win among equal scores."""
    largest, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    columns, worst = columns[:, :k], largest[:, k - 1 : k]
    # topk takes any of several equal scores. Only if the last place is contested, choose again by id.
    contested = (largest[:, k:] == worst).any(1).nonzero().squeeze(1)
    if contested.numel():
        rivals, limit, numbers = scores[contested], worst[contested], ids.expand_as(scores)[contested]
        rank = torch.where(rivals == limit, -1.0 - numbers.double(), -torch.inf).masked_fill(rivals > limit, 0.0)
        columns[contested] = rank.topk(k, dim=1, sorted=False).indices
    return columns


def order(scores: Tensor, ids: Tensor) -> Tensor:
    """Return columns that sort ``[..., n]``: best score first, equal scores by ascending id, empty places last."""
    by_id = ids.argsort(dim=-1)
    return by_id.gather(-1, scores.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True))


def _search_codes(queries: Tensor, codes: Tensor, k: int, *, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Search like ``search_blocks``, for ``queries [G, R, D]`` among stored ``codes [G, n, P, ...]``.

    All scores are made: one number per block and query is small beside the codes of a block.
    """
    scores = torch.stack([best_codes(held, rows) for held, rows in zip(codes, queries, strict=True)])
    if wanted is not None:
        scores = scores.masked_fill(~wanted, -torch.inf)
    at = largest(scores, min(k, scores.shape[2]))
    found = filled(scores.gather(2, at), k, -torch.inf)
    return found, filled(at, k, -1).masked_fill(found == -torch.inf, -1)


def _block_scores(tile: Tile, queries: Tensor, head: int, *, rounded: bool = False) -> Tensor:
    """Return ``[R, n]`` float32: the largest product of each of ``queries [R, D]`` with each block's keys.

    ``rounded``: with products in the type of the keys, unless they are codes.
    """
    keys = tile.keys[head]  # [n, P, D]
    if not keys.is_floating_point():
        return best_codes(keys, queries)
    if keys.shape[1] == 1 and not rounded:
        return queries @ keys.squeeze(1).float().T
    dtype = keys.dtype if rounded else torch.float32
    products = keys.flatten(0, 1).to(dtype) @ queries.to(dtype).T  # [n*P, R]
    # This order, because a maximum over bfloat16 is slow on CPUs.
    return products.float().view(*keys.shape[:2], -1).amax(1).T
