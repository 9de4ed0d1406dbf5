"""Cases of the choice by index scores, and a program that runs its kernels where a test cannot.

    python -m tests.kernels.choice                   # the Triton kernel on CASES, in Triton's interpreter
    python -m tests.kernels.choice --compile sm_90   # what it needs of a GPU that is not there

Both print JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.kernels.index_scores import choose


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, with the letters of the public function, and what is special."""

    s: int = 5
    h: int = 4
    d: int = 16
    t: int = 130
    k: int = 20
    block: int = 1
    relu: bool = True
    weighted: bool = True
    special: str = ""


CASES = {
    "one of everything": Case(s=1, h=1, d=1, t=1, k=1),
    "fewer keys than wanted": Case(t=7, k=9),
    "64 heads of 128": Case(s=2, h=64, d=128, t=300, k=100),
    "heads that fill no vector": Case(h=3, d=20),
    "more heads than a vector has": Case(s=3, h=33, d=12),
    "many queries": Case(s=300, h=2, t=90),
    "many keys": Case(s=1, h=16, t=3000, k=200),
    "a plain sum": Case(weighted=False),
    "products below 0 too": Case(relu=False),
    "blocks": Case(h=1, block=7, relu=False, weighted=False, k=6),
    "blocks of 128, the last one not whole": Case(s=40, h=1, t=700, block=128, relu=False, weighted=False, k=4),
    "keys that lie apart": Case(special="strided"),
    "keys that nobody likes": Case(s=8, h=1, t=900, k=500, special="zeros"),
    "keys that are no numbers": Case(k=130, special="nan"),
    "queries that see nothing": Case(special="blind"),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the options of ``choose``; small integers, whose products and sums have no rounding."""
    generator = torch.Generator().manual_seed(case.t + case.s)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    keys = whole(case.t, 3 * case.d)[:, case.d : 2 * case.d] if case.special == "strided" else whole(case.t, case.d)
    limit = torch.randint(0, case.t + 3, (case.s,), generator=generator)
    limit[-1] = case.t
    if case.special == "zeros":
        keys[torch.rand(case.t, generator=generator) < 0.9] = 0
    if case.special == "nan":
        keys[::3], keys[1::3] = torch.nan, torch.inf
    if case.special == "blind":
        limit[:-1] = torch.tensor([0, -5, 0, 1])
    tensors = {
        "queries": whole(case.s, case.h, case.d),
        "weights": whole(case.s, case.h) if case.weighted else None,
        "keys": keys.to(dtype),
        "limit": limit,
    }
    return tensors, {"scale": 0.5, "k": case.k, "relu": case.relu, "block": case.block}


def agrees(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> bool:
    """Whether a back end gives the very ids and scores of the reference."""
    tensors, options = inputs(case, dtype)
    truth = choose(**tensors, **options, backend="reference")
    there = {name: x if x is None else x.to(device) for name, x in tensors.items()}
    found = choose(**there, **options, backend=backend)  # type: ignore[arg-type]
    return all(torch.equal(x.cpu(), y) for x, y in zip(found, truth, strict=True))


def interpreted() -> dict[str, bool]:
    """Each case in each type that the interpreter computes."""
    warnings.filterwarnings("ignore", "invalid value")  # NumPy warns of infinities where a GPU does not
    return {
        f"{name} ({kind})": agrees(case, TYPES[kind], "triton")
        for name, case in CASES.items()
        for kind in ("float32", "float16")
    }


def compiled(target: str) -> list[dict[str, Any]]:
    """What the kernel needs on a GPU, for the index of DeepSeek-V3.2 and a small one."""
    from memstore.kernels._tiles import SMALLEST, padded
    from memstore.kernels.index_scores import triton
    from tests.kernels.compiling import TARGETS, row

    rows = []
    for dtype, dim, parts in (("bf16", 128, 1), ("bf16", 128, 3), ("fp32", 128, 1), ("fp32", 64, 1)):
        told = {"D": dim, "BD": padded(dim), "BH": SMALLEST, "BK": triton.KEYS, "PARTS": parts, "RELU": True}
        kinds = dict.fromkeys(("queries", "keys"), f"*{dtype}")
        kinds |= {"weights": "*fp32", "scores": "*fp32", "scale": "fp32"}
        warps = triton.THREADS // TARGETS[target].warp_size
        rows.append(row(triton._scores_kernel, kinds, told, target, dtype, dim, warps=warps, aligned=("stride",)))
    return rows


if __name__ == "__main__":
    printed = compiled(sys.argv[2]) if "--compile" in sys.argv else interpreted()
    sys.stdout.write(json.dumps(printed))
