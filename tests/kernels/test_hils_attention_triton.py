"""The Triton kernels of HiLS attention equal the reference, and compile for the GPUs that they are for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.kernels.hils_attention import hils_attention
from tests.kernels.child import program
from tests.kernels.hils import CASES, HALF, Case, errors, inputs, results
from tests.pairs import each

pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the kernels compute in Triton's interpreter, which has to be chosen before Triton is imported."""
    return json.loads(program("tests.kernels.hils", TRITON_INTERPRET="1"))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_kernels_are_as_exact_as_the_fast_form(interpreted: dict[str, Any]) -> None:
    wanted = [name for name, case in CASES.items() if not case.large]
    names = {f"{name} (float32)" for name in wanted} | {f"{name} (float16)" for name in HALF}
    assert interpreted.keys() == names | {"under autocast"}
    wrong = {
        case: found for case, found in interpreted.items() if any(error > allowed for error, allowed in found.values())
    }
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_without_spills(target: str, tmp_path: Path, record_property: Any) -> None:
    rows = json.loads(program("tests.kernels.hils", "--compile", target, TRITON_CACHE_DIR=str(tmp_path)))
    record_property("resources", rows)
    assert len(rows) == 8
    assert all(row["fits"] and row["products"] and not row["spilled"] for row in rows), rows


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes tensors of a CPU")
def test_a_cpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"TRITON_INTERPRET=1 .* on cpu; use 'auto' or 'torch'"):
        results(hils_attention, inputs(Case(), torch.float32), backend="triton")


@pytest.mark.gpu
@each(case=[name for name in CASES if not CASES[name].large], dtype=[torch.bfloat16, torch.float16])
def test_kernels_on_a_gpu_are_as_exact_as_half_types_are(case: str, dtype: torch.dtype) -> None:
    given = inputs(CASES[case], dtype)
    found = errors(given, device="cuda", backend="triton")
    assert all(error <= allowed for error, allowed in found.values()), found


@pytest.mark.gpu
def test_what_kernels_cannot_do_is_refused_on_a_gpu_and_left_to_torch() -> None:
    for case, dtype, message in (
        (Case(), torch.float32, "float16 or bfloat16 on a GPU"),
        (Case(t=200, size=80, window=160), torch.bfloat16, "at most 64 tokens"),
    ):
        given = inputs(case, dtype).on("cuda")
        with pytest.raises(InvalidArgument, match=message):
            results(hils_attention, given, backend="triton")
        assert results(hils_attention, given)["out"].isfinite().all()
