"""``memstore expire``: how long a document is kept."""

from __future__ import annotations

import re
from typing import Annotated

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.tools.options import DocumentArgument, MemoryUrl, existing
from memstore.tools.output import Report

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)

After = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="How long from now: 45m, 12h, 30d or 8w; or never, to keep it for ever.",
        show_default=False,
    ),
]


def expire(memory: MemoryUrl, document: DocumentArgument, *, after: After) -> Report:
    """Let a document be forgotten after a time.

    It happens with the first append to another document after that time, and not while it is pinned; until then the
    document is as it was.

    Example:

        memstore expire notes.mem moby-dick --after 30d

    In Python: memstore.Document.expire.
    """
    seconds = parse_duration(after)
    with memstore.open(memory) as opened:
        found = existing(opened, document)
        found.expire(seconds)
        when = found.expires
        words = (
            f"{document!r} is kept for ever" if when is None else f"{document!r} expires at {when:%Y-%m-%d %H:%M} UTC"
        )
        if when is not None and found.pinned:
            words += ", but is pinned: nothing happens before memstore unpin"
    expires = None if when is None else when.isoformat(timespec="seconds")
    data = {"memory": memory, "document": document, "expires": expires}
    return Report(data=data, text=lambda page: page.line(words))


def parse_duration(text: str) -> float | None:
    """Seconds that a text such as ``30d`` means; None for ``never``. Raises ``InvalidArgument``."""
    from memstore.memory.keeping import LONGEST

    if text.strip().lower() == "never":
        return None
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 0 < seconds < LONGEST:
        raise InvalidArgument(f"--after must be a time such as 45m, 12h, 30d or 8w, or never, not {text!r}")
    return seconds
