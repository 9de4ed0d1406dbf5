"""Exact search: the true top k. The default index, and the oracle of all others.

``ExactIndex.search`` chooses one of five ways. On a GPU a kernel scores and chooses in one go. On a CPU one pass in C
does so, and if it is long, what it found is scored a second time. A search of many keys first reads them in 8 bits
(``sieve.py``), which provably rules most of them out. It scores the rest in float32. All other searches walk over the
keys in tiles whose scores stay in the processor's cache. Only a few scores are in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import contract, files
from memstore.index.chunks import GATHERED_NUMBERS, PLACES, Chunk, Chunks, Tile, held_as
from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex
from memstore.index.sieve import CodedGroups, QueryGroups, Sieve, group_rows
from memstore.kernels._largest import filled, largest
from memstore.kernels.best_codes import best_codes
from memstore.kernels.search_blocks import KeyChunk, fastest, search_blocks, search_chunks

TILE_KEYS = 8192
TILE_QUERIES = 64
TILE_KEYS_OF_FEW = 1 << 15
"""Keys of a tile for queries so few that their scores stay in the cache."""
FEW_QUERIES = 8
SCORES_ON_A_DEVICE = 1 << 28
"""Scores of one product on a GPU, which has no cache to respect and waits between products."""
SCORES_AT_ONCE, TILE_KEYS_AT_ONCE = 1 << 18, 1 << 13
"""If all scores fit the first limit, they are made at once, from tiles with the second number of keys."""
CODED_KEYS, CODED_KEYS_OF_FEW = 1 << 15, 1 << 17
CODED_KEYS_BESIDE_C, CODED_KEYS_OF_FEW_BESIDE_C = 1 << 18, 1 << 19
"""Keys from which reading codes first pays; more are needed for few queries, and where C can score all keys."""
FEWEST_GROUPS = 64
"""Groups for each wanted block from which reading codes first pays."""
PASSED_PRODUCTS = 1 << 23
"""Products up to which C sums the final scores in its own order, else in that of PyTorch, as searches by codes do."""
LARGEST_PLAIN_DIM = 256
"""Numbers of a key up to which PyTorch adds the products of one key one after the other."""

Way = Literal["kernel", "pass", "scan", "codes", "tiles"]
"""How to search: with a kernel on a GPU, in one pass in C, the same with a second scoring, by codes of 8 bits first, or
tile by tile."""


class ExactIndex(VectorIndex):
    """Keys ``[G, D]`` of ``P`` per block. The result is the true top k of the keys in ``dtype``.

    Scores are computed in float32. Blocks with equal scores are ordered by id, the smaller first. Codes in 8 bits are
    stored beside the keys if the processor is faster with them: a quarter of the keys' bytes in float32, half in
    bfloat16.

    ``dtype`` may be ``torch.int8``, for keys that are whole numbers from -127 to 127, and ``torch.bool``, for keys of
    +1 and -1, stored as one bit each. That is for GPUs, where they are searched in this form
    (``memstore.kernels.best_codes``); a CPU is faster with the indexes ``codes`` and ``signs``.

    A search during an addition in another thread is not safe; the memory holds a lock.
    """

    capabilities = IndexCapabilities(exact=True, dense=True, devices=True)

    def _prepare(self, settings: str) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.int8, torch.bool):
            raise InvalidArgument(
                "dtype of an exact index must be torch.float32 or torch.bfloat16 (for codes torch.int8 or "
                f"torch.bool), not {self.dtype}."
            )
        self._refuse(settings)
        sizes = self.key_heads, self.keys_per_block, self.key_dim
        self._chunks = Chunks(sizes, self.dtype, self.device)
        self._like_keys = torch.empty(0, self.key_dim, dtype=self.dtype, device=self.device)

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
        grouped = self._grouped(queries)
        match self._way(grouped, k):
            case "kernel":
                heads = self._search_in_kernel(grouped, k, allowed)
            case "pass":
                heads = self._search_in_one_pass(grouped, k, allowed)
            case "scan":
                heads = self._search_and_settle(grouped, k, allowed)
            case way:
                scans = self._scans(allowed, k, coded=way == "codes")
                heads = [self._search_head(scans, rows, head, k) for head, rows in enumerate(grouped)]
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
                heads = [_rounded_scores(tile, grouped[head], head) for head in range(self.key_heads)]
                parts.append(torch.stack(heads))
                ids.append(tile.ids)
        order_of_ids = torch.cat(ids).argsort()
        scores = torch.cat(parts, -1)[..., order_of_ids] if parts else grouped.new_empty((*grouped.shape[:2], 0))
        shape = (*queries.shape[:2], order_of_ids.numel())
        return scores.reshape(shape).to(queries.device), torch.cat(ids)[order_of_ids].to(queries.device)

    def content(self) -> tuple[Tensor, Tensor]:
        """Return ids ``[n]`` in the order of their places, and stored keys ``[G, n, P, D]``, on the CPU."""
        return self._chunks.content()

    def facts(self) -> Mapping[str, Any]:
        return {"kind": "exact"}

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

    @property
    def _about(self) -> dict[str, Any]:
        return files.identity("exact", self, dtype=self.dtype)

    def _tensors(self) -> dict[str, Tensor]:
        return self._chunks.tensors()

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._chunks.replace(tensors)

    def _way(self, grouped: Tensor, k: int) -> Way:
        """Return how to search for ``grouped [G, R, D]``."""
        rows, keys = grouped.shape[1], len(self) * self.keys_per_block
        if not self.dtype.is_floating_point:
            return "kernel" if self.device.type == "cuda" and self._chunks.ascending else "tiles"
        match fastest(grouped, self._like_keys, k):
            case "triton" if (
                self._chunks.ascending
            ):  # the kernel takes the first of equal blocks, which must have the smaller id
                return "kernel"
            case "native" if rows * keys * self.key_dim <= PASSED_PRODUCTS:
                return "pass"
            case "native":
                return "codes" if self._codes_pay(rows, beside_c=True) else "scan"
        return "codes" if self._codes_pay(rows) else "tiles"

    def _codes_pay(self, queries: int, *, beside_c: bool = False) -> bool:
        """Return whether there are enough keys for reading their codes first to pay, beside products in C or others."""
        least = (CODED_KEYS_OF_FEW, CODED_KEYS) if not beside_c else (CODED_KEYS_OF_FEW_BESIDE_C, CODED_KEYS_BESIDE_C)
        return self._chunks.coded and len(self) * self.keys_per_block >= least[queries > FEW_QUERIES]

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

    def _search_in_one_pass(self, grouped: Tensor, k: int, allowed: range | Tensor | None) -> list[SearchResult]:
        """Search with ``kernels/search_blocks/native.c``, in float32, so the results need no second scoring."""
        parts = self._parts(allowed)
        return [SearchResult(*search_chunks(parts(head), rows, k)) for head, rows in enumerate(grouped)]

    def _search_and_settle(self, grouped: Tensor, k: int, allowed: range | Tensor | None) -> list[SearchResult]:
        """Search in the same way, with the scores that ``_settle`` gives."""
        parts = self._parts(allowed)
        heads = []
        for head, rows in enumerate(grouped):
            if self.keys_per_block == 1 and self.key_dim <= LARGEST_PLAIN_DIM:
                heads.append(SearchResult(*search_chunks(parts(head), rows, k, settle="in order")))
                continue
            found = BestBlocks(*search_chunks(parts(head), rows, k, settle="no"))
            heads.append(self._settle(found, rows, head))
        return heads

    def _parts(self, allowed: range | Tensor | None) -> Callable[[int], list[KeyChunk]]:
        """Return what gives the ``allowed`` part of a head's keys."""
        wanted = self._chunks.wanted(allowed)
        return lambda head: [
            KeyChunk(chunk.keys[head, : chunk.used], chunk.ids, wanted[number], number * PLACES)
            for number, chunk in self._chunks.by_number.items()
        ]

    def _scans(self, allowed: range | Tensor | None, k: int, start: int = 0, *, coded: bool) -> list[_Scan]:
        """Return what to read from place ``start`` on; ``coded``: codes first, if enough groups are whole."""
        first, row = divmod(start, PLACES)
        scans = []
        for number, wanted in self._chunks.wanted(allowed, first).items():
            chunk = self._chunks.by_number[number]
            if number == first and row:
                wanted = chunk.wanted(allowed) if wanted is None else wanted
                wanted[:row] = False
            scans.append(_Scan.of(number, chunk, wanted, coded=coded))
        if coded and sum(scan.whole_groups for scan in scans) < FEWEST_GROUPS * k:
            return self._scans(allowed, k, start, coded=False)
        return scans

    def _search_head(self, scans: Sequence[_Scan], queries: Tensor, head: int, k: int) -> SearchResult:
        return self._settle(self._search_rows(scans, queries, head, k), queries, head)

    def _search_rows(self, scans: Sequence[_Scan], queries: Tensor, head: int, k: int) -> BestBlocks:
        bests = [self._search_tile(scans, part, head, k) for part in torch.split(queries, TILE_QUERIES)]
        return BestBlocks(*(torch.cat(tensors) for tensors in zip(*bests, strict=True)))

    def _search_tile(self, scans: Sequence[_Scan], queries: Tensor, head: int, k: int) -> BestBlocks:
        """Return the best blocks for ``queries [R, D]``, so few that a tile's scores stay in the cache."""
        best = _nothing(len(queries), k, self.device)
        coded = [scan for scan in scans if scan.groups is not None]
        if coded and len(queries):
            found, helped = _best_of_groups(coded, queries, head, k)
            best = merge(best, found, k)
            rest = (~helped).nonzero().squeeze(1)
            if rest.numel():
                plain = [scan._replace(groups=None, rows=scan.coded_rows()) for scan in coded]
                found = self._scan_rows(plain, queries[rest], head, _nothing(len(rest), k, self.device))
                best = BestBlocks(*(mine.index_copy(0, rest, new) for mine, new in zip(best, found, strict=True)))
        return self._scan_rows(scans, queries, head, best)

    def _scan_rows(self, scans: Sequence[_Scan], queries: Tensor, head: int, best: BestBlocks) -> BestBlocks:
        k = best.scores.shape[1]
        if len(queries) * sum(scan.rows.numel() for scan in scans) <= SCORES_AT_ONCE:
            return self._choose_at_once(scans, queries, head, best)
        keys = TILE_KEYS if len(queries) > FEW_QUERIES else TILE_KEYS_OF_FEW
        for number, chunk, _, rows in scans:
            for tile in chunk.tiles(max(1, keys // self.keys_per_block), rows):
                scores = _block_scores(tile, queries, head)
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
            for number, chunk, _, rows in scans
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
    """The part of one chunk that a search reads: some groups by their codes first, other rows directly."""

    number: int
    chunk: Chunk
    groups: CodedGroups | None
    """Groups whose codes are read first."""
    rows: Tensor
    """``[n]``: rows that are scored directly."""

    @classmethod
    def of(cls, number: int, chunk: Chunk, wanted: Tensor | None, *, coded: bool) -> _Scan:
        """Scan the rows ``wanted [used]`` bool, or all if None; ``coded``: read codes first."""
        codes = chunk.codes if coded else None
        if codes is not None:
            codes.extend(chunk.keys, chunk.used)
        count = 0 if codes is None else codes.groups * codes.rows_per_group
        if wanted is None:
            rows = torch.arange(count, chunk.used, device=chunk.ids.device)
            return cls(number, chunk, CodedGroups(codes, None) if codes is not None and count else None, rows)
        if codes is None or not count:
            return cls(number, chunk, None, wanted.nonzero().squeeze(1))
        # Groups with only some wanted blocks are scored directly: their best product may belong to another block.
        whole = wanted[:count].view(codes.groups, -1).all(1)
        wanted[:count].view(codes.groups, -1)[whole] = False
        return cls(number, chunk, CodedGroups(codes, whole), wanted.nonzero().squeeze(1))

    @property
    def whole_groups(self) -> int:
        """Groups whose codes are read first."""
        if self.groups is None:
            return 0
        return self.groups.codes.groups if self.groups.whole is None else int(self.groups.whole.sum())

    def coded_rows(self) -> Tensor:
        """Rows that are represented only by codes."""
        assert self.groups is not None
        codes, whole = self.groups
        groups = torch.arange(codes.groups) if whole is None else whole.nonzero().squeeze(1)
        return (groups.unsqueeze(1) * codes.rows_per_group + torch.arange(codes.rows_per_group)).flatten()


def _best_of_groups(scans: Sequence[_Scan], queries: Tensor, head: int, k: int) -> tuple[BestBlocks, Tensor]:
    """Return the best blocks of coded groups, and for which queries ``[R]`` their codes were enough."""
    sieve = Sieve([scan.groups for scan in scans if scan.groups is not None], queries, head)
    first = sieve.best(k)
    scores = _score_groups(scans, sieve, first, queries, head)
    limit = scores.view(len(queries), -1).topk(k, dim=1).values[:, -1]
    second, helped = sieve.left(limit, first)
    pairs = QueryGroups(*(torch.cat(both) for both in zip(first, second, strict=True)))
    scores = torch.cat((scores, _score_groups(scans, sieve, second, queries, head)))
    pair, row = (scores >= limit[pairs.query].unsqueeze(1)).nonzero().unbind(1)
    ids, places = _blocks_of_groups(scans, sieve, pairs.group[pair], row)
    return _best_of_pairs(pairs.query[pair], scores[pair, row], ids, places, len(queries), k), helped


def _score_groups(scans: Sequence[_Scan], sieve: Sieve, pairs: QueryGroups, queries: Tensor, head: int) -> Tensor:
    """Return the scores ``[W, rows per group]`` of all blocks of the groups."""
    keys_per_block, dim = scans[0].chunk.keys.shape[2:]
    per_group = group_rows(keys_per_block)
    numbers = per_group * keys_per_block * dim
    scores = torch.empty(len(pairs.group), per_group)
    part = torch.searchsorted(sieve.starts, pairs.group, right=True) - 1
    for number, scan in enumerate(scans):
        # index_select of whole groups copies memory; indexing with more dimensions copies number by number.
        groups = scan.chunk.keys[head].flatten()[: scan.chunk.used // per_group * numbers].view(-1, numbers)
        for here in (part == number).nonzero().squeeze(1).split(max(1, GATHERED_NUMBERS // numbers)):
            keys = groups.index_select(0, pairs.group[here] - sieve.starts[number]).float()
            products = keys.view(-1, numbers // dim, dim).bmm(queries[pairs.query[here]].unsqueeze(2))
            scores[here] = products.view(-1, per_group, keys_per_block).amax(2)
    return scores


def _blocks_of_groups(scans: Sequence[_Scan], sieve: Sieve, group: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and places ``[V]`` of the blocks at ``row [V]`` of groups ``[V]``."""
    ids, places = torch.empty_like(group), torch.empty_like(group)
    part = torch.searchsorted(sieve.starts, group, right=True) - 1
    rows = (group - sieve.starts[part]) * group_rows(scans[0].chunk.keys.shape[2]) + row
    for number, scan in enumerate(scans):
        here = (part == number).nonzero().squeeze(1)
        ids[here] = scan.chunk.ids[rows[here]]
        places[here] = rows[here] + scan.number * PLACES
    return ids, places


def _best_of_pairs(query: Tensor, scores: Tensor, ids: Tensor, places: Tensor, rows: int, k: int) -> BestBlocks:
    """Return the ``k`` best of blocks ``[V]`` for each query; ``query [V]`` has the row of each block's query."""
    by_query = query.argsort(stable=True)
    counts = torch.bincount(query, minlength=rows)
    row = query[by_query]
    column = torch.arange(len(query)) - (counts.cumsum(0) - counts)[row]
    shape = (rows, max(int(counts.max()), k))
    table = BestBlocks(torch.full(shape, -torch.inf), torch.full(shape, -1), torch.full(shape, -1))
    for whole, values in zip(table, (scores, ids, places), strict=True):
        whole[row, column] = values[by_query]
    return choose(*table, k)


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
    scores = torch.full((rows, k), -torch.inf, device=device)
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
    """Return columns that sort ``[R, n]``: best score first, equal scores by ascending id, empty places last."""
    by_id = ids.argsort(dim=1)
    return by_id.gather(1, scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True))


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


def _block_scores(tile: Tile, queries: Tensor, head: int) -> Tensor:
    """Return ``[R, n]`` float32: the largest product of each of ``queries [R, D]`` with each block's keys."""
    keys = tile.keys[head]  # [n, P, D]
    if not keys.is_floating_point():
        return best_codes(keys, queries)
    if keys.shape[1] == 1:
        return queries @ keys.squeeze(1).float().T
    products = keys.flatten(0, 1).float() @ queries.T  # [n*P, R]
    return products.view(*keys.shape[:2], -1).amax(1).T.contiguous()


def _rounded_scores(tile: Tile, queries: Tensor, head: int) -> Tensor:
    """Return ``_block_scores``, with products in the type of the keys unless they are codes."""
    keys = tile.keys[head]
    if not keys.is_floating_point():
        return best_codes(keys, queries)
    products = keys.flatten(0, 1) @ queries.to(keys.dtype).T
    # This order, because a maximum over bfloat16 is slow on CPUs.
    return products.float().reshape(*keys.shape[:2], -1).amax(1).T
