"""Attention over chosen rows is that of a softmax over them, in every back end; latents are keys and values at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.kernels import merge_attention
from memstore.kernels.latent_attention import attend, attend_rows, fused, native
from memstore.kernels.native import processor
from tests.kernels.child import program
from tests.kernels.narrow import narrower
from tests.kernels.rows import ALLOWED, CASES, TYPES, Case, error, inputs
from tests.pairs import each

NAMES = [f"{name} ({kind})" for name in CASES for kind in ("float32", "float16")]


def in_c(dtype: torch.dtype) -> None:
    if (problem := native.problem(dtype)) is not None:
        pytest.skip(f"backend 'native' {problem}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_a_softmax_over_the_chosen_rows(case: Case) -> None:
    (q, keys, values, ids), options = inputs(case, torch.float64)
    out, lse = attend_rows(q, keys, values, ids, **options, backend="reference")
    for query in range(case.s):
        for head in range(case.h):
            group = head // (case.h // case.g)
            chosen = ids[query] if ids.dim() == 2 else ids[query, group]
            chosen = chosen[chosen >= 0].long()
            scores = keys[chosen, group] @ q[query, head] * options["scale"]
            sink = [] if options["sinks"] is None else [options["sinks"][head].double()]
            every = torch.cat([scores, *(each.view(1) for each in sink)])
            weights = every.softmax(0)[: len(scores)]
            assert torch.allclose(out[query, head], weights @ values[chosen, group], atol=1e-9)
            assert torch.allclose(lse[query, head], every.logsumexp(0), atol=1e-9)


@each(case=list(CASES.values()) * 3, dtype=list(TYPES.values()))
def test_torch_is_as_close_as_its_type(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(case, dtype, "torch") <= ALLOWED
    monkeypatch.setattr(fused, "NUMBERS", 2000)  # so that queries are cut
    assert error(case, dtype, "torch") <= ALLOWED


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c_is_as_close_as_its_type(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c(dtype)
    assert error(case, dtype, "native") <= ALLOWED
    monkeypatch.setattr(native, "QUERIES", 200)  # so that queries are cut
    assert error(case, dtype, "native") <= ALLOWED


@pytest.mark.parametrize("features", [{"avx2", "fma", "f16c"}, set()], ids=["AVX2", "narrower"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c_with_narrower_vectors_is_as_close(case: Case, features: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    in_c(torch.float32)
    if not features <= processor():
        pytest.skip("this processor has no AVX2")
    narrower(native, features, monkeypatch)
    assert error(case, torch.bfloat16, "native") <= ALLOWED


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_latent_attention_is_attention_with_the_up_projection_absorbed(backend: Any) -> None:
    """Keys and values of every head, made from the latents, give the same as the latents themselves."""
    if backend == "native":
        in_c(torch.float32)
    generator = torch.Generator().manual_seed(1)
    heads, latent, rope, size, rows = 3, 16, 8, 10, 40
    up_keys, up_values = torch.randn(2, heads, size, latent, generator=generator)
    q, q_rope = torch.randn(4, heads, size, generator=generator), torch.randn(4, heads, rope, generator=generator)
    table = torch.randn(rows, latent + rope, generator=generator)
    ids = torch.stack([torch.randperm(rows, generator=generator)[:12] for _ in range(4)])
    ids[2, 5:] = -1
    absorbed = torch.einsum("shd,hdc->shc", q, up_keys)
    found = attend(absorbed, q_rope, table, ids, scale=0.2, backend=backend)
    out = torch.einsum("shc,hdc->shd", found, up_values)
    keys = torch.einsum("nc,hdc->nhd", table[:, :latent], up_keys)
    values = torch.einsum("nc,hdc->nhd", table[:, :latent], up_values)
    for query in range(4):
        chosen = ids[query][ids[query] >= 0]
        scores = torch.einsum("hd,nhd->hn", q[query], keys[chosen])
        scores = (scores + torch.einsum("hr,nr->hn", q_rope[query], table[chosen, latent:])) * 0.2
        assert torch.allclose(out[query], torch.einsum("hn,nhd->hd", scores.softmax(-1), values[chosen]), atol=1e-4)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_nan_reaches_those_who_chose_it_alone(backend: Any) -> None:
    if backend == "native":
        in_c(torch.float32)
    (q, keys, values, ids), options = inputs(Case(n=200))
    keys[ids[1, 3]] = torch.nan
    chose = (ids == ids[1, 3]).any(1)
    out, lse = attend_rows(q, keys, values, ids, **options, backend=backend)
    assert torch.equal(out.isnan().any(-1).any(-1), chose)
    assert torch.equal(lse.isnan().any(-1), chose)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_parts_are_merged_into_the_whole(backend: Any) -> None:
    if backend == "native":
        in_c(torch.float32)
    (q, keys, values, ids), options = inputs(Case(k=30))
    out, lse = attend_rows(q, keys, values, ids, **options, backend=backend)
    parts = [attend_rows(q, keys, values, some, **options, backend=backend) for some in ids.split(11, 1)]
    merged = merge_attention(*zip(*parts, strict=True))
    assert torch.allclose(merged[0], out, atol=1e-6)
    assert torch.allclose(merged[1], lse, atol=1e-6)


def test_threads_compute_the_same() -> None:
    in_c(torch.float32)
    (q, keys, values, ids), options = inputs(Case(s=7, h=70))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(attend_rows(q, keys, values, ids, **options, backend="native")[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
@pytest.mark.parametrize(("queries", "rows"), [(0, 5), (5, 0)])
def test_nothing_gives_nothing(queries: int, rows: int, backend: Any) -> None:
    if backend == "native":
        in_c(torch.float32)
    ids = torch.full((queries, 3), -1)
    out = attend(
        torch.ones(queries, 2, 8), torch.ones(queries, 2, 4), torch.ones(rows, 12), ids, scale=1.0, backend=backend
    )
    assert torch.equal(out, torch.zeros(queries, 2, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": torch.ones(5, 24)},
            r"expected q \[S, H, D\], keys \[N, G, D\] and values \[N, G, Dv\], got q \(5, 24\)",
        ),
        ({"q": torch.ones(5, 4, 23)}, "H must be a multiple of G"),
        ({"keys": torch.ones(60, 3, 24), "values": torch.ones(60, 3, 24)}, "H must be a multiple of G"),
        ({"values": torch.ones(59, 1, 16)}, "shapes must agree"),
        ({"q": torch.ones(5, 4, 24).long()}, "expected floating-point tensors, got torch.int64"),
        ({"ids": torch.ones(5, 3)}, r"ids must be int32 or int64 \[S, k\] or \[S, G, k\] with S, G = 5, 1"),
        ({"ids": torch.ones(4, 3).long()}, r"got torch.int64 of \[4, 1, 3\]"),
        ({"ids": torch.ones(5, 2, 3).long()}, r"got torch.int64 of \[5, 2, 3\]"),
        ({"ids": torch.full((5, 3), 60)}, "row 60 does not exist; there are 60"),
        ({"sinks": torch.ones(3)}, r"sinks must be one number for each of 4 heads, got \[3\]"),
        ({"backend": "cuda"}, "backend must be"),
        ({"q": torch.ones(5, 4, 24).double(), "backend": "native"}, "at most 32 bits"),
        ({"keys": torch.ones(60, 1, 24).double(), "backend": "native"}, "takes rows in float32"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    (q, keys, values, ids), options = inputs(Case())
    given = {"q": q, "keys": keys, "values": values, "ids": ids, **options, **changes}
    with pytest.raises(InvalidArgument, match=message):
        attend_rows(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": torch.ones(6, 13)}, r"expected q_latent \[S, H, C\], q_rope \[S, H, R\] and table \[N, C \+ R\]"),
        ({"q_rope": torch.ones(4, 2, 4)}, r"got q_latent \(5, 2, 8\), q_rope \(4, 2, 4\), table \(6, 12\)"),
        ({"ids": torch.zeros(5, 1, 3).long()}, r"expected ids \[S, k\], got ids \(5, 1, 3\)"),
    ],
)
def test_latents_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {"q_latent": torch.ones(5, 2, 8), "q_rope": torch.ones(5, 2, 4), "table": torch.ones(6, 12)}
    with pytest.raises(InvalidArgument, match=message):
        attend(**{**given, "ids": torch.zeros(5, 3).long(), "scale": 1.0, **changes})


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the kernel computes in Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    return json.loads(program("tests.kernels.rows", TRITON_INTERPRET="1"))  # type: ignore[no-any-return]


def test_the_kernel_is_as_close_as_its_type(interpreted: dict[str, Any]) -> None:
    assert {case: interpreted[case] for case in NAMES if not interpreted[case] <= ALLOWED} == {}


def test_the_kernel_gives_nan_for_a_row_that_does_not_exist(interpreted: dict[str, Any]) -> None:
    assert interpreted["missing"] == [False, True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_kernel_compiles_without_spills(target: str, tmp_path: Path, record_property: Any) -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    rows = json.loads(program("tests.kernels.rows", "--compile", target, TRITON_CACHE_DIR=str(tmp_path)))
    record_property("resources", rows)
    assert len(rows) == 5
    assert all(row["fits"] and not row["spilled"] for row in rows), rows


@pytest.mark.gpu
@each(case=list(CASES.values()) * 3, dtype=list(TYPES.values()))
def test_a_gpu_is_as_close_as_its_type(case: Case, dtype: torch.dtype) -> None:
    assert error(case, dtype, "triton", device="cuda") <= ALLOWED
