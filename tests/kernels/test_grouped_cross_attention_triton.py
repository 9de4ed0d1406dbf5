"""The Triton kernels of grouped cross attention equal the reference, and compile for the GPUs that they are for."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import Any

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.kernels.grouped_cross_attention import grouped_cross_attention
from tests.kernels.child import program
from tests.kernels.gca import CASES, HALF, Case, errors, inputs, results
from tests.pairs import each

pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
INTERPRETED = [f"{name} (float32)" for name in CASES] + [f"{name} (float16)" for name in HALF]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the kernels compute in Triton's interpreter, which has to be chosen before Triton is imported."""
    return json.loads(program("tests.kernels.gca", TRITON_INTERPRET="1"))  # type: ignore[no-any-return]


def test_kernels_are_as_exact_as_plain_attention(interpreted: dict[str, Any]) -> None:
    cases = {case: interpreted[case] for case in INTERPRETED}
    wrong = {case for case, found in cases.items() if any(error > allowed for error, allowed in found.values())}
    assert not wrong, {case: cases[case] for case in wrong}


def test_a_block_that_does_not_exist_gives_its_list_nan(interpreted: dict[str, Any]) -> None:
    assert interpreted["missing"] == [False, True, False]


def test_inference_and_single_gradients_are_the_same(interpreted: dict[str, Any]) -> None:
    assert interpreted["inference"] == [0.0] * 5


def test_entries_are_found_by_their_blocks() -> None:
    from memstore.kernels.grouped_cross_attention import triton

    blocks = torch.tensor([[[2, -1], [0, 2]], [[1, 1], [3, -1]]])
    entries, starts = triton.chosen_by(blocks, 3)  # block 3 does not exist
    found = [entries[a:b].tolist() for a, b in pairwise(starts.tolist())]
    assert found == [[2], [], [0, 3], [], [4, 5], []]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes tensors of a CPU")
def test_a_cpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"TRITON_INTERPRET=1 .* on cpu; use 'auto' or 'torch'"):
        results(grouped_cross_attention, inputs(Case(), torch.float32), backend="triton")


def test_what_kernels_cannot_do_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="at most 256, got 257; use 'auto' or 'torch'"):
        results(grouped_cross_attention, inputs(Case(d=257), torch.float32), backend="triton")
    with pytest.raises(InvalidArgument, match=r"float32, float16 or bfloat16, .* got torch.float64"):
        results(grouped_cross_attention, inputs(Case()), backend="triton")


@pytest.mark.gpu
@each(case=list(CASES), dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu_are_as_exact_as_plain_attention(case: str, dtype: torch.dtype) -> None:
    found = errors(grouped_cross_attention, inputs(CASES[case], dtype), device="cuda", backend="triton")
    assert all(error <= allowed for error, allowed in found.values()), found


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_the_same_in_every_run() -> None:
    given = inputs(Case(b=2, c=64, h=8, g=2, t=33, d=64, s=63, k=8, n=16), torch.bfloat16).on("cuda")
    first, second = (results(grouped_cross_attention, given, backend="triton") for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
