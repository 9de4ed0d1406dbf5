"""Inputs of HiLS attention, and how far an implementation is from the truth.

As a program (``python -m tests.kernels.hils``, in a process with Triton's interpreter) it runs the Triton kernels on
``CASES`` and prints the errors as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.kernels.hils_attention import reference

NAMES = ("out", "dq", "dk", "dv", "du")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, with the letters of the public function."""

    t: int = 75
    b: int = 1
    h: int = 2
    g: int = 2
    d: int = 16
    size: int = 8
    window: int = 16
    top_k: int = 3
    softmax1: bool = False
    scale: float | None = None
    large: bool = False
    """Whether exponentials of scores overflow."""

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "default"


CASES = {
    "blocks of 8": Case(),
    "one token": Case(t=1),
    "shorter than a block": Case(t=7, softmax1=True),
    "one block": Case(t=8),
    "a block and a token": Case(t=9, b=2),
    "nothing to choose yet": Case(t=23),
    "one candidate for the last tokens": Case(t=25, h=1, g=1),
    "more places than candidates": Case(t=70, top_k=40),
    "one place": Case(top_k=1),
    "four heads share": Case(h=8, g=2),
    "all heads share, softmax1": Case(h=4, g=1, softmax1=True),
    "softmax1": Case(b=2, softmax1=True),
    "a window that ends within a block": Case(t=90, window=21),
    "a window shorter than a block": Case(t=60, window=3),
    "a window of one": Case(t=40, window=1),
    "blocks of two": Case(t=21, size=2, window=4),
    "blocks of 64, heads of 24": Case(t=333, size=64, window=128, d=24, top_k=2),
    "scores turned around": Case(scale=-0.3),
    "all scores alike": Case(t=30, scale=0.0, top_k=40),
    "large scores": Case(large=True),
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the public function takes, and the gradient of its output."""

    tensors: tuple[Tensor, ...]
    """``q, k, v, u``"""
    dout: Tensor
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Inputs:
        """In another precision."""
        return Inputs(tensors=tuple(x.to(dtype) for x in self.tensors), dout=self.dout.to(dtype), options=self.options)


def inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Random inputs of a case; their numbers are those of float32 at most, so the same blocks are chosen everywhere."""
    gen = torch.Generator().manual_seed(case.t + seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(case.b, heads, case.t, case.d, generator=gen).to(dtype)

    q, k, v, u, dout = (normal(heads) for heads in (case.h, case.g, case.g, case.h, case.h))
    if case.large:
        q, u = q * 60, u * 60
    options = {
        "block_size": case.size,
        "window": case.window,
        "top_k": case.top_k,
        "softmax1": case.softmax1,
        "scale": case.scale,
    }
    return Inputs(tensors=(q, k, v, u), dout=dout, options=options)


def results(function: Callable[..., Tensor], given: Inputs, **options: Any) -> dict[str, Tensor]:
    """The output and all gradients of the public function or of one with the same signature."""
    tensors = [x.detach().requires_grad_() for x in given.tensors]
    out = function(*tensors, **given.options, **options)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, tensors, given.dout)), strict=True))


def exact(q: Tensor, k: Tensor, v: Tensor, u: Tensor, **options: Any) -> Tensor:
    """The reference, with the signature of the public function."""
    scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    given = {name: options[name] for name in ("window", "top_k", "softmax1")}
    return reference.hils_attention(q, k, v, u, size=options["block_size"], scale=scale, **given)


def largest(x: Tensor) -> float:
    """The largest entry, whatever its sign; NaN if one is."""
    return float(x.abs().max()) if x.numel() else 0.0
