"""``memstore limit``: how much a memory may hold, and what happens then."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, get_args

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.tools.options import MemoryUrl
from memstore.tools.output import Page, Report

if TYPE_CHECKING:
    from memstore.memory.keeping import WhenFull

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)

MaxBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The most that the values may take: 500MB, 10GB, 8GiB, or none for no limit."),
]
WhenFullOption = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="What an append does that finds no room: refuse, evict-oldest-document or evict-least-read.",
    ),
]


def limit(memory: MemoryUrl, *, max_bytes: MaxBytes = None, when_full: WhenFullOption = None) -> Report:
    """Set or tell the limit of a memory.

    It is stored with the memory and holds for every append from now on. What is there already stays until then.

    Example:

        memstore limit notes.mem --max-bytes 10GB --when-full evict-least-read

    In Python: memstore.Memory.limit.
    """
    change = max_bytes is not None or when_full is not None
    with memstore.open(memory, mode="a" if change else "r") as opened:
        rules = opened.stats()["rules"]
        if change:
            most = rules["max_bytes"] if max_bytes is None else parse_size(max_bytes)
            opened.limit(most, _rule(when_full) if when_full else None)
        numbers = opened.stats()
    rules = numbers["rules"]
    data = {name: rules[name] for name in ("max_bytes", "when_full")} | {"used_bytes": numbers["used_bytes"]}

    def text(page: Page) -> None:
        most = "no limit" if rules["max_bytes"] is None else f"of at most {rules['max_bytes']:,}"
        page.line(f"{numbers['used_bytes']:,} bytes used, {most}; when full: {rules['when_full']}")
        if rules["max_bytes"] is not None and numbers["used_bytes"] > rules["max_bytes"]:
            what = "is refused" if rules["when_full"] == "refuse" else "forgets other documents, but no pinned ones"
            page.line(f"that is more than the limit, so the next append {what}")

    return Report(data={"memory": memory, **data}, text=text)


def parse_size(text: str) -> int | None:
    """Bytes that a text such as ``10GB`` means; None for ``none``. Raises ``InvalidArgument``."""
    if text.lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None or not (size := int(float(match[1]) * unit)):
        raise InvalidArgument(f"--max-bytes must be a size such as 500MB, 10GB or 8GiB, or none, not {text!r}")
    return size


def _rule(text: str) -> WhenFull:
    from memstore.memory.keeping import WhenFull

    for rule in get_args(WhenFull):
        if text == rule:
            return rule  # type: ignore[no-any-return]  # one of the literals
    raise InvalidArgument(f"--when-full must be one of {', '.join(get_args(WhenFull))}, not {text!r}")
