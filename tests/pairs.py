"""Parameters of a test by pairs: every two values of two dimensions meet at least once, but not every combination."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, cycle, islice, product
from typing import Any

import pytest


def pairs(**dimensions: Sequence[Any]) -> pytest.MarkDecorator:
    """``@pairs(codec=CODECS, dtype=DTYPES, shape=SHAPES)`` instead of three ``parametrize``: the largest two multiply.

    Faults seldom need three particular values at once, and a full product of independent dimensions mostly repeats
    itself. Rows are chosen greedily, and always the same.
    """
    names, values = list(dimensions), [list(each) for each in dimensions.values()]
    missing = {
        (a, i, b, j)
        for a, b in combinations(range(len(names)), 2)
        for i, j in product(range(len(values[a])), range(len(values[b])))
    }
    rows: list[tuple[int, ...]] = []
    everything = list(product(*(range(len(each)) for each in values)))
    while missing:
        best = max(everything, key=lambda row: len(missing & set(_pairs(row))))
        missing -= set(_pairs(best))
        rows.append(best)
    cases = [tuple(values[axis][index] for axis, index in enumerate(row)) for row in sorted(rows)]
    return pytest.mark.parametrize(",".join(names), cases)


def each(**dimensions: Sequence[Any]) -> pytest.MarkDecorator:
    """Every value of every dimension, but as few instances as the longest dimension has: the others take turns."""
    most = max(len(values) for values in dimensions.values())
    cases = list(zip(*(islice(cycle(values), most) for values in dimensions.values()), strict=True))
    return pytest.mark.parametrize(",".join(dimensions), cases, ids=_name)


def _pairs(row: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    return [(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)]


def _name(value: Any) -> str:
    """The same in every process: a function by its name, not by its address."""
    return str(getattr(value, "__name__", value))
