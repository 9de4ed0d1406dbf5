"""Pictures of needles, of a memory, and of the blocks retrieved from it: matplotlib figures.

All are readable in black and white: amounts are shades of grey, kinds have hatches or markers. Texts of documents on an
axis are shown unchanged, and never taken for formulas.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument, NotFound, ReadOnlyMemory
from memstore.memory import Document
from memstore.memory.search import check_layer
from memstore.memory.traces import KEPT, TIERS, Look, Step, Trace, counted, most_weight
from memstore.readers.audit import Audit, pieces

if TYPE_CHECKING:
    from memstore.eval.run import CellResult

Numbers = npt.NDArray[np.floating[Any]]

WIDEST = 11.0
"""Inches."""
PER_INCH = 18
"""Letters of a caption, at most."""
SUFFIXES = (".png", ".svg")


def figure_class() -> Any:
    """Return ``matplotlib.figure.Figure``, or raise an error that says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise NotFound("pictures need the package matplotlib: pip install 'torch-memstore[eval]'") from None
    return Figure


def check_picture(path: Path) -> None:
    """Raise unless a picture can be written to ``path``: before hours of measuring, not after."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(f"the picture {path} must end in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise NotFound(f"the folder {path.parent} does not exist: create it, or choose another folder for the picture.")
    figure_class()


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


# No meaning depends on a colour that a printer or an eye may lack. Grey files are also half as large.
def new_figure(width: float, height: float, *, title: str, caption: str, columns: int = 1) -> tuple[Any, Any]:
    """Make a figure of the given inches, at least 5 by 2.5, with its title above and its caption below, and its axes.

    Several ``columns`` of axes share their rows.
    """
    width, height = min(WIDEST, max(5.0, width)), max(2.5, height)
    lines = textwrap.wrap(caption, int(width * PER_INCH))
    figure = figure_class()(figsize=(width, height + 0.13 * len(lines)), layout="constrained")
    figure.suptitle(drawable(title), fontsize="medium")
    figure.supxlabel(drawable("\n".join(lines), lines=True), fontsize="x-small", x=0.02, ha="left")
    return figure, figure.subplots(1, columns, sharey=True)


def drawable(text: str, *, longest: int | None = None, lines: bool = False) -> str:
    """``text`` as a label: on one line unless ``lines``, without formulas and without letters that the font lacks."""
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(_drawn(letter, lines=lines) for letter in text)


def _drawn(letter: str, *, lines: bool) -> str:
    if lines and letter == "\n":
        return letter
    if not letter.isprintable():
        return letter.encode("unicode_escape", "backslashreplace").decode()
    if letter == "$":
        return r"\$"  # otherwise two of them make a formula
    return letter if _in_font(letter) else "□"


@cache
def _in_font(letter: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return bool(get_font(findfont("DejaVu Sans")).get_char_index(ord(letter)))


def count_axis(axis: Any, most: int = 8, scale: float = 1.0) -> None:
    """Write whole numbers with commas on an axis, at ``most`` places; a step of it counts ``scale``."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:,.0f}"))


