"""Compiles the kernels of landmark attention for GPUs that are not there, and tells what they need of one.

    python -m tests.kernels.compiling_landmark            # every kernel, as the tests compile it
    python -m tests.kernels.compiling_landmark --all      # every configuration that the tuner may try

It needs a process without Triton's interpreter. One JSON row for each kernel is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import triton
from triton.compiler import ASTSource

from memstore.kernels._tuning import config, padded
from memstore.kernels.landmark_attention import triton as landmark
from tests.kernels.compiling import SHARED_LIMIT, TARGETS, Resources, usage

KERNELS = {
    "forward": landmark._forward_kernel,
    "queries": landmark._queries_kernel,
    "keys": landmark._keys_kernel,
}
STATES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
TABLES = ("starts", "until", "tile", "own", "first")
STRIDES = ("qb", "qh", "qs", "kb", "kg", "ks", "vb", "vg", "vs")


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every configuration, block size and head size")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args()
    for target in options.targets:
        for row in every(target) if options.all else representative(target):
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
            sys.stdout.flush()


def representative(target: str) -> Iterator[Resources]:
    """Every kernel once: with matrix units, in float32 with documents or a window on the oldest."""
    for kernel in KERNELS:
        if target == "sm_80":
            yield compiled(kernel, target, "fp32", 16, 24, config(4, 1, BM=16), limited=True)
        else:
            yield compiled(kernel, target, "bf16", 64, 64, config(4, 2, BM=64))


def every(target: str) -> Iterator[Resources]:
    """All configurations that the tuner may try, over a spread of sizes."""
    for kernel in KERNELS:
        for dtype in ("bf16", "fp32"):
            for size, dim in ((8, 16), (50, 64), (64, 128), (128, 128), (64, 256)):
                for tiles in landmark.admissible(landmark.CONFIGS, constants(kernel, size, dim)):
                    yield compiled(kernel, target, dtype, size, dim, tiles)


def constants(kernel: str, size: int, dim: int, *, limited: bool = False) -> dict[str, Any]:
    """What the compiler is told about the shapes."""
    given = {
        "ROWS": 128,
        "D": dim,
        "DV": dim,
        "BD": padded(dim),
        "BDV": padded(dim),
        "BS": padded(size),
        "LIMITED": limited,
        "PRECISION": "ieee",
    }
    names = KERNELS[kernel].arg_names
    return {name: value for name, value in given.items() if name in names} | (
        {"until": True} if "until" in names else {}
    )


def compiled(
    kernel: str, target: str, dtype: str, size: int, dim: int, config: Any, *, limited: bool = False
) -> Resources:
    """Compile one kernel to machine code for a target."""
    jitted = KERNELS[kernel].fn
    told = constants(kernel, size, dim, limited=limited) | config.kwargs
    told.pop("until", None)
    types = {name: "constexpr" if name in told else kind for name, kind in signature(jitted, dtype).items()}
    aligned = (*STATES, *TABLES, "ordinary", "lse", "delta", *STRIDES)
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(jitted.arg_names) if name in aligned}
    result = triton.compile(
        ASTSource(jitted, types, told, attributes),
        target=TARGETS[target],
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True},
    )
    registers, spilled = usage(result.asm)
    shared = result.metadata.shared
    return Resources(
        kernel=kernel,
        target=target,
        dtype=dtype,
        size=size,
        dim=dim,
        tile=(config.kwargs["BM"], told["BS"]),
        warps=config.num_warps,
        stages=config.num_stages,
        shared_bytes=shared,
        registers=registers,
        spilled=spilled,
        fits=shared <= SHARED_LIMIT[target],
    )


def signature(jitted: Any, dtype: str) -> dict[str, str]:
    """Types of the arguments of a kernel, by their names."""
    kinds = {
        **dict.fromkeys(STATES, "*" + dtype),
        **dict.fromkeys(TABLES, "*i32"),
        **dict.fromkeys(("lse", "delta"), "*fp32"),
        **dict.fromkeys(("scale", "ramp"), "fp32"),
        "ordinary": "*i8",
    }
    return {p.name: "constexpr" if p.is_constexpr else kinds.get(p.name, "i32") for p in jitted.params}


if __name__ == "__main__":
    main()
