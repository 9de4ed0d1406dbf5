"""Python's language reference, which every Python carries, in paragraphs with other sentences hidden among them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memstore.eval.needles import topics


def paragraphs(characters: int, least: int, text: str | None = None) -> list[str]:
    """Pieces of whole lines, of ``least`` characters or a little more, of ``text`` or so many characters of the manual.

    Raises ``NotFound`` where this Python has none.
    """
    text = "\n".join(reversed(topics()))[:characters] if text is None else text
    pieces, piece = list[str](), ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= least:
            pieces.append(piece.strip("\n"))
            piece = ""
    return pieces


def hidden(
    sentences: Sequence[str], among: Sequence[str], chance: random.Random
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Paragraphs with ``sentences`` in their order at places by chance, and which numbers these have then."""
    places = dict(zip(sorted(chance.sample(range(len(among)), len(sentences))), sentences, strict=True))
    pool, numbers = list[str](), list[int]()
    for place, paragraph in enumerate(among):
        pool.append(paragraph)
        if place in places:
            numbers.append(len(pool))
            pool.append(places[place])
    return tuple(pool), tuple(numbers)
