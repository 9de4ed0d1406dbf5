"""Inputs of attention over chosen rows, how far an implementation is from the truth, and what its kernel needs.

    python -m tests.kernels.rows                   # errors of the Triton kernel on CASES, in Triton's interpreter
    python -m tests.kernels.rows --compile sm_90   # what it needs of a GPU that is not there

Both print JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstore.kernels.latent_attention import attend_rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, with the letters of the public function, and what is special."""

    s: int = 5
    h: int = 4
    g: int = 1
    d: int = 24
    dv: int = 16
    n: int = 60
    k: int = 20
    inside: bool = True
    """Whether values are the first numbers of the keys."""
    sinks: bool = False
    special: str = ""


CASES = {
    "one of everything": Case(s=1, h=1, d=1, dv=1, n=1, k=1),
    "latents of the small model": Case(h=8, d=160, dv=128, n=300, k=256),
    "odd sizes": Case(s=3, h=5, d=37, dv=19, n=101, k=33),
    "more heads than vectors of a task": Case(s=2, h=50, d=20, k=70),
    "values without rotation": Case(d=16, sinks=True),
    "usual keys and values": Case(h=6, g=2, d=20, dv=36, inside=False),
    "values as large as keys": Case(h=4, g=4, d=64, dv=64, inside=False, sinks=True),
    "a choice of each key head": Case(h=6, g=3, inside=False, special="own"),
    "some places unused": Case(k=50, sinks=True, special="unused"),
    "queries that chose nothing": Case(special="nothing"),
    "queries that chose nothing, with sinks": Case(sinks=True, special="nothing"),
    "no place at all": Case(k=0),
    "NaN in what was not chosen": Case(special="nan"),
    "the same row several times": Case(n=3, k=40),
    "rows that lie apart": Case(h=4, g=2, special="strided"),
    "large scores": Case(sinks=True, special="large"),
    "one query, many rows": Case(s=1, h=3, n=700, k=600),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any]:
    """Queries, keys, values, ids, and the options of ``attend_rows``; rows and queries of a type."""
    generator = torch.Generator().manual_seed(case.n + case.s + case.d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    choices = case.g if case.special == "own" else 1
    ids = torch.randint(0, case.n, (case.s, choices, case.k), generator=generator)
    keys, values = normal(case.n, case.g, case.d), normal(case.n, case.g, case.dv)
    if case.special == "unused":
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
    if case.special == "nothing":
        ids[::2] = -1
    if case.special == "nan":
        ids[ids % 3 == 0] = -1
        keys[::3] = torch.nan
    q = normal(case.s, case.h, case.d) * (60 if case.special == "large" else 1)
    q, keys, values = (x.to(dtype) for x in (q, keys, values))
    if case.special == "strided":
        keys, ids = torch.cat([keys, keys], 2)[..., : case.d], ids.int()
    if case.inside:
        values = keys[..., : case.dv]
    options = {"scale": case.d**-0.5, "sinks": normal(case.h) if case.sinks else None}
    return (q, keys, values, ids if choices > 1 else ids[:, 0]), options


def error(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> float:
    """The largest error of the output and of the log-sum-exp against float64, in roundings of the type.

    NaN, or infinity, where one is and the other is not.
    """
    (q, keys, values, ids), options = inputs(case, dtype)
    truth = attend_rows(q.double(), keys, values, ids, **options, backend="reference")
    there = [x.to(device) for x in (q, keys, ids)]
    own = there[1][..., : case.dv] if case.inside else values.to(device)
    sinks = None if options["sinks"] is None else options["sinks"].to(device)
    options |= {"sinks": sinks, "backend": backend}
    found = attend_rows(there[0], there[1], own, there[2], **options)
    worst = 0.0
    for x, y in zip(found, truth, strict=True):
        x = x.cpu().double()
        if not torch.equal(x == -torch.inf, y == -torch.inf) or bool(x.isnan().any()):
            return float("inf")
        finite = y > -torch.inf
        largest = max(1.0, float(y[finite].abs().max()) if bool(finite.any()) else 0.0)
        most = float((x[finite] - y[finite]).abs().max()) if bool(finite.any()) else 0.0
        worst = max(worst, most / largest / torch.finfo(dtype).eps)
    return worst


ALLOWED = 24.0
"""Roundings: those of a score of up to 8, which change its weight by as much, and of weights given to matrix units."""


def interpreted() -> dict[str, Any]:
    """Errors by the names of the cases, and whether a row that does not exist gives NaN."""
    from memstore.kernels.latent_attention import triton

    found: dict[str, Any] = {
        f"{name} ({kind})": error(case, TYPES[kind], "triton")
        for name, case in CASES.items()
        for kind in ("float32", "float16")
    }
    (q, keys, values, ids), _ = inputs(Case())
    ids[1, 5] = len(keys)
    out, _ = triton.attend_rows(q, keys, values, ids.unsqueeze(1), 1.0, None)
    return found | {"missing": out.isnan().all(-1).all(-1).tolist()}


def compiled(target: str) -> list[dict[str, Any]]:
    """What the kernel needs on a GPU: for the latents of DeepSeek-V3.2 and small ones, and usual keys and values."""
    from memstore.kernels._tiles import SMALLEST, padded
    from memstore.kernels.latent_attention import triton
    from tests.kernels.compiling import TARGETS, row

    rows = []
    for dtype, dim, size, inside in (
        ("bf16", 576, 512, True), ("bf16", 160, 128, True), ("bf16", 128, 128, False), ("fp32", 160, 128, True),
        ("fp32", 64, 64, False),
    ):  # fmt: skip
        begin = size if inside else 0
        told: dict[str, Any] = {"D": dim, "DV": size, "BEGIN": begin, "BV": padded(size), "BR": padded(dim - begin)}
        exact = dtype == "bf16" or target == "gfx942"
        told |= {"BH": SMALLEST, "BK": triton.ROWS, "INSIDE": inside, "PRECISION": "ieee" if exact else "tf32x3"}
        kinds = {"ids": "*i64", "lse": "*fp32", "scale": "fp32"}
        kinds |= dict.fromkeys(("q", "keys", "values", "out"), f"*{dtype}")
        warps, aligned = triton.THREADS // TARGETS[target].warp_size, ("kn", "kg", "vn", "vg")
        rows.append(row(triton._attend_kernel, kinds, told, target, dtype, dim, warps=warps, aligned=aligned))
    return rows


if __name__ == "__main__":
    printed = compiled(sys.argv[2]) if "--compile" in sys.argv else interpreted()
    sys.stdout.write(json.dumps(printed))
