"""Inputs of HiLS attention, and how far an implementation is from the truth.

As a program (``python -m tests.kernels.hils``, in a process with Triton's interpreter) it runs the Triton kernels on
``CASES`` and prints the errors as JSON.
"""

from __future__ import annotations

import json
import sys
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

    def on(self, device: str) -> Inputs:
        """On another device."""
        return Inputs(
            tensors=tuple(x.to(device) for x in self.tensors), dout=self.dout.to(device), options=self.options
        )


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


HALF = ("blocks of 8", "four heads share", "blocks of 64, heads of 24")
"""Cases that the interpreter also runs in float16; it has no bfloat16."""


def errors(given: Inputs, *, device: str = "cpu", **options: Any) -> dict[str, tuple[float, float]]:
    """Largest error of the output and each gradient, and what is allowed, of the size of the largest entry.

    Only the public function runs on ``device``.

    In half types everything is chosen, so that no rounding changes a choice, and the truth is of the same numbers.
    """
    from memstore.kernels.hils_attention import hils_attention

    if given.dout.dtype != torch.float32:
        given = Inputs(tensors=given.tensors, dout=given.dout, options={**given.options, "top_k": 99})
    truth, got = results(exact, given.to(torch.float32)), results(hils_attention, given.on(device), **options)
    roundings = 300 if given.dout.dtype == torch.float32 else 16
    return {
        name: (
            largest(got[name].cpu().float() - truth[name]),
            roundings * torch.finfo(given.dout.dtype).eps * (largest(truth[name]) or largest(given.dout)),
        )
        for name in NAMES
    }


def interpreted() -> dict[str, Any]:
    """Errors of the Triton kernels in the interpreter, by the names of the cases."""
    from memstore.kernels import _tiles

    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # uninitialised memory is NaN
    assert _tiles.interpreted()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = errors(inputs(CASES["blocks of 8"], torch.float16), backend="triton")
    return {"under autocast": under} | {
        f"{name} ({str(dtype).removeprefix('torch.')})": errors(inputs(CASES[name], dtype), backend="triton")
        for dtype, names in ((torch.float32, CASES), (torch.float16, HALF))
        for name in names
        if not CASES[name].large
    }


def compiled(target: str) -> list[dict[str, Any]]:
    """What each kernel needs on a GPU, for several sizes."""
    from memstore.kernels._tiles import padded
    from memstore.kernels.hils_attention import triton as hils
    from tests.kernels.compiling import row

    rows = []
    for kernel in (hils._window_kernel, hils._chosen_kernel, hils._queries_kernel, hils._keys_kernel):
        jitted: Any = kernel.fn
        for dim in (64, 128):
            told = {"S": 64, "BS": padded(64), "D": dim, "BD": padded(dim), "PRECISION": "ieee"}
            chosen = hils.tiles(target, padded(dim))
            kinds = dict.fromkeys(("q", "k", "v", "near", "out", "dout", "dq", "dk", "dv"), "*bf16")
            kinds |= dict.fromkeys(("weights", "lse", "delta", "dweights"), "*fp32") | {"scale": "fp32"}
            aligned = [name for name in kinds if name in jitted.arg_names and name != "scale"]
            sizes = {"warps": chosen.num_warps, "stages": chosen.num_stages}
            rows.append(row(jitted, kinds, {**told, **chosen.kwargs}, target, "bf16", dim, aligned=aligned, **sizes))
    return rows


if __name__ == "__main__":
    printed = compiled(sys.argv[2]) if "--compile" in sys.argv else interpreted()
    sys.stdout.write(json.dumps(printed))
