"""Shared parts of all Triton kernels: how a kernel gets its tiles, and whether the interpreter runs it.

Tiles come from a ``TABLE`` beside the kernels (in ``grouped_cross_attention`` and ``landmark_attention``; a formula in
``knn_attention``, constants in ``search_blocks``). By the compiler's report, none spills registers. Measuring in each
process may find faster tiles, but takes minutes of compiling, and the next process may choose others. Then sums have
another order, and reading a text again no longer gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Finite, so that differences of it are numbers."""
SMALLEST = 16
"""Shortest side of a tile that the matrix units of all devices accept."""
ANY = 1 << 30
"""No limit, in a table."""

Machine = str
"""The kind of a device: ``"sm_90"`` (Hopper and later, with asynchronous products), ``"sm_80"`` (others of NVIDIA),
``"gfx942"`` (AMD)."""


def config(warps: int, stages: int, **sizes: int) -> triton.Config:
    """Make tiles of these ``sizes``, which are named after the kernel's arguments."""
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


def padded(length: int) -> int:
    """Return the side of a tile that covers ``length``."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


def warps(threads: int) -> int:
    """Return the warps of a program with this many threads."""
    return threads // (64 if torch.version.hip else 32)


def grid(matrices: int, rows: int, side: str, parts: int = 1) -> Any:
    """Return the programs: one for each tile of ``rows`` of each matrix, and each part of its work."""
    return lambda config: (matrices * -(-rows // config[side]), parts)


def strides(names: str, x: Tensor) -> dict[str, int]:
    """Return the strides of ``x``, from the first dimension on, by the names of arguments."""
    return dict(zip(names.split(), x.stride(), strict=False))


def split(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Split ``x`` into a sum of one or three numbers of ``dtype``, without loss: ``[parts, ...]``."""
    if torch.promote_types(x.dtype, dtype) == dtype:
        return x.to(dtype).contiguous().unsqueeze(0)
    parts, rest = [], x.float()
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts)


def precision(dtype: torch.dtype) -> str:
    """Return how matrix units multiply a type: float32 as three TF32 products, or one if PyTorch allows TF32.

    NVIDIA's matrix units have no exact products of float32. Without matrix units, sums spill kilobytes of registers.
    """
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    matmul = torch.backends.cuda.matmul  # allow_tf32 and its like raise once fp32_precision, new in 2.9, was set
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if tf32 else "tf32x3"


@dataclass(frozen=True)
class TileTable:
    """The tiles of one operation's kernels."""

    kernels: Sequence[str]
    sizes: Sequence[str]
    """Kernel arguments that are sides of tiles."""
    rows: Sequence[tuple[Machine, int, int, int, int, Sequence[Sequence[int]]]]
    """The device, bytes of a number, and the most rows of queries, numbers of a head and tokens of a block. For each
    kernel, warps, stages, and the sides of a tile follow.
    """

    def tiles(
        self, kernel: str, machine: Machine, dtype: torch.dtype, *, queries: int, dim: int, block: int
    ) -> triton.Config:
        """Return the tiles of the first row that is large enough, else of the last row for this number size."""
        column = self.kernels.index(kernel)
        for *kind, most_queries, most_dim, most_block, tiles in self.rows:
            if kind == [machine, dtype.itemsize]:
                warps, stages, *sides = tiles[column]
                if queries <= most_queries and dim <= most_dim and block <= most_block:
                    break
        return config(warps, stages, **dict(zip(self.sizes, sides, strict=True)))

    def tiled(self, kernel: str, *, block: str, **interpreted: int) -> Callable[[Any], TiledKernel]:
        """Give a kernel the tiles of its column. ``block`` names the argument that is the length of a block."""

        def choose(arguments: Mapping[str, Any]) -> triton.Config:
            sizes = {"queries": arguments["ROWS"], "dim": max(arguments["BD"], arguments["BDV"])}
            return self.tiles(kernel, machine(), arguments["q"].dtype, block=padded(arguments[block]), **sizes)

        return tiled(choose, interpreted_config=config(1, 1, **interpreted))


class TiledKernel:
    """A kernel, called like one of Triton's, that gets its tiles from ``choose`` by its arguments, such as ``q``."""

    def __init__(self, kernel: Any, choose: Callable[[Mapping[str, Any]], triton.Config]) -> None:
        self.fn, self.choose = kernel, choose

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            with torch.cuda.device_of(arguments["q"]):
                # Triton 3.9 warns if enable_fp_fusion is not set.
                self.fn[grid](**arguments, **self.choose(arguments).all_kwargs(), enable_fp_fusion=True)

        return launch


def tiled(
    choose: Callable[[Mapping[str, Any]], triton.Config], *, interpreted_config: triton.Config
) -> Callable[[Any], TiledKernel]:
    """Give a kernel the tiles of ``choose``; the interpreter has no registers and uses one size for all."""

    def give(kernel: Any) -> TiledKernel:
        return TiledKernel(kernel, choose if isinstance(kernel, triton.JITFunction) else lambda _: interpreted_config)

    return give


def machine() -> Machine:
    """Return the kind of the current device."""
    return "gfx942" if torch.version.hip else _machine(torch.cuda.current_device())


@functools.cache
def _machine(device: int) -> Machine:
    # 12 is Blackwell for desktops, which has the shared memory and the products of older devices.
    return "sm_90" if torch.cuda.get_device_capability(device)[0] in (9, 10) else "sm_80"


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels: its variable was set when this module was imported."""
    return not isinstance(load_rows, triton.JITFunction)


@triton.jit
def _places(
    first: tl.tensor, count: tl.tensor, stride: tl.tensor,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Locate rows from ``first`` on in a matrix ``[count, SIZE]``: an offset in 64 bits, offsets from it, a mask."""
    index, dims = tl.arange(0, LENGTH), tl.arange(0, PADDED)
    mask = (first + index < count)[:, None]
    if SIZE != PADDED:
        mask = mask & (dims < SIZE)[None, :]
    return (tl.full([], 0, tl.int64) + first) * stride, index[:, None] * stride + dims[None, :], mask


@triton.jit
def load_rows(
    base: tl.tensor, first: tl.tensor, count: tl.tensor, stride: tl.tensor,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load ``LENGTH`` rows of a matrix, with 0 beyond its edges."""
    begin, offsets, mask = _places(first, count, stride, LENGTH, SIZE, PADDED)
    return tl.load(base + begin + offsets, mask=mask, other=0.0)


@triton.jit
def store_rows(
    base: tl.tensor, tile: tl.tensor, first: tl.tensor, count: tl.tensor,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a tile to rows of a contiguous matrix ``[count, SIZE]``."""
    begin, offsets, mask = _places(first, count, SIZE, LENGTH, SIZE, PADDED)
    tl.store(base + begin + offsets, tile.to(base.dtype.element_ty), mask=mask)
