"""Ranges of blocks, each with step 1: what several have in common, what they leave out, and what they are together."""

from __future__ import annotations

from collections.abc import Iterable


def common(one: range, other: range) -> range:
    """What two ranges of step 1 have in common."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def lacking(expected: range, there: Iterable[range]) -> list[range]:
    """What is in ``expected`` and in none of ``there``."""
    gaps, start = [], expected.start
    for part in sorted(there, key=lambda part: part.start):
        gaps.append(range(start, min(part.start, expected.stop)))
        start = max(start, part.stop)
    gaps.append(range(start, expected.stop))
    return [gap for gap in gaps if gap]


def merged(parts: Iterable[range]) -> list[range]:
    """Ranges in order, those that touch each other as one."""
    found: list[range] = []
    for part in sorted((part for part in parts if part), key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found
