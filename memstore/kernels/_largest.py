"""The largest of many numbers, in one order among equal ones.

A number and its place are packed into 64 bits. The upper half is the number, as an integer of the same order; the lower
half is the place, counted down. No two are equal, so a selection cannot break ties by the layout of its input. Among
equal numbers, the smaller place is the larger integer. A stable sort of all would take many times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAST = 0xFFFFFFFF
"""Largest place."""


def packed(x: Tensor, places: Tensor) -> Tensor:
    """Pack ``x [...]`` in float32 and its ``places [...]``, int64, into int64."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0: turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as integers they sort like the numbers
    return (ordered << 32) + (LAST - places)


def unpacked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers and the places that ``packed`` made into ``x``."""
    bits = (x >> 32).int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32), LAST - (x & LAST)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the places of the ``k`` largest of ``x [..., n]`` in float32, in order; the first of equal ones wins."""
    places = torch.arange(x.shape[-1], device=x.device)
    return LAST - (packed(x, places).topk(k, -1).values & LAST)


def best_first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ``k`` scores and places of ``scores [..., n]`` by a plain stable sort; -inf and -1 for missing ones."""
    best, places = (scores + 0.0).sort(dim=-1, descending=True, stable=True)
    best, places = filled(best, k, -torch.inf), filled(places, k, -1)
    return best, places.masked_fill(best == -torch.inf, -1)


def filled(x: Tensor, k: int, value: float) -> Tensor:
    """Return the first ``k`` columns of ``x [..., n]``, and fill up missing ones with ``value``."""
    missing = k - x.shape[-1]
    return x[..., :k] if missing <= 0 else torch.nn.functional.pad(x, (0, missing), value=value)
