"""Find the groups of an exact index that can hold a best block, by codes of 8 bits and an error bound.

A second copy of the keys has 8 bits per number. Blocks are in groups of about 32 keys; a code is
``round(key / scale)``, with one scale for each group. For a key ``x`` and a query ``q``, both in the coordinates of
``Frame``, the product of codes ``x'`` and ``q'`` differs from ``q . x`` by at most

    ``|q| |x - x'| + |q - q'| |x'|``  (Cauchy-Schwarz, both codes multiplied by their scales),

so if a group's best product of codes is further below the k-th best score, it holds none of the best k.

A search (``kernels/search_blocks/native.c``) multiplies codes. It looks into a few most promising groups, then into all
others that can still hold better blocks, and scores in float32 what can be among the best. All other groups are proven
to hold none, so the result is the true top k. If too many are left, as with many equal keys, it reads all keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.kernels.best_products import LARGEST_DIM as LARGEST_CODED_DIM
from memstore.kernels.best_products import backend_problem
from memstore.kernels.search_blocks import KeyCodes, KeyFrame, lists_problem

EXPONENT = 0.125
"""Directions are divided by this power of their variance. A power of 0.5 would make all equally long, and queries
uneven.
"""
SMALLEST_VARIANCE = 1e-4
"""Least share of the largest variance for every direction."""
LARGEST_TURNED_DIM = 256
"""Longer keys are coded without a turn: turning 64 of them would take longer than the two milliseconds of an append."""
GROUP_KEYS = 32
"""Keys represented by their best product."""
LARGEST_CODE = 127
CODED_AT_ONCE = 1 << 11
"""Groups coded at a time."""
LARGEST_SHARE = 8
"""At most one group in so many is worth looking into; beyond that reading all keys is as fast."""


class Frame(NamedTuple):
    """The coordinates in which the keys of each of ``G`` heads are coded, so 8 bits lose less.

    If keys are turned by one matrix and queries by the inverse of its transpose, their products do not change. Also,
    ``query . centre`` is the same for all keys. So the mean is subtracted from keys, and their long directions are
    shortened (those of queries grow as much). All directions are mixed, so no number of a key or a query stands out,
    because the largest number decides how coarse a code is. Any frame is correct; a good one leaves fewer groups to
    score.
    """

    centre: Tensor
    """``[G, D]`` float32"""
    turn: Tensor
    """``[G, D, D]`` float64 for keys; ``[G, 0, 0]`` if they are not turned."""
    back: Tensor
    """``[G, D, D]`` float64 for queries: ``turn[g] @ back[g].T`` is the identity."""
    stretch: Tensor
    """``[G]`` float64: the largest ratio of the distance of a key and the centre to that in this frame."""

    @classmethod
    def of(cls, keys: Tensor) -> Frame:
        """Make a frame that suits ``keys [G, n, D]``."""
        keys = keys.double()
        centre, dim = keys.mean(1), keys.shape[2]
        if dim > LARGEST_TURNED_DIM:
            none = torch.empty(len(keys), 0, 0, dtype=torch.float64)
            return cls(centre.float(), none, none, torch.ones(len(keys), dtype=torch.float64))
        # Only keys decide. With the queries still fewer groups would be left, but then the speed of an index would
        # depend on earlier queries.
        apart = keys - centre[:, None]
        variances, directions = torch.linalg.eigh(apart.mT @ apart / keys.shape[1])
        least = (variances.amax(1, keepdim=True) * SMALLEST_VARIANCE).clamp(min=1e-30)
        lengths = variances.maximum(least)[:, None] ** EXPONENT
        mixed = _cosines(dim)
        turn, back = directions / lengths @ mixed, directions * lengths @ mixed
        return cls(centre.float(), turn, back, lengths.amax((1, 2)))

    @classmethod
    def named(cls, tensors: Mapping[str, Tensor]) -> Frame:
        """Make a frame from the result of ``_asdict``."""
        return cls(*(tensors[name] for name in cls._fields))

    def keys(self, keys: Tensor) -> Tensor:
        """Return ``keys [G, ..., D]`` in this frame, float32."""
        apart = keys.float().flatten(1, -2) - self.centre[:, None]
        turned = (apart.double() @ self.turn).float() if self.turn.numel() else apart
        return turned.view(keys.shape)

    def of_head(self, head: int, codes: Sequence[Codes]) -> KeyFrame:
        """Return what a search of these ``codes`` must know."""
        reach = sum(
            max((float(getattr(each, name)[head, : each.groups].max()) for each in codes if each.groups), default=0.0)
            for name in ("longest", "lost")
        )
        apart = reach * float(self.stretch[head]) + float(self.centre[head].norm())
        rows = codes[0].rows_per_group
        return KeyFrame(self.centre[head], self.back[head], rows, LARGEST_SHARE, reach, apart)


def _cosines(dim: int) -> Tensor:
    """Return an orthogonal ``[D, D]`` float64 without large numbers: the matrix of the discrete cosine transform."""
    place = torch.arange(dim, dtype=torch.float64)
    matrix = torch.cos(math.pi / dim * (place[:, None] + 0.5) * place) * math.sqrt(2 / dim)
    matrix[:, 0] = math.sqrt(1 / dim)
    return matrix


class Codes:
    """The codes of one chunk. Only rows of whole groups are coded: ``groups * rows_per_group`` rows."""

    def __init__(self, capacity: int, sizes: tuple[int, int, int], frame: Frame) -> None:
        heads, keys_per_block, dim = sizes
        self.rows_per_group = group_rows(keys_per_block)
        self.keys_per_group = self.rows_per_group * keys_per_block
        groups = capacity // self.rows_per_group
        self.frame = frame
        # C reads them, whatever PyTorch's defaults are.
        self.values = torch.empty(heads, groups, self.keys_per_group, dim, dtype=torch.int8, device="cpu")
        self.scales, self.lost, self.longest = torch.empty(3, heads, groups, dtype=torch.float32, device="cpu")
        """The steps of codes, and the lengths of each group's longest difference from a code and longest code."""
        self.groups = 0

    @classmethod
    def of(cls, keys_per_block: int, tensors: Mapping[str, Tensor]) -> Codes:
        """Make codes around the result of ``tensors``, without a copy."""
        heads, groups, _, dim = tensors["values"].shape
        codes = cls(0, (heads, keys_per_block, dim), Frame.named(tensors))
        codes.values, codes.scales = tensors["values"], tensors["scales"]
        codes.lost, codes.longest = tensors["lost"], tensors["longest"]
        codes.groups = groups
        return codes

    def tensors(self) -> dict[str, Tensor]:
        whole = {"values": self.values, "scales": self.scales, "lost": self.lost, "longest": self.longest}
        return {name: tensor[:, : self.groups] for name, tensor in whole.items()} | self.frame._asdict()

    def of_head(self, head: int) -> KeyCodes:
        """Return the codes of a key head."""
        return KeyCodes(*(each[head, : self.groups] for each in (self.values, self.scales, self.lost, self.longest)))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.lost, self.longest))

    def extend(self, keys: Tensor, used: int) -> None:
        """Encode the groups of ``keys [G, capacity, P, D]`` that are whole with ``used`` rows and have no code yet."""
        stop = min(used // self.rows_per_group, self.values.shape[1])
        for first in range(self.groups, stop, CODED_AT_ONCE):
            self._encode(keys, slice(first, min(first + CODED_AT_ONCE, stop)))
        self.groups = max(self.groups, stop)

    def _encode(self, keys: Tensor, new: slice) -> None:
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
        """Keep only the codes of the first ``used`` rows, which are unchanged."""
        self.groups = min(self.groups, used // self.rows_per_group)


def group_rows(keys_per_block: int) -> int:
    """Return the number of blocks in a group."""
    return max(1, GROUP_KEYS // keys_per_block)


def usable(device: torch.device, dim: int) -> bool:
    """Return whether keys of ``dim`` numbers are compared faster in 8 bits."""
    if device.type != "cpu" or not 8 <= dim <= LARGEST_CODED_DIM:
        return False
    return backend_problem("native", dim) is None and lists_problem() is None
