"""The coordinates in which keys are coded: what makes 8 bits lose less.

A product of a key and a query does not change when keys are turned by one matrix and queries by the inverse of its
transpose, and ``query . centre`` is the same for all keys. So keys are taken around their mean, their long directions
are shortened (those of queries grow as much), and all directions are mixed, so that no number of a key or a query
stands out: the largest number decides how coarse a code is. Any frame is right; a good one leaves less to look at
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

EXPONENT = 0.125
"""Directions are divided by this power of their variance. A half would make all equally long, and queries uneven."""
SMALLEST_VARIANCE = 1e-4
"""Share of the largest variance that every direction is given at least."""
LARGEST_DIM = 256
"""Longer keys are coded as they are: turning them takes longer than adding them may."""


class Frame(NamedTuple):
    """One for each of ``G`` key heads."""

    centre: Tensor
    """``[G, D]`` float32"""
    turn: Tensor
    """``[G, D, D]`` float64 for keys; ``[G, 0, 0]`` where they are coded as they are."""
    back: Tensor
    """``[G, D, D]`` float64 for queries: ``turn[g] @ back[g].T`` is the identity."""
    stretch: Tensor
    """``[G]`` float64: how much longer than in this frame the difference of a key and the centre can be."""

    @classmethod
    def of(cls, keys: Tensor) -> Frame:
        """A frame that suits ``keys [G, n, D]``."""
        keys = keys.double()
        centre, dim = keys.mean(1), keys.shape[2]
        if dim > LARGEST_DIM:
            none = torch.empty(len(keys), 0, 0, dtype=torch.float64)
            return cls(centre.float(), none, none, torch.ones(len(keys), dtype=torch.float64))
        apart = keys - centre[:, None]
        variances, directions = torch.linalg.eigh(apart.mT @ apart / keys.shape[1])
        least = (variances.amax(1, keepdim=True) * SMALLEST_VARIANCE).clamp(min=1e-30)
        lengths = variances.maximum(least)[:, None] ** EXPONENT
        mixed = _cosines(dim)
        turn, back = directions / lengths @ mixed, directions * lengths @ mixed
        return cls(centre.float(), turn, back, lengths.amax((1, 2)))

    @classmethod
    def named(cls, tensors: Mapping[str, Tensor]) -> Frame:
        """What ``_asdict`` gave."""
        return cls(*(tensors[name] for name in cls._fields))

    def keys(self, keys: Tensor) -> Tensor:
        """``keys [G, ..., D]`` in this frame, float32."""
        apart = keys.float().flatten(1, -2) - self.centre[:, None]
        turned = (apart.double() @ self.turn).float() if self.turn.numel() else apart
        return turned.view(keys.shape)

    def queries(self, queries: Tensor, head: int) -> Tensor:
        """``queries [R, D]`` of a key head in this frame, float32."""
        return (queries.double() @ self.back[head]).float() if self.back.numel() else queries


def _cosines(dim: int) -> Tensor:
    """An orthogonal matrix ``[D, D]`` float64 without large numbers: that of the discrete cosine transform."""
    place = torch.arange(dim, dtype=torch.float64)
    matrix = torch.cos(math.pi / dim * (place[:, None] + 0.5) * place) * math.sqrt(2 / dim)
    matrix[:, 0] = math.sqrt(1 / dim)
    return matrix
