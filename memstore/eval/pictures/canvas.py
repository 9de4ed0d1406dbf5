"""What all pictures share: figures of a fitting size, captions, labels that are safe to draw, and pooled axes."""

from __future__ import annotations

import textwrap
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from memstore.eval.picture import figure_class

Numbers = npt.NDArray[np.floating[Any]]

WIDEST = 11.0
"""Inches."""
PER_INCH = 18
"""Letters of a caption."""


# Nothing hangs on a colour that a printer or an eye does not have; grey files are half as large.
def new_figure(width: float, height: float, *, title: str, caption: str) -> Any:
    """An empty figure of so many inches, at least 5 by 2.5, with its title above and its caption below."""
    width, height = min(WIDEST, max(5.0, width)), max(2.5, height)
    lines = textwrap.wrap(caption, int(width * PER_INCH))
    figure = figure_class()(figsize=(width, height + 0.13 * len(lines)), layout="constrained")
    figure.suptitle(drawable(title), fontsize="medium")
    figure.supxlabel(drawable("\n".join(lines), lines=True), fontsize="x-small", x=0.02, ha="left")
    return figure


def drawable(text: str, *, longest: int | None = None, lines: bool = False) -> str:
    """``text`` as a label: on one line unless ``lines``, no formulas, and nothing that the font has no letter for."""
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(_drawn(letter, lines=lines) for letter in text)


def _drawn(letter: str, *, lines: bool) -> str:
    if lines and letter == "\n":
        return letter
    if not letter.isprintable():
        return letter.encode("unicode_escape", "backslashreplace").decode()
    if letter == "$":
        return r"\$"  # else two of them are a formula
    return letter if _in_font(letter) else "□"


@cache
def _in_font(letter: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return bool(get_font(findfont("DejaVu Sans")).get_char_index(ord(letter)))


def count_axis(axis: Any) -> None:
    """Whole numbers with commas."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def bins(count: int, most: int) -> list[range]:
    """``range(count)`` in at most ``most`` parts of nearly equal length, none of them empty."""
    number = min(count, most)
    edges = [count * place // number for place in range(number + 1)] if number else [0]
    return [range(start, stop) for start, stop in pairwise(edges)]


def pooled(values: Numbers, parts: list[range]) -> Numbers:
    """Means of ``values [..., n]`` over parts of the last dimension: ``[..., len(parts)]``."""
    return np.stack([values[..., part.start : part.stop].mean(-1) for part in parts], -1)


def ink(figure: Any, axes: Any, cells: Numbers, label: str, **options: Any) -> None:
    """Draw ``cells [rows, columns]`` in shades of grey, more being darker, with a scale beside them."""
    largest = float(np.nanmax(cells)) if cells.size and not np.isnan(cells).all() else 1.0
    limits = {"vmin": 0.0, "vmax": largest or 1.0} | options
    axes.set_facecolor("white")
    image = axes.imshow(cells, cmap="Greys", aspect="auto", interpolation="nearest", **limits)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label(label, fontsize="small")
    bar.ax.tick_params(labelsize="small")


def separate(axes: Any, rows: int, columns: int) -> None:
    """Thin lines between cells, where there are few enough to tell them apart."""
    if rows <= 80:
        axes.set_yticks([row - 0.5 for row in range(1, rows)], minor=True)
    if columns <= 80:
        axes.set_xticks([column - 0.5 for column in range(1, columns)], minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
