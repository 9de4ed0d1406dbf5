"""Codes in 8 bits and in one give the scores of their products, in the reference and in the kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.kernels.best_codes import best_codes, hold, numbers
from memstore.memory.spec import encode_landmarks
from tests.kernels.child import program
from tests.kernels.codes import CASES, KINDS, QUERIES, agrees, inputs
from tests.pairs import each

EVERY = {"name": list(CASES), "kind": list(KINDS), "queries": list(QUERIES)}


@each(**EVERY)
def test_the_reference_gives_the_best_products(name: str, kind: str, queries: str) -> None:
    assert agrees(name, kind, queries, "reference")


@each(name=list(CASES), kind=list(KINDS))
def test_holding_loses_nothing(name: str, kind: str) -> None:
    keys, _ = inputs(name, kind, "signs")
    assert torch.equal(numbers(hold(keys, KINDS[kind]), keys.shape[2]), keys)


def test_bits_are_held_as_a_memory_stores_them() -> None:
    keys, _ = inputs("codes of a router", "bits", "signs")
    assert torch.equal(hold(keys, torch.bool), encode_landmarks(keys, "bit"))


def test_the_kernel_gives_the_best_products() -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    found = json.loads(program("tests.kernels.codes", TRITON_INTERPRET="1"))
    assert len(found) == len(CASES) * len(KINDS) * len(QUERIES) // 2
    assert [case for case, right in found.items() if not right] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_kernel_compiles_without_spills_for_matrix_units(target: str, tmp_path: Path, record_property: Any) -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    rows = json.loads(program("tests.kernels.codes", "--compile", target, TRITON_CACHE_DIR=str(tmp_path)))
    record_property("resources", rows)
    assert len(rows) == 6
    wanted = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "gfx942": "v_mfma"}[target]
    assert all(row["fits"] and not row["spilled"] and wanted in row["products"] for row in rows), rows


@pytest.mark.gpu
@each(**EVERY)
def test_a_gpu_gives_the_best_products(name: str, kind: str, queries: str) -> None:
    assert agrees(name, kind, queries, "triton", "cuda")


def test_what_does_not_fit_is_refused() -> None:
    codes, queries = hold(torch.ones(2, 3, 20), torch.bool), torch.ones(4, 20)
    for bad in ((codes, torch.ones(4, 25)), (codes.float(), queries), (codes, queries.long()), (codes[0], queries)):
        with pytest.raises(InvalidArgument, match="expected codes"):
            best_codes(*bad)
    with pytest.raises(InvalidArgument, match="at least one key"):
        best_codes(codes[:, :0], queries)
    with pytest.raises(InvalidArgument, match="TRITON_INTERPRET"):
        best_codes(codes, queries, backend="triton")
