"""Search token codes of one or eight bits per number for late interaction, with int8 products.

A memory that routes for all layers stores a code for each token of a block. A block's score is a sum over the query
tokens of the product with its best code (`memstore.attention.routing`). This is equation 3 of Khattab & Zaharia 2020,
with scores that are standardised and have a floor. That needs the score of *every* block, so no graph and no inverted
file can help. But codes are small whole numbers: signs, or codes rounded to 8 bits. They are stored as int8, which is
exact, and multiplied as int8, four times as fast as bfloat16 on a CPU.

``route`` is faster still; attached models call it if the index is ``codes:pruned``. It first scores all blocks by sums
of four tokens' codes. Then it scores the most promising blocks by the codes themselves, with a sample that estimates
mean and deviation of all blocks. It may miss blocks at the end of the list; ``benchmarks/index.py`` reports how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import contract, files
from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex
from memstore.kernels import best_products
from memstore.kernels._largest import filled, largest

LARGEST = 127
PRUNED = "pruned"
# Sums of four tokens, not every fourth dimension: as many products, but a quarter of the maxima of longer vectors. Half
# the sample finds as much (0.98 of the blocks that all scores choose, among a million real codes).
RUN = 4
"""Tokens summed for the first score of a block."""
CANDIDATES = 1024
SAMPLE = 2048
"""Blocks scored token by token: the most promising ones, and a sample of all."""
FLOOR = 1.0
CHUNK_KEYS = 1 << 18


class CodeIndex(VectorIndex):
    """Keys that are whole numbers from -127 to 127, such as the signs that a memory with ``key_dtype="bit"`` keeps.

    Queries are rounded to 8 bits, with a scale for each. If they are whole numbers in this range already, every score
    is exact. ``search`` always returns true scores. The blocks that it finds may differ at the end of the list, where
    scores differ by less than one part in 100. ``score`` uses the rounded queries. Blocks with equal scores are ordered
    by id, the smaller first. ``settings`` is empty, or ``pruned``, which allows ``route``.

    A search during an addition in another thread is not safe; the memory holds a lock.
    """

    def _prepare(self, settings: str) -> None:
        if settings not in ("", PRUNED):
            raise InvalidArgument(
                f"A code index has one setting: write 'codes' or 'codes:{PRUNED}', not 'codes:{settings}'."
            )
        self.capabilities = IndexCapabilities(exact=False, dense=True, routes=settings == PRUNED)
        self._refuse()
        self._room = max(1, CHUNK_KEYS // self.keys_per_block)
        self._keys: list[Tensor] = []  # each [G, room, P, D] int8
        self._runs: list[Tensor] = []  # each [G, room, ceil(P / RUN), D] int8, if blocks are longer than a run
        self._scales = torch.empty(self.key_heads, 0)  # of the runs in each used row
        self._ids = torch.empty(0, dtype=torch.int64)  # of each used row, -1 if it is free

    def __len__(self) -> int:
        return int((self._ids >= 0).sum())

    def __repr__(self) -> str:
        return f"CodeIndex({len(self)} blocks, {self.key_heads}x{self.keys_per_block}x{self.key_dim})"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._keys, *self._runs, self._scales, self._ids))

    def add(self, ids: Tensor, keys: Tensor) -> None:
        self._check_blocks(ids, keys)
        if bool((keys != keys.round()).any()) or (keys.numel() and float(keys.abs().max()) > LARGEST):
            raise InvalidArgument(
                "Keys of a code index must be whole numbers from -127 to 127; use 'exact' for other keys."
            )
        contract.check_new(torch.isin(ids, self._ids), ids)
        start, codes = 0, keys.to(torch.int8).transpose(0, 1)
        while start < ids.numel():
            chunk, row = divmod(self._ids.numel(), self._room)
            if chunk == len(self._keys):
                self._grow()
            stop = min(start + self._room - row, ids.numel())
            rows = slice(row, row + stop - start)
            self._keys[chunk][:, rows] = codes[:, start:stop]
            if self.keys_per_block > RUN:
                self._runs[chunk][:, rows], scales = _summed_runs(codes[:, start:stop])
                self._scales = torch.cat((self._scales, scales), 1)
            self._ids = torch.cat((self._ids, ids[start:stop]))
            start = stop

    def remove(self, ids: Tensor) -> None:
        contract.check_ids(ids)
        contract.check_held(torch.isin(ids, self._ids), ids)
        self._ids = torch.where(torch.isin(self._ids, ids), -1, self._ids)
        alive = (self._ids >= 0).nonzero()
        used = int(alive[-1]) + 1 if alive.numel() else 0
        self._ids, self._scales = self._ids[:used], self._scales[:, :used]
        chunks = -(-used // self._room)
        del self._keys[chunks:], self._runs[chunks:]
        free = (self._ids < 0).sum()
        if 2 * int(free) > used and free:  # when a document loses its oldest blocks
            self._replace(*self._content())

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        contract.check_top_k(k)
        rows = self._rows(allowed)
        grouped = self._grouped(queries)
        heads = [self._search_head(grouped[head], head, rows, k) for head in range(self.key_heads)]
        return SearchResult.of_heads(heads, queries)

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the score of every block for queries in 8 bits: ``([H, T, N] float32, ids [N] ascending)``."""
        rows = self._rows(allowed)
        grouped = self._grouped(queries)
        scores = torch.stack([self._maxima(self._keys, grouped[head], head, rows) for head in range(self.key_heads)])
        return scores.reshape(*queries.shape[:2], rows.numel()), self._ids[rows]

    def route(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the best blocks for the query tokens ``[T, D]`` together: ``(scores [k], ids [k])``, best first.

        A block's score is ``memstore.attention.late_interaction`` of one group of all these tokens, each weighted by
        the length of its code. If there are fewer than ``k`` blocks, all are returned. Only for one key head.
        """
        contract.check_top_k(k)
        if self.key_heads != 1:
            raise InvalidArgument(f"routing by codes needs one key head; this index has {self.key_heads}.")
        rows, tokens = self._rows(allowed), self._grouped(queries[None])[0]
        weights = tokens.norm(dim=-1)
        if rows.numel() <= CANDIDATES + SAMPLE or self.keys_per_block <= RUN:
            exact = self._maxima(self._keys, tokens, 0, rows)
            summed = _summed(exact, weights, *_moments(exact)) if rows.numel() else exact.sum(0)
        else:
            coarse = self._maxima(self._runs, tokens, 0, rows) * self._scales[0, rows]
            moments = _moments(coarse)
            best = _summed(coarse, weights, *moments).topk(min(max(CANDIDATES, k), rows.numel())).indices.sort().values
            some = torch.linspace(0, rows.numel() - 1, SAMPLE).long()
            sample = self._maxima(self._keys, tokens, 0, rows[some])
            mean, deviation = _estimated(sample, coarse[:, some], *moments)
            exact, rows = self._maxima(self._keys, tokens, 0, rows[best]), rows[best]
            summed = _summed(exact, weights, mean, deviation)
        top = summed.topk(min(k, rows.numel()))
        return top.values, self._ids[rows[top.indices]]

    def facts(self) -> Mapping[str, Any]:
        return {"kind": "codes", "pruned": self.capabilities.routes}

    def save(self, path: Path) -> None:
        ids, keys = self._content()
        files.save(path, self._about, {"ids": ids, "keys": keys.to(torch.int8)})

    def load(self, path: Path) -> None:
        content = files.load(path, self._about)
        shape = ("n", self.key_heads, self.keys_per_block, self.key_dim)
        content.check(ids=(torch.int64, ("n",)), keys=(torch.int8, shape))
        keys = content.tensors["keys"]
        content.require(not bool((keys == -128).any()), "keys")
        self._replace(content.tensors["ids"], keys.float())

    @property
    def _about(self) -> dict[str, Any]:
        return files.identity("codes", self)

    def _grow(self) -> None:
        sizes = (self.key_heads, self._room, self.keys_per_block)
        with torch.inference_mode(False):  # tensors made in inference mode could not be filled outside of it
            self._keys.append(torch.empty(*sizes, self.key_dim, dtype=torch.int8))
            if self.keys_per_block > RUN:
                runs = -(-self.keys_per_block // RUN)
                self._runs.append(torch.empty(*sizes[:2], runs, self.key_dim, dtype=torch.int8))

    def _content(self) -> tuple[Tensor, Tensor]:
        """Return ids ``[n]`` ascending, and keys ``[n, G, P, D]`` float32."""
        rows = self._rows(None)
        sizes = (0, self.key_heads, self.keys_per_block, self.key_dim)
        parts = [self._keys[chunk][:, piece].transpose(0, 1).float() for chunk, piece in self._pieces(rows)]
        return self._ids[rows], torch.cat([torch.empty(sizes), *parts])

    def _replace(self, ids: Tensor, keys: Tensor) -> None:
        self._keys, self._runs, self._scales, self._ids = [], [], self._scales[:, :0], self._ids[:0]
        self.add(ids, keys)

    def _rows(self, allowed: range | Tensor | None) -> Tensor:
        """Return the rows of the allowed blocks, in the order of their ids."""
        contract.check_allowed(allowed)
        wanted = self._ids >= 0
        if allowed is not None:
            wanted &= contract.allows(allowed, self._ids)
        rows = wanted.nonzero().squeeze(1)
        return rows[self._ids[rows].argsort()]

    def _pieces(self, rows: Tensor) -> Iterator[tuple[int, Tensor | slice]]:
        """Yield chunks and the rows in them, in order; a slice if these are adjacent."""
        chunks, lengths = torch.unique_consecutive(rows.div(self._room, rounding_mode="floor"), return_counts=True)
        for chunk, piece in zip(chunks.tolist(), rows.split(lengths.tolist()), strict=True):
            inside = piece - chunk * self._room
            first, last = int(inside[0]), int(inside[-1])
            adjacent = last - first + 1 == len(inside) and bool((inside[1:] > inside[:-1]).all())
            yield chunk, slice(first, last + 1) if adjacent else inside

    def _maxima(self, codes: list[Tensor], queries: Tensor, head: int, rows: Tensor) -> Tensor:
        """Return ``[R, n]`` float32: the best product of ``queries [R, d]`` with the ``codes`` of each row."""
        if not len(queries):
            return torch.empty(0, rows.numel())
        values, scales = _rounded(queries)
        best = torch.empty(rows.numel(), len(queries), dtype=torch.float32)
        start = 0
        for chunk, inside in self._pieces(rows):
            held = codes[chunk][head]  # [room, P, D]
            held, chosen = (held[inside], None) if isinstance(inside, slice) else (held, inside)
            stop = start + len(held if chosen is None else chosen)
            best_products(held, values, chosen=chosen, out=best[start:stop])
            start = stop
        return best.T.contiguous() * scales

    def _search_head(self, queries: Tensor, head: int, rows: Tensor, k: int) -> SearchResult:
        near = self._maxima(self._keys, queries, head, rows)
        best = largest(near, min(k, rows.numel())).sort(dim=1).values  # [R, count]
        scores, offsets = torch.empty(best.shape), torch.empty(best.shape, dtype=torch.int64)
        for row, query in enumerate(queries):
            chosen = rows[best[row]]
            at = chosen.div(self._room, rounding_mode="floor").tolist(), (chosen % self._room).tolist()
            keys = [self._keys[chunk][head, inside] for chunk, inside in zip(*at, strict=True)]
            if keys:
                scores[row], offsets[row] = (torch.stack(keys).float() @ query).max(1)
        order = scores.argsort(dim=1, descending=True, stable=True)
        return SearchResult(
            filled(scores.gather(1, order), k, -torch.inf),
            filled(self._ids[rows[best.gather(1, order)]], k, -1),
            filled(offsets.gather(1, order), k, -1),
        )


def _rounded(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``queries [R, d]`` as int8, and the scale of each, ``[R, 1]``: 1 if it is a code already."""
    longest = queries.abs().amax(1, keepdim=True)
    codes = (queries == queries.round()).all(1, keepdim=True) & (longest <= LARGEST)
    scales = torch.where(codes, 1.0, longest.clamp(min=1e-30) / LARGEST)
    return (queries / scales).round().to(torch.int8), scales


def _summed_runs(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Sum runs of tokens of ``codes [G, n, P, D]``: ``[G, n, ceil(P / RUN), D]`` int8, and scales ``[G, n]``."""
    runs = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[2] % RUN)).float().unflatten(2, (-1, RUN)).sum(3)
    scales = runs.abs().amax((2, 3)).clamp_(min=1).div_(LARGEST)
    return runs.div_(scales[:, :, None, None]).round_().to(torch.int8), scales


def _summed(scores: Tensor, weights: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the late interaction of ``[T, n]`` best products: sums of weighted, standardised scores of at least 1."""
    z = (scores - mean[:, None]) / deviation.clamp(min=1e-6)[:, None]
    return weights @ z.clamp(min=FLOOR)


def _moments(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation ``[T]`` of scores ``[T, n]``; ``std`` takes ten times as long."""
    mean = scores.mean(1)
    return mean, (scores - mean[:, None]).square_().mean(1).sqrt_()


def _estimated(sample: Tensor, coarse_sample: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate mean and deviation ``[T]`` of all blocks from a sample's scores ``[T, m]`` and coarse scores.

    If the sample's coarse scores are above those of all blocks, its scores are too, in proportion to their correlation.
    """
    sample_mean, coarse_mean = sample.mean(1), coarse_sample.mean(1)
    apart, coarse_apart = sample - sample_mean[:, None], coarse_sample - coarse_mean[:, None]
    slope = (apart * coarse_apart).mean(1) / coarse_apart.square().mean(1).clamp(min=1e-12)
    rest = (apart - slope[:, None] * coarse_apart).square().mean(1)
    return sample_mean + slope * (mean - coarse_mean), (slope.square() * deviation.square() + rest).sqrt()
