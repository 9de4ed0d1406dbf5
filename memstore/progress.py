"""The progress line on standard error for long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memstore.errors import on_one_line

UPDATE_SECONDS = 0.1
"""Time between two lines."""


@contextmanager
def progress_bar(
    name: str, done: int, total: int | None, show: bool, verb: str = "reading", unit: str = "tokens"
) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error; call the result with the count just done. ``total``: None if unknown."""
    shown = on_one_line([name])
    begun = told = time.perf_counter()
    read = width = 0

    def tell(end: str) -> None:
        nonlocal width
        speed = read / max(time.perf_counter() - begun, 1e-9)
        part, left = "", ""
        if total:
            part = f" of {total:,}"
            left = f", {max(0, total - done - read) / speed:,.0f} s left" if speed else ""
        line = f"{verb} {shown} {done + read:,}{part} {unit}, {speed:,.0f} {unit}/s{left}"
        sys.stderr.write(line.ljust(width) + end)  # spaces overwrite the rest of a longer line
        sys.stderr.flush()
        width = len(line)

    def advance(count: int) -> None:
        nonlocal read, told
        read += count
        if show and time.perf_counter() - told > UPDATE_SECONDS and sys.stderr.isatty():
            told = time.perf_counter()
            tell("\r")

    try:
        yield advance
    finally:
        if show:
            tell("\n")
