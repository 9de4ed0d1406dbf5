"""Cases of the best codes, and a program that runs the kernel where a test cannot: ``python -m tests.kernels.codes``.

Triton's interpreter has to be chosen before Triton is imported, and compiling needs Triton without it.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import torch
from torch import Tensor

from memstore.kernels.best_codes import Backend, best_codes, hold

CASES = {
    "codes of a router": (5, 64, 256, 32),
    "more blocks than a tile": (130, 5, 24, 9),
    "more queries than a tile": (3, 7, 24, 70),
    "a code that is no power of two": (63, 3, 33, 5),
    "one key": (111, 1, 8, 1),
    "a single number": (1, 2, 1, 2),
}
"""Blocks, keys of each, numbers of a key, queries."""
KINDS = {"bits": torch.bool, "int8": torch.int8}
QUERIES = {"float32": torch.float32, "float16": torch.float16, "signs": None}
SIZES = (64, 128, 256)
"""Numbers of a code that the kernel is compiled for."""


def inputs(name: str, kind: str, queries: str) -> tuple[Tensor, Tensor]:
    """Keys ``[n, P, D]`` and queries ``[R, D]``."""
    blocks, keys, dim, rows = CASES[name]
    generator = torch.Generator().manual_seed(blocks)
    codes = torch.randint(-127, 128, (blocks, keys, dim), generator=generator).float()
    asked = torch.randn(rows, dim, generator=generator)
    asked = asked.sign() if QUERIES[queries] is None else asked.to(QUERIES[queries])
    return torch.where(codes < 0, -1.0, 1.0) if kind == "bits" else codes, asked


def agrees(name: str, kind: str, queries: str, backend: Backend, device: str = "cpu") -> bool:
    """Whether scores are those of products in float64: equal for signs, else as far as float32 can say."""
    keys, asked = inputs(name, kind, queries)
    held = hold(keys, KINDS[kind])
    spaced = torch.cat([held, held.flip(1)], 1).to(device)[:, : keys.shape[1]]  # a view of more keys
    found = best_codes(spaced, asked.to(device), backend=backend).cpu().double()
    truth = torch.einsum("npd,rd->rnp", keys.double(), asked.double()).amax(2)
    if QUERIES[queries] is None:
        return torch.equal(found, truth)
    allowed = 2e-6 * asked.double().abs().sum(1, keepdim=True) * keys.abs().max()
    return bool(((found - truth).abs() <= allowed).all())


def interpreted() -> dict[str, bool]:
    """Every case, as the interpreter computes it: half of all combinations, with every two values of two dimensions."""
    numbered = product(*(enumerate(names) for names in (CASES, KINDS, QUERIES)))
    chosen = [(name, kind, queries) for (i, name), (j, kind), (k, queries) in numbered if (i + j + k) % 2 == 0]
    return {", ".join(each): agrees(*each, backend="triton") for each in chosen}


def compiled(target: str) -> list[dict[str, Any]]:
    """What the kernel needs on a GPU, for bits and int8 of some sizes."""
    from memstore.kernels.best_codes import triton
    from tests.kernels.compiling import TARGETS, row

    rows = []
    for kind in KINDS:
        for dim in SIZES:
            bits = kind == "bits"
            told = {"BITS": bits, "BD": dim, "BW": dim // 8 if bits else dim, "BN": triton.BLOCKS, "BR": triton.QUERIES}
            kinds = {"codes": "*u8" if bits else "*i8", "queries": "*i8", "best": "*fp32"}
            warps = triton.THREADS // TARGETS[target].warp_size
            aligned = [*kinds, *(("cn", "cp", "width") if told["BW"] % 16 == 0 else ("cn",))]
            kernel = triton._best_codes_kernel
            rows.append(row(kernel, kinds, told, target, kind, dim, warps=warps, aligned=aligned))
    return rows


if __name__ == "__main__":
    printed = compiled(sys.argv[2]) if "--compile" in sys.argv else interpreted()
    sys.stdout.write(json.dumps(printed))
