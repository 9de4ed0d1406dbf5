"""Compiles Triton kernels for GPUs that are not there, and tells what they need of one.

    python -m tests.kernels.compiling            # every kernel, as the tests compile it
    python -m tests.kernels.compiling --all      # every configuration that the tuner may try

It needs a process without Triton's interpreter. One JSON row for each kernel is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memstore.kernels._tuning import config, padded
from memstore.kernels.grouped_cross_attention import triton as gca

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program can have."""
KERNELS = {
    "forward": gca._forward_kernel,
    "queries": gca._queries_kernel,
    "blocks": gca._blocks_kernel,
}
INDICES = ("blocks", "entries", "starts")
FLOATS = ("weights", "lse", "delta")
STATES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
COUNTS = ("lists", "lists_per_row", "groups", "rows", "chosen", "count", "share")
STRIDES = ("kb", "kn", "kg", "ks", "vb", "vn", "vg", "vs")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs."""

    kernel: str
    target: str
    dtype: str
    size: int
    """Tokens of a block."""
    dim: int
    tile: tuple[int, int]
    warps: int
    stages: int
    shared_bytes: int
    registers: int
    spilled: int
    """Bytes of stack of a thread (NVIDIA), or registers (AMD)."""
    fits: bool


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
    """Every kernel in both precisions."""
    for kernel in KERNELS:
        yield compiled(kernel, target, "bf16", 64, 64, config(4, 2, BM=64, BS=64), rows=128)
        yield compiled(kernel, target, "fp32", 33, 24, config(4, 1, BM=16, BS=16), rows=16)
        if target == "sm_90":
            yield compiled(kernel, target, "bf16", 64, 64, config(4, 2, BM=16, BS=64), rows=16, counts=1)


def every(target: str) -> Iterator[Resources]:
    """All configurations that the tuner may try, over a spread of sizes."""
    for kernel in KERNELS:
        for dtype in ("bf16", "fp32"):
            for size, dim in ((32, 16), (64, 64), (63, 128), (64, 256)):
                for tiles in gca.admissible(gca.CONFIGS, constants(kernel, size, dim, 128)):
                    yield compiled(kernel, target, dtype, size, dim, tiles, rows=128)


def constants(kernel: str, size: int, dim: int, rows: int) -> dict[str, Any]:
    """What the compiler is told about the shapes."""
    given = {
        "ROWS": rows,
        "S": size,
        "D": dim,
        "DV": dim,
        "BD": padded(dim),
        "BDV": padded(dim),
        "PRECISION": "ieee",
        "OFF_BY_ONE": True,
        "SAVE": True,
    }
    names = KERNELS[kernel].arg_names
    marks = {"entries": True} if "entries" in names else {}
    return {name: value for name, value in given.items() if name in names} | marks


def compiled(
    kernel: str, target: str, dtype: str, size: int, dim: int, config: Any, *, rows: int, counts: int | None = None
) -> Resources:
    """Compile one kernel to machine code for a target; ``counts``: what the compiler knows all counts to be.

    Triton makes constants of arguments that are 1 and of pointers that are None.
    """
    jitted = KERNELS[kernel].fn
    told = constants(kernel, size, dim, rows) | config.kwargs
    told.pop("entries", None)
    if counts is not None:
        told |= {name: counts for name in COUNTS if name in jitted.arg_names}
        told |= {"SAVE": False, "lse": None} if "SAVE" in told else {}
    types = {name: "constexpr" if name in told else kind for name, kind in signature(jitted, dtype).items()}
    attributes = {place: kept for place, kept in aligned(jitted).items() if jitted.arg_names[place[0]] not in told}
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
        tile=(config.kwargs["BM"], config.kwargs["BS"]),
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
        **dict.fromkeys(INDICES, "*i64"),
        **dict.fromkeys(FLOATS, "*fp32"),
        **dict.fromkeys(STATES, "*" + dtype),
        "scale": "fp32",
    }
    return {p.name: "constexpr" if p.is_constexpr else kinds.get(p.name, "i32") for p in jitted.params}


def aligned(jitted: Any) -> dict[tuple[int, ...], list[list[Any]]]:
    """Pointers and strides are multiples of 16, as they are for tensors that PyTorch allocates."""
    names = [*INDICES, *FLOATS, *STATES, *STRIDES]
    return {(i,): [["tt.divisibility", 16]] for i, name in enumerate(jitted.arg_names) if name in names}


def usage(code: Any) -> tuple[int, int]:
    """Registers of a thread, and what was spilled of them."""
    if "cubin" in code:
        dumped = _dumped(code["cubin"])
        return int(_field(r"REG:(\d+)", dumped)), int(_field(r"STACK:(\d+)", dumped))
    return int(_field(r"\.vgpr_count:\s+(\d+)", code["amdgcn"])), int(
        _field(r"\.vgpr_spill_count:\s+(\d+)", code["amdgcn"])
    )


def _dumped(binary: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout


def _field(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in the compiler's report"
    return found[1]


if __name__ == "__main__":
    main()
