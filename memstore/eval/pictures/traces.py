"""Pictures of a trace: which blocks each generated token used, where they came from, how clearly they were chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memstore.errors import InvalidArgument
from memstore.eval.pictures.canvas import Numbers, bins, count_axis, drawable, ink, new_figure, pooled, separate
from memstore.memory.traces import KEPT, TIERS, Look, Step, Trace, counted, most_weight

ROWS = 32
"""Blocks that have a row of their own."""
COLUMNS = 400
"""Steps that have a column of their own; more are put together."""
WORDS = 72
"""Steps under which their token can be written."""
SHADES = {
    "device": ("white", ""),
    "host": ("0.75", ""),
    "disk": ("0.35", ""),
    "own": ("white", "////"),
    KEPT: ("white", ".."),
}
"""Grey and hatch of each tier: the darker, the further away. What was kept came from nowhere."""

Block = tuple[str, int]


# Rows are the 32 blocks with most weight, not positions in the document: a token uses a handful of 300,000 blocks,
# which would be less than a pixel each. What is left is one row with the largest of the others, on the same scale.
def heat(trace: Trace, *, words: Sequence[str] | None = None, layer: int | None = None, head: int | None = None) -> Any:
    """Generated tokens by blocks, weight as ink. Blocks with most weight have rows of their own, in order.

    Args:
        trace: of one generation.
        words: the text of each step's token, where it is known.
        layer: the weights of this layer alone, else the mean over layers.
        head: those of this query head alone, else the mean over heads.

    Raises:
        InvalidArgument: nothing was retrieved.
    """
    steps = _steps(trace)
    by_step = [{(name, at): w for name, at, w in most_weight([step], layer=layer, head=head)} for step in steps]
    names, cells, others = _rows(by_step)
    if not names:
        raise InvalidArgument(f"trace {trace.number} retrieved nothing{_where(layer, head)}; there is nothing to draw")
    parts = bins(len(steps), COLUMNS)
    cells = pooled(cells, parts)
    rows, columns = cells.shape
    figure = new_figure(
        3.4 + 0.17 * columns,
        1.7 + 0.19 * rows,
        title=f"Retrieved blocks of each generated token{_where(layer, head)}",
        caption=f"{_caption(trace)} Ink: weight of a block in the output, mean over {_means(layer, head)}."
        + (f" Others: the largest of {others:,} further blocks." if others else ""),
    )
    axes = figure.subplots()
    ink(figure, axes, cells, "weight")
    separate(axes, rows, columns)
    several = len({name for name, _ in names}) > 1
    labels = [f"{drawable(name, longest=24)}  {at:,}" if several else f"{at:,}" for name, at in names]
    axes.set_yticks(range(rows), [*labels, "others"] if others else labels, fontsize="small")
    axes.set_ylabel("document and block" if several else f"block of {drawable(names[0][0], longest=24)}")
    _token_axis(axes, steps, words, parts)
    return figure


def tiers(trace: Trace) -> Any:
    """Blocks that each step looked at, by the tier that they were brought from, or kept from the step before.

    Raises ``InvalidArgument`` for none.
    """
    steps = _steps(trace)
    counts = np.array([counted(step) for step in steps], float).T
    if not counts.sum():
        raise InvalidArgument(f"trace {trace.number} retrieved nothing; there is nothing to draw")
    parts = bins(len(steps), COLUMNS // 4)
    counts = pooled(counts, parts)
    figure = new_figure(
        3.0 + 0.12 * len(parts),
        3.4,
        title="Where retrieved blocks came from",
        caption=f"{_caption(trace)} Entries of all lists of all layers; a block in two lists counts twice.",
    )
    axes = figure.subplots()
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
    """By how much the best block of each list led the second one and the last one, step by step.

    A trace holds the scores of what was retrieved alone; how far the next block was behind is told by an audit, and by
    ``document_margins``. Raises ``InvalidArgument`` where no list has two blocks.
    """
    steps = _steps(trace)
    leads = [_leads(step.looks, layer) for step in steps]
    if not any(len(each) for each in leads):
        raise InvalidArgument(f"no list of trace {trace.number}{_where(layer, None)} has two blocks to compare")
    parts = bins(len(steps), COLUMNS)
    figure = new_figure(
        3.5 + 0.1 * len(parts),
        3.4,
        title=f"How clearly the best block stood out{_where(layer, None)}",
        caption=f"{_caption(trace)} Median over lists, and from the least to the largest in grey. In the units of "
        "scores, which differ between mechanisms and layers.",
    )
    axes = figure.subplots()
    places = np.arange(len(parts))
    for column, (name, marker, line) in enumerate((("second", "o", "-"), ("last", "s", "--"))):
        groups = [np.concatenate([leads[step][:, column] for step in part]) for part in parts]
        low, middle, high = _quantiles(groups)
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
        raise InvalidArgument(f"trace {trace.number} has no step that retrieved anything; there is nothing to draw")
    return steps


def _rows(by_step: list[dict[Block, float]]) -> tuple[list[Block], Numbers, int]:
    """The blocks with rows of their own, cells ``[rows, steps]``, and how many blocks the last row stands for.

    That row has the weight of one of them, the largest at each step, so that the scale is the same for all rows.
    """
    total: dict[Block, float] = {}
    for weights in by_step:
        for block, weight in weights.items():
            total[block] = total.get(block, 0.0) + weight
    best = sorted(sorted(total, key=lambda block: -total[block])[:ROWS])
    cells = np.array([[weights.get(block, 0.0) for weights in by_step] for block in best]).reshape(
        len(best), len(by_step)
    )
    others = len(total) - len(best)
    if others:
        rest = [max((weight for block, weight in each.items() if block not in best), default=0.0) for each in by_step]
        cells = np.vstack([cells, rest])
    return best, cells, others


def _leads(looks: Sequence[Look], layer: int | None) -> Numbers:
    """``[lists, 2]``: score of the best block of each list, minus that of the second and of the last one."""
    return np.array(list(_each_lead(looks, layer)), np.float64).reshape(-1, 2)


def _each_lead(looks: Sequence[Look], layer: int | None) -> Iterator[tuple[float, float]]:
    for look in looks:
        for scores, there in zip(look.scores, look.document >= 0, strict=True):
            found = np.sort(scores[there & np.isfinite(scores)])[::-1]
            if len(found) > 1 and layer in (None, look.layer):
                yield float(found[0] - found[1]), float(found[0] - found[-1])


def _quantiles(groups: Sequence[Numbers]) -> tuple[Numbers, Numbers, Numbers]:
    """Least, median and largest of each group; NaN for one of nothing."""
    rows = [np.quantile(group, (0, 0.5, 1)) if len(group) else np.full(3, np.nan) for group in groups]
    low, middle, high = np.array(rows).T
    return low, middle, high


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
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    stop = parts[-1].stop
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place * stop / len(parts):,.0f}"))
    axes.set_xlabel("step (0 chose the first token)" + (f", {stop / len(parts):.1f} in a column" * (stop > len(parts))))


def _where(layer: int | None, head: int | None) -> str:
    return ("" if layer is None else f", layer {layer}") + ("" if head is None else f", head {head}")


def _means(layer: int | None, head: int | None) -> str:
    if layer is None:
        return "layers" if head is not None else "layers and heads"
    return "heads" if head is None else "nothing"


def _caption(trace: Trace) -> str:
    """What was generated: the model, the mechanism, the question."""
    info = trace.info
    question = " ".join(str(info.get("question") or "").split())
    asked = f" asked “{question[-100:]}”" if question else ""
    return f"Trace {trace.number}: {info.get('model') or 'a model'} ({info.get('mechanism')}){asked}."
