"""Parts that the trainable layers share: feed-forward, rotary positions, attention projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """``W_down(silu(W_gate x) * W_up x)`` (Shazeer 2020)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` -> the same."""
        gate, up = self.gate_up(x).chunk(2, -1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


def rotary(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[..., dim]`` of positions ``[...]``, half-split.

    Angles are computed in float64, so that they are as good at position 100,000,000 as at 0: in float32 an angle of
    that size has no correct digit after the point.
    """
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.double().unsqueeze(-1) * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x [..., T, D]`` by cosines and sines that broadcast to it (Su et al. 2021)."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[0][..., :half], cos_sin[1][..., :half]
    first, second = x.split(half, -1)
    return torch.cat([torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)], -1)


def heads(x: Tensor, count: int) -> Tensor:
    """``[B, T, count * D]`` -> ``[B, count, T, D]``."""
    split: Tensor = x.unflatten(-1, (count, -1)).transpose(1, 2)
    return split


def merged(x: Tensor) -> Tensor:
    """``[B, H, T, D]`` -> ``[B, T, H * D]``: the inverse of ``heads``."""
    return x.transpose(1, 2).flatten(2)
