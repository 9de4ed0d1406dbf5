"""Where the tokens of a memory are placed when a query attends to them.

States are stored without positions; positions are applied when blocks are fetched. What a query sees is, in this order,

    sink | retrieved blocks | direct tokens (the window) | local tokens (the segment itself)

``stingy`` gives these consecutive positions from 0 on, however long the document is (after section 3.2.1 of Mohtashami
& Jaggi 2023), one slot of ``block_size`` positions for each retrieved block. ``true`` gives every token its place in
the document; it is exact while the document is shorter than what the model was trained for. ``clamped`` is ``true``,
moved down so that the local tokens start at ``limit`` at most, with everything that would come before 0 at position 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Positions of everything that comes before the local tokens."""

    sink: Tensor
    """``[1, 1, sink tokens]``"""
    retrieved: Tensor
    """``[B or 1, heads or 1, K * S]``"""
    local_start: int
    """Position of the first local token; direct tokens are placed right before it."""


def place(
    kind: Literal["stingy", "true", "clamped"],
    *,
    sink: range,
    direct: range,
    blocks: Tensor,
    slots: Tensor,
    block_size: int,
    limit: int,
) -> Placement:
    """Place ``sink`` and ``direct`` (ranges of token numbers) and the retrieved ``blocks [B, heads, K]``.

    ``slots [B, heads, K]`` says which of the K slots each block takes (stingy positions only).
    ``limit`` is the highest position that the local tokens may start at, for ``clamped``.
    """
    within = torch.arange(block_size)
    if kind == "stingy":
        taken = len(sink) + slots.unsqueeze(-1) * block_size + within
        start = len(sink) + blocks.shape[-1] * block_size + len(direct)
        return Placement(torch.arange(len(sink))[None, None], taken.flatten(-2), start)
    shift = max(0, direct.stop - limit) if kind == "clamped" else 0
    true = blocks.unsqueeze(-1) * block_size + within
    return Placement(
        (torch.arange(sink.start, sink.stop) - shift).clamp(min=0)[None, None],
        (true - shift).clamp(min=0).flatten(-2),
        direct.stop - shift,
    )


def t5_buckets(distance: Tensor, *, buckets: int = 32, farthest: int = 128) -> Tensor:
    """Numbers of the buckets ``[...]`` of how far back a key lies, ``distance [...]`` in tokens (Raffel et al. 2020).

    The first half of the ``buckets`` are one distance each, the others grow geometrically up to ``farthest``; what lies
    further back is in the last one, what lies ahead in the first.
    """
    distance = distance.clamp(min=0)
    exact = buckets // 2
    grown = (distance.clamp(min=1).float() / exact).log() / math.log(farthest / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + grown.long()).clamp(max=buckets - 1))
