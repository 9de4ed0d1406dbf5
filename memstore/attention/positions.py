"""Distances of tokens: rotary positions, the buckets of T5, and the slots of landmark attention.

Landmark attention counts in slots of one block each. The tokens since the last committed block follow these slots.
``searching_slots`` and ``final_slots`` are section 3.2.1 and figure 2 of its paper (Mohtashami & Jaggi 2023).
``Rotary`` rotates states to their positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument


def t5_buckets(distance: Tensor, *, buckets: int = 32, farthest: int = 128) -> Tensor:
    """Return bucket numbers ``[...]`` for how far back a key lies, ``distance [...]`` in tokens (Raffel et al. 2020).

    In the first half of the ``buckets`` each has one distance. The others grow geometrically up to ``farthest``. Keys
    further back share the last bucket, and keys ahead are in the first.
    """
    distance = distance.clamp(min=0)
    exact = buckets // 2
    grown = (distance.clamp(min=1).float() / exact).log() / math.log(farthest / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + grown.long()).clamp(max=buckets - 1))


class Turns(NamedTuple):
    """Cosines and sines of positions; the sines have the sign that each dimension needs."""

    cos: Tensor
    """``[..., D]``"""
    sin: Tensor
    """``[..., D]``"""


class Rotary:
    """Rotary positions (Su et al. 2021): pairs of dimensions, each turned by an angle that grows with the position.

    A pair is ``i`` and ``i + D / 2`` as in Llama. With ``interleaved`` it is the neighbours ``2 i`` and ``2 i + 1``, as
    in the GPT-2-like model of the landmark paper.
    """

    def __init__(self, dim: int, theta: float = 10_000.0, *, interleaved: bool = False) -> None:
        """``dim``: size of a head. Raises ``InvalidArgument`` if it is odd."""
        if dim < 2 or dim % 2:
            raise InvalidArgument(f"rotary positions need an even head size, not {dim}")
        self.dim = dim
        self.theta = theta
        self.interleaved = interleaved

    def turns(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Turns:
        """Return turns ``[..., D]`` of ``positions [...]``, which may be negative.

        Angles are computed in float64, so they are as good at position 100,000,000 as at 0. ``dtype`` is the dtype of
        the states to rotate. Half types are rotated in float32.
        """
        angles = positions.unsqueeze(-1) * self.frequencies(positions.device)
        cos, sin = angles.cos(), angles.sin()
        wide = torch.promote_types(dtype, torch.float32)
        if self.interleaved:
            return Turns(_beside(cos, cos).to(wide), _beside(-sin, sin).to(wide))
        return Turns(torch.cat([cos, cos], -1).to(wide), torch.cat([-sin, sin], -1).to(wide))

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Return the angles of the pairs at position 1, ``[D / 2]`` float64; 0 for pairs that do not turn."""
        powers = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim
        return torch.as_tensor(self.theta**-powers)

    def rotate(self, x: Tensor, turns: Turns) -> Tensor:
        """Rotate ``x [..., D]`` by turns that broadcast."""
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if self.interleaved else x.roll(self.dim // 2, -1)
        return torch.addcmul(x * turns.cos, swapped, turns.sin).to(x.dtype)


def _beside(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack([even, odd], -1).flatten(-2)


def positional_jumps(is_landmark: Tensor, largest: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Return positions ``[B, T]`` that grow by 1, and after each landmark by 1 to ``largest``, drawn each time.

    Mohtashami & Jaggi 2023, appendix E (their ``p_jump``): a model trained this way knows distances longer than its
    texts.
    """
    if largest < 1:
        raise InvalidArgument(f"the largest jump of positions must be at least 1, not {largest}")
    extra = torch.randint(largest, is_landmark.shape, generator=generator, device=is_landmark.device) * is_landmark
    return torch.arange(is_landmark.shape[1], device=is_landmark.device) + extra.cumsum(1) - extra


def local_slot(count: Tensor, top_k: int) -> Tensor:
    """Return the slot of the first local token if ``count`` blocks are in memory: the slot after the last block.

    ``top_k + 1`` slots lie before it, because figure 2 keeps one empty. While there are fewer blocks, positions are
    true.
    """
    return count.clamp(max=top_k + 1)


def searching_slots(blocks: Tensor, count: Tensor, top_k: int) -> Tensor:
    """Return the slots of blocks during the search: one each for the last ``top_k``, slot 0 for all older ones.

    ``blocks`` and ``count`` (blocks in memory) broadcast.
    """
    return (blocks - (count - top_k - 1).clamp(min=0)).clamp(min=0)


def final_slots(blocks: Tensor, count: Tensor, top_k: int) -> Tensor:
    """Return the slots in which the chosen ``blocks [..., K]`` are attended to; K is at most ``top_k``.

    Blocks are in order of time, missing ones (-1) first. Those among the last ``top_k`` of ``count`` blocks go to the
    right, up to the local tokens. Older ones go to the left, so at least one slot between them stays empty.
    """
    size = blocks.shape[-1]
    place = torch.arange(size, device=blocks.device)
    left = place - (blocks < 0).sum(-1, keepdim=True)
    right = local_slot(count, top_k) - size + place
    return torch.where(blocks >= count - top_k, right, left).clamp(min=0)
