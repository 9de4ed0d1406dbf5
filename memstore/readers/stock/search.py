"""Which blocks of a memory a prompt would choose: a search by text, through the model that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memstore.attention import pooled
from memstore.memory.search import Match, best, check_layer
from memstore.readers.stock.visible import Candidates, Source

if TYPE_CHECKING:
    from memstore.readers.stock.attached import StockReader


def search(attached: StockReader, tokens: Tensor, top_k: int, layer: int | None) -> list[Match]:
    """The ``top_k`` blocks that the prompt ``tokens [n]`` finds among all complete ones, best first."""
    layer = check_layer(attached.memories[0], layer)
    candidates = _everything(attached)
    if not len(candidates):
        return []
    scores = _scores(attached, tokens, layer, candidates)
    parts, start = [], 0
    for source, blocks in candidates.parts:
        here = torch.arange(blocks.start, blocks.stop)
        parts.append((source.document, here, scores[start : start + len(blocks)]))
        start += len(blocks)
    return best(parts, top_k)


def _everything(attached: StockReader) -> Candidates:
    """All complete blocks: also those that a prompt would see without a search, at the document's two ends."""
    sources = [
        Source(document, number)
        for number, memory in enumerate(attached.memories)
        for document in attached.documents
        if document.memory is memory
    ]
    return Candidates(
        tuple((source, part) for source in sources for part in source.document.present(source.document.complete_blocks))
    )


def _scores(attached: StockReader, tokens: Tensor, layer: int, candidates: Candidates) -> Tensor:
    """Scores ``[N]`` as the prompt ``tokens [T]`` would give them to ``candidates`` in ``layer``."""
    selection, options = attached.selection, attached.retrieval
    asking = attached.asking(tokens)[layer]
    if not selection.by_layer:
        return selection.routed(candidates, layer, selection.encode(layer, asking[None])[0])
    queries = asking if options.query == "all" else asking[:, -options.span :]  # [H, t, D]
    scores = candidates.score(layer, [queries.float().cpu()] * candidates.memories)
    return pooled(scores, pool=options.pool, lists=1)[0]
