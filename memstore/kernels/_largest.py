"""The largest of many numbers, in their order, where there are equal ones."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(x: Tensor, k: int) -> Tensor:
    """Where the ``k`` largest of ``x [..., n]`` in float32 are, in their order, of equal ones the first.

    A selection takes any of equal numbers, and a stable sort of all takes many times as long. So the place of a number
    becomes the lower half of one in 64 bits, and no two are equal.
    """
    bits = (x + 0.0).view(torch.int32)  # + 0.0: there are two zeros
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as integers they have the order of the numbers
    places = torch.arange(x.shape[-1], device=x.device)
    keys = (ordered << 32) + (0xFFFFFFFF - places)
    return 0xFFFFFFFF - (keys.topk(k, -1).values & 0xFFFFFFFF)


def filled(x: Tensor, k: int, value: float) -> Tensor:
    """The first ``k`` columns of ``x [..., n]``, with ``value`` where there are fewer."""
    missing = k - x.shape[-1]
    return x[..., :k] if missing <= 0 else torch.nn.functional.pad(x, (0, missing), value=value)