def bins(count: int, most: int) -> list[range]:
    """Cut ``range(count)`` into at most ``most`` parts of nearly equal length, none of them empty."""
    number = min(count, most)
    edges = [count * place // number for place in range(number + 1)] if number else [0]
    return [range(start, stop) for start, stop in pairwise(edges)]


def pooled(values: Numbers, parts: list[range]) -> Numbers:
    """Return means of ``values [..., n]`` over parts of the last dimension: ``[..., len(parts)]``."""
    return np.stack([values[..., part.start : part.stop].mean(-1) for part in parts], -1)


def ink(figure: Any, axes: Any, cells: Numbers, label: str) -> None:
    """Draw ``cells [rows, columns]`` in shades of grey, larger values darker, with a scale beside them."""
    largest = float(cells.max()) or 1.0
    image = axes.imshow(cells, cmap="Greys", aspect="auto", interpolation="nearest", vmin=0.0, vmax=largest)
    _scale(figure.colorbar(image, ax=axes, pad=0.01), label)


def _scale(bar: Any, label: str) -> None:
    bar.set_label(label, fontsize="small")
    bar.ax.tick_params(labelsize="small")


def separate(axes: Any, rows: int, columns: int) -> None:
    """Draw thin lines between cells, if the cells are few enough to tell them apart."""
    if rows <= 80:
        axes.set_yticks([row - 0.5 for row in range(1, rows)], minor=True)
    if columns <= 80:
        axes.set_xticks([column - 0.5 for column in range(1, columns)], minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.5)
    axes.tick_params(which="minor", length=0)


# Needles: which share of the answers is right, by length of the haystack and depth of the needle.

BINS = 5
"""Rows of the picture if depths are random."""
Cell = tuple[int, int]
"""Right answers, and samples."""


def draw_picture(rows: Sequence[CellResult], path: Path, *, title: str, caption: str) -> None:
    """Write the heat map of ``rows`` to ``path``, in the format of its ending. Needs matplotlib."""
    lengths = sorted({row.length for row in rows})
    labels, cells = _grid(rows, lengths)
    # 1.2 by 0.55 inches a cell, and room for labels.
    figure, axes = new_figure(2.2 + 1.2 * len(lengths), 2.2 + 0.55 * len(labels), title=title, caption=caption)
    _draw_grid(axes, cells)
    axes.set_xticks(range(len(lengths)), [tokens_label(length) for length in lengths])
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("length of the haystack [tokens]")
    axes.set_ylabel("depth of the needle [%]")
    save_picture(figure, path)


def tokens_label(tokens: int) -> str:
    """Format powers of two as ``64K`` and ``1M``, other numbers in full."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


def _grid(rows: Sequence[CellResult], lengths: Sequence[int]) -> tuple[list[str], list[list[Cell]]]:
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


def _draw_grid(axes: Any, cells: list[list[Cell]]) -> None:
    shades = [[right / count if count else float("nan") for right, count in row] for row in cells]
    axes.imshow(shades, cmap="gray", vmin=0, vmax=1, aspect="auto")
    axes.set_facecolor("white")
    for y, row in enumerate(cells):
        for x, (right, count) in enumerate(row):
            text = f"{100 * right / count:.0f}%\n{right}/{count}" if count else "no sample"
            dark = count and right / count < 0.5
            axes.text(x, y, text, ha="center", va="center", fontsize="small", color="white" if dark else "black")
    separate(axes, len(cells), len(cells[0]))


# Traces: which blocks each generated token used, where they came from, how clearly they were chosen.

ROWS = 32
"""Blocks with a row of their own, at most."""
COLUMNS = 400
"""Steps with a column of their own, at most; more are pooled."""
WORDS = 72
"""Steps up to which their tokens are written below."""
SHADES = {
    "device": ("white", ""),
    "host": ("0.75", ""),
    "disk": ("0.35", ""),
    "own": ("white", "////"),
    KEPT: ("white", ".."),
}
"""Grey and hatch of each tier: the farther away, the darker. Kept blocks were not fetched."""


# Rows are the 32 blocks with most weight, not positions in the document. A token uses a few of 300,000 blocks, so each
# would be thinner than a pixel. The last row shows the largest of the other blocks, on the same scale.
def heat(trace: Trace, *, words: Sequence[str] | None = None, layer: int | None = None, head: int | None = None) -> Any:
    """Draw generated tokens by blocks, weight as ink. The blocks with most weight have rows of their own, in order.

    Args:
        trace: of one generation.
        words: the text of each step's token, if it is known.
        layer: the weights of this layer alone, else the mean over layers.
        head: the weights of this query head alone, else the mean over heads.

    Raises:
        InvalidArgument: nothing was retrieved.
    """
    steps = _steps(trace)
    by_step = [{(name, at): w for name, at, w in most_weight([step], layer=layer, head=head)} for step in steps]
    used = [(name, at) for name, at, _ in most_weight(steps, layer=layer, head=head)]
    names, others = sorted(used[:ROWS]), len(used[ROWS:])
    cells = np.array([[weights.get(block, 0.0) for weights in by_step] for block in names])
    if others:  # the largest of each step, so that the scale is the same for all rows
        rest = [max((weight for block, weight in each.items() if block not in names), default=0.0) for each in by_step]
        cells = np.vstack([cells, rest])
    if not names:
        raise InvalidArgument(
            f"trace {trace.number} retrieved no block{_where(layer, head)}; choose another trace, layer or head"
        )
    parts = bins(len(steps), COLUMNS)
    cells = pooled(cells, parts)
    rows, columns = cells.shape
    figure, axes = new_figure(
        3.4 + 0.17 * columns,
        1.7 + 0.19 * rows,
        title=f"Retrieved blocks of each generated token{_where(layer, head)}",
        caption=f"{_caption(trace)} Ink: weight of a block in the output, mean over {_means(layer, head)}."
        + (f" Others: the largest of {others:,} further blocks." if others else ""),
    )
    ink(figure, axes, cells, "weight")
    separate(axes, rows, columns)
    several = len({name for name, _ in names}) > 1
    labels = [f"{drawable(name, longest=24)}  {at:,}" if several else f"{at:,}" for name, at in names]
    axes.set_yticks(range(rows), [*labels, "others"] if others else labels, fontsize="small")
    axes.set_ylabel("document and block" if several else f"block of {drawable(names[0][0], longest=24)}")
    _token_axis(axes, steps, words, parts)
    return figure


def tiers(trace: Trace) -> Any:
    """Draw the blocks of each step by the tier that they were fetched from, or kept from the step before.

    Raises ``InvalidArgument`` if there are none.
    """
    steps = _steps(trace)
    counts = np.array([counted(step) for step in steps], float).T
    if not counts.sum():
        raise InvalidArgument(f"trace {trace.number} retrieved no block; choose another trace")
    parts = bins(len(steps), COLUMNS // 4)
    counts = pooled(counts, parts)
    figure, axes = new_figure(
        3.0 + 0.12 * len(parts),
        3.4,
        title="Where retrieved blocks came from",
        caption=f"{_caption(trace)} Entries of all lists of all layers; a block in two lists counts twice.",
    )
    below = np.zeros(len(parts))
    for name, row in zip((*TIERS, KEPT), counts, strict=True):
        if row.any():
            shade, hatch = SHADES[name]
            style = {"color": shade, "hatch": hatch, "edgecolor": "black", "linewidth": 0.4}
            axes.bar(range(len(parts)), row, 1.0, bottom=below, label=name, **style)
            below += row
    axes.set_xlim(-0.6, len(parts) - 0.4)
    axes.set_ylabel("blocks in the lists" + (" (mean)" if len(parts) < len(steps) else ""))
    count_axis(axes.yaxis)
    figure.legend(title="tier", fontsize="small", title_fontsize="small", loc="outside right center", frameon=False)
    _step_axis(axes, parts)
    return figure


def margins(trace: Trace, *, layer: int | None = None) -> Any:
    """Draw by how much the best block of each list led the second one and the last one, step by step.

    A trace holds only the scores of retrieved blocks. An audit, or ``document_margins``, shows how far behind the next
    block was. Raises ``InvalidArgument`` if no list has two blocks.
    """
    steps = _steps(trace)
    leads = [_leads(step.looks, layer) for step in steps]
    if not any(len(each) for each in leads):
        raise InvalidArgument(
            f"no top-k list of trace {trace.number}{_where(layer, None)} has two blocks to compare; choose "
            "another trace or layer"
        )
    parts = bins(len(steps), COLUMNS)
    figure, axes = new_figure(
        3.5 + 0.1 * len(parts),
        3.4,
        title=f"How clearly the best block stood out{_where(layer, None)}",
        caption=f"{_caption(trace)} Median over lists, and from the least to the largest in grey. In the units of "
        "scores, which differ between mechanisms and layers.",
    )
    places = np.arange(len(parts))
    for column, (name, marker, line) in enumerate((("second", "o", "-"), ("last", "s", "--"))):
        groups = [np.concatenate([leads[step][:, column] for step in part]) for part in parts]
        low, middle, high = np.array(
            [np.quantile(group, (0, 0.5, 1)) if len(group) else np.full(3, np.nan) for group in groups]
        ).T
        axes.fill_between(places, low, high, color="0.85" if column else "0.7", alpha=0.7, linewidth=0)
        style = {"marker": marker, "markersize": 3.5, "markevery": max(1, len(parts) // 40), "color": "black"}
        axes.plot(places, middle, line, label=f"over the {name}", **style)
    axes.set_ylabel("lead of the best block [score]")
    axes.margins(x=0.02)
    axes.set_ylim(bottom=0)
    figure.legend(fontsize="small", loc="outside right center", frameon=False)
    _step_axis(axes, parts)
    return figure


def _steps(trace: Trace) -> list[Step]:
    steps = [step for step in trace.steps() if step.looks]
    if not steps:
        raise InvalidArgument(f"no step of trace {trace.number} retrieved a block; choose another trace")
    return steps


def _leads(looks: Sequence[Look], layer: int | None) -> Numbers:
    """Return ``[lists, 2]``: score of the best block of each list, minus that of the second and of the last one."""
    leads = []
    for look in (look for look in looks if layer in (None, look.layer)):
        for scores, there in zip(look.scores, look.document >= 0, strict=True):
            found = np.sort(scores[there & np.isfinite(scores)])[::-1]
            if len(found) > 1:
                leads.append([found[0] - found[1], found[0] - found[-1]])
    return np.array(leads, np.float64).reshape(-1, 2)


def _token_axis(axes: Any, steps: Sequence[Step], words: Sequence[str] | None, parts: list[range]) -> None:
    if words is None or len(steps) > WORDS:
        _step_axis(axes, parts)
        return
    said = [words[step.number] if step.number < len(words) else "" for step in steps]
    labels = [drawable(each.strip(" ") or each, longest=14) for each in said]
    turned = 90 if max(map(len, labels)) > 2 else 0
    axes.set_xticks(range(len(steps)), labels, rotation=turned, fontsize="small")
    axes.set_xlabel("generated token")


def _step_axis(axes: Any, parts: list[range]) -> None:
    steps = parts[-1].stop / len(parts)
    count_axis(axes.xaxis, 12, steps)
    axes.set_xlabel("step (0 chose the first token)" + (f", {steps:.1f} in a column" if steps > 1 else ""))


def _where(layer: int | None, head: int | None) -> str:
    return ("" if layer is None else f", layer {layer}") + ("" if head is None else f", head {head}")


def _means(layer: int | None, head: int | None) -> str:
    if layer is None:
        return "layers" if head is not None else "layers and heads"
    return "heads" if head is None else "nothing"


def _caption(trace: Trace) -> str:
    """Return the caption of a generation: the model, the mechanism, the question."""
    info = trace.info
    question = " ".join(str(info.get("question") or "").split())
    asked = f" asked “{question[-100:]}”" if question else ""
    return f"Trace {trace.number}: {info.get('model') or 'a model'} ({info.get('mechanism')}){asked}."


# Landmarks of a document: how alike its blocks are, and how clearly a search would tell them apart.

CELLS = 160
"""Cells on a side, at most: more blocks are pooled."""
ASKING = 512
"""Blocks that act as queries for the margins, at most."""


# The mean of all products of two groups is the product of their means. So no pair is computed, and 300,000 blocks are
# read once.
def similarity(document: Document, *, layer: int | None = None) -> Any:
    """Draw the cosine of the landmarks of every two blocks, or the mean of all pairs if a cell has several blocks.

    ``layer``: one that has landmarks, by default the last. Raises ``InvalidArgument`` for another, or without blocks.
    """
    layer = _layer(document, layer)
    blocks = document.complete_blocks
    parts = bins(len(blocks), CELLS)
    cells = _cosines(document, layer, parts)
    size = 2.4 + min(4.2, max(1.6, 0.25 * len(parts)))
    figure, axes = new_figure(
        size + 1.4,
        size,
        title=f"Likeness of the landmarks of {drawable(document.name, longest=32)}, layer {layer}",
        caption=f"{len(blocks):,} block{'' if len(blocks) == 1 else 's'} of {document.memory.spec.block_size} tokens"
        + (f", {len(blocks) / len(parts):.0f} in a cell: means over all pairs" if len(parts) < len(blocks) else "")
        + ". Shades from the 5th to the 95th percentile of what is off the diagonal.",
    )
    low, high = _range(cells)
    first, stop = blocks.start - 0.5, blocks.stop - 0.5
    image = axes.imshow(
        cells, cmap="Greys", vmin=low, vmax=high, interpolation="nearest", extent=(first, stop, stop, first)
    )
    _scale(figure.colorbar(image, ax=axes, pad=0.02, extend="both"), "cosine, mean over key heads")
    for axis in (axes.xaxis, axes.yaxis):
        count_axis(axis)
    axes.set_xlabel("block")
    axes.set_ylabel("block")
    return figure


def document_margins(document: Document, *, layer: int | None = None, top_k: int = 8) -> Any:
    """Draw how clearly a search with a block's landmark tells the ``top_k`` best other blocks from the next ones.

    The search is exact. Raises ``InvalidArgument`` if there are too few blocks.
    """
    layer = _layer(document, layer)
    blocks = document.complete_blocks
    if len(blocks) < top_k + 2:
        raise InvalidArgument(
            f"document {document.name!r} has {len(blocks)} searchable blocks, but comparing {top_k} of them with "
            f"the next one needs {top_k + 2}: use a smaller top_k"
        )
    asking = [blocks[part.start] for part in bins(len(blocks), ASKING)]
    scores = _best_others(document, layer, asking, top_k + 1)
    figure, axes = new_figure(
        7.5,
        3.6,
        title=f"Score margins in {drawable(document.name, longest=32)}, layer {layer}",
        caption=f"Each of {len(asking):,} of the {len(blocks):,} blocks asks with its own landmark; a block never "
        "finds itself. Scores are inner products of landmarks, mean over key heads. Equal scores have no "
        "mark.",
    )
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
    if not len(document.complete_blocks):
        size = document.memory.spec.block_size
        raise InvalidArgument(
            f"document {document.name!r} has {len(document)} tokens, but only whole blocks of {size} tokens have "
            "landmarks: choose a longer document"
        )
    return check_layer(document.memory, layer)


def _cosines(document: Document, layer: int, parts: list[range]) -> Numbers:
    """Return the mean cosine of every two parts of the blocks, as a product of means: no pair is computed."""
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
    """Return a range of shades that shows the differences, not what all landmarks share."""
    off = cells[~np.eye(len(cells), dtype=bool)]
    if not len(off):
        return 0.0, 1.0
    low, high = (float(x) for x in np.quantile(off, (0.05, 0.95)))
    return (low, high) if high - low > 1e-6 else (low - 0.5, low + 0.5)


def _best_others(document: Document, layer: int, asking: list[int], count: int) -> Numbers:
    """Return the best ``count`` scores of other blocks for each block in ``asking``, ``[n, count]``, best first."""
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


# Audits: captured mass and recall, by layer and head.

WRITTEN = 64
"""Cells up to which each shows its number."""


def audit_picture(audit: Audit) -> Any:
    """Draw captured mass and recall of each layer and head in shades, and their means over heads as lines.

    Raises ``InvalidArgument`` for an audit without a layer.
    """
    if not audit.layers:
        raise InvalidArgument("no layer of this audit retrieves, so there is nothing to draw")
    captured = _table([layer.captured for layer in audit.layers])
    recall = _table([layer.recall for layer in audit.layers])
    rows, heads = captured.shape
    stored, unit = (audit.blocks, "blocks") if audit.stored_tokens is None else (audit.stored_tokens, "tokens")
    mass = "the softmax over all scores" if audit.memory is None else f"the attention on {unit}"
    place = "group of upper layers" if audit.mechanism == "drt" else "layer"
    figure, (left, middle, right) = new_figure(
        5.2 + 0.42 * min(heads, 16),
        2.0 + 0.2 * rows,
        title=f"Retrieved blocks, compared with the true best: {', '.join(audit.documents)}",
        caption=f"{audit.top_k:,} of {stored:,} {unit} retrieved, {audit.steps} steps. Captured mass: the share of "
        f"{mass} that went to the retrieved ones. Recall: the share of the true best {unit} that was "
        "retrieved. White is 0%, black is 100%. Dotted: both by chance.",
        columns=3,
    )
    _cells(left, captured, "captured mass")
    _cells(middle, recall, "recall")
    _lines(right, captured, recall, audit.chance)
    ticks = range(0, rows, max(1, -(-rows // 16)))
    left.set_yticks(list(ticks), [str(audit.layers[row].layer) for row in ticks])
    left.set_ylabel(place)
    return figure


def _table(rows: list[torch.Tensor]) -> Numbers:
    """Return ``[layers, H]``, with NaN if a layer has fewer heads."""
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
