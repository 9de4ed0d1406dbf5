"""The picture of an audit: captured mass and recall, per layer and head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memstore.errors import InvalidArgument
from memstore.eval.pictures.canvas import Numbers, new_figure
from memstore.readers.audit import Audit

WRITTEN = 64
"""Cells up to which their number is written into them."""


def audit_picture(audit: Audit) -> Any:
    """Captured mass and recall of each layer and head in shades, and their means over heads as lines.

    Raises ``InvalidArgument`` for an audit without a layer.
    """
    if not audit.layers:
        raise InvalidArgument("this audit has no layer that retrieves; there is nothing to draw")
    captured = _table([layer.captured for layer in audit.layers])
    recall = _table([layer.recall for layer in audit.layers])
    rows, heads = captured.shape
    stored, unit = (audit.blocks, "blocks") if audit.stored_tokens is None else (audit.stored_tokens, "tokens")
    mass = "the softmax over all scores" if audit.memory is None else f"the attention on {unit}"
    place = "group of upper layers" if audit.mechanism == "drt" else "layer"
    figure = new_figure(
        5.2 + 0.42 * min(heads, 16),
        2.0 + 0.2 * rows,
        title=f"What was retrieved, of what should have been: {', '.join(audit.documents)}",
        caption=f"{audit.top_k:,} of {stored:,} {unit} retrieved, {audit.steps} steps. Captured mass: share of "
        f"{mass} that the retrieved ones hold. Recall: of the true best {unit}. White is 0, black is 100%. "
        "Dotted: both by chance.",
    )
    left, middle, right = figure.subplots(1, 3, sharey=True)
    _cells(left, captured, "captured mass")
    _cells(middle, recall, "recall")
    _lines(right, captured, recall, audit.chance)
    ticks = range(0, rows, max(1, -(-rows // 16)))
    left.set_yticks(list(ticks), [str(audit.layers[row].layer) for row in ticks])
    left.set_ylabel(place)
    return figure


def _table(rows: list[torch.Tensor]) -> Numbers:
    """``[layers, H]``; NaN where a layer has fewer heads."""
    most = max(map(len, rows))
    return np.array([[*row.tolist(), *[float("nan")] * (most - len(row))] for row in rows])


def _cells(axes: Any, cells: Numbers, title: str) -> None:
    rows, heads = cells.shape
    axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize="small")
    axes.set_xlabel("head")
    axes.set_xticks(list(range(0, heads, max(1, -(-heads // 8)))))
    if cells.size > WRITTEN:
        return
    for y in range(rows):
        for x in range(heads):
            if not np.isnan(cells[y, x]):
                shade = "white" if cells[y, x] > 0.5 else "black"
                number = f"{100 * cells[y, x]:.0f}"
                axes.text(x, y, number, ha="center", va="center", fontsize="x-small", color=shade)


def _lines(axes: Any, captured: Numbers, recall: Numbers, chance: float) -> None:
    places = np.arange(len(captured))
    for cells, style in ((captured, "o-"), (recall, "s--")):
        known = ~np.isnan(cells)
        means = np.where(known, cells, 0).sum(1) / np.maximum(known.sum(1), 1)
        axes.plot(100 * means, places, style, color="black", markersize=4, mfc="white")
    axes.axvline(100 * chance, linestyle=":", color="0.4", linewidth=1)
    axes.set_xlim(-3, 103)
    axes.set_xlabel("mean over heads [%]")
    axes.grid(axis="x", color="0.85", linewidth=0.5)
    axes.set_title("○ captured mass  □ recall", fontsize="small")
