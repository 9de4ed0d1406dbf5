"""The Triton kernels of landmark attention equal the reference, and compile for the GPUs that they are for."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.kernels.landmark_attention import landmark_attention
from tests.kernels.child import program
from tests.kernels.landmark import CASES, HALF, Case, errors, inputs, results
from tests.pairs import each

pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")

INTERPRETED = [f"{name} (float32)" for name in CASES] + [f"{name} (float16)" for name in HALF]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the kernels compute in Triton's interpreter, which has to be chosen before Triton is imported."""
    return json.loads(program("tests.kernels.landmark", TRITON_INTERPRET="1"))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_kernels_are_as_exact_as_plain_attention(interpreted: dict[str, Any]) -> None:
    cases = {case: interpreted[case] for case in INTERPRETED}
    wrong = {case for case, found in cases.items() if any(error > allowed for error, allowed in found.values())}
    assert not wrong, {case: cases[case] for case in wrong}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes tensors of a CPU")
def test_a_cpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"TRITON_INTERPRET=1 .* on cpu; use 'auto' or 'torch'"):
        results(landmark_attention, inputs(Case(), torch.float32), backend="triton")


def test_what_kernels_cannot_do_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="at most 256, got 257; use 'auto' or 'torch'"):
        results(landmark_attention, inputs(Case(d=257), torch.float32), backend="triton")
    with pytest.raises(InvalidArgument, match=r"float32, float16 or bfloat16, .* got torch.float64"):
        results(landmark_attention, inputs(Case()), backend="triton")
    with pytest.raises(InvalidArgument, match="causal attention only; use 'auto' or 'torch'"):
        results(landmark_attention, inputs(Case(causal=False), torch.float32), backend="triton")


@pytest.mark.gpu
def test_long_blocks_are_refused_with_what_to_do_and_left_to_torch() -> None:
    given = inputs(Case(t=300, landmarks=257), torch.float32).on("cuda")
    with pytest.raises(InvalidArgument, match="at most 256 tokens, got 257; use 'auto' or 'torch'"):
        results(landmark_attention, given, backend="triton")
    assert results(landmark_attention, given)["out"].isfinite().all()


@pytest.mark.gpu
@each(case=list(CASES), dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu_are_as_exact_as_plain_attention(case: str, dtype: torch.dtype) -> None:
    found = errors(landmark_attention, inputs(CASES[case], dtype), device="cuda", backend="triton")
    assert all(error <= allowed for error, allowed in found.values()), found


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_the_same_in_every_run() -> None:
    given = inputs(Case(b=2, t=777, h=8, g=2, d=64, landmarks=50), torch.bfloat16).on("cuda")
    first, second = (results(landmark_attention, given, backend="triton") for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
