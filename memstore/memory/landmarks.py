"""How landmarks are stored: as they are, in bfloat16, or as signs of one bit each.

A bit code keeps, for each number, whether it is negative: 1 means it is not. Bit 0 of byte 0 belongs to the first
number (little-endian). It is decoded to +1 and -1, so that an inner product with a query counts agreeing signs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memstore.memory.tensors import TORCH_DTYPES


def encode(landmarks: Tensor, key_dtype: str) -> Tensor:
    """``[n, G, P, D]`` floating point -> as stored."""
    if key_dtype != "bit":
        return landmarks.to(TORCH_DTYPES[key_dtype])
    signs = (landmarks >= 0).cpu().numpy()
    return torch.from_numpy(np.packbits(signs, axis=-1, bitorder="little"))


def decode(stored: Tensor, key_dtype: str) -> Tensor:
    """As stored -> ``[n, G, P, D]`` float32."""
    if key_dtype != "bit":
        return stored.float()
    bits = torch.from_numpy(np.unpackbits(stored.numpy(), axis=-1, bitorder="little"))
    return bits.float().mul_(2).sub_(1)


def index_dtype(key_dtype: str) -> torch.dtype:
    """What an index should keep of landmarks: +1 and -1 are exact in bfloat16."""
    return torch.float32 if key_dtype == "float32" else torch.bfloat16
