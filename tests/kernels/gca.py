"""Inputs of grouped cross attention, and how far an implementation is from the truth.

As a program (``python -m tests.kernels.gca``, in a process with Triton's interpreter) it runs the Triton kernels on
``CASES`` and prints the errors as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.kernels import grouped_cross_attention

NAMES = ("out", "dq", "dk", "dv", "dweights")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, with the letters of the public function, and what is special."""

    b: int = 1
    c: int = 2
    h: int = 2
    g: int = 1
    t: int = 5
    d: int = 16
    dv: int = 0
    """Size of a value; 0: that of a key."""
    s: int = 7
    k: int = 2
    n: int = 4
    off_by_one: bool = True
    blocks: tuple[tuple[int, ...], ...] = ()
    """Chosen blocks of each list, in every row; at random if empty."""
    special: str = ""


CASES = {
    "one query of one key": Case(c=1, h=1, t=1, s=1, k=1, n=1, blocks=((0,),)),
    "heads of 24, shared by two": Case(t=31, s=33, d=24),
    "plain softmax, two rows, other values": Case(b=2, c=1, h=1, t=33, s=63, dv=24, off_by_one=False),
    "whole tiles": Case(c=1, t=32, s=64, d=64, k=2),
    "one long block": Case(c=1, h=1, t=111, s=111, k=1, n=2),
    "decoding, blocks shared by programs": Case(c=1, h=8, g=2, t=1, s=31, d=64, k=6, n=9),
    "nothing chosen": Case(blocks=((-1, -1), (-1, -1))),
    "the same block twice, and by both lists": Case(blocks=((1, 1, -1), (-1, 1, 0)), k=3),
    "NaN in what was not chosen": Case(blocks=((1, -1), (-1, 3)), special="nan"),
    "states as projections leave them": Case(b=2, h=4, g=2, special="strided"),
}
HALF = ("heads of 24, shared by two", "decoding, blocks shared by programs")
"""Cases that the interpreter also runs in float16; it has no bfloat16."""


@dataclass(frozen=True)
class Inputs:
    """What the public function takes, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    blocks: Tensor
    dout: Tensor
    off_by_one: bool

    def to(self, dtype: torch.dtype) -> Inputs:
        """In another precision, weights included."""
        q, k, v, weights, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.weights, self.dout))
        return Inputs(q, k, v, weights, self.blocks, dout, self.off_by_one)

    def on(self, device: str) -> Inputs:
        """On another device."""
        q, k, v, weights, dout = (x.to(device) for x in (self.q, self.k, self.v, self.weights, self.dout))
        return Inputs(q, k, v, weights, self.blocks.to(device), dout, self.off_by_one)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random inputs of a case."""
    gen = torch.Generator().manual_seed(case.t * 1000 + case.s)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, dout = normal(case.b, case.c, case.h, case.t, case.d), normal(case.b, case.c, case.h, case.t, case.dv or case.d)
    k, v = (normal(case.b, case.n, case.g, case.s, dim) for dim in (case.d, case.dv or case.d))
    weights = normal(case.b, case.c, case.k).softmax(-1)
    blocks = torch.randint(-1, case.n, weights.shape, generator=gen)
    if case.blocks:
        blocks = torch.tensor(case.blocks).expand(case.b, -1, -1)
    if case.special == "nan":
        weights = weights.masked_fill(blocks < 0, float("nan"))
        k, v = k.clone(), v.clone()
        k[:, [0, 2]] = v[:, [0, 2]] = float("nan")
    if case.special == "strided":
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))
        blocks, dout = blocks.int(), dout[..., :1, :1].expand_as(dout)
    q, k, v, weights, dout = (x.to(dtype) for x in (q, k, v, weights, dout))
    return Inputs(q, k, v, weights, blocks, dout, case.off_by_one)


def results(function: Callable[..., Tensor], given: Inputs, **options: Any) -> dict[str, Tensor]:
    """The output and all gradients of the public function or of one with the same signature."""
    tensors = [x.detach().requires_grad_() for x in (given.q, given.k, given.v, given.weights)]
    out = function(*tensors, given.blocks, off_by_one=given.off_by_one, **options)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, tensors, given.dout)), strict=True))


def exact(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, blocks: Tensor, *, off_by_one: bool) -> Tensor:
    """The reference."""
    return grouped_cross_attention(q, k, v, weights, blocks, off_by_one=off_by_one, backend="reference")


