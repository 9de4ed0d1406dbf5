"""How a stock model and other ranks search and attend to a memory together: each has a share of the blocks.

A rank scores its own blocks, and names its best. The best of these are the best of the whole memory. Each rank fetches
the states of its own winners alone and attends to them. The first rank also attends to everything else. Partial results
are merged by their log-sum-exp, in one collective for each layer. This is exact up to the order of sums. Scores are
standardised over all blocks, so the ranks first add up their moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstore.attention.routing import inherited, late_interaction, pooled
from memstore.kernels.block_attention import block_attention, merge_attention
from memstore.kernels.block_attention.fused import whole_mask
from memstore.readers.asking import Query
from memstore.readers.ranks import Ranks, Share
from memstore.readers.stock.selection import CandidateLists, Selection, units_and_weights
from memstore.readers.stock.visible import (
    SHORT,
    AttachedDocument,
    Candidates,
    ShortDocument,
    ShortDocuments,
    best_of,
    incomplete_landmarks,
)


@dataclass(eq=False)
class OwnPart:
    """The part of the chosen lists that this rank fetches."""

    chosen: CandidateLists
    """``[B or 1, lists, n]``: this rank's own candidates; short lists are filled up."""
    columns: Tensor
    """``[B or 1, lists, n]``: their columns in the whole lists."""
    void: Tensor | None
    """``[B or 1, lists, n]``: True where a list was filled up; None if none was."""


class _Scores(NamedTuple):
    scores: Tensor
    """``[H, T, n]`` float32"""
    numbers: Tensor
    """``[n]``: the numbers of the candidates, ascending."""
    own: Tensor
    """``[n]``: False for candidates that only precede a run of this rank's blocks."""


class ShardedSelection(Selection):
    """A ``Selection`` that chooses together with the other ranks."""

    def __init__(self, share: Share, *options: Any) -> None:
        """Take a rank's share, and the ``options`` of ``Selection``."""
        super().__init__(*options)
        self.share, self.ranks = share, share.ranks
        self.last = ShortDocuments()
        """The last blocks of short documents."""

    def own_part(self, candidates: Candidates, chosen: CandidateLists) -> OwnPart:
        """Return this rank's part of ``chosen``."""
        mine = self._owners(candidates)[chosen.numbers] == self.ranks.rank
        most = int(mine.sum(-1).max())
        columns = (~mine).long().sort(dim=-1, stable=True).indices[..., :most]
        void = ~mine.gather(-1, columns)
        numbers, slots, scores = (each.gather(-1, columns) for each in (chosen.numbers, chosen.slots, chosen.scores))
        if not bool(void.any()):
            return OwnPart(CandidateLists(numbers, slots, scores), columns, None)
        return OwnPart(CandidateLists(numbers.where(~void, numbers[~void][0]), slots, scores), columns, void)

    def _owners(self, candidates: Candidates) -> Tensor:
        """Return the rank of each candidate, ``[N]``."""
        parts = [
            self.share.owners(source.document, torch.arange(blocks.start, blocks.stop))
            for source, blocks in candidates.parts
        ]
        return torch.cat(parts)

    def _route_row(
        self, candidates: Candidates, layer: int, codes: Tensor, query: Query | None
    ) -> tuple[Tensor, Tensor]:
        options = self.retrieval
        units, weights = units_and_weights(codes, candidates)
        scores, numbers, own = self._scored(candidates, layer, units)
        moments = self.ranks.moments(scores[0][:, own])
        blocks = late_interaction(scores[0], weights, moments)
        follows = candidates.consecutive()[numbers]
        follows[1:] &= numbers[1:] == numbers[:-1] + 1
        follows[:1] = False
        blocks = inherited(blocks, follows.to(blocks.device))
        if query is not None and options.words:
            blocks = blocks + options.words * self.words.score(candidates, query)[numbers].to(blocks.device)
        chosen, best = self.ranks.best(blocks[own], numbers[own], self.slots(candidates))
        return chosen[None], best[None]

    def _layer_row(
        self, candidates: Candidates, layer: int, queries: Sequence[Tensor], lists: int
    ) -> tuple[Tensor, Tensor]:
        scores, numbers, own = self._scored(candidates, layer, queries)
        mine, pool = scores[..., own], self.retrieval.pool
        moments = self.ranks.moments(mine.amax(1) if pool == "max" else mine.mean(1))
        blocks = pooled(mine, pool=pool, lists=lists, moments=moments)
        return self.ranks.best(blocks, numbers[own], self.slots(candidates))

    def _scored(self, candidates: Candidates, layer: int, queries: Sequence[Tensor]) -> _Scores:
        """Score this rank's candidates, and the one before each run of them."""
        parts, stop = [], 0
        for source, blocks in candidates.parts:
            stop += len(blocks)
            ids = torch.arange(blocks.start, blocks.stop)
            own = self.share.mine(source.document, ids)
            wanted = own.clone()
            wanted[:-1] |= own[1:]  # a block passes some of its score on to the next one
            ids, own = ids[wanted], own[wanted]
            last = len(ids) and int(ids[-1]) == blocks.stop - 1
            tokens = candidates.incomplete.get(stop - 1) if last else None
            part = ShortDocument(source.document, source.state.edits, blocks, tokens)
            short = len(blocks) <= SHORT and len(candidates.parts) > 1
            scores = self._scores_of(source, layer, ids, part, queries[source.memory].cpu(), short=short)
            parts.append(_Scores(scores, ids - blocks.stop + stop, own))
        return _Scores(*(torch.cat(each, -1) for each in zip(*parts, strict=True)))

    def _scores_of(
        self, source: AttachedDocument, layer: int, ids: Tensor, part: ShortDocument, queries: Tensor, *, short: bool
    ) -> Tensor:
        """Score the blocks ``ids [n]`` of a ``part``: ``[H, T, n]``; ``short``: as blocks of short documents."""
        full, scores = ids if part.tokens is None else ids[:-1], [queries.new_empty(*queries.shape[:2], 0)]
        if len(full):
            scores.append(self.share.index(source.document, layer, full).score(queries, allowed=full)[0])
        if part.tokens is not None:
            last = part._replace(blocks=part.blocks[-1:])
            spec = last.document.memory.spec
            if short:  # in the dtype of an index
                scores.append(self.last.score(source.memory, layer, (last,), queries))
            else:
                keys = last.document.layer(layer).landmarks(last.blocks)[0]
                scores.append(best_of(incomplete_landmarks(keys, part.tokens, spec.block_size), queries).unsqueeze(-1))
        return torch.cat(scores, -1)


def attend_together(
    ranks: Ranks, fetched: range, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Attend to the blocks that all ranks have fetched, and once to everything else.

    Like ``attend``: ``q [B, H, T, D]``, and this rank's ``keys, values [B, heads, n, D]``. Its part of the lists has
    the keys in the range ``fetched``.
    """
    mask = None if mask is None else whole_mask(mask, q.shape[1], keys.shape[2])
    if ranks.rank:
        here = slice(fetched.start, fetched.stop)
        keys, values, mask = keys[:, :, here], values[:, :, here], None if mask is None else mask[..., here]
        options["sinks"] = None
    if keys.shape[2]:
        out, lse = block_attention(q, keys, values, mask=mask, **options)
    else:
        out, lse = q.new_zeros(*q.shape[:3], values.shape[-1]), q.new_full(q.shape[:3], -torch.inf)
    told = ranks.gathered(torch.cat([out.float(), lse.float().unsqueeze(-1)], -1))
    merged, _ = merge_attention([each[..., :-1] for each in told], [each[..., -1] for each in told])
    return merged.to(q.dtype)
