"""Parts that the trainable layers share: feed-forward, rotary positions, attention projections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.device_copies import numbers

States = tuple[Tensor, Tensor]
"""Keys and values of a layer, ``[B, G, n, D]`` each."""


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` that takes about half the time on a CPU if no gradients are needed."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same shape."""
        if torch.is_grad_enabled() or x.dtype != torch.float32 or x.device.type != "cpu":
            return super().forward(x.to(self.weight.dtype))  # under autocast it may differ, of which PyTorch warns
        factor = self.lengths(x).reciprocal_().mul_(x.shape[-1] ** 0.5)
        normed: Tensor = (x * factor).mul_(self.weight)
        return normed

    def lengths(self, x: Tensor) -> Tensor:
        """Return lengths ``[..., 1]`` of ``x [..., hidden]`` on a CPU; ``eps`` is added to the mean of the squares."""
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return lengths.hypot_(_least(x.shape[-1] * self.least, x.dtype))

    @property
    def least(self) -> float:
        """The number that is added to the mean of the squares."""
        return torch.finfo(self.weight.dtype).eps if self.eps is None else self.eps


@lru_cache(maxsize=64)
def _least(square: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(square**0.5, dtype=dtype)


class SwiGLU(nn.Module):
    """The feed-forward layer ``W_down(silu(W_gate x) * W_up x)`` (Shazeer 2020)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same shape."""
        gate, up = self.gate_up(x).chunk(2, -1)
        inner = F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate, inplace=True).mul_(up)
        down: Tensor = self.down(inner)
        return down


def rotary(starts: Sequence[int], count: int, dim: int, theta: float, like: Tensor) -> Tensor:
    """Return turns ``[len(starts), count, dim / 2]`` of the positions from ``starts`` on: complex numbers of length 1.

    Angles are computed in float64, so they are as good at position 100,000,000 as at 0. In float32 an angle of that
    size has no correct digit after the point. ``like`` has the dtype and the device of the states to rotate.
    """
    first = _turns(numbers(starts, like.device), dim, theta)
    turns = first.unsqueeze(1) * _first_turns(count, dim, theta, like.device)
    return turns if like.dtype == torch.float64 else turns.to(torch.complex64)


@lru_cache(maxsize=16)
def _first_turns(count: int, dim: int, theta: float, device: torch.device) -> Tensor:
    return _turns(torch.arange(count, device=device), dim, theta)


def _turns(positions: Tensor, dim: int, theta: float) -> Tensor:
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.double().unsqueeze(-1) * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate neighbouring pairs of ``x [..., D]`` by ``turns [..., D / 2]`` that broadcast (Su et al. 2021).

    This is one product of complex numbers. Half types are rotated in float32.
    """
    # Neighbours, not halves as in Llama: one pass instead of six. No other code reads these weights.
    wide = x if turns.dtype == torch.complex128 else x.float()
    turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * turns
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def after(past: States | None, states: States) -> States:
    """Join states that follow one another."""
    if past is None:
        return states
    return torch.cat([past[0], states[0]], 2), torch.cat([past[1], states[1]], 2)


def merged(x: Tensor) -> Tensor:
    """Merge the heads: ``[B, H, T, D]`` -> ``[B, T, H * D]``."""
    return x.transpose(1, 2).flatten(2)
