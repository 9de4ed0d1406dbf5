"""Search token codes of one or eight bits per number for late interaction, with int8 products.

A memory that routes for all layers stores a code for each token of a block. A block's score is a sum over the query
tokens of the product with its best code (`memstore.attention.routing`). This is equation 3 of Khattab & Zaharia 2020,
with scores that are standardised and have a floor. That needs the score of *every* block, so no graph and no inverted
file can help. But codes are small whole numbers: signs, or codes rounded to 8 bits. They are stored as int8, which is
exact, and multiplied as int8, four times as fast as bfloat16 on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import contract, files
from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex
from memstore.kernels import best_products
from memstore.kernels._largest import filled, largest
from memstore.kernels.best_codes import LARGEST

CHUNK_KEYS = 1 << 18


class CodeIndex(VectorIndex):
    """Keys that are whole numbers from -127 to 127, such as the signs that a memory with ``key_dtype="bit"`` keeps.

    Queries are rounded to 8 bits, with a scale for each. If they are whole numbers in this range already, every score
    is exact. ``search`` always returns true scores. The blocks that it finds may differ at the end of the list, where
    scores differ by less than one part in 100. ``score`` uses the rounded queries. Blocks with equal scores are ordered
    by id, the smaller first.
    """

    capabilities = IndexCapabilities(exact=False, dense=True)
    kind = "codes"

    def _prepare(self, settings: str) -> None:
        self._refuse(settings)
        self._room = max(1, CHUNK_KEYS // self.keys_per_block)
        self._keys: list[Tensor] = []  # each [G, room, P, D] int8
        self._ids = torch.empty(0, dtype=torch.int64)  # of each used row, -1 if it is free

    def __len__(self) -> int:
        return int((self._ids >= 0).sum())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._keys, self._ids))

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
            self._keys[chunk][:, row : row + stop - start] = codes[:, start:stop]
            self._ids = torch.cat((self._ids, ids[start:stop]))
            start = stop

    def remove(self, ids: Tensor) -> None:
        contract.check_ids(ids)
        contract.check_held(torch.isin(ids, self._ids), ids)
        self._ids = torch.where(torch.isin(self._ids, ids), -1, self._ids)
        alive = (self._ids >= 0).nonzero()
        used = int(alive[-1]) + 1 if alive.numel() else 0
        self._ids = self._ids[:used]
        del self._keys[-(-used // self._room) :]
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
        scores = torch.stack([self._maxima(grouped[head], head, rows) for head in range(self.key_heads)])
        return scores.reshape(*queries.shape[:2], rows.numel()), self._ids[rows]

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

    def _grow(self) -> None:
        sizes = (self.key_heads, self._room, self.keys_per_block)
        with torch.inference_mode(False):  # tensors made in inference mode could not be filled outside of it
            self._keys.append(torch.empty(*sizes, self.key_dim, dtype=torch.int8))

    def _content(self) -> tuple[Tensor, Tensor]:
        """Return ids ``[n]`` ascending, and keys ``[n, G, P, D]`` float32."""
        rows = self._rows(None)
        sizes = (0, self.key_heads, self.keys_per_block, self.key_dim)
        parts = [self._keys[chunk][:, piece].transpose(0, 1).float() for chunk, piece in self._pieces(rows)]
        return self._ids[rows], torch.cat([torch.empty(sizes), *parts])

    def _replace(self, ids: Tensor, keys: Tensor) -> None:
        self._keys, self._ids = [], self._ids[:0]
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

    def _maxima(self, queries: Tensor, head: int, rows: Tensor) -> Tensor:
        """Return ``[R, n]`` float32: the best product of ``queries [R, d]`` with the codes of each row."""
        if not len(queries):
            return torch.empty(0, rows.numel(), dtype=torch.float32)
        values, scales = _rounded(queries)
        best = torch.empty(rows.numel(), len(queries), dtype=torch.float32)
        start = 0
        for chunk, inside in self._pieces(rows):
            held = self._keys[chunk][head]  # [room, P, D]
            held, chosen = (held[inside], None) if isinstance(inside, slice) else (held, inside)
            stop = start + len(held if chosen is None else chosen)
            best_products(held, values, chosen=chosen, out=best[start:stop])
            start = stop
        return best.T.contiguous() * scales

    def _search_head(self, queries: Tensor, head: int, rows: Tensor, k: int) -> SearchResult:
        near = self._maxima(queries, head, rows)
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
