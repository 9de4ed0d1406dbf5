"""kNN attention is what the paper writes, in every form, with the gradients to match."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import Backend
from memstore.kernels.knn_attention import knn_attention, knn_attention_with_lse
from tests.kernels.child import program
from tests.kernels.knn import CASES, HALF, Case, Inputs, errors, inputs, plain, public, results
from tests.pairs import each

INTERPRETED = [f"{name} (float32)" for name in CASES] + [f"{name} (float16)" for name in HALF]


@each(case=list(CASES.values()), dtype=[torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_fast_form_is_as_exact_as_plain_attention(case: Case, dtype: torch.dtype) -> None:
    found = errors(public("torch"), inputs(case, dtype))
    assert all(error <= allowed for error, allowed in found.values()), found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_dense_attention_over_what_was_found(case: Case) -> None:
    given = inputs(case)
    torch.testing.assert_close(results(public("reference"), given), results(plain, given), rtol=0, atol=1e-10)


def test_many_queries_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from memstore.kernels.knn_attention import fused

    given = inputs(Case(t=33, k=7))
    whole = results(public("torch"), given)
    monkeypatch.setattr(fused, "GATHERED_NUMBERS", 500)
    torch.testing.assert_close(results(public("torch"), given), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_was_found_may_be_given_itself(backend: Any) -> None:
    given = inputs(Case(b=2, h=4, g=2))
    rows, groups = torch.arange(2)[:, None, None, None], (torch.arange(4) // 2)[:, None, None]
    k, v = (x[rows, groups, given.ids.clamp(min=0)] for x in (given.k, given.v))
    whole = knn_attention(given.q, given.k, given.v, given.ids, scale=0.3, backend=backend)
    found = knn_attention(given.q, k, v, valid=given.ids >= 0, scale=0.3, backend=backend)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("given", [inputs(Case(n=0, k=0)), inputs(Case(k=0))], ids=["memory", "list"])
def test_an_empty_memory_or_list_leaves_local_attention_alone(backend: Any, given: Inputs) -> None:
    out = knn_attention(given.q, given.k, given.v, given.ids, local=given.local, gate=given.gate + 9, backend=backend)
    torch.testing.assert_close(out, given.local)
    alone, lse = knn_attention_with_lse(given.q, given.k, given.v, given.ids, backend=backend)
    assert not alone.any()
    assert bool((lse == -torch.inf).all())


def test_no_gradient_goes_into_the_memory() -> None:
    given = inputs(Case())
    k, v, q = (x.clone().requires_grad_() for x in (given.k, given.v, given.q))
    backends: list[Backend] = ["torch", "reference"]
    for backend in backends:
        knn_attention(q, k, v, given.ids, backend=backend).sum().backward()
        assert (k.grad, v.grad) == (None, None)
        assert q.grad is not None


def test_all_tokens_are_dense_attention() -> None:
    given = inputs(Case(t=9, n=33, k=33))
    ids = torch.arange(33).expand(1, 2, 9, -1)
    out, lse = knn_attention_with_lse(given.q, given.k, given.v, ids)
    dense = torch.nn.functional.scaled_dot_product_attention(given.q, given.k, given.v)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, (given.q @ given.k.mT / 4).logsumexp(-1), rtol=0, atol=1e-12)


def call(**changes: Any) -> Tensor:
    given = inputs(Case())
    return knn_attention(**({"q": given.q, "k": given.k, "v": given.v, "ids": given.ids} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.ones(1, 2, 40, 8)}, "shapes must agree"),
        ({"k": torch.ones(1, 3, 40, 16), "v": torch.ones(1, 3, 40, 16)}, "H must be a multiple of G"),
        ({"ids": torch.zeros(1, 2, 5, 3)}, "ids must be int32 or int64"),
        ({"ids": torch.full((1, 2, 5, 3), 40)}, "token 40 does not exist; there are 40"),
        ({"scale": torch.ones(3)}, r"each of the 2 heads, got \[3\]"),
        ({"gate": torch.ones(2)}, "pass local and gate together"),
        ({"gate": torch.ones(3), "local": torch.ones(1, 2, 5, 16)}, "gate must have one number"),
        ({"gate": torch.ones(2), "local": torch.ones(1, 2, 4, 16)}, r"local must be \[1, 2, 5, 16\]"),
        ({"valid": torch.ones(1, 2, 5, 8, dtype=torch.bool)}, "missing entries by -1"),
        ({"ids": None}, r"expected q .* k, v \[B, H, T, K, D\]"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call(**changes)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the kernels compute in Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    return json.loads(program("tests.kernels.knn", TRITON_INTERPRET="1"))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_kernels_are_as_exact_as_plain_attention(interpreted: dict[str, Any]) -> None:
    cases = {case: interpreted[case] for case in INTERPRETED}
    wrong = {case for case, found in cases.items() if any(error > allowed for error, allowed in found.values())}
    assert not wrong, {case: cases[case] for case in wrong}


@pytest.mark.slow
def test_a_token_that_does_not_exist_gives_its_query_nan(interpreted: dict[str, Any]) -> None:
    assert interpreted["missing"] == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_without_spills(target: str, tmp_path: Path, record_property: Any) -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    rows = json.loads(program("tests.kernels.knn", "--compile", target, TRITON_CACHE_DIR=str(tmp_path)))
    record_property("resources", rows)
    assert len(rows) == 4
    assert all(row["fits"] and not row["spilled"] for row in rows), rows


@pytest.mark.gpu
@each(case=list(CASES.values()), dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu_are_as_exact_as_plain_attention(case: Case, dtype: torch.dtype) -> None:
    found = errors(public("triton"), inputs(case, dtype), device="cuda")
    assert all(error <= allowed for error, allowed in found.values()), found
