"""The tiles of the tables: every size has some, and what the compiler makes of them stays in registers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.child import program

pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
from memstore.kernels._tiles import TiledKernel, padded, precision
from memstore.kernels.grouped_cross_attention import triton as gca
from memstore.kernels.knn_attention import triton as knn
from memstore.kernels.landmark_attention import triton as landmark

TARGETS = ["sm_80", "sm_90", "gfx942"]
SPILLED = {
    ("landmark keys", "sm_80", "fp32", 64): 64,
    ("landmark keys", "sm_80", "fp32", 128): 7080,
    ("landmark keys", "sm_90", "fp32", 128): 800,
    ("landmark queries", "gfx942", "fp32", 128): 326,
}
"""What is known to be spilled by kernel, target, type and head: bytes (NVIDIA) or registers (AMD)."""
TOO_LARGE = {("landmark keys", "sm_80", "fp32", 128)}
"""What fits into the shared memory of an A100, but not of its relatives in desktops. Only who asks for it gets it:
"auto" leaves float32 to PyTorch."""
SECONDS, TARGET_SECONDS, PROCESSES = 20, 30, 14
"""Of a processor, for one kernel; for all of a target, where so many processes share them."""


@pytest.mark.parametrize("table", [gca.TABLE, landmark.TABLE], ids=["gca", "landmark"])
def test_every_size_has_tiles_on_every_device(table: Any) -> None:
    for target, dtype, dim, block in product(
        TARGETS, (torch.bfloat16, torch.float32), (16, 64, 128, 256), (16, 64, 256)
    ):
        for kernel, queries in product(table.kernels, (16, 64, 128)):
            sides = table.tiles(kernel, target, dtype, queries=queries, dim=dim, block=block).kwargs
            assert set(sides) == set(table.sizes)
            assert all(side == padded(side) for side in sides.values())


def test_all_kernels_have_tiles() -> None:
    kernels = (gca._forward_kernel, gca._blocks_kernel, knn._backward_kernel, landmark._keys_kernel)
    assert all(isinstance(kernel, TiledKernel) for kernel in kernels)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="new in PyTorch 2.9")
@pytest.mark.parametrize(("told", "expected"), [("tf32", "tf32"), ("ieee", "tf32x3")])
def test_the_newer_name_of_the_precision_counts(told: str, expected: str) -> None:
    """The older getters raise once it was set."""
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, told
    try:
        assert (precision(torch.float32), precision(torch.bfloat16)) == (expected, "ieee")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_no_tile_of_the_table_is_spilled(target: str, tmp_path: Path, record_property: Any) -> None:
    printed = program("tests.kernels.compiling", "--targets", target, TRITON_CACHE_DIR=str(tmp_path))
    rows = [json.loads(line) for line in printed.splitlines()]
    record_property("resources", rows)
    assert len(rows) == 6 * 2 * 2 + 2 * 2
    for row in rows:
        case = (row["kernel"], target, row["dtype"], row["dim"])
        assert row["fits"] or case in TOO_LARGE, row
        assert row["spilled"] <= SPILLED.get(case, 0), row
        assert row["seconds"] < SECONDS, row
        # Matrix units everywhere; those of Hopper, which work beside the rest, where tiles are large enough for them.
        wanted = "wgmma.mma_async" if target == "sm_90" and row["tile"]["BM"] >= 64 else ""
        assert any(name.startswith(wanted) for name in row["products"]), row
    seconds = [row["seconds"] for row in rows]
    assert sum(seconds) / PROCESSES + max(seconds) < TARGET_SECONDS
