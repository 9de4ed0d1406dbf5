"""Packing bit by bit, and products in their plainest form, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 15
"""Bits of a key in a word."""


def best_signs(keys: Tensor, queries: Tensor) -> Tensor:
    """Take ``keys [n, P, D]``, ``queries [R, D]``: see the public function."""
    wide = queries.double()
    found = [(block.double() @ wide.T).amax(0).float() for block in keys]
    return torch.stack(found) if found else torch.empty(0, len(queries))


def pack(keys: Tensor, words: Tensor) -> bool:
    """Pack ``keys [n, P, D]`` into ``words [n, tiles, W, lanes]``; False unless all are signs."""
    tiles, count, lanes = words.shape[1:]
    places = torch.arange(tiles * lanes).clamp(max=keys.shape[1] - 1)
    powers = 2 ** torch.arange(WORD_BITS, dtype=torch.int16)
    for block, into in zip(keys, words, strict=True):
        bits = torch.nn.functional.pad((block > 0).to(torch.int16), (0, count * WORD_BITS - keys.shape[2]))
        numbers = (bits.unflatten(1, (count, WORD_BITS)) * powers).sum(2, dtype=torch.int16)  # [P, words]
        into.copy_(numbers[places].unflatten(0, (tiles, lanes)).transpose(1, 2))
    return bool((keys.abs() == 1).all())
