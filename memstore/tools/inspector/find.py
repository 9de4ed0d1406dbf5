"""Search for a text in a document, a piece at a time: a long one takes seconds, and the page shows what it has."""

from __future__ import annotations

import time
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument
from memstore.tools.inspector.data import document_of, rows
from memstore.tools.inspector.words import Words, readable

if TYPE_CHECKING:
    from memstore.memory import Memory

LONGEST = 200
"""Characters of a query."""
_PIECE = 256  # blocks that are looked at between two looks at the clock


# In pieces of 0.3 seconds: an index of words would be another store to keep right, and the first hits are there at
# once.
def find(
    memory: Memory, words: Words, number: int, query: str, start: int, *, most: int = 50, seconds: float = 0.3
) -> dict[str, Any]:
    """Blocks from ``start`` on in which ``query`` begins, whatever its case; where to go on, None at the end.

    Looks for about ``seconds`` and stops after ``most`` blocks. Raises ``NotFound``, ``InvalidArgument`` and
    ``DamagedError``.
    """
    if not 1 <= len(query) <= LONGEST:
        raise InvalidArgument(f"a text to search for has 1 to {LONGEST} characters, not {len(query)}.")
    document, size = document_of(memory, number), memory.spec.block_size
    live, begun = document.blocks, time.monotonic()
    at, found = max(start, live.start), list[dict[str, Any]]()
    beyond = 1 + -(-len(query) // size)  # a match may go on in the blocks that follow
    while at < live.stop and len(found) < most and time.monotonic() - begun < seconds:
        piece = range(at, min(at + _PIECE, live.stop))
        texts = [words.of(ids) for _, ids in rows(document, range(piece.start, piece.stop + beyond))]
        places = _matches(texts, words.between, query)
        found += [{"block": at + place, "text": readable(texts[place])} for place in places if place < len(piece)]
        at = piece.stop
    if len(found) > most:
        found = found[:most]
        at = found[-1]["block"] + 1
    return {"matches": found, "next": at if at < live.stop else None, "first": live.start, "stop": live.stop}


def _matches(texts: list[str], between: str, query: str) -> list[int]:
    """In which of ``texts``, which follow one another, ``query`` begins."""
    lowered = [text.lower() + between for text in texts]
    begins = [0, *accumulate(map(len, lowered))]
    whole, wanted, places = "".join(lowered), query.lower(), list[int]()
    at = whole.find(wanted)
    while at >= 0:
        place = bisect_right(begins, at) - 1
        places.append(place)
        at = whole.find(wanted, begins[place + 1])
    return places
