"""Keys in 8 bits, with a bound on what that changes: most of a chunk need not be read to know that it holds no winner.

Blocks lie in groups of about 32 keys. A code is ``round(key / scale)``, with one scale for each group. Of a key ``x``
and a query ``q``, both in the coordinates of ``frame.py``, the product of codes ``x'`` and ``q'`` differs from
``q . x`` by at most

    ``|q| |x - x'| + |q - q'| |x'|``  (Cauchy-Schwarz, both codes multiplied by their scales),

so a group whose best product of codes lies further below the k-th best score than that holds none of the best k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.index.frame import Frame
from memstore.kernels.best_products.api import LARGEST_DIM, fastest

GROUP_KEYS = 32
"""Keys whose best product stands for all of them."""
LARGEST_CODE = 127
STEP = 1 << 11
"""Groups that are coded at a time."""


class Codes:
    """The codes of one chunk. Rows of whole groups only: ``groups * rows_per_group`` of them are coded."""

    def __init__(self, capacity: int, sizes: tuple[int, int, int], frame: Frame) -> None:
        heads, keys_per_block, dim = sizes
        self.rows_per_group = group_rows(keys_per_block)
        self.keys_per_group = self.rows_per_group * keys_per_block
        groups = capacity // self.rows_per_group
        self.frame = frame
        self.values = torch.empty(heads, groups, self.keys_per_group, dim, dtype=torch.int8)
        self.scales = torch.empty(heads, groups)
        self.lost = torch.empty(heads, groups)
        """Length of the longest difference between a key and its code."""
        self.longest = torch.empty(heads, groups)
        """Length of the longest code."""
        self.groups = 0

    @classmethod
    def of(cls, keys_per_block: int, tensors: Mapping[str, Tensor]) -> Codes:
        """Codes around what ``tensors`` gave; nothing is copied."""
        heads, groups, _, dim = tensors["values"].shape
        codes = cls(0, (heads, keys_per_block, dim), Frame.named(tensors))
        codes.values, codes.scales = tensors["values"], tensors["scales"]
        codes.lost, codes.longest = tensors["lost"], tensors["longest"]
        codes.groups = groups
        return codes

    def tensors(self) -> dict[str, Tensor]:
        """All of them, to be saved."""
        whole = {"values": self.values, "scales": self.scales, "lost": self.lost, "longest": self.longest}
        return {name: tensor[:, : self.groups] for name, tensor in whole.items()} | self.frame._asdict()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.lost, self.longest))

    def extend(self, keys: Tensor, used: int) -> None:
        """Encode the groups of ``keys [G, capacity, P, D]`` that have become complete with ``used`` rows."""
        stop = used // self.rows_per_group
        for first in range(self.groups, stop, STEP):
            self._encode(keys, slice(first, min(first + STEP, stop)))
        self.groups = max(self.groups, stop)

    def _encode(self, keys: Tensor, new: slice) -> None:
        """Encode the groups ``new``."""
        rows = slice(new.start * self.rows_per_group, new.stop * self.rows_per_group)
        shape = (keys.shape[0], new.stop - new.start, self.keys_per_group, keys.shape[3])
        turned = self.frame.keys(keys[:, rows]).view(shape)
        scales = turned.abs().amax((2, 3)).div_(LARGEST_CODE).clamp_(min=torch.finfo(torch.float32).tiny)
        values = (turned / scales[..., None, None]).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
        self.values[:, new] = values.to(torch.int8)
        self.scales[:, new] = scales
        values.mul_(scales[..., None, None])
        self.longest[:, new] = values.norm(dim=3).amax(2)
        self.lost[:, new] = turned.sub_(values).norm(dim=3).amax(2)

    def cut(self, used: int) -> None:
        """Only the first ``used`` rows are still what they were."""
        self.groups = min(self.groups, used // self.rows_per_group)


class CodedQueries(NamedTuple):
    """Some queries of one key head, ready for products with codes; lengths are in units of each query's scale."""

    values: Tensor
    """``[R, D]`` int8"""
    scales: Tensor
    """``[R]`` float32"""
    lengths: Tensor
    """``[R]`` float32: of the query."""
    lost: Tensor
    """``[R]`` float32: of the difference between query and code."""


def group_rows(keys_per_block: int) -> int:
    """Blocks in a group."""
    return max(1, GROUP_KEYS // keys_per_block)


def encode_queries(queries: Tensor) -> CodedQueries:
    """``queries [R, D]`` float32 with a scale for each, which drops out of every comparison."""
    scales = queries.abs().amax(1, keepdim=True).div_(LARGEST_CODE).clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = queries / scales
    values = scaled.round().clamp_(-LARGEST_CODE, LARGEST_CODE)
    lost = (scaled - values).norm(dim=1)
    return CodedQueries(values.to(torch.int8), scales.squeeze(1), scaled.norm(dim=1), lost)


def usable(device: torch.device, dim: int) -> bool:
    """Whether keys of ``dim`` numbers are compared faster in 8 bits."""
    return device.type == "cpu" and 8 <= dim <= LARGEST_DIM and fastest(dim) != "reference"
