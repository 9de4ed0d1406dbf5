"""Pictures of shares as bars, readable in black and white."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from memstore.eval.pictures import figure_class, save_picture

Bars = Mapping[str, Mapping[str, float]]
"""Shares from 0 to 1 by name, for each group of bars."""
GREYS = ("0.2", "0.6", "0.85", "0.4", "0.75", "0.95")


def draw_bars(panels: Mapping[str, Bars], path: Path, *, title: str, caption: str) -> None:
    """Write bars to ``path``, in the format of its ending, each panel's under its title. Needs matplotlib."""
    heights = [sum(len(shares) + 1 for shares in groups.values()) for groups in panels.values()]
    size = 8.0, 1.6 + 0.19 * sum(heights) + 0.6 * len(panels)  # inches
    figure = figure_class()(figsize=size, layout="constrained")
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (words, groups) in zip(rows, panels.items(), strict=True):
        _draw_bars(axes, groups)
        axes.set_xlabel(words, fontsize="small")
    rows[0].set_title(title, fontsize="medium")
    figure.supxlabel(caption, fontsize="x-small")
    save_picture(figure, path)


def _draw_bars(axes: Any, groups: Bars) -> None:
    bars: dict[str, list[tuple[int, float]]] = {}
    at, middles = 0, list[float]()
    for shares in groups.values():
        middles.append(at + (len(shares) - 1) / 2)
        for place, (name, share) in enumerate(shares.items(), at):
            bars.setdefault(name, []).append((place, share))
        at += len(shares) + 1
    for grey, (name, drawn) in zip(cycle(GREYS), bars.items(), strict=False):
        there = axes.barh(*zip(*drawn, strict=True), height=0.85, color=grey, edgecolor="0.2", label=name)
        axes.bar_label(there, fmt="%.2f", padding=2, fontsize="x-small")
    axes.set_yticks(middles, [*groups], fontsize="small")
    axes.set_ylim(at - 1.2, -0.8)
    axes.set_xlim(0, 1.06)
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
