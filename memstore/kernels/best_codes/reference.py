"""The stored form of codes (whole numbers in 8 bits, or signs in one), and products in their plainest form."""

from __future__ import annotations

import torch
from torch import Tensor

from memstore.errors import InvalidArgument

LARGEST = 127
"""Largest code in 8 bits."""
BYTE = 8
STEP_NUMBERS, STEP_NUMBERS_THERE = 1 << 20, 1 << 28
"""Numbers of codes or products at a time, on a CPU and on other devices."""


def best_codes(codes: Tensor, queries: Tensor) -> Tensor:
    """Take ``codes [n, P, ...]``, ``queries [R, D]``: see the public function. In float64 for queries in float64."""
    wide = queries.to(torch.promote_types(queries.dtype, torch.float32))
    rows, dim = queries.shape
    most = STEP_NUMBERS if codes.device.type == "cpu" else STEP_NUMBERS_THERE
    step = max(1, most // (codes.shape[1] * max(dim, rows)))
    pieces = (numbers(piece, dim).to(wide.dtype) for piece in codes.split(step))
    return torch.cat(
        [(piece.flatten(0, 1) @ wide.T).unflatten(0, piece.shape[:2]).amax(1) for piece in pieces]
    ).T.float()


def hold(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode ``keys [..., D]``: int8 for ``torch.int8``, and uint8 ``[..., ceil(D / 8)]`` for ``torch.bool``.

    ``torch.bool`` stores only the sign, in one bit: 1 is +1, 0 is -1. Bit 0 of byte 0 is the first number. Raises
    ``InvalidArgument`` unless the keys are whole numbers from -127 to 127, or +1 and -1.
    """
    if dtype == torch.int8:
        if bool((keys != keys.round()).any()) or (keys.numel() and float(keys.abs().max()) > LARGEST):
            raise InvalidArgument(
                "keys stored as int8 must be whole numbers from -127 to 127; store other keys as bfloat16"
            )
        return keys.to(torch.int8)
    if bool((keys.abs() != 1).any()):
        raise InvalidArgument("keys stored as one bit must be +1 or -1 in every number; store other keys as bfloat16")
    bits = torch.nn.functional.pad(keys > 0, (0, -keys.shape[-1] % BYTE)).unflatten(-1, (-1, BYTE))
    packed: Tensor = (bits << torch.arange(BYTE, dtype=torch.uint8, device=keys.device)).sum(-1, dtype=torch.uint8)
    return packed


def numbers(codes: Tensor, dim: int) -> Tensor:
    """Decode what ``hold`` encoded: ``[..., D]`` float32, of ``dim`` numbers each."""
    if codes.dtype == torch.int8:
        return codes.float()
    bits = codes.unsqueeze(-1) >> torch.arange(BYTE, dtype=torch.uint8, device=codes.device) & 1
    return bits.flatten(-2)[..., :dim].float().mul_(2).sub_(1)
