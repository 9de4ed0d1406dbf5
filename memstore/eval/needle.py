"""What a model makes of a needle: its answer, and how clearly the needle's block stood out from all others."""

from __future__ import annotations

from dataclasses import dataclass

WIDE = 64
"""Best blocks among which the needle is looked for, however few the model takes."""


@dataclass(frozen=True)
class NeedleScore:
    """How one needle was retrieved at the end of the question."""

    margin: float | None
    """Score of the needle's block minus that of the best other; None where there is no other. For a needle that is not
    among the ``WIDE`` best the score of the last of them stands in: the margin is at most this."""
    weight: float
    """What the model gave the needle's blocks, of 1."""


@dataclass(frozen=True)
class LayerScore:
    """How one layer of a landmark model saw the needle, in the head that ranked it best."""

    layer: int
    rank: int
    """Blocks in memory whose landmark weighed more than that of the needle's best block."""
    margin: float | None
    """Score of the needle's best block minus that of the best other; None where there is no other."""
    weight: float
    """Of the softmax over all landmarks in memory, what the needle's blocks have."""


@dataclass(frozen=True)
class Reply:
    """What the model said, and what it retrieved for it."""

    tokens: list[int]
    found: tuple[NeedleScore, ...]
    """For each needle that had to be found what its group of upper layers retrieved (of a landmark model: the layer
    that saw it best); none without scores."""
    layers: tuple[LayerScore, ...] = ()
    """What each layer of a landmark model saw; none where the needle was among the local tokens."""


def needle_blocks(place: range, tokens_per_block: int) -> range:
    """The blocks that a needle at ``place`` lies in."""
    return range(place.start // tokens_per_block, (place.stop - 1) // tokens_per_block + 1)
