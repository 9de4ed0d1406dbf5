"""The largest of many numbers, in stable order among equal ones."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(x: Tensor, k: int) -> Tensor:
    """Return the places of the ``k`` largest of ``x [..., n]`` in float32, in order; the first of equal ones wins.

    A selection takes any of equal numbers, and a stable sort of all takes many times as long. So number and place are
    packed into 64 bits, with the place in the lower half; then no two are equal.
    """
    bits = (x + 0.0).view(torch.int32)  # + 0.0: turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as integers they sort like the numbers
    places = torch.arange(x.shape[-1], device=x.device)
    keys = (ordered << 32) + (0xFFFFFFFF - places)
    return 0xFFFFFFFF - (keys.topk(k, -1).values & 0xFFFFFFFF)


def filled(x: Tensor, k: int, value: float) -> Tensor:
    """Return the first ``k`` columns of ``x [..., n]``, and fill up missing ones with ``value``."""
    missing = k - x.shape[-1]
    return x[..., :k] if missing <= 0 else torch.nn.functional.pad(x, (0, missing), value=value)
