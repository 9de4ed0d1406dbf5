"""What a model makes of a needle: its answer, and how clearly the needle's block stood out from all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


def layer_found(layer: int, weights: Tensor, own: Tensor) -> LayerScore:
    """Of ``weights [H, N]`` on landmarks, those of the needle being ``own [N]``: by the head that ranks it best."""
    mine, others = weights[:, own], weights[:, ~own]
    ranks = (others > mine.amax(1, keepdim=True)).sum(1)
    shares = mine.sum(1)
    head = min(range(len(weights)), key=lambda each: (int(ranks[each]), -float(shares[each])))
    margin = None
    if others.shape[1]:
        tiny = torch.finfo(weights.dtype).tiny
        lead = mine[head].amax().clamp(min=tiny).log() - others[head].amax().clamp(min=tiny).log()
        margin = float(lead)
    return LayerScore(layer, int(ranks[head]), margin, float(shares[head]))
