"""The largest product of each block of signs with each query, for a memory that routes by one-bit codes.

Keys of +1 and -1 are stored as bits. Five bits are an index into a table, whose entry is their product with the query's
five numbers. So a product of 256 numbers is the sum of 52 entries. Entries are rounded to 16 bits, so the processor
looks up 32 of them with one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels.best_signs.reference import WORD_BITS

__all__ = ["PackedSigns", "best_signs", "pack"]

Backend = Literal["auto", "reference", "native"]
BITS, LANES = 5, 32
"""Bits looked up together, and keys side by side."""
LARGEST_SUM = 32767
LARGEST_DIM = 4096
"""Beyond that the entries would have too few steps."""


@dataclass(frozen=True, eq=False)
class PackedSigns:
    """Blocks of keys of +1 and -1."""

    words: Tensor
    """``[n, ceil(P / 32), ceil(D / 15), 32]`` int16, contiguous: word by word, for 32 keys at a time. Bit i is number i
    of the word, and set if that is +1. The last keys of a block are padded with copies of its last key.
    """
    keys: int
    """``P``"""
    dim: int
    """``D``"""

    def unpacked(self) -> Tensor:
        """Return the keys, ``[n, P, D]`` float32."""
        bits = self.words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int16) & 1  # [n, tiles, words, 32, 15]
        signs = bits.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)[:, : self.keys, : self.dim]
        return signs.float().mul_(2).sub_(1)


def words_shape(keys: int, dim: int) -> tuple[int, int, int]:
    """Return the shape of the words of one block."""
    return -(-keys // LANES), -(-dim // WORD_BITS), LANES


def pack(keys: Tensor) -> PackedSigns:
    """Pack floating-point ``keys [n, P, D]`` on the CPU.

    Raises ``InvalidArgument`` for numbers other than +1 and -1.
    """
    if keys.dim() != 3 or not keys.shape[1] or not 1 <= keys.shape[2] <= LARGEST_DIM or not keys.is_floating_point():
        raise InvalidArgument(f"expected keys [n, P, D] with D at most {LARGEST_DIM}, got {tuple(keys.shape)}")
    words = torch.empty(len(keys), *words_shape(*keys.shape[1:]), dtype=torch.int16)
    if problem() is None:
        from memstore.kernels.best_signs import native

        good = native.pack(keys.float(), words)
    else:
        from memstore.kernels.best_signs import reference

        good = reference.pack(keys, words)
    if not good:
        raise InvalidArgument("keys of a sign index must be +1 or -1 in every number; use index='exact' for other keys")
    return PackedSigns(words, *keys.shape[1:])


def best_signs(signs: PackedSigns, queries: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return the largest inner product of each block's keys with each query.

    Args:
        signs: ``n`` blocks.
        queries: ``[R, D]`` floating point on the CPU, finite.
        backend: ``"reference"``; ``"native"``, in C, compiled at the first use (Linux on a processor with AVX-512 BW);
            or ``"auto"``: the last of them that works here.

    Returns:
        ``[n, R]`` float32. The error of ``"native"`` is at most ``allowance``; it is and exact for queries of whole
        numbers whose
        sum without signs is at most 32,767.

    Raises:
        InvalidArgument: shapes or types do not fit, or the back end is not available.
    """
    if queries.dim() != 2 or queries.shape[1] != signs.dim or not queries.is_floating_point():
        raise InvalidArgument(f"expected queries [R, {signs.dim}] floating point, got {tuple(queries.shape)}")
    if backend == "native" and (reason := problem()):
        raise InvalidArgument(f"backend 'native' {reason}")
    if backend != "reference" and problem() is None:
        from memstore.kernels.best_signs import native

        return native.best_signs(signs.words, queries.float(), signs.dim)
    from memstore.kernels.best_signs import reference

    return reference.best_signs(signs.unpacked(), queries)


def allowance(queries: Tensor) -> Tensor:
    """Return the largest error of the products of ``queries [R, D]``: ``[R]`` float32.

    It is half a step for each entry, and the float32 rounding when tables are made and sums are scaled.
    """
    entries = -(-queries.shape[1] // BITS)
    lengths = queries.float().abs().sum(1)
    return lengths * (0.5 * entries / (LARGEST_SUM - entries) + 1e-6)


def problem() -> str | None:
    """Say why the fast back end is not available, and what to do; None if it is."""
    from memstore.kernels.best_signs import native

    return native.problem()
