"""Inputs of kNN attention, and how far an implementation is from the truth.

    python -m tests.kernels.knn                   # errors of the Triton kernels on CASES, in Triton's interpreter
    python -m tests.kernels.knn --compile sm_90   # what the kernels need of a GPU that is not there

The second needs a process without the interpreter. Both print JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memstore.kernels.knn_attention import knn_attention, knn_attention_with_lse

NAMES = ("out", "lse", "dq", "dscale", "dlocal", "dgate")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, with the letters of the public function, and what is special."""

    b: int = 1
    h: int = 2
    g: int = 2
    t: int = 5
    d: int = 16
    dv: int = 0
    """Size of a value; 0: that of a key."""
    n: int = 40
    k: int = 8
    gated: bool = True
    special: str = ""


CASES = {
    "one query, one token": Case(h=1, g=1, t=1, n=1, k=1),
    "heads of 24, shared by two, other values": Case(b=2, h=4, t=7, d=24, dv=40, k=17),
    "more tokens than a tile": Case(t=3, n=111, k=63, d=64),
    "without a gate": Case(b=2, gated=False, k=5),
    "queries that found nothing": Case(t=4, special="nothing"),
    "the same token several times": Case(n=2, k=9),
    "NaN in what was not found": Case(special="nan"),
    "states as projections leave them": Case(b=2, h=4, special="strided"),
}
HALF = ("heads of 24, shared by two, other values", "without a gate")
"""Cases that the interpreter also runs in float16; it has no bfloat16."""


