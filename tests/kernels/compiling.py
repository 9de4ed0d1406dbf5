"""Compiles Triton kernels for GPUs that are not there, and tells what they need of one.

    python -m tests.kernels.compiling                             # what the tables hold, for every target
    python -m tests.kernels.compiling --targets sm_90 --kernels "landmark keys" --dims 128 --blocks 64

It needs a process without Triton's interpreter. One JSON row for each kernel is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memstore.kernels._tiles import TileTable, padded
from memstore.kernels.grouped_cross_attention import triton as gca
from memstore.kernels.landmark_attention import triton as landmark

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program can have; for sm_80 those of its relatives in desktops."""
KERNELS: dict[str, tuple[Any, TileTable]] = {
    "gca forward": (gca._forward_kernel, gca.TABLE),
    "gca queries": (gca._queries_kernel, gca.TABLE),
    "gca blocks": (gca._blocks_kernel, gca.TABLE),
    "landmark forward": (landmark._forward_kernel, landmark.TABLE),
    "landmark queries": (landmark._queries_kernel, landmark.TABLE),
    "landmark keys": (landmark._keys_kernel, landmark.TABLE),
}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STATES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
FLOATS = ("weights", "lse", "delta")
TABLES = ("starts", "until", "tile", "own", "first")
STRIDES = ("kb", "kn", "kg", "ks", "vb", "vn", "vg", "vs", "qb", "qh", "qs")
_WITH_ONES = set[tuple[str, ...]]()
PRODUCTS = r"wgmma\.mma_async|mma\.sync|v_mfma"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one compiled kernel needs."""

    kernel: str
    target: str
    dtype: str
    block: int
    """Tokens of a block."""
    dim: int
    few: bool
    """For few rows of queries."""
    tile: dict[str, int]
    warps: int
    stages: int
    shared_bytes: int
    registers: int
    spilled: int
    """Bytes of stack of a thread (NVIDIA), or registers (AMD)."""
    products: dict[str, int]
    """Instructions of matrix units, by their names."""
    seconds: float
    """Of a processor."""
    fits: bool


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--dtypes", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--blocks", nargs="+", type=int, default=[64], help="tokens of a block")
    parser.add_argument("--irregular", action="store_true", help="landmark attention to blocks of several lengths")
    options = parser.parse_args()
    for row in rows(options):
        sys.stdout.write(json.dumps(asdict(row)) + "\n")
        sys.stdout.flush()


def rows(options: argparse.Namespace) -> Iterator[Resources]:
    """What the tables hold for these sizes; tiles for few rows in bfloat16 alone."""
    for target in options.targets:
        for kernel in options.kernels:
            for dtype in options.dtypes:
                for dim in options.dims:
                    for block in options.blocks:
                        for few in (False, True) if dtype == "bf16" and kernel.split()[1] == "forward" else (False,):
                            yield compiled(kernel, target, dtype, block, dim, few=few, irregular=options.irregular)


def compiled(
    kernel: str,
    target: str,
    dtype: str,
    block: int,
    dim: int,
    *,
    few: bool = False,
    irregular: bool = False,
    config: Any = None,
) -> Resources:
    """Compile one kernel to machine code for a target, with the tiles of its table or of ``config``."""
    rows = 16 if few else 128
    launched, table = KERNELS[kernel]
    jitted = launched.fn
    if config is None:
        sizes = {"queries": rows, "dim": padded(dim), "block": padded(block)}
        config = table.tiles(kernel.split()[1], target, TYPES[dtype], **sizes)
    told = constants(jitted, target, dtype, block, dim, rows) | config.kwargs
    if irregular and "SIZE" in told:
        told |= {"SIZE": 0, "LIMITED": True}
    integers = "*i64" if kernel.startswith("gca") else "*i32"
    types = {name: "constexpr" if name in told else kind for name, kind in signature(jitted, dtype, integers).items()}
    aligned = {name for name, kind in types.items() if kind.startswith("*")} | set(STRIDES)
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(jitted.arg_names) if name in aligned}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    begun = _processor_seconds()
    result = triton.compile(ASTSource(jitted, types, told, attributes), target=TARGETS[target], options=options)
    seconds = _processor_seconds() - begun
    compile_for_ones(jitted, types, told, options, target)
    registers, spilled = usage(result.asm)
    found = re.findall(PRODUCTS, result.asm.get("ptx") or result.asm["amdgcn"])
    return Resources(
        kernel=kernel,
        target=target,
        dtype=dtype,
        block=block,
        dim=dim,
        few=few,
        tile=dict(config.kwargs),
        warps=config.num_warps,
        stages=config.num_stages,
        shared_bytes=result.metadata.shared,
        registers=registers,
        spilled=spilled,
        products={name: found.count(name) for name in sorted(set(found))},
        seconds=round(seconds, 1),
        fits=result.metadata.shared <= SHARED_LIMIT[target],
    )


def row(
    jitted: Any, kinds: dict[str, str], told: dict[str, Any], target: str, dtype: str, dim: int, *, warps: int,
    aligned: Sequence[str] = (), stages: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel without tables needs, whose arguments are of ``kinds``, or numbers; for a test.

    ``aligned`` are those that a launch would find to be multiples of 16.
    """
    types = {p.name: "constexpr" if p.is_constexpr else kinds.get(p.name, "i32") for p in jitted.params}
    options = {"num_warps": warps, "enable_fp_fusion": True} | ({} if stages is None else {"num_stages": stages})
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(jitted.arg_names) if name in aligned}
    result = triton.compile(ASTSource(jitted, types, told, attributes), target=TARGETS[target], options=options)
    compile_for_ones(jitted, types, told, options, target)
    registers, spilled = usage(result.asm)
    fits = result.metadata.shared <= SHARED_LIMIT[target]
    found = re.findall(PRODUCTS, result.asm.get("ptx") or result.asm["amdgcn"])
    return {
        "kernel": jitted.__name__, "target": target, "dtype": dtype, "dim": dim, "fits": fits,
        "registers": registers, "spilled": spilled, "products": sorted(set(found)),
    }  # fmt: skip


