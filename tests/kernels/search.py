"""Cases of the search for blocks, and a program that runs its kernels where a test cannot: ``python -m ...search``.

Triton's interpreter has to be chosen before Triton is imported, and compiling needs Triton without it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.kernels import search_blocks
from memstore.kernels.search_blocks import Backend


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, and what is special."""

    h: int = 2
    g: int = 2
    t: int = 5
    n: int = 130
    p: int = 1
    d: int = 16
    k: int = 3
    special: str = ""


CASES = {
    "one block": Case(n=1, t=1, k=1),
    "fewer blocks than wanted": Case(n=7, k=9),
    "63 blocks": Case(n=63),
    "64 blocks": Case(n=64, k=64),
    "111 blocks and queries": Case(n=111, t=111),
    "several keys": Case(n=150, p=3, d=24, k=8),
    "grouped heads": Case(h=6, g=2, t=3, n=200),
    "a head that is no power of two": Case(d=33),
    "some blocks": Case(n=300, k=5, special="some"),
    "none of the blocks": Case(special="none"),
    "equal blocks": Case(n=200, k=20, special="equal"),
    "not contiguous": Case(n=150, p=2, special="strided"),
}


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, landmarks of a type, and which are wanted."""
    generator = torch.Generator().manual_seed(case.n + case.t)
    queries = torch.randn(case.h, case.t, case.d, generator=generator)
    landmarks = torch.randn(case.g, case.n, case.p, case.d, generator=generator)
    wanted = None
    if case.special == "some":
        wanted = torch.rand(case.n, generator=generator) < 0.3
    if case.special == "none":
        wanted = torch.zeros(case.n, dtype=torch.bool)
    if case.special == "equal":  # small integers, whose products have no rounding
        queries, landmarks = queries.round(), landmarks[:, torch.arange(case.n) % 11].round()
    if case.special == "strided":
        landmarks = landmarks.transpose(0, 1).contiguous().transpose(0, 1)
        wanted = (torch.rand(2 * case.n, generator=generator) < 0.5)[::2]
    return queries, landmarks.to(dtype), wanted


def agrees(case: Case, dtype: torch.dtype, backend: Backend = "triton") -> bool:
    """Whether the kernels find the blocks of the reference in float64, but for scores that are equal by rounding."""
    queries, landmarks, wanted = inputs(case, dtype)
    scores, blocks = search_blocks(queries, landmarks, case.k, wanted=wanted, backend=backend)
    truth, expected = search_blocks(queries.double(), landmarks, case.k, wanted=wanted, backend="reference")
    if case.special == "equal" and not torch.equal(blocks, expected):
        return False
    close = torch.allclose(scores.double(), truth, atol=1e-5, rtol=1e-5)
    return close and bool(((blocks == expected) | _tied(truth)).all()) and torch.equal(blocks < 0, expected < 0)


def _tied(scores: Tensor) -> Tensor:
    near = torch.zeros_like(scores, dtype=torch.bool)
    same = (scores[..., 1:] - scores[..., :-1]).abs() < 1e-5
    near[..., 1:] |= same
    near[..., :-1] |= same
    near[..., -1] = True  # the first that was left out may be as good
    return near


def interpreted() -> dict[str, bool]:
    """Each case in each type that the interpreter computes."""
    types = {"float32": torch.float32, "float16": torch.float16}
    return {f"{name} ({type_})": agrees(CASES[name], dtype) for name in CASES for type_, dtype in types.items()}


def compiled(target: str) -> list[dict[str, Any]]:
    """What each kernel needs on a GPU, for two sizes."""
    import triton

    from memstore.kernels.search_blocks import triton as search
    from tests.kernels.compiling import TARGETS, row

    rows = []
    for kernel in (search._best_of_runs_kernel, search._score_runs_kernel):
        for dtype, dim in (("bf16", 128), ("fp32", 24)):
            parts = {"bf16": 3, "fp32": 1}[dtype]
            told = {"D": dim, "BD": triton.next_power_of_2(dim), "PARTS": parts, "FILTERED": True}
            told |= {"RUN": search.RUN, "BR": search.QUERIES}
            told = {name: value for name, value in told.items() if name in kernel.arg_names}
            single = kernel is search._score_runs_kernel
            kinds = {"queries": "*fp32" if single else f"*{dtype}", "landmarks": f"*{dtype}", "wanted": "*u8"}
            kinds |= {"best": "*fp32", "scores": "*fp32", "chosen": "*i64"}
            warps = search.THREADS // TARGETS[target].warp_size
            rows.append(row(kernel, kinds, told, target, dtype, dim, warps=warps))
    return rows


if __name__ == "__main__":
    printed = compiled(sys.argv[2]) if "--compile" in sys.argv else interpreted()
    sys.stdout.write(json.dumps(printed))
