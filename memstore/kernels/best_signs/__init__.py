"""The largest product of each block of signs with each query, for a memory that routes by one-bit codes.

Keys of +1 and -1 are stored as bits. Five bits are an index into a table, whose entry is their product with the query's
five numbers. So a product of 256 numbers is the sum of 52 entries. Entries are rounded to 16 bits, so the processor
looks up 32 of them with one instruction.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels import native
from memstore.kernels._backends import check_device, first_able
from memstore.kernels.best_codes import reference as best_codes

Backend = Literal["auto", "reference", "native"]
BITS, WORD_BITS, LANES = 5, 15, 32
"""Bits looked up together, bits of a key in a word, and keys side by side."""
LARGEST_SUM = 32767
LARGEST_DIM = 4096
"""Beyond that the entries would have too few steps."""
VECTORS = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw"}
"""Required features of the processor, and the compiler's flags for them."""
WORDS_PER_THREAD = 1 << 16
"""Key words from which another thread pays."""


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
    if problem() is not None:
        good = _pack(keys, words)
    else:
        good = not keys.numel() or not _library.call(
            "memstore_pack_signs", keys.float().contiguous(), words, *keys.shape
        )
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
        ``[n, R]`` float32. The error of ``"native"`` is at most ``allowance``. It is exact for queries of whole numbers
        whose sum without signs is at most 32,767.

    Raises:
        InvalidArgument: shapes or types do not fit, or the back end is not available.
    """
    if queries.dim() != 2 or queries.shape[1] != signs.dim or not queries.is_floating_point():
        raise InvalidArgument(f"expected queries [R, {signs.dim}] floating point, got {tuple(queries.shape)}")
    check_device(words=signs.words, queries=queries)
    choices: tuple[Backend, ...] = ("native", "reference")
    backend = first_able(backend, choices, lambda each: problem() if each == "native" else None)
    out = torch.empty(len(signs.words), len(queries), dtype=torch.float32)
    if not out.numel():
        return out
    if backend == "reference":
        return out.copy_(best_codes(signs.unpacked().to(torch.int8), queries.double()).T)
    threads = min(torch.get_num_threads(), 1 + signs.words.numel() // WORDS_PER_THREAD)
    sizes = (*signs.words.shape[:2], *reversed(queries.shape), threads)
    if _library.call("memstore_best_signs", signs.words, queries.float().contiguous(), out, *sizes):
        raise MemoryError(
            f"there is not enough memory for the tables of {len(queries)} queries of {signs.dim} numbers; search fewer "
            "queries at once."
        )
    return out


def allowance(queries: Tensor) -> Tensor:
    """Return the largest error of the products of ``queries [R, D]``: ``[R]`` float32.

    It is half a step for each entry, and the float32 rounding when tables are made and sums are scaled.
    """
    entries = -(-queries.shape[1] // BITS)
    lengths = queries.float().abs().sum(1)
    return lengths * (0.5 * entries / (LARGEST_SUM - entries) + 1e-6)


def _pack(keys: Tensor, words: Tensor) -> bool:
    """Pack in PyTorch: ``keys [n, P, D]`` into ``words [n, tiles, W, lanes]``; False unless all are signs."""
    tiles, count, lanes = words.shape[1:]
    places = torch.arange(tiles * lanes).clamp(max=keys.shape[1] - 1)
    powers = 2 ** torch.arange(WORD_BITS, dtype=torch.int16)
    for block, into in zip(keys, words, strict=True):
        bits = torch.nn.functional.pad((block > 0).to(torch.int16), (0, count * WORD_BITS - keys.shape[2]))
        numbers = (bits.unflatten(1, (count, WORD_BITS)) * powers).sum(2, dtype=torch.int16)  # [P, words]
        into.copy_(numbers[places].unflatten(0, (tiles, lanes)).transpose(1, 2))
    return bool((keys.abs() == 1).all())


def _load(source: Path) -> ctypes.CDLL:
    if not native.processor().issuperset(VECTORS):
        raise native.Unavailable("needs Linux on an x86-64 processor with AVX-512 BW; use 'auto'")
    return native.parallel(source, list(VECTORS.values()))


_library = native.Library(__file__, _load)
problem = _library.problem
