"""Attention heads of a model whose layers torch has divided among processes (tensor parallelism).

A layer asks a memory with all its heads, and has stored all of them. So before attention each process is told the heads
of the others, and goes on with its own part of what attention gives. Every process opens the memory for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memstore.readers.ranks import Ranks


def counts(heads: tuple[int, int], config: Any, size: int) -> tuple[int, int] | None:
    """All query heads and key heads of a layer, of which each of ``size`` processes has ``heads``.

    None where they are not divided alike.
    """
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    whole = heads[0] * size, heads[1] * size
    return whole if whole == (config.num_attention_heads, groups) else None


class DividedHeads:
    """What the processes tell each other of their heads."""

    def __init__(self, group: Any) -> None:
        self._ranks = Ranks(group)

    def whole(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """All heads of each of ``parts [B, heads, T, D]``, in one collective. Raises as ``Ranks.gathered``."""
        parts = list(parts)
        told = self._ranks.gathered(torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1))
        sizes = [part.shape[1] * part.shape[3] for part in parts]
        found = zip(*(each.split(sizes, -1) for each in told), strict=True)
        return [
            torch.cat([each.unflatten(-1, (-1, part.shape[3])) for each in of_all], 2).transpose(1, 2)
            for part, of_all in zip(parts, found, strict=True)
        ]

    def own(self, out: Tensor) -> Tensor:
        """Of all heads of ``out [B, H, T, D]`` those of this process."""
        return out.chunk(self._ranks.size, 1)[self._ranks.rank]
