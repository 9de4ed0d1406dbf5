"""Pictures of results, readable in black and white: a heat map of needles."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument, NotFound, ReadOnlyMemory

if TYPE_CHECKING:
    from memstore.eval.run import CellResult

BINS = 5
"""Rows of the picture if depths are random."""
SUFFIXES = (".png", ".svg")
Cell = tuple[int, int]
"""Right answers, and samples."""


def check_picture(path: Path) -> None:
    """Raise unless a picture can be written to ``path``: before hours of measuring, not after."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(f"the picture {path} must end in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise NotFound(f"the folder {path.parent} does not exist: create it, or choose another folder for the picture.")
    figure_class()


def draw_picture(rows: Sequence[CellResult], path: Path, *, title: str, caption: str) -> None:
    """Write the heat map of ``rows`` to ``path``, in the format of its ending. Needs matplotlib."""
    lengths = sorted({row.length for row in rows})
    labels, cells = _cells(rows, lengths)
    # 1.2 by 0.55 inches a cell, and room for labels.
    figure = figure_class()(
        figsize=(max(5.0, 2.2 + 1.2 * len(lengths)), 2.2 + 0.55 * len(labels)), layout="constrained"
    )
    axes = figure.subplots()
    _draw_cells(axes, cells)
    axes.set_xticks(range(len(lengths)), [tokens_label(length) for length in lengths])
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("length of the haystack [tokens]")
    axes.set_ylabel("depth of the needle [%]")
    axes.set_title(title, fontsize="medium")
    figure.supxlabel(caption, fontsize="x-small")
    save_picture(figure, path)


def save_picture(figure: Any, path: Path) -> None:
    """Write a grey figure to ``path``, in the format of its ending.

    Raises ``ReadOnlyMemory`` if that is not allowed.
    """
    import matplotlib
    from PIL import Image

    kind, drawn = path.suffix[1:].lower(), io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(drawn, dpi=150, format=kind)
    try:
        if kind == "png":
            Image.open(drawn).convert("L").save(path, format=kind, optimize=True)  # half the bytes of colour pictures
        else:
            path.write_bytes(drawn.getvalue())
    except PermissionError:
        raise ReadOnlyMemory(f"the picture {path} cannot be written: permission denied. Choose another path.") from None


def tokens_label(tokens: int) -> str:
    """Format powers of two as ``64K`` and ``1M``, other numbers in full."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


def _cells(rows: Sequence[CellResult], lengths: Sequence[int]) -> tuple[list[str], list[list[Cell]]]:
    """Return the labels of the picture's rows, and their cells: a row for each depth, or for a fifth of random ones."""
    found: dict[tuple[float, int], list[bool]] = {}
    for row in rows:
        for each in row.outcomes:
            place = min(BINS - 1, int(each.depth * BINS)) if row.depth is None else row.depth
            found.setdefault((place, row.length), []).append(each.correct)
    if any(row.depth is None for row in rows):
        places: Sequence[float] = range(BINS)
        labels = [f"{100 * number // BINS}-{100 * (number + 1) // BINS}" for number in range(BINS)]
    else:
        places = sorted({place for place, _ in found})
        labels = [f"{100 * depth:g}" for depth in places]
    correct = [[found.get((place, length), []) for length in lengths] for place in places]
    return labels, [[(sum(each), len(each)) for each in row] for row in correct]


def _draw_cells(axes: Any, cells: list[list[Cell]]) -> None:
    shades = [[right / count if count else float("nan") for right, count in row] for row in cells]
    axes.imshow(shades, cmap="gray", vmin=0, vmax=1, aspect="auto")
    axes.set_facecolor("white")
    for y, row in enumerate(cells):
        for x, (right, count) in enumerate(row):
            text = f"{100 * right / count:.0f}%\n{right}/{count}" if count else "no sample"
            dark = count and right / count < 0.5
            axes.text(x, y, text, ha="center", va="center", fontsize="small", color="white" if dark else "black")
    for edge in range(1, len(cells)):
        axes.axhline(edge - 0.5, color="0.6", linewidth=0.8)
    for edge in range(1, len(cells[0])):
        axes.axvline(edge - 0.5, color="0.6", linewidth=0.8)


def figure_class() -> Any:
    """Return ``matplotlib.figure.Figure``, or raise an error that says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise NotFound("pictures need the package matplotlib: pip install 'torch-memstore[eval]'") from None
    return Figure