def allowed(given: Inputs) -> dict[str, float]:
    """How far the output and each gradient may be from the truth, in whatever order a processor sums.

    Values on the way (scores, weights, what blocks give) are rounded to the type of the inputs a few times, and scores
    by their own size, which changes weights by as much. Sums are kept in float32 at least, and their rounding errors,
    each about as likely up as down, grow as the root of the number of terms. The size of the terms is that of the
    largest entry, as they have both signs. In float64 the truth is rounded as well.
    """
    truth, eps = results(exact, given.to(torch.float64)), torch.finfo(given.q.dtype).eps
    if given.q.dtype == torch.float64:
        eps *= 2
    _, lists, heads, tokens, dim = given.q.shape
    _, _, groups, length, _ = given.k.shape
    keys = given.k.double().nan_to_num().repeat_interleave(heads // groups, 2)  # [B, N, H, S, D]
    score = largest(given.q.double()[:, :, None] @ keys[:, None].mT) * dim**-0.5
    of_query = length * given.blocks.shape[2]
    of_key = lists * tokens * heads // groups * given.blocks.shape[2]
    counts = (of_query, of_query, of_key, of_key, heads * tokens * given.v.shape[-1])
    return {
        name: largest(truth[name]) * (eps * (8 + score) + min(eps, torch.finfo(torch.float32).eps) * count**0.5)
        for name, count in zip(NAMES, counts, strict=True)
    }


def errors(
    function: Callable[..., Tensor], given: Inputs, *, device: str = "cpu", **options: Any
) -> dict[str, tuple[float, float]]:
    """Largest error of the output and each gradient against float64, and the error that is allowed.

    Only ``function`` runs on ``device``.
    """
    got = {name: x.cpu() for name, x in results(function, given.on(device), **options).items()}
    truth, most = results(exact, given.to(torch.float64)), allowed(given)
    return {name: (largest(got[name].double() - truth[name]), most[name]) for name in NAMES}


def largest(x: Tensor) -> float:
    """The largest entry, whatever its sign; NaN if one is."""
    return float(x.abs().max())


def main() -> None:
    """Errors of the Triton kernels in the interpreter, by the names of the cases."""
    from memstore.kernels import _tiles
    from memstore.kernels.grouped_cross_attention import triton

    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # uninitialised memory is NaN
    assert _tiles.interpreted()
    found: dict[str, Any] = {
        f"{name} ({str(dtype).removeprefix('torch.')})": errors(
            grouped_cross_attention, inputs(CASES[name], dtype), backend="triton"
        )
        for dtype, names in ((torch.float32, CASES), (torch.float16, HALF))
        for name in names
    }
    found["missing"] = missing(triton)
    found["inference"] = inference(triton)
    sys.stdout.write(json.dumps(found))


def missing(triton: Any) -> list[bool]:
    """For each list, whether all of its output is NaN, where the second chose a block that does not exist."""
    given = inputs(Case(blocks=((0, 1), (2, 4), (-1, 3)), c=3), torch.float32)
    out = triton.grouped_cross_attention(
        given.q, given.k, given.v, given.blocks, given.weights, scale=0.25, off_by_one=True
    )
    return [bool(x.isnan().all()) for x in out[0]]


def inference(triton: Any) -> list[float]:
    """How far the output without gradients, and single gradients, are from those of everything at once."""
    given = inputs(Case(), torch.float32)
    everything = results(lambda *x, off_by_one: _call(triton, x[:4], x[4]), given)
    tensors = [given.q, given.k, given.v, given.weights]
    far = [largest(_call(triton, tensors, given.blocks) - everything["out"])]
    for i, name in enumerate(NAMES[1:]):
        one = [x.detach().requires_grad_(i == j) for j, x in enumerate(tensors)]
        (gradient,) = torch.autograd.grad(_call(triton, one, given.blocks), [one[i]], given.dout)
        far.append(largest(gradient - everything[name]))
    return far


def _call(triton: Any, tensors: Sequence[Tensor], blocks: Tensor) -> Tensor:
    q, k, v, weights = tensors
    out: Tensor = triton.grouped_cross_attention(q, k, v, blocks, weights, scale=0.25, off_by_one=True)
    return out


if __name__ == "__main__":
    main()
