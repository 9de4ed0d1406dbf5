"""Tensors as bytes and back: what a store keeps, viewed, not converted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.store.contract import Bytes, Layout, Record

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""The dtypes that a store knows, as torch calls them."""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def byte_rows(tensor: Tensor) -> Bytes:
    """``[n, ...]`` -> uint8 ``[n, bytes]``; a view where the tensor is contiguous and on the CPU."""
    rows = tensor.detach().cpu().contiguous()
    if not rows.numel():
        return np.empty((len(rows), 0), np.uint8)
    return _numpy(rows.reshape(len(rows), -1).view(torch.uint8))


def to_record(tensor: Tensor) -> Record:
    """The tensor as a record. Raises ``InvalidArgument`` for a dtype that a store does not know."""
    if tensor.dtype not in _NAMES:
        raise InvalidArgument(
            f"a memory keeps {', '.join(TORCH_DTYPES)}, not {tensor.dtype}; convert the tensor first."
        )
    return Record(Layout(_NAMES[tensor.dtype], tuple(tensor.shape)), byte_rows(tensor.reshape(1, -1))[0])


def from_record(record: Record) -> Tensor:
    """The tensor in a record, whose bytes it shares."""
    dtype = TORCH_DTYPES[record.layout.dtype]
    if not record.payload.size:
        return torch.empty(record.layout.shape, dtype=dtype)
    return torch.from_numpy(record.payload.reshape(-1)).view(dtype).reshape(record.layout.shape)


class Rows:
    """Buffers for ``n`` values of some layouts: the store fills bytes, the caller sees tensors."""

    def __init__(self, n: int, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._buffers = [torch.empty(n, layout.nbytes, dtype=torch.uint8) for layout in layouts]

    @property
    def out(self) -> list[Bytes]:
        """The buffers as ``BlockStore.read`` wants them: uint8 ``[n, bytes]`` each."""
        return [_numpy(buffer) for buffer in self._buffers]

    def tensors(self) -> list[Tensor]:
        """The buffers as tensors ``[n, *shape]``, one for each layout."""
        return as_tensors(self._buffers, self._layouts)


def as_tensors(rows: Iterable[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """Bytes ``[n, bytes]`` for each layout, seen as tensors ``[n, *shape]``."""
    pairs = zip(rows, layouts, strict=True)
    return [row.view(TORCH_DTYPES[layout.dtype]).reshape(len(row), *layout.shape) for row, layout in pairs]


def _numpy(tensor: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = tensor.numpy()
    return array
