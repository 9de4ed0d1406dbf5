"""Exact search: every key is scored. The default index, and the oracle of all others.

Keys lie in chunks that grow geometrically and are never copied again. A search walks over them in tiles whose scores
stay in the processor's cache, keeps the best ``k`` blocks of each tile, and merges them as it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import checks, files
from memstore.index.chunk import Chunk, Tile
from memstore.index.contract import Found, IndexCapabilities, VectorIndex

FIRST_CHUNK_KEYS = 4096
LARGEST_CHUNK_KEYS = 1 << 18
TILE_KEYS = 8192
TILE_QUERIES = 256
GATHERED_NUMBERS = 1 << 22
PLACES = 1 << 32


class _Best(NamedTuple):
    scores: Tensor  # [R, k] float32
    ids: Tensor  # [R, k]
    places: Tensor  # [R, k]: chunk * PLACES + row


class ExactIndex(VectorIndex):
    """Keys ``[G, D]`` of ``P`` per block, searched by brute force.

    With ``dtype=torch.float32`` the result is the true top k. With ``torch.bfloat16`` (half the memory, several times
    the speed) candidates are chosen by products rounded to bfloat16, so blocks whose scores differ by less than one
    part in 256 may change places at the end of the list; the scores returned are computed in float32.
    Blocks with equal scores are ordered by id, the smaller first.

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
        self._chunks: list[Chunk] = []
        self._largest_id = -1

    def __len__(self) -> int:
        return sum(chunk.live().numel() for chunk in self._chunks)

    def __repr__(self) -> str:
        return f"ExactIndex({len(self)} blocks, {self.key_heads}x{self.keys_per_block}x{self.key_dim} {self.dtype})"

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and ids."""
        return sum(chunk.nbytes for chunk in self._chunks)

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
        for chunk in self._chunks:
            chunk.drop(ids)
        self._chunks = [chunk for chunk in self._chunks if chunk.used]
        self._largest_id = max((int(chunk.live().max()) for chunk in self._chunks), default=-1)

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> Found:
        """Top ``k`` blocks for each of ``queries [H, T, D]``: see ``Found``. Head h uses key head ``h // (H // G)``."""
        checks.check_top_k(k)
        checks.check_allowed(allowed)
        grouped = self._grouped(queries)
        founds = [self._search_head(grouped[head], head, k, allowed) for head in range(self.key_heads)]
        shape = (*queries.shape[:2], k)
        scores, ids, offsets = (torch.stack(parts).reshape(shape) for parts in zip(*founds, strict=True))
        return Found(scores.to(queries.device), ids.to(queries.device), offsets.to(queries.device))

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Score of every block: ``([H, T, N] float32, ids [N] ascending)``."""
        checks.check_allowed(allowed)
        grouped = self._grouped(queries)
        parts: list[Tensor] = []
        ids: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=self.device)]
        for _, tile in self._tiles(allowed):
            heads = [_block_scores(tile, grouped[head], head) for head in range(self.key_heads)]
            parts.append(torch.stack(heads))
            ids.append(tile.ids)
        order = torch.cat(ids).argsort()
        scores = torch.cat(parts, -1)[..., order] if parts else grouped.new_empty((*grouped.shape[:2], 0)).float()
        shape = (*queries.shape[:2], order.numel())
        return scores.reshape(shape).to(queries.device), torch.cat(ids)[order].to(queries.device)

    def save(self, path: Path) -> None:
        """Write the index to the file ``path`` (safetensors), replacing it at once or not at all."""
        live = [chunk.ids[: chunk.used] >= 0 for chunk in self._chunks]
        ids = [chunk.ids[: chunk.used][rows] for chunk, rows in zip(self._chunks, live, strict=True)]
        keys = [chunk.keys[:, : chunk.used][:, rows] for chunk, rows in zip(self._chunks, live, strict=True)]
        none = torch.empty(self.key_heads, 0, self.keys_per_block, self.key_dim, dtype=self.dtype)
        order = torch.cat(ids).argsort() if ids else torch.empty(0, dtype=torch.int64)
        files.save(
            path,
            ids=(torch.cat(ids) if ids else order)[order].cpu(),
            keys=(torch.cat(keys, 1) if keys else none)[:, order].transpose(0, 1).contiguous().cpu(),
        )

    def load(self, path: Path) -> None:
        """Replace the content by what ``save`` wrote. On ``NotFound`` or ``DamagedError``, nothing is."""
        shape = (self.key_heads, self.keys_per_block, self.key_dim)
        ids, keys = files.load(path, shape, self.dtype)
        self._chunks, self._largest_id = [], -1
        self.add(ids, keys)

    def _grouped(self, queries: Tensor) -> Tensor:
        checks.check_queries(queries, self.key_heads, self.key_dim)
        # The query heads of one key head become more rows of one product: [G, R*T, D].
        return queries.to(self.device).reshape(self.key_heads, -1, self.key_dim).float()

    def _tiles(self, allowed: range | Tensor | None) -> Iterator[tuple[int, Tile]]:
        rows = max(1, TILE_KEYS // self.keys_per_block)
        for number, chunk in enumerate(self._chunks):
            for tile in chunk.tiles(rows, allowed):
                yield number, tile

    def _search_head(self, queries: Tensor, head: int, k: int, allowed: range | Tensor | None) -> Found:
        parts = torch.split(queries, TILE_QUERIES)  # of [R, D]
        bests = [_nothing(len(part), k, self.device) for part in parts]
        for number, tile in self._tiles(allowed):
            for i, part in enumerate(parts):
                bests[i] = _merge(bests[i], _best_of_tile(number, tile, part, head, k), k)
        best = _Best(*(torch.cat(tensors) for tensors in zip(*bests, strict=True)))
        return self._settle(best, queries, head)

    def _settle(self, best: _Best, queries: Tensor, head: int) -> Found:
        """Score the winners again, in float32 whatever the keys are, and find which of their keys matched."""
        scores, offsets = best.scores.clone(), torch.full_like(best.ids, -1)
        per_step = max(1, GATHERED_NUMBERS // (self.keys_per_block * self.key_dim))
        for number, chunk in enumerate(self._chunks):
            here = (best.places.div(PLACES, rounding_mode="floor") == number).nonzero()
            for step in torch.split(here, per_step):
                row, column = step.unbind(1)
                keys = chunk.keys[head][best.places[row, column] % PLACES]  # [w, P, D]
                products = torch.bmm(keys.float(), queries[row].unsqueeze(2)).squeeze(2)
                scores[row, column], offsets[row, column] = products.max(1)
        order = _order(scores, best.ids)
        return Found(scores.gather(1, order), best.ids.gather(1, order), offsets.gather(1, order))

    def _chunk_with_room(self) -> Chunk:
        if not self._chunks or not self._chunks[-1].room:
            held = sum(chunk.ids.numel() for chunk in self._chunks) * self.keys_per_block
            keys = min(max(held, FIRST_CHUNK_KEYS), LARGEST_CHUNK_KEYS)
            sizes = (self.key_heads, self.keys_per_block, self.key_dim)
            self._chunks.append(Chunk(max(1, keys // self.keys_per_block), sizes, self.dtype, self.device))
        return self._chunks[-1]

    def _present(self, ids: Tensor) -> Tensor:
        present = torch.zeros_like(ids, dtype=torch.bool)
        for chunk in self._chunks:
            present |= torch.isin(ids, chunk.live())
        return present

    @staticmethod
    def _require(good: Tensor, ids: Tensor, problem: str) -> None:
        if not bool(good.all()):
            bad = ids[~good].tolist()
            raise InvalidArgument(f"Blocks {bad[:5]}{' and more' if len(bad) > 5 else ''} are {problem}.")


def _nothing(rows: int, k: int, device: torch.device) -> _Best:
    scores = torch.full((rows, k), -torch.inf, device=device)
    none = torch.full((rows, k), -1, dtype=torch.int64, device=device)
    return _Best(scores, none, none)


def _block_scores(tile: Tile, queries: Tensor, head: int) -> Tensor:
    """``[R, n]`` float32: the largest product of each of ``queries [R, D]`` with the keys of each block."""
    keys = tile.keys[head]  # [n, P, D]
    products = keys.flatten(0, 1) @ queries.to(keys.dtype).T  # [n*P, R]
    # In this order because a maximum over bfloat16 is slow on CPUs.
    return products.float().reshape(*keys.shape[:2], -1).amax(1).T


def _best_of_tile(number: int, tile: Tile, queries: Tensor, head: int, k: int) -> _Best:
    """The best blocks of a tile of chunk ``number`` for ``queries [R, D]``, in any order."""
    scores = _block_scores(tile, queries, head).contiguous()
    columns = _top(scores, tile.ids, min(k, scores.shape[1]))  # [R, k]
    return _Best(scores.gather(1, columns), tile.ids[columns], tile.rows[columns] + number * PLACES)


def _top(scores: Tensor, ids: Tensor, k: int) -> Tensor:
    """Columns ``[R, k]`` of the ``k`` largest of ``scores [R, n]``; among equal ones those with the smallest ids."""
    top, columns = scores.topk(k, dim=1, sorted=False)
    worst = top.amin(1, keepdim=True)
    # topk takes any of several equal scores. Only where the last place is contested, choose again by id.
    contested = ((scores >= worst).sum(1) > k).nonzero().squeeze(1)
    if contested.numel():
        rivals, limit = scores[contested], worst[contested]
        rank = torch.where(rivals == limit, -1.0 - ids.double(), -torch.inf).masked_fill(rivals > limit, 0.0)
        columns[contested] = rank.topk(k, dim=1, sorted=False).indices
    return columns


def _merge(one: _Best, other: _Best, k: int) -> _Best:
    """The ``k`` best of both."""
    scores, ids, places = (torch.cat(pair, 1) for pair in zip(one, other, strict=True))
    order = _order(scores, ids)[:, :k]
    return _Best(scores.gather(1, order), ids.gather(1, order), places.gather(1, order))


def _order(scores: Tensor, ids: Tensor) -> Tensor:
    """Columns that put ``[R, n]`` in order: best score first, equal scores by ascending id, empty places last."""
    by_id = ids.argsort(dim=1)
    return by_id.gather(1, scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True))