def compile_for_ones(
    jitted: Any, types: dict[str, str], told: dict[str, Any], options: dict[str, Any], target: str
) -> None:
    """Compile a kernel as a launch does whose numbers are 1, once for each type of its tensors.

    Triton makes such a number a constant, which has no ``to`` and no ``dtype``.
    """
    ones = dict.fromkeys((name for name, kind in types.items() if kind == "i32"), 1)
    kind = (jitted.__name__, *types.values())
    if kind not in _WITH_ONES:
        _WITH_ONES.add(kind)
        source = ASTSource(jitted, types | dict.fromkeys(ones, "constexpr"), told | ones)
        triton.compile(source, target=TARGETS[target], options=options)


def constants(jitted: Any, target: str, dtype: str, block: int, dim: int, rows: int) -> dict[str, Any]:
    """What the compiler is told about the shapes."""
    exact = dtype == "bf16" or target == "gfx942"
    given = {
        **dict.fromkeys(("D", "DV"), dim),
        **dict.fromkeys(("BD", "BDV"), padded(dim)),
        "ROWS": rows,
        "S": block,
        "SIZE": block,
        "PRECISION": "ieee" if exact else "tf32x3",
        "OFF_BY_ONE": True,
        "SAVE": True,
        "LIMITED": False,
    }
    if "SIZE" in jitted.arg_names:
        given["BS"] = padded(block)
    return {name: value for name, value in given.items() if name in jitted.arg_names}


def signature(jitted: Any, dtype: str, integers: str) -> dict[str, str]:
    """Types of the arguments of a kernel, by their names."""
    kinds = {
        **dict.fromkeys(("blocks", "entries", *TABLES), integers),
        **dict.fromkeys(FLOATS, "*fp32"),
        **dict.fromkeys(STATES, "*" + dtype),
        **dict.fromkeys(("scale", "ramp"), "fp32"),
        "ordinary": "*i8",
    }
    return {p.name: "constexpr" if p.is_constexpr else kinds.get(p.name, "i32") for p in jitted.params}


def usage(code: Any) -> tuple[int, int]:
    """Registers of a thread, and what was spilled of them."""
    if "cubin" in code:
        dumped = _dumped(code["cubin"])
        return int(_field(r"REG:(\d+)", dumped)), int(_field(r"STACK:(\d+)", dumped))
    return int(_field(r"\.vgpr_count:\s+(\d+)", code["amdgcn"])), int(
        _field(r"\.vgpr_spill_count:\s+(\d+)", code["amdgcn"])
    )


def _processor_seconds() -> float:
    """Of this process and of the compilers that it started: a busy machine does not count."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


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
