"""Exact search among keys of +1 and -1, stored as bits: the index of a memory that routes by one-bit codes.

A memory with ``key_dtype="bit"`` needs the score of every block for every token of a question, so no graph and no
inverted file can help. As bits a million codes of 256 numbers take 38 MB, 14 times less than in bfloat16, and are
scored without multiplying (``memstore.kernels.best_signs``). If the processor supports it, ``index="exact"`` of such a
memory is this index.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.index import contract, files
from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex
from memstore.kernels.best_signs import PackedSigns, allowance, best_signs, pack, problem, words_shape

LEAST_ROOM = 64
"""Initial room, in blocks."""


class SignIndex(VectorIndex):
    """Keys of +1 and -1. ``search`` finds the true top k, with scores in float32.

    ``score`` rounds sums of five numbers of a query to 16 bits. For keys of 256 numbers its error is less than 1/1200
    of the sum of the query's absolute numbers, and usually a tenth of that. For n times as many numbers it is n times
    that. It is exact if queries are signs. Blocks with equal scores are ordered by id, the smaller first.
    """

    capabilities = IndexCapabilities(exact=True, dense=True)
    kind = "signs"

    def _prepare(self, settings: str) -> None:
        self._refuse(settings)
        if reason := problem():
            raise InvalidArgument(f"A sign index {reason.replace('auto', 'exact')}.")
        self._words, self._ids = self._room_for(0)
        self._held = slice(0, 0)  # the rows in use; their ids ascend

    def __len__(self) -> int:
        return self._held.stop - self._held.start

    @property
    def nbytes(self) -> int:
        return self._words.nbytes + self._ids.nbytes

    def add(self, ids: Tensor, keys: Tensor) -> None:
        self._check_blocks(ids, keys)
        contract.check_new(self._holds(ids), ids)
        words = torch.stack([pack(keys[:, head].cpu()).words for head in range(self.key_heads)])
        there = self._ids[self._held]
        if len(ids) and len(there) and int(ids[0]) < int(there[-1]):
            self._hold(torch.cat([there, ids]), torch.cat([self._words[:, self._held], words], 1))
            return
        first, stop = self._held.start, self._held.stop
        if stop + len(ids) > len(self._ids):
            held, there = self._words[:, self._held], self._ids[self._held]
            self._words, self._ids = self._room_for(2 * (len(there) + len(ids)))
            first, stop = 0, len(there)
            self._words[:, :stop], self._ids[:stop] = held, there
        self._words[:, stop : stop + len(ids)], self._ids[stop : stop + len(ids)] = words, ids
        self._held = slice(first, stop + len(ids))

    def remove(self, ids: Tensor) -> None:
        contract.check_ids(ids)
        contract.check_held(self._holds(ids), ids)
        there = self._ids[self._held]
        if torch.equal(there[: len(ids)], ids):  # when a document loses its oldest blocks
            self._held = slice(self._held.start + len(ids), self._held.stop)
        else:
            left = ~torch.isin(there, ids)
            self._hold(there[left], self._words[:, self._held][:, left])

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        contract.check_top_k(k)
        contract.check_allowed(allowed)
        grouped, rows = self._grouped(queries).detach(), self._rows(allowed)
        heads = [self._search_head(grouped[head], head, rows, k) for head in range(self.key_heads)]
        return SearchResult.of_heads(heads, queries)

    def score(self, queries: Tensor, *, allowed: range | Tensor | None = None) -> tuple[Tensor, Tensor]:
        contract.check_allowed(allowed)
        grouped, rows = self._grouped(queries).detach(), self._rows(allowed)
        scores = torch.stack([self._scores(grouped[head], head, rows) for head in range(self.key_heads)])
        ids = self._ids[rows].clone()
        return scores.reshape(*queries.shape[:2], len(ids)).to(queries.device), ids.to(queries.device)

    def save(self, path: Path) -> None:
        files.save(path, self._about, {"ids": self._ids[self._held], "words": self._words[:, self._held]})

    def load(self, path: Path) -> None:
        content = files.load(path, self._about)
        shape = (self.key_heads, "n", *words_shape(self.keys_per_block, self.key_dim))
        content.check(ids=(torch.int64, ("n",)), words=(torch.int16, shape))
        self._hold(content.tensors["ids"], content.tensors["words"])

    def _room_for(self, blocks: int) -> tuple[Tensor, Tensor]:
        shape = (self.key_heads, max(blocks, LEAST_ROOM), *words_shape(self.keys_per_block, self.key_dim))
        with torch.inference_mode(False):  # tensors made in inference mode could not be filled outside of it
            return torch.empty(shape, dtype=torch.int16), torch.empty(shape[1], dtype=torch.int64)

    def _hold(self, ids: Tensor, words: Tensor) -> None:
        """Replace the content by blocks ``ids [n]``, in any order, with ``words [G, n, ...]``."""
        order = ids.argsort()
        room = self._room_for(len(ids))
        room[0][:, : len(ids)], room[1][: len(ids)] = words[:, order], ids[order]
        (self._words, self._ids), self._held = room, slice(0, len(ids))

    def _holds(self, ids: Tensor) -> Tensor:
        there = self._ids[self._held]
        if not len(there):
            return torch.zeros_like(ids, dtype=torch.bool)
        at = torch.searchsorted(there, ids).clamp(max=len(there) - 1)
        return there[at] == ids

    def _rows(self, allowed: range | Tensor | None) -> slice | Tensor:
        """Return the rows of the allowed blocks, in the order of their ids; a slice if they are adjacent."""
        if allowed is None:
            return self._held
        there = self._ids[self._held]
        if isinstance(allowed, range) and allowed.step == 1:
            ends = torch.tensor([allowed.start, max(allowed.start, allowed.stop)])
            first, stop = torch.searchsorted(there, ends).tolist()
            return slice(self._held.start + first, self._held.start + stop)
        return self._held.start + contract.allows(allowed, there).nonzero().squeeze(1)

    def _keys(self, head: int, rows: slice | Tensor) -> PackedSigns:
        return PackedSigns(self._words[head, rows].contiguous(), self.keys_per_block, self.key_dim)

    def _scores(self, queries: Tensor, head: int, rows: slice | Tensor) -> Tensor:
        """Return scores ``[R, n]`` float32."""
        return best_signs(self._keys(head, rows), queries).T.contiguous()

    # The error bound of the scores rules out blocks that cannot be among the best; the rest is scored again.
    def _search_head(self, queries: Tensor, head: int, rows: slice | Tensor, k: int) -> SearchResult:
        near, ids = self._scores(queries, head, rows), self._ids[rows]
        count, off, places = min(k, len(ids)), 2 * allowance(queries), torch.arange(len(self._ids))[rows]
        shape = (len(queries), k)
        found = SearchResult(torch.full(shape, -torch.inf), torch.full(shape, -1), torch.full(shape, -1))
        for number, query in enumerate(queries if count else ()):
            least = near[number].topk(count).values[-1] - off[number]
            some = (near[number] >= least).nonzero().squeeze(1)
            scores, offsets = (self._keys(head, places[some]).unpacked() @ query).max(1)
            best = scores.argsort(descending=True, stable=True)[:count]
            for whole, values in zip(found, (scores[best], ids[some[best]], offsets[best]), strict=True):
                whole[number, :count] = values
        return found
