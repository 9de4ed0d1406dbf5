"""Pictures of a document's landmarks: how alike its blocks are, and how clearly a search would tell them apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.eval.pictures.canvas import Numbers, bins, count_axis, drawable, new_figure
from memstore.memory import Document
from memstore.readers.audit import pieces

CELLS = 160
"""Cells on a side, at most: more blocks are put together."""
ASKING = 512
"""Blocks that ask for the margins, at most."""


# The mean of all products of two groups is the product of their means: no pair is ever looked at, and 300,000 blocks
# are read once.
def similarity(document: Document, *, layer: int | None = None) -> Any:
    """Cosines of the landmarks of every two blocks; the mean of all pairs where a cell stands for several blocks.

    ``layer``: one that has landmarks, by default the last. Raises ``InvalidArgument`` for another, or for no blocks.
    """
    layer = _layer(document, layer)
    blocks = document.complete_blocks
    parts = bins(len(blocks), CELLS)
    cells = _cosines(document, layer, parts)
    size = 2.4 + min(4.2, max(1.6, 0.25 * len(parts)))
    figure = new_figure(
        size + 1.4,
        size,
        title=f"Likeness of the landmarks of {drawable(document.name, longest=32)}, layer {layer}",
        caption=f"{len(blocks):,} block{'' if len(blocks) == 1 else 's'} of {document.memory.spec.block_size} tokens"
        + (f", {len(blocks) / len(parts):.0f} in a cell: means over all pairs" if len(parts) < len(blocks) else "")
        + ". Shades from the 5th to the 95th percentile of what is off the diagonal.",
    )
    axes = figure.subplots()
    low, high = _range(cells)
    image = axes.imshow(
        cells, cmap="Greys", vmin=low, vmax=high, interpolation="nearest", extent=_extent(blocks), aspect="equal"
    )
    bar = figure.colorbar(image, ax=axes, pad=0.02, extend="both")
    bar.set_label("cosine, mean over key heads", fontsize="small")
    bar.ax.tick_params(labelsize="small")
    for axis in (axes.xaxis, axes.yaxis):
        count_axis(axis)
    axes.set_xlabel("block")
    axes.set_ylabel("block")
    return figure


def document_margins(document: Document, *, layer: int | None = None, top_k: int = 8) -> Any:
    """How clearly a search with a block's own landmark tells the ``top_k`` best other blocks from the next ones.

    By exact search. Raises ``InvalidArgument`` where there are too few blocks.
    """
    layer = _layer(document, layer)
    blocks = document.complete_blocks
    if len(blocks) < top_k + 2:
        raise InvalidArgument(
            f"document {document.name!r} has {len(blocks)} searchable blocks; to compare {top_k} of them with the next "
            f"it needs {top_k + 2}: take a smaller top_k"
        )
    asking = [blocks[part.start] for part in bins(len(blocks), ASKING)]
    scores = _best_others(document, layer, asking, top_k + 1)
    figure = new_figure(
        7.5,
        3.6,
        title=f"Score margins in {drawable(document.name, longest=32)}, layer {layer}",
        caption=f"{len(asking):,} of {len(blocks):,} blocks ask with their own landmark; themselves left out. "
        "Scores are inner products of landmarks, mean over key heads. Equal scores have no mark.",
    )
    axes = figure.subplots()
    size = 3.0 if len(asking) > 100 else 5.0
    lead, edge = scores[:, 0] - scores[:, 1], scores[:, top_k - 1] - scores[:, top_k]
    axes.plot(asking, lead, "o", color="0.6", markersize=size, label="best over second", zorder=2)
    axes.plot(asking, edge, "x", color="black", markersize=size, label=f"number {top_k} over number {top_k + 1}")
    axes.set_xlabel("block that asks")
    axes.set_ylabel("margin [score]")
    if bool((edge > 0).any()):
        axes.set_yscale("log")  # a few blocks may stand out a thousand times as clearly as the others
    count_axis(axes.xaxis)
    figure.legend(fontsize="small", loc="outside right center", frameon=False)
    return figure


def _layer(document: Document, layer: int | None) -> int:
    layers = document.memory.spec.index_layers
    if not len(document.complete_blocks):
        size = document.memory.spec.block_size
        raise InvalidArgument(
            f"document {document.name!r} has {len(document)} tokens, and only whole blocks of {size} have landmarks: "
            "name a longer one"
        )
    if layer is not None and layer not in layers:
        raise InvalidArgument(
            f"layer {layer} has no landmarks; layers that have: {', '.join(map(str, layers)) or 'none'}"
        )
    if not layers:
        raise InvalidArgument("no layer of this memory has landmarks")
    return layers[-1] if layer is None else layer


def _cosines(document: Document, layer: int, parts: list[range]) -> Numbers:
    """Mean cosine of every two parts of the blocks. A mean of products is a product of means: no pair is looked at."""
    first = document.complete_blocks.start
    view, rows = document.layer(layer), []
    for part in parts:
        total: Tensor | None = None
        for piece in pieces(range(first + part.start, first + part.stop)):
            unit = F.normalize(view.landmarks(piece), dim=-1).mean(2).sum(0)  # [G, D]
            total = unit if total is None else total + unit
        assert total is not None
        rows.append((total / len(part)).flatten())
    means = torch.stack(rows)
    heads = document.memory.spec.key_heads
    cells: Numbers = (means @ means.T / heads).numpy()
    return cells


def _range(cells: Numbers) -> tuple[float, float]:
    """Shades that show what differs, whatever all landmarks have in common."""
    off = cells[~np.eye(len(cells), dtype=bool)]
    if not len(off):
        return 0.0, 1.0
    low, high = (float(x) for x in np.quantile(off, (0.05, 0.95)))
    return (low, high) if high - low > 1e-6 else (low - 0.5, low + 0.5)


def _extent(blocks: range) -> tuple[float, float, float, float]:
    return blocks.start - 0.5, blocks.stop - 0.5, blocks.stop - 0.5, blocks.start - 0.5


def _best_others(document: Document, layer: int, asking: list[int], count: int) -> Numbers:
    """The best ``count`` scores of other blocks for each that asks, ``[n, count]``, best first."""
    view = document.layer(layer)
    queries = torch.cat([view.landmarks(range(block, block + 1)).mean(2) for block in asking])  # [n, G, D]
    best = torch.full((len(asking), count), -torch.inf)
    itself = torch.tensor(asking)[:, None]
    for piece in pieces(document.complete_blocks):
        keys = view.landmarks(piece).mean(2)  # [m, G, D]
        scores = torch.einsum("ngd,mgd->nm", queries, keys) / queries.shape[1]
        scores = scores.masked_fill(itself == torch.arange(piece.start, piece.stop), -torch.inf)
        best = torch.cat([best, scores], 1).topk(count, 1).values
    numbers: Numbers = best.numpy()
    return numbers
