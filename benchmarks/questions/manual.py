"""Python's language reference, which every Python carries, in paragraphs with other sentences hidden among them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memstore.eval.needles import topics


def paragraphs(characters: int, least: int, text: str | None = None) -> list[str]:
    """Cut ``text``, or so many characters of the manual, into pieces of whole lines.

    A piece has ``least`` characters or a little more. Raises ``NotFound`` if this Python has no manual.
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
    """Return paragraphs with ``sentences`` at random places in their order, and the numbers of these sentences."""
    places = dict(zip(sorted(chance.sample(range(len(among)), len(sentences))), sentences, strict=True))
    pool, numbers = list[str](), list[int]()
    for place, paragraph in enumerate(among):
        pool.append(paragraph)
        if place in places:
            numbers.append(len(pool))
            pool.append(places[place])
    return tuple(pool), tuple(numbers)
