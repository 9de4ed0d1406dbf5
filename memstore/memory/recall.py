"""How much of the truth an approximate index finds, measured against every landmark in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memstore.index import VectorIndex
from memstore.memory.index_files import Source

TOP_K = 8
LOGGED = 64
"""Queries that are remembered, or taken from the keys where nobody has searched yet."""


def recall(index: VectorIndex, source: Source, blocks: range, logged: Sequence[Tensor]) -> dict[str, Any]:
    """Share of the true best eight of ``blocks`` that ``index`` finds: JSON values for ``memstore stats``.

    ``logged`` are queries ``[H, 1, D]`` of the last searches. Without them keys of the index are its queries, which is
    easier than real ones: the answer says which of the two it was.
    """
    alike = [queries for queries in logged if queries.shape == logged[-1].shape]
    queries = torch.cat(alike, 1).float() if alike else _keys(source, blocks)
    found = index.search(queries, TOP_K).ids
    truth = _truth(source, blocks, queries)
    hits = (found.unsqueeze(3) == truth.unsqueeze(2)).any(2) & (truth >= 0)
    share = float(hits.sum() / (truth >= 0).sum().clamp(min=1))
    return {"recall": round(share, 4), "recall_at": TOP_K, "recall_queries": "logged" if alike else "keys"}


def _keys(source: Source, blocks: range) -> Tensor:
    """The first key of some blocks: ``[G, T, D]``."""
    some = [blocks[len(blocks) * place // LOGGED] for place in range(min(LOGGED, len(blocks)))]
    rows = [next(iter(source.landmarks.read(source.places, range(b, b + 1))))[1] for b in dict.fromkeys(some)]
    return torch.cat(rows)[:, :, 0].transpose(0, 1).contiguous()


def _truth(source: Source, blocks: range, queries: Tensor) -> Tensor:
    """The best blocks by brute force, a piece of the store at a time: ``[H, T, TOP_K]``, -1 where there are fewer."""
    scores = torch.full((*queries.shape[:2], TOP_K), -torch.inf)
    ids = torch.full(scores.shape, -1)
    for piece, keys in source.landmarks.read(source.places, blocks):
        heads = keys.repeat_interleave(len(queries) // keys.shape[1], 1)  # [n, H, P, D]
        new = torch.einsum("htd,nhpd->htnp", queries, heads).amax(3)
        numbers = torch.arange(piece.start, piece.stop).expand(new.shape)
        scores, order = torch.cat([scores, new], 2).topk(TOP_K, dim=2)
        ids = torch.cat([ids, numbers], 2).gather(2, order)
    return ids