@dataclass(frozen=True)
class Inputs:
    """What the public functions take, and the gradients of what they return."""

    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor
    scale: Tensor
    local: Tensor
    gate: Tensor
    dout: Tensor
    dlse: Tensor
    gated: bool

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """With every tensor changed."""
        changed: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **changed)

    def to(self, dtype: torch.dtype) -> Inputs:
        """In another precision."""
        return self.map(lambda x: x.to(dtype) if x.is_floating_point() else x)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random inputs of a case."""
    gen = torch.Generator().manual_seed(case.t * 1000 + case.k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    heads, dv = (case.b, case.h, case.t), case.dv or case.d
    q, k, v = normal(*heads, case.d), normal(case.b, case.g, case.n, case.d), normal(case.b, case.g, case.n, dv)
    ids = torch.randint(-1, case.n, (*heads, case.k), generator=gen)
    if case.special == "nothing":
        ids[:, :, ::2] = -1
    if case.special == "nan":
        ids = ids.masked_fill(ids % 3 == 0, -1)
        k[:, :, ::3] = v[:, :, ::3] = float("nan")
    local, dout = normal(*heads, dv), normal(*heads, dv)
    if case.special == "strided":
        q, k, v, local = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, local))
        ids, dout = ids.int(), dout[..., :1].expand_as(dout)
    scale, gate = (normal(case.h) / 4).exp() * case.d**-0.5, normal(case.h)
    return Inputs(q, k, v, ids, scale, local, gate, dout, normal(*heads), case.gated).to(dtype)


def results(function: Callable[..., tuple[Tensor, Tensor]], given: Inputs) -> dict[str, Tensor]:
    """Both outputs and all gradients of a function of the tensors of ``given``; log-sum-exps only without a gate.

    The gradient of a scale is that of its logarithm, whose size does not depend on that of the heads.
    """
    tensors = [x.detach().requires_grad_() for x in (given.q, given.scale, given.local, given.gate)]
    q, scale, local, gate = tensors
    out, lse = function(q, given.k, given.v, given.ids, scale, local if given.gated else None, gate)
    found = lse.detach() > -torch.inf
    lse = torch.where(found, lse, 0)
    loss = (out * given.dout).sum() + (0 if given.gated else (lse * given.dlse).sum())
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
    dq, dscale, *others = gradients
    return dict(zip(NAMES, (out.detach(), lse.detach(), dq, given.scale * dscale, *others), strict=True))


def public(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The public functions as one."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"scale": scale, "backend": backend}
        if local is None:
            return knn_attention_with_lse(q, k, v, ids, **options)
        out = knn_attention(q, k, v, ids, local=local, gate=gate, **options)
        return out, torch.zeros(q.shape[:-1], dtype=out.dtype)

    return call


def plain(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: Tensor, local: Tensor | None, gate: Tensor
) -> tuple[Tensor, Tensor]:
    """As one would write it down, over the whole memory and in the precision of the inputs."""
    per_group = q.shape[1] // k.shape[1]
    k, v = (x.nan_to_num().repeat_interleave(per_group, 1) for x in (k, v))
    counts = torch.zeros(*ids.shape[:3], k.shape[2] + 1, dtype=q.dtype)
    counts = counts.scatter_add(-1, torch.where(ids < 0, k.shape[2], ids).long(), torch.ones_like(ids, dtype=q.dtype))[
        ..., :-1
    ]
    found = (ids >= 0).any(-1, keepdim=True)
    scores = (q @ k.mT) * scale[:, None, None]
    scores = torch.where(counts > 0, scores + counts.clamp(min=1).log(), -torch.inf)
    scores = torch.where(found, scores, 0)
    out = torch.where(found, scores.softmax(-1) @ v, 0)
    if local is not None:
        opened = torch.where(found, gate.sigmoid()[:, None, None], 0)
        return out * opened + local * (1 - opened), torch.zeros_like(q[..., 0])
    return out, torch.where(found.squeeze(-1), scores.logsumexp(-1), -torch.inf)


def errors(
    function: Callable[..., tuple[Tensor, Tensor]], given: Inputs, device: str = "cpu"
) -> dict[str, tuple[float, float]]:
    """Largest error of each output and gradient against float64, and the error that is allowed.

    Allowed is the error of ``plain`` in the same precision, and roundings of the largest entry: a few, and those of the
    largest score, which change weights by as much (twice in float64, in which the truth is rounded too). Gradients of
    scale and gate add up products of scores, or of gates, and of entries of about 1, much of which cancels: their terms
    are at least as large as the largest score, and as 1.
    """
    got = {name: x.cpu() for name, x in results(function, given.map(lambda x: x.to(device))).items()}
    truth, written_down = results(plain, given.to(torch.float64)), results(plain, given)
    keys = given.k.nan_to_num().repeat_interleave(given.q.shape[1] // given.k.shape[1], 1)
    score = _largest(given.q @ keys.mT * given.scale[:, None, None])
    rounding = (16 + score) * (2 if given.q.dtype == torch.float64 else 1) * torch.finfo(given.q.dtype).eps
    return {
        name: (
            _largest(got[name].double() - truth[name]),
            _largest(written_down[name].double() - truth[name]) + rounding * max(1.0, score, _largest(truth[name])),
        )
        for name in NAMES
    }


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max())


def interpreted() -> dict[str, Any]:
    """Errors of the kernels by the names of the cases, and whether a token that does not exist gives NaN."""
    from memstore.kernels import _tiles
    from memstore.kernels.knn_attention import triton

    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # uninitialised memory is NaN
    assert _tiles.interpreted()
    found: dict[str, Any] = {
        f"{name} ({str(dtype).removeprefix('torch.')})": errors(public("triton"), inputs(CASES[name], dtype))
        for dtype, names in ((torch.float32, CASES), (torch.float16, HALF))
        for name in names
    }
    given = inputs(Case(h=1, g=1, t=3, n=4), torch.float32)
    given.ids[0, 0, 1, 5] = 4
    out, _ = triton.knn_attention(given.q, given.k, given.v, given.ids, given.scale, None, None)
    return found | {"missing": out[0, 0].isnan().all(-1).tolist()}


def compiled(target: str) -> list[dict[str, Any]]:
    """What each kernel needs on a GPU, for two sizes."""
    import triton

    from memstore.kernels._tiles import config
    from memstore.kernels.knn_attention import triton as knn
    from tests.kernels.compiling import row

    rows = []
    for kernel in (knn._forward_kernel.fn, knn._backward_kernel.fn):
        for dtype, dim, tiles in (("bf16", 128, config(4, 2, BK=32)), ("fp32", 24, config(1, 2, BK=16))):
            told = {"CHOSEN": 32, "D": dim, "DV": dim, "BD": triton.next_power_of_2(dim), "GATED": True}
            told |= {"BDV": told["BD"], **tiles.kwargs}
            states = ("q", "k", "v", "local", "out", "dout", "dq", "dlocal")
            floats = ("scale", "gate", "lse", "dlse", "dscale", "dgate")
            kinds = {"ids": "*i64"} | dict.fromkeys(states, f"*{dtype}") | dict.fromkeys(floats, "*fp32")
            rows.append(row(kernel, kinds, told, target, dtype, dim, warps=tiles.num_warps))
    return rows


if __name__ == "__main__":
    printed = compiled(sys.argv[2]) if "--compile" in sys.argv else interpreted()
    sys.stdout.write(json.dumps(printed))
