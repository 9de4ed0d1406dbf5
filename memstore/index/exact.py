"""Exact search: the true top k. The default index, and the oracle of all others.

Keys lie in chunks that grow geometrically and are never copied again. A search of many keys first reads them in 8 bits
(``sieve.py``), which rules most of them out for certain, and scores what is left in float32. Where that does not apply
it walks over the keys in tiles whose scores stay in the processor's cache. On a GPU a kernel scores and chooses in one
go. Of more than a few scores never all are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import checks, codes, files
from memstore.index.best import PLACES, Best, choose, merge, nothing, order
from memstore.index.chunk import Chunk, Tile
from memstore.index.contract import Found, IndexCapabilities, VectorIndex
from memstore.index.frame import Frame
from memstore.index.scan import Scan
from memstore.index.sieve import Look, Pairs
from memstore.kernels.best_products.api import fastest
from memstore.kernels.search_blocks import native, search_blocks
from memstore.kernels.search_blocks.api import triton_problem

FIRST_CHUNK_KEYS = 4096
LARGEST_CHUNK_KEYS = 1 << 18
TILE_KEYS = 8192
TILE_QUERIES = 64
TILE_KEYS_OF_FEW = 1 << 15
"""Keys of a tile for so few queries that their scores stay in the cache."""
FEW_QUERIES = 8
SCORES_AT_ONCE, TILE_KEYS_AT_ONCE = 1 << 18, 1 << 13
"""Scores that are held where there are no more in all, and the keys of a tile that makes them."""
CODED_KEYS, CODED_KEYS_OF_FEW = 1 << 15, 1 << 17
"""Keys from which on it pays to read codes first; more for few queries where PyTorch reads them."""
GATHERED_NUMBERS = 1 << 18
FEWEST_GROUPS = 64
"""Groups for each block wanted from which on it pays to read codes first."""
PASSED_NUMBERS = 1 << 23
"""Products up to which one pass over the keys in C is fastest."""


class ExactIndex(VectorIndex):
    """Keys ``[G, D]`` of ``P`` per block. The result is the true top k of the keys as ``dtype`` holds them.

    Scores are computed in float32. Blocks with equal scores are ordered by id, the smaller first. Codes in 8 bits are
    kept beside the keys where the processor is faster with them (``codes=False`` leaves them out): a quarter of the
    keys' bytes in float32, half in bfloat16.

    Not safe for a search in one thread beside an addition in another; the memory holds a lock.
    """

    capabilities = IndexCapabilities(exact=True, dense=True)

    def __init__(
        self,
        key_heads: int,
        key_dim: int,
        keys_per_block: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        settings: str = "",
        *,
        codes: bool = True,
    ) -> None:
        for name, size in (("key_heads", key_heads), ("key_dim", key_dim), ("keys_per_block", keys_per_block)):
            if size < 1:
                raise InvalidArgument(f"{name} must be at least 1, not {size}.")
        if dtype not in (torch.float32, torch.bfloat16):
            raise InvalidArgument(f"dtype of an exact index must be torch.float32 or torch.bfloat16, not {dtype}.")
        if settings:
            raise InvalidArgument(f"An exact index has no settings; write 'exact', not 'exact:{settings}'.")
        self.key_heads = key_heads
        self.key_dim = key_dim
        self.keys_per_block = keys_per_block
        self.dtype = dtype
        self.device = torch.device(device)
        self._coded = codes
        self._chunks: dict[int, Chunk] = {}
        self._next = 0
        self._frame: Frame | None = None
        self._largest_id = -1

    def __len__(self) -> int:
        return sum(chunk.count for chunk in self._chunks.values())

    def __repr__(self) -> str:
        return f"ExactIndex({len(self)} blocks, {self.key_heads}x{self.keys_per_block}x{self.key_dim} {self.dtype})"

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, codes and ids."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    def add(self, ids: Tensor, keys: Tensor) -> None:
        """Add blocks ``ids [n]`` (int64, new, ascending) with ``keys [n, G, P, D]``. Raises ``InvalidArgument``."""
        checks.check_ids(ids)
        checks.check_keys(keys, (ids.numel(), self.key_heads, self.keys_per_block, self.key_dim))
        ids = ids.to(self.device)
        if ids.numel() and int(ids[0]) <= self._largest_id:
            self._require(~self._present(ids), ids, "in the index already; remove them first")
        start = 0
        while start < ids.numel():
            chunk = self._chunk_with_room()
            stop = min(start + chunk.room, ids.numel())
            chunk.fill(ids[start:stop], keys[start:stop])
            start = stop
        if ids.numel():
            self._largest_id = max(self._largest_id, int(ids[-1]))

    def remove(self, ids: Tensor) -> None:
        """Remove blocks ``ids [n]``. Raises ``InvalidArgument``, with nothing removed, where one does not exist."""
        checks.check_ids(ids)
        ids = ids.to(self.device)
        self._require(self._present(ids), ids, "not in the index")
        for number, chunk in list(self._chunks.items()):
            chunk.drop(ids)
            if not chunk.used:
                del self._chunks[number]
        self._largest_id = max((chunk.largest_id for chunk in self._chunks.values()), default=-1)
        self._frame = self._frame if self._chunks else None

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> Found:
        """Top ``k`` blocks for each of ``queries [H, T, D]``: see ``Found``. Head h uses key head ``h // (H // G)``."""
        checks.check_top_k(k)
        checks.check_allowed(allowed)
        if self._fused and all(chunk.ascending for chunk in self._chunks.values()):
            return self._search_fused(queries, k, allowed)
        rows = queries.shape[0] // self.key_heads * queries.shape[1]
        if self._in_one_pass(rows, k):
            return self._search_in_one_pass(queries, k, allowed)
        scans = self._scans(allowed, k, queries=rows)
        return self._each_head(queries, k, lambda rows, head: self._search_head(scans, rows, head, k))

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score of every block: ``([H, T, N] float32, ids [N] ascending)``.

        Products of bfloat16 keys are rounded to bfloat16, which is several times as fast.
        """
        checks.check_allowed(allowed)
        grouped = self._grouped(queries)
        parts: list[Tensor] = []
        ids: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=self.device)]
        for chunk in self._chunks.values():
            for tile in chunk.tiles(self._tile_rows, chunk.wanted(allowed).nonzero().squeeze(1)):
                heads = [_rounded_scores(tile, grouped[head], head) for head in range(self.key_heads)]
                parts.append(torch.stack(heads))
                ids.append(tile.ids)
        order_of_ids = torch.cat(ids).argsort()
        scores = torch.cat(parts, -1)[..., order_of_ids] if parts else grouped.new_empty((*grouped.shape[:2], 0))
        shape = (*queries.shape[:2], order_of_ids.numel())
        return scores.reshape(shape).to(queries.device), torch.cat(ids)[order_of_ids].to(queries.device)

    def facts(self) -> Mapping[str, Any]:
        """Its kind."""
        return {"kind": "exact"}

    def save(self, path: Path) -> None:
        """Write the index to the file ``path`` (safetensors), replacing it at once or not at all."""
        files.save(path, self._about, self._tensors())

    def load(self, path: Path) -> None:
        """Replace the content by what ``save`` wrote, mapped from the file. On an error, nothing is.

        Raises ``NotFound`` or ``DamagedError``.
        """
        self._take(files.load(path, self._about).tensors)

    @property
    def _about(self) -> dict[str, Any]:
        """What a file must agree with."""
        sizes = {"key_heads": self.key_heads, "keys_per_block": self.keys_per_block, "key_dim": self.key_dim}
        return {"index": "exact", **sizes, "dtype": str(self.dtype).removeprefix("torch.")}

    def _tensors(self) -> dict[str, Tensor]:
        """All blocks, in the order of their places, with their codes."""
        chunks = self._chunks.values()
        alive = [chunk.alive[: chunk.used] for chunk in chunks]
        none = torch.empty(self.key_heads, 0, self.keys_per_block, self.key_dim, dtype=self.dtype)
        keys = [_rows(chunk.keys[:, : chunk.used], rows) for chunk, rows in zip(chunks, alive, strict=True)]
        tensors = {
            "ids": torch.cat([torch.empty(0, dtype=torch.int64), *(chunk.live().cpu() for chunk in chunks)]),
            "keys": torch.cat([none, *(piece.cpu() for piece in keys)], 1),
        }
        if self._uses_codes and len(self) > codes.group_rows(self.keys_per_block):
            frame = Frame.of(tensors["keys"].flatten(1, 2)) if self._frame is None else self._frame
            made = codes.Codes(len(self), (self.key_heads, self.keys_per_block, self.key_dim), frame)
            made.extend(tensors["keys"], len(self))
            tensors |= {f"code_{name}": tensor for name, tensor in made.tensors().items()}
        return tensors

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        ids, keys = tensors["ids"], tensors["keys"]
        coded = {name.removeprefix("code_"): tensor for name, tensor in tensors.items() if name.startswith("code_")}
        self._chunks, self._frame = {}, None
        if ids.numel():
            made = codes.Codes.of(self.keys_per_block, coded) if coded and self._uses_codes else None
            self._frame = None if made is None else made.frame
            self._chunks[self._next] = Chunk.of(ids.to(self.device), keys.to(self.device), made)
            self._next += 1
        self._largest_id = int(ids.max()) if ids.numel() else -1

    @property
    def _uses_codes(self) -> bool:
        return self._coded and codes.usable(self.device, self.key_dim)

    def _grouped(self, queries: Tensor) -> Tensor:
        checks.check_queries(queries, self.key_heads, self.key_dim)
        # The query heads of one key head become more rows of one product: [G, R*T, D].
        return queries.to(self.device).reshape(self.key_heads, -1, self.key_dim).float()

    def _each_head(self, queries: Tensor, k: int, search: Callable[[Tensor, int], Found]) -> Found:
        """What ``search(queries [R, D], head)`` finds, for ``queries [H, T, D]``."""
        grouped = self._grouped(queries)
        founds = [search(grouped[head], head) for head in range(self.key_heads)]
        shape = (*queries.shape[:2], k)
        scores, ids, offsets = (torch.stack(parts).reshape(shape) for parts in zip(*founds, strict=True))
        return Found(scores.to(queries.device), ids.to(queries.device), offsets.to(queries.device))

    @property
    def _fused(self) -> bool:
        """Whether a kernel searches: on a GPU, where it can."""
        return self.device.type == "cuda" and triton_problem(*self._samples) is None

    @property
    def _samples(self) -> tuple[Tensor, Tensor]:
        """A query and a key such as a kernel would get."""
        empty = torch.empty(0, self.key_dim, device=self.device)
        return empty, empty.to(self.dtype)

    def _search_fused(self, queries: Tensor, k: int, allowed: range | Tensor | None) -> Found:
        """As ``search``, by the kernel: all heads and queries at once, a chunk after the other."""
        grouped = self._grouped(queries)  # [G, R, D]
        best = nothing(grouped.shape[0] * grouped.shape[1], k, self.device)
        wanted = self._wanted(allowed)
        for number, chunk in self._chunks.items():
            scores, rows = search_blocks(grouped, chunk.keys[:, : chunk.used], k, wanted=wanted[number])
            scores, rows = scores.flatten(0, 1), rows.flatten(0, 1)
            found = Best(scores, chunk.ids[rows.clamp(min=0)], rows + number * PLACES)
            best = merge(best, Best(scores, *(x.where(rows >= 0, -1) for x in found[1:])), k)
        by_head = [Best(*(x.unflatten(0, grouped.shape[:2])[head] for x in best)) for head in range(self.key_heads)]
        return self._each_head(queries, k, lambda rows, head: self._settle(by_head[head], rows, head))

    def _in_one_pass(self, rows: int, k: int) -> bool:
        """Whether so few queries, keys and blocks wanted are searched fastest by reading the keys once, in C."""
        numbers = rows * len(self) * self.keys_per_block * self.key_dim
        few = numbers <= PASSED_NUMBERS and k <= native.LARGEST_K
        return few and self.device.type == "cpu" and native.problem() is None

    def _search_in_one_pass(self, queries: Tensor, k: int, allowed: range | Tensor | None) -> Found:
        """As ``search``, by ``kernels/search_blocks/native.c``."""
        wanted = self._wanted(allowed)

        def search(rows: Tensor, head: int) -> Found:
            parts = [
                native.Part(chunk.keys[head, : chunk.used], chunk.ids, wanted[number])
                for number, chunk in self._chunks.items()
            ]
            return Found(*native.search_parts(parts, rows, k))

        return self._each_head(queries, k, search)

    def _wanted(self, allowed: range | Tensor | None, first: int = 0) -> dict[int, Tensor | None]:
        """Which rows ``[used]`` of each chunk from ``first`` on hold a block that is ``allowed``; None: all."""
        everything = self._allows_all(allowed)
        return {
            number: None if everything and chunk.count == chunk.used else chunk.wanted(allowed)
            for number, chunk in self._chunks.items()
            if number >= first
        }

    def _allows_all(self, allowed: range | Tensor | None) -> bool:
        if not isinstance(allowed, range) or allowed.step != 1 or not self._chunks:
            return allowed is None
        least = min(chunk.smallest_id for chunk in self._chunks.values())
        return allowed.start <= least and self._largest_id < allowed.stop

    @property
    def _tile_rows(self) -> int:
        return max(1, TILE_KEYS // self.keys_per_block)

    def _scans(
        self, allowed: range | Tensor | None, k: int, start: int = 0, *, queries: int = TILE_QUERIES
    ) -> list[Scan]:
        """What to look at from place ``start`` on, and how: codes first where there are enough of them to pay."""
        first, row = divmod(start, PLACES)
        scans = []
        many = queries > FEW_QUERIES or fastest(self.key_dim) == "native"
        least = CODED_KEYS if many else CODED_KEYS_OF_FEW
        coded = len(self) * self.keys_per_block >= least
        for number, wanted in self._wanted(allowed, first).items():
            chunk = self._chunks[number]
            if number == first and row:
                wanted = chunk.wanted(allowed) if wanted is None else wanted
                wanted[:row] = False
            scans.append(Scan.of(number, chunk, wanted, coded=coded))
        if sum(scan.whole_groups for scan in scans) >= FEWEST_GROUPS * k:
            return scans
        return [scan.without_codes() for scan in scans]

    def _search_head(self, scans: Sequence[Scan], queries: Tensor, head: int, k: int) -> Found:
        return self._settle(self._search_rows(scans, queries, head, k), queries, head)

    def _search_rows(self, scans: Sequence[Scan], queries: Tensor, head: int, k: int) -> Best:
        bests = [self._search_part(scans, part, head, k) for part in torch.split(queries, TILE_QUERIES)]
        return Best(*(torch.cat(tensors) for tensors in zip(*bests, strict=True)))

    def _search_part(self, scans: Sequence[Scan], queries: Tensor, head: int, k: int) -> Best:
        """The best blocks for ``queries [R, D]``, few enough that a tile's scores stay in the cache."""
        best = nothing(len(queries), k, self.device)
        coded = [scan for scan in scans if scan.part is not None]
        if coded and len(queries):
            found, helped = self._best_of_groups(coded, queries, head, k)
            best = merge(best, found, k)
            rest = (~helped).nonzero().squeeze(1)
            if rest.numel():
                plain = [scan._replace(part=None, rows=scan.coded_rows()) for scan in coded]
                found = self._scan_rows(plain, queries[rest], head, nothing(len(rest), k, self.device))
                best = Best(*(mine.index_copy(0, rest, new) for mine, new in zip(best, found, strict=True)))
        return self._scan_rows(scans, queries, head, best)

    def _scan_rows(self, scans: Sequence[Scan], queries: Tensor, head: int, best: Best) -> Best:
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
                    old = Best(*(each[better] for each in best))
                    new = merge(old, choose(scores[better], tile.ids, tile.rows + number * PLACES, k), k)
                    best = Best(*(each.index_copy(0, better, more) for each, more in zip(best, new, strict=True)))
        return best

    def _choose_at_once(self, scans: Sequence[Scan], queries: Tensor, head: int, best: Best) -> Best:
        """All scores first: choosing among the tiles one by one would take longer than they do."""
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

    def _best_of_groups(self, scans: Sequence[Scan], queries: Tensor, head: int, k: int) -> tuple[Best, Tensor]:
        """The best blocks of coded groups, and for which queries ``[R]`` a first look at their codes was enough."""
        look = Look([scan.part for scan in scans if scan.part is not None], queries, head)
        first = look.best(k)
        scores = self._score_pairs(scans, look, first, queries, head)
        limit = scores.view(len(queries), -1).topk(k, dim=1).values[:, -1]
        second, helped = look.left(limit, first)
        pairs = Pairs(*(torch.cat(both) for both in zip(first, second, strict=True)))
        scores = torch.cat((scores, self._score_pairs(scans, look, second, queries, head)))
        pair, row = (scores >= limit[pairs.query].unsqueeze(1)).nonzero().unbind(1)
        places = self._places(scans, look, pairs.group[pair], row)
        return _best_of_pairs(pairs.query[pair], scores[pair, row], *places, len(queries), k), helped

    def _score_pairs(self, scans: Sequence[Scan], look: Look, pairs: Pairs, queries: Tensor, head: int) -> Tensor:
        """Scores ``[W, rows per group]`` of all blocks of the groups."""
        per_group = codes.group_rows(self.keys_per_block)
        numbers = per_group * self.keys_per_block * self.key_dim
        step = max(1, GATHERED_NUMBERS // numbers)
        scores = torch.empty(len(pairs.group), per_group)
        part = torch.searchsorted(look.starts, pairs.group, right=True) - 1
        for number, scan in enumerate(scans):
            # index_select of whole groups copies memory; indexing with more dimensions goes number by number.
            groups = scan.chunk.keys[head].flatten()[: scan.chunk.used // per_group * numbers].view(-1, numbers)
            for here in (part == number).nonzero().squeeze(1).split(step):
                keys = groups.index_select(0, pairs.group[here] - look.starts[number]).float()
                keys = keys.view(-1, numbers // self.key_dim, self.key_dim)
                products = keys.bmm(queries[pairs.query[here]].unsqueeze(2))
                scores[here] = products.view(-1, per_group, self.keys_per_block).amax(2)
        return scores

    def _places(self, scans: Sequence[Scan], look: Look, group: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and places ``[V]`` of the blocks at ``row [V]`` of groups ``[V]``."""
        ids, places = torch.empty_like(group), torch.empty_like(group)
        part = torch.searchsorted(look.starts, group, right=True) - 1
        rows = (group - look.starts[part]) * codes.group_rows(self.keys_per_block) + row
        for number, scan in enumerate(scans):
            here = (part == number).nonzero().squeeze(1)
            ids[here] = scan.chunk.ids[rows[here]]
            places[here] = rows[here] + scan.number * PLACES
        return ids, places

    def _settle(self, best: Best, queries: Tensor, head: int) -> Found:
        """Score the winners again, in float32 whatever the keys are, and find which of their keys matched."""
        scores, offsets = self._score_places(best.places, queries, head)
        columns = order(scores, best.ids)
        return Found(scores.gather(1, columns), best.ids.gather(1, columns), offsets.gather(1, columns))

    def _score_places(self, places: Tensor, queries: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Scores of the blocks at ``places [R, n]`` and which of their keys matched; -inf and -1 for place -1."""
        scores = torch.full(places.shape, -torch.inf, device=self.device)
        offsets = torch.full_like(places, -1)
        per_step = max(1, GATHERED_NUMBERS // (self.keys_per_block * self.key_dim))
        for number, chunk in self._chunks.items():
            here = (places.div(PLACES, rounding_mode="floor") == number).nonzero()
            for step in torch.split(here, per_step):
                row, column = step.unbind(1)
                keys = chunk.keys[head].flatten(1).index_select(0, places[row, column] % PLACES)
                keys = keys.float().view(-1, self.keys_per_block, self.key_dim)
                products = keys.bmm(queries[row].unsqueeze(2)).squeeze(2)
                scores[row, column], offsets[row, column] = products.max(1)
        return scores, offsets

    def _chunk_with_room(self) -> Chunk:
        last = self._chunks.get(self._next - 1)
        if last is None or not last.room:
            held = sum(chunk.ids.numel() for chunk in self._chunks.values()) * self.keys_per_block
            keys = min(max(held, FIRST_CHUNK_KEYS), LARGEST_CHUNK_KEYS)
            sizes = (self.key_heads, self.keys_per_block, self.key_dim)
            if last is not None and self._frame is None and self._uses_codes:
                # The first chunk knows well enough what keys of this model are like.
                self._frame = Frame.of(last.keys[:, : last.used].flatten(1, 2))
            last = Chunk(max(1, keys // self.keys_per_block), sizes, self.dtype, self.device, self._frame)
            self._chunks[self._next] = last
            self._next += 1
        return last

    def _present(self, ids: Tensor) -> Tensor:
        present = torch.zeros_like(ids, dtype=torch.bool)
        for chunk in self._chunks.values():
            present |= chunk.holds(ids)
        return present

    @staticmethod
    def _require(good: Tensor, ids: Tensor, problem: str) -> None:
        if not bool(good.all()):
            bad = ids[~good].tolist()
            raise InvalidArgument(f"Blocks {bad[:5]}{' and more' if len(bad) > 5 else ''} are {problem}.")


def _rows(keys: Tensor, alive: Tensor) -> Tensor:
    """``keys [G, n, P, D]`` of the rows that are alive."""
    return keys if bool(alive.all()) else keys[:, alive]


def _best_of_pairs(query: Tensor, scores: Tensor, ids: Tensor, places: Tensor, rows: int, k: int) -> Best:
    """The ``k`` best of blocks ``[V]`` for each of so many queries, given by their rows ``query [V]``."""
    by_query = query.argsort(stable=True)
    counts = torch.bincount(query, minlength=rows)
    row = query[by_query]
    column = torch.arange(len(query)) - (counts.cumsum(0) - counts)[row]
    shape = (rows, max(int(counts.max()), k))
    table = Best(torch.full(shape, -torch.inf), torch.full(shape, -1), torch.full(shape, -1))
    for whole, values in zip(table, (scores, ids, places), strict=True):
        whole[row, column] = values[by_query]
    return choose(*table, k)


def _block_scores(tile: Tile, queries: Tensor, head: int) -> Tensor:
    """``[R, n]`` float32: the largest product of each of ``queries [R, D]`` with the keys of each block."""
    keys = tile.keys[head]  # [n, P, D]
    if keys.shape[1] == 1:
        return queries @ keys.squeeze(1).float().T
    products = keys.flatten(0, 1).float() @ queries.T  # [n*P, R]
    return products.view(*keys.shape[:2], -1).amax(1).T.contiguous()


def _rounded_scores(tile: Tile, queries: Tensor, head: int) -> Tensor:
    """The same, with products in the type of the keys."""
    keys = tile.keys[head]
    products = keys.flatten(0, 1) @ queries.to(keys.dtype).T
    # In this order because a maximum over bfloat16 is slow on CPUs.
    return products.float().reshape(*keys.shape[:2], -1).amax(1).T
