"""Inputs of landmark attention, and how far an implementation is from the truth.

As a program (``python -m tests.kernels.landmark``, in a process with Triton's interpreter) it runs the Triton kernels
on ``CASES`` and prints the errors as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memstore.kernels import landmark_attention

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, with the letters of the public function, where landmarks are, and what is special."""

    t: int = 23
    """Keys."""
    queries: int | None = None
    """None: as many as keys."""
    b: int = 1
    h: int = 1
    g: int = 1
    d: int = 16
    dv: int = 0
    """Size of a value; 0: that of a key."""
    landmarks: int | tuple[tuple[int, ...], ...] = 7
    """One at the end of each block of so many tokens, or the positions in each row."""
    padded: tuple[tuple[int, ...], ...] = ()
    """Positions that are padding, in each row."""
    documents: tuple[int, ...] = ()
    """Where a new document begins, in every row."""
    window: int | None = None
    ramp: float = 1.0
    scale: float | None = None
    causal: bool = True
    special: str = ""

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "default"


CASES = {
    "one token": Case(t=1, landmarks=((),)),
    "one landmark": Case(t=1, landmarks=((0,),)),
    "blocks of 7, the last incomplete": Case(),
    "whole tiles": Case(t=64, landmarks=32, d=32, h=1, g=1),
    "blocks of 50, grouped heads of 24": Case(t=104, h=2, landmarks=50, d=24, dv=40),
    "tiny blocks": Case(t=31, landmarks=3),
    "blocks of one token and its landmark": Case(t=11, landmarks=2),
    "first block short": Case(t=70, landmarks=((5, 16, 27, 38, 49, 60),)),
    "empty blocks": Case(t=29, landmarks=((0, 1, 9, 10, 11, 20),)),
    "only landmarks": Case(t=5, landmarks=((0, 1, 2, 3, 4),)),
    "no landmark": Case(t=83, landmarks=((),), b=1),
    "a landmark late and one early": Case(t=90, b=2, landmarks=((3,), (85,))),
    "each row another layout": Case(t=61, b=3, landmarks=((), (0, 13, 14, 40), (7, 15, 23, 31, 39, 47, 55, 60))),
    "last queries": Case(t=45, queries=11, landmarks=8, h=3),
    "one query": Case(t=45, queries=1, landmarks=8, h=4, g=2),
    "padding left, right and within": Case(
        t=31, b=3, landmarks=8, padded=(tuple(range(11)), tuple(range(25, 31)), (3, 7, 12, 13, 14))
    ),
    "a row of padding": Case(t=12, b=2, landmarks=4, padded=(tuple(range(12)), ())),
    "NaN in padding": Case(t=31, b=2, landmarks=8, padded=(tuple(range(11)), (3, 7)), special="nan"),
    "documents": Case(t=50, b=2, landmarks=8, documents=(1, 19, 40)),
    "window": Case(t=50, landmarks=8, window=21),
    "window of one": Case(t=17, landmarks=4, window=1),
    "window, documents, padding, last queries": Case(
        t=75, queries=37, b=2, h=2, landmarks=11, documents=(30,), window=33, padded=((0, 1, 40), ()), ramp=0.5
    ),
    "half way to landmarks": Case(t=50, landmarks=8, ramp=0.5),
    "ordinary softmax": Case(t=50, b=2, landmarks=8, ramp=0.0, documents=(33,), padded=((0, 1, 2), ())),
    "scores turned around": Case(t=45, landmarks=8, scale=-0.3, ramp=0.7),
    "all scores alike": Case(t=45, landmarks=8, scale=0.0),
    "large scores": Case(t=45, landmarks=8, special="large"),
    "states as projections leave them": Case(t=45, b=2, h=4, g=2, landmarks=8, special="strided"),
}
EVERYWHERE = {
    "all sees all": Case(t=31, causal=False),
    "all sees all, documents, padding, window": Case(
        t=45, b=2, landmarks=8, causal=False, documents=(20,), padded=((3, 4, 5), ()), window=9, ramp=0.7
    ),
}
"""Attention that is not causal, which the Triton kernels do not have."""
HALF = ("blocks of 50, grouped heads of 24", "padding left, right and within", "first block short")
"""Cases that the interpreter also runs in float16; it has no bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the public function takes, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    is_landmark: Tensor
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Inputs:
        """In another precision."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        return replace(self, q=q, k=k, v=v, dout=dout)

    def on(self, device: str) -> Inputs:
        """On another device."""
        q, k, v, dout, is_landmark = (x.to(device) for x in (self.q, self.k, self.v, self.dout, self.is_landmark))
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return Inputs(q=q, k=k, v=v, dout=dout, is_landmark=is_landmark, options=options)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random inputs of a case."""
    gen = torch.Generator().manual_seed(case.t)
    queries = case.t if case.queries is None else case.queries

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, dout = normal(case.b, case.h, queries, case.d), normal(case.b, case.h, queries, case.dv or case.d)
    k, v = normal(case.b, case.g, case.t, case.d), normal(case.b, case.g, case.t, case.dv or case.d)
    real = ~places(case.padded, case)
    if case.special == "nan":
        k, v = (x.masked_fill(~real[:, None, :, None], float("nan")) for x in (k, v))
        q = q.masked_fill(~real[:, None, case.t - queries :, None], float("nan"))
    if case.special == "large":
        q = q * 30  # exp(score) overflows
    if case.special == "strided":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        dout = dout[..., :1, :1].expand_as(dout)
    options: dict[str, Any] = {"window": case.window, "ramp": case.ramp, "causal": case.causal}
    if case.scale is not None:
        options["scale"] = case.scale
    if case.padded:
        options["key_padding"] = real
    if case.documents:
        options["documents"] = (places((case.documents,) * case.b, case)).cumsum(1) % 2
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    return Inputs(q=q, k=k, v=v, dout=dout, is_landmark=landmarks(case), options=options)


def landmarks(case: Case) -> Tensor:
    """Where a landmark is, ``[B, T]``."""
    if isinstance(case.landmarks, int):
        return (torch.arange(1, case.t + 1) % case.landmarks == 0).repeat(case.b, 1)
    return places(case.landmarks, case)


def places(rows: tuple[tuple[int, ...], ...], case: Case) -> Tensor:
    """True at the given positions, ``[B, T]``."""
    there = torch.zeros(case.b, case.t, dtype=torch.bool)
    for row, positions in enumerate(rows):
        there[row, list(positions)] = True
    return there


def results(function: Callable[..., Tensor], given: Inputs, **options: Any) -> dict[str, Tensor]:
    """The output and all gradients of the public function or of one with the same signature."""
    tensors = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    out = function(*tensors, given.is_landmark, **given.options, **options)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, tensors, given.dout)), strict=True))


def exact(q: Tensor, k: Tensor, v: Tensor, is_landmark: Tensor, **options: Any) -> Tensor:
    """The reference."""
    return landmark_attention(q, k, v, is_landmark, **options, backend="reference")


def plain(q: Tensor, k: Tensor, v: Tensor, is_landmark: Tensor, **options: Any) -> Tensor:
    """As one would write it down, all in the precision of the inputs: the measure of what is exact enough."""
    weights = exact(q, k, torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:3], -1), is_landmark, **options)
    real = options.get("key_padding")
    values = v if real is None else torch.where(real[:, None, :, None], v, 0)
    return weights @ values.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def errors(
    function: Callable[..., Tensor], given: Inputs, *, device: str = "cpu", **options: Any
) -> dict[str, tuple[float, float]]:
    """Largest error of the output and each gradient against float64, and the error that is allowed.

    Allowed is the error of ``plain`` in the same precision, and roundings of the largest entry: a few, and those of the
    largest score, which change weights by as much (twice in float64, in which the truth is rounded too). Where the
    truth is 0, as gradients are if only one token is seen, the largest entry is that of what cancels out. Only
    ``function`` runs on ``device``.
    """
    got = {name: x.cpu() for name, x in results(function, given.on(device), **options).items()}
    truth, written_down = results(exact, given.to(torch.float64)), results(plain, given)
    keys = given.k.nan_to_num().repeat_interleave(given.q.shape[1] // given.k.shape[1], dim=1)
    score = largest(given.q.nan_to_num() @ keys.mT) * abs(given.options.get("scale", given.q.shape[-1] ** -0.5))
    rounding = (8 + score) * (2 if given.q.dtype == torch.float64 else 1) * torch.finfo(given.q.dtype).eps
    return {
        name: (
            largest(got[name].double() - truth[name]),
            largest(written_down[name].double() - truth[name])
            + rounding * (largest(truth[name]) or largest(given.dout)),
        )
        for name in NAMES
    }


def largest(x: Tensor) -> float:
    """The largest entry, whatever its sign; NaN if one is."""
    return float(x.abs().max()) if x.numel() else 0.0


def main() -> None:
    """Errors of the Triton kernels in the interpreter, by the names of the cases."""
    from memstore.kernels import _tiles

    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # uninitialised memory is NaN
    assert _tiles.interpreted()
    found = {
        f"{name} ({str(dtype).removeprefix('torch.')})": errors(
            landmark_attention, inputs(CASES[name], dtype), backend="triton"
        )
        for dtype, names in ((torch.float32, CASES), (torch.float16, HALF))
        for name in names
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
