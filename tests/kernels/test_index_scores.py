"""The choice by index scores is that of a loop over keys, in one order for all back ends and slices."""

from __future__ import annotations

import json
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore.errors import InvalidArgument
from memstore.kernels import index_scores
from memstore.kernels import native as compiler
from memstore.kernels.index_scores import IndexCodes, choose, encode, native
from memstore.kernels.native import processor
from tests.kernels.child import program
from tests.kernels.choice import CASES, TYPES, Case, agrees, inputs
from tests.kernels.narrow import narrower
from tests.pairs import each

NAMES = [f"{name} ({kind})" for name in CASES for kind in ("float32", "float16")]


def in_c(dtype: torch.dtype) -> None:
    if (problem := native.problem(dtype)) is not None:
        pytest.skip(f"backend 'native' {problem}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_what_a_loop_finds(case: Case) -> None:
    tensors, options = inputs(case)
    ids, scores = choose(**tensors, **options, backend="reference")
    queries, keys = tensors["queries"], tensors["keys"]
    for row in list(range(case.s))[-5:]:
        every = []
        for start in range(0, max(0, min(int(tensors["limit"][row]), case.t)), case.block):
            score = -torch.inf
            for key in keys[start : min(start + case.block, int(tensors["limit"][row]))]:
                products = (queries[row] @ key) * options["scale"]
                products = products.clamp(min=0) if case.relu else products
                one = float(products.sum() if tensors["weights"] is None else products @ tensors["weights"][row])
                score = max(score, one) if one == one else score
            if score > -torch.inf:
                every.append((-score, start // case.block))
        best = sorted(every)[: case.k]
        missing = case.k - len(best)
        assert ids[row].tolist() == [number for _, number in best] + [-1] * missing
        assert scores[row].tolist() == [-score for score, _ in best] + [-torch.inf] * missing


@each(case=list(CASES.values()) * 3, dtype=list(TYPES.values()))
def test_matrix_products_give_what_the_reference_gives(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_scores, "SCORES", {"cpu": 200})  # so that keys are cut
    assert agrees(case, dtype, "torch")


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c_gives_what_the_reference_gives(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c(dtype)
    assert agrees(case, dtype, "native")
    monkeypatch.setattr(native, "PANEL", 1)
    monkeypatch.setattr(index_scores, "ROWS", 7)
    assert agrees(case, dtype, "native")


@pytest.mark.parametrize("features", [{"avx2", "fma", "f16c"}, set()], ids=["AVX2", "narrower"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_c_with_narrower_vectors_gives_the_same(
    case: Case, features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_c(torch.float32)
    if not features <= processor():
        pytest.skip("this processor has no AVX2")
    narrower(native, features, monkeypatch)
    assert agrees(case, torch.bfloat16, "native")


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 600), max_size=4), k=st.integers(1, 700))
def test_equal_scores_are_in_one_order_however_the_keys_are_cut(
    backend: str, seed: int, cuts: list[int], k: int
) -> None:
    """Two heads of a small index: most scores are exactly 0, some are equal and are not."""
    if backend == "native":
        in_c(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randint(-1, 2, shape, generator=generator).float() for shape in ((3, 2, 4), (600, 4)))
    weights, limit = torch.tensor([1.0, -1.0]).repeat(3, 1), torch.tensor([600, 599, 17])
    options: dict[str, Any] = {"scale": 1.0, "k": k, "backend": backend}
    whole = choose(queries, weights, keys, limit=limit, **options)
    stable = torch.einsum("shd,td->sht", queries, keys).relu().mul(weights[:, :, None]).sum(1)
    assert int((stable == 0).sum()) > 300
    for row, sees in enumerate(limit.tolist()):
        truth = stable[row, :sees].sort(descending=True, stable=True).indices[:k].tolist()
        assert whole[0][row].tolist() == truth + [-1] * (k - len(truth))
    edges = [0, *sorted(cuts), 600]
    pieces = [keys[a:b] for a, b in pairwise(edges)]
    cut = choose(queries, weights, pieces, limit=limit, **options)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


def test_a_score_does_not_depend_on_where_slices_begin() -> None:
    """Bit for bit, in C: the order of a sum is that of its key, not of its place."""
    in_c(torch.float32)
    queries, weights, keys = torch.randn(2, 20, 33), torch.randn(2, 20), torch.randn(500, 33)
    options: dict[str, Any] = {"scale": 0.3, "k": 500, "backend": "native"}
    whole = choose(queries, weights, keys, limit=torch.tensor([500, 500]), **options)
    for cut in (1, 13, 100):
        parts = choose(queries, weights, [keys[:cut], keys[cut:]], limit=torch.tensor([500, 500]), **options)
        assert torch.equal(parts[0], whole[0])
        assert torch.equal(parts[1], whole[1])
        alone = choose(queries[1:], weights[1:], keys[cut:], limit=torch.tensor([500]), **options)
        kept = whole[0][1] >= cut
        assert torch.equal(alone[1][0, : 500 - cut], whole[1][1][kept])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_scores_are_those_of_float64_but_for_rounding(backend: str) -> None:
    in_c(torch.bfloat16) if backend == "native" else None
    queries, weights, keys = torch.randn(3, 32, 128), torch.randn(3, 32), torch.randn(2000, 128).bfloat16()
    options: dict[str, Any] = {"scale": 128**-0.5, "limit": torch.tensor([2000, 1500, 3]), "k": 64}
    _, scores = choose(queries, weights, keys, backend=backend, **options)  # type: ignore[arg-type]
    _, truth = choose(queries.double(), weights.double(), keys, backend="reference", **options)
    assert torch.allclose(scores.double(), truth, rtol=1e-5, atol=1e-5)


def test_threads_choose_the_same() -> None:
    in_c(torch.float32)
    queries, weights, keys = torch.randn(3, 16, 64), torch.randn(3, 16), torch.randn(5000, 64)
    options: dict[str, Any] = {"scale": 0.1, "limit": torch.tensor([5000, 4000, 100]), "k": 300, "backend": "native"}
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(choose(queries, weights, keys, **options))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What scans are made of from now on; last: how many keys are scanned by their codes."""
    made: list[tuple[Any, ...]] = []
    kind = native._Scan

    def scan(*given: Any) -> Any:
        made.append(given)
        return kind(*given)

    monkeypatch.setattr(native, "_Scan", scan)
    return made


def codes_of(keys: torch.Tensor) -> IndexCodes:
    return encode(keys[: len(keys) // 64 * 64])


def same_by_codes(tensors: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice by codes is that of the scores, bit for bit, and the codes are read."""
    monkeypatch.setattr(native, "CODED", {"keys": 1, "heads": 1, "queries": 0, "panel": 128})
    exact = choose(**tensors, **options, backend="native")
    codes = codes_of(tensors["keys"])
    read = scans(monkeypatch)
    by_codes = choose(**tensors, **options, codes=codes, backend="native")
    assert bool(read[0][-1]) == (len(codes.codes) * 64 >= lcm(64, options["block"]) and "avx2" in compiler.processor())
    for found, truth in zip(by_codes, exact, strict=True):
        assert torch.equal(found, truth)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_codes_choose_what_scores_choose(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c(dtype)
    same_by_codes(*inputs(case, dtype), monkeypatch)


def test_codes_of_transposed_keys_and_of_an_odd_number_are_right() -> None:
    in_c(torch.float32)
    keys = torch.randn(16, 200)
    for found, truth in zip(encode(keys.T), encode(keys.T.contiguous()[:192]), strict=True):
        assert torch.equal(found, truth)


EXTREMES = [0.0, -0.0, 1e-40, -1e-30, 3e-20, 1e15, -1e19, 3e38, torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("features", [None, {"avx2", "fma", "f16c"}, {"avx2", "fma", "f16c", "avx512f"}, set()])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(*map(st.sampled_from, ([1, 3, 4, 9], [1, 3, 4, 33], [1, 5, 16, 70], [64, 200, 1000]))),
    k=st.integers(1, 300),
    block=st.sampled_from([1, 1, 7, 128]),
    where=st.sets(st.sampled_from(["keys", "queries", "weights"])),
    extreme=st.sampled_from(EXTREMES),
    size=st.sampled_from([1e-30, 1e-12, 1.0, 1e9]),
    relu=st.booleans(),
)
def test_codes_leave_out_no_key_that_is_chosen(
    features: set[str] | None, seed: int, shape: tuple[int, ...], k: int, block: int, where: set[str], extreme: float,
    size: float, relu: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also beside keys that are large, small, equal, zero or no numbers, and for such queries."""
    in_c(torch.float32)
    with monkeypatch.context() as patch:
        if features is not None:
            if not features <= processor():
                pytest.skip("this processor has narrower vectors")
            narrower(native, features, patch)
        s, h, d, t = shape
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(each, generator=generator)
            for name, each in {"queries": (s, h, d), "weights": (s, h), "keys": (t, d)}.items()
        }
        tensors["keys"][::3] = tensors["keys"][1]  # equal scores
        tensors["keys"] *= size
        for name in where:
            flat = tensors[name].flatten()
            flat[torch.randint(0, len(flat), (1 + len(flat) // 200,), generator=generator)] = extreme
            tensors[name] = flat.view(tensors[name].shape)
        limit = torch.randint(0, t + 1, (s,), generator=generator)
        limit[0] = t
        options = {"scale": 0.25, "k": k, "block": block, "relu": relu, "limit": limit}
        same_by_codes(tensors, options, patch)


@pytest.mark.parametrize("rounded", ["keys", "queries"])
def test_the_bound_is_needed_where_scores_are_close(rounded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes lose something of one side only, which alone would change the choice."""
    in_c(torch.float32)
    if "avx2" not in processor():
        pytest.skip("codes need AVX2")
    monkeypatch.setattr(native, "CODED", {"keys": 1, "heads": 1, "queries": 0, "panel": 128})
    wrong = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        near = torch.randint(-2, 3, (3968, 16), generator=generator)
        keys = torch.randint(-63, 64, (1, 16), generator=generator) + near * (0.07 if rounded == "keys" else 1)
        queries = torch.randint(-63, 64, (3, 2, 16), generator=generator).float()
        if rounded == "keys":
            queries[..., 0] = 127 if {"avx512bw", "avx512_vnni"} <= processor() else 63  # so that a step is 1
        else:
            queries, keys[:, 0] = queries + torch.rand(3, 2, 16, generator=generator), 127
        codes, weights = encode(keys.float()), torch.rand(3, 2, generator=generator)
        options: dict[str, Any] = {"scale": 1.0, "limit": torch.full((3,), 3968), "k": 5}
        truth = choose(queries, weights, keys.float(), **options)
        for found, expected in zip(choose(queries, weights, keys.float(), codes=codes, **options), truth, strict=True):
            assert torch.equal(found, expected)
        codes.about[:, 64 if rounded == "keys" else 128 :] = 0
        wrong += not torch.equal(choose(queries, weights, keys.float(), codes=codes, **options)[0], truth[0])
    assert wrong > 1


def test_codes_rule_out_most_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds that are too low, only the first keys are found, and the last ones, which have no codes."""
    in_c(torch.float32)
    if "avx2" not in processor():
        pytest.skip("codes need AVX2")
    monkeypatch.setattr(native, "CODED", {"keys": 1, "heads": 1, "queries": 0, "panel": 128})
    queries, weights, keys = torch.randn(2, 16, 64), torch.rand(2, 16), torch.randn(20_000, 64)
    codes, options = codes_of(keys), {"scale": 0.1, "limit": torch.tensor([20_000, 20_000]), "k": 10}
    codes.about.zero_()
    ids, _ = choose(queries, weights, keys, codes=codes, **options)  # type: ignore[arg-type]
    assert bool(((ids < 128) | (ids >= 19_968)).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.ones(5, 16)}, r"expected queries \[S, H, D\] and keys \[T, D\], got queries \(5, 16\)"),
        ({"queries": torch.ones(5, 4, 17)}, "expected queries"),
        ({"queries": torch.ones(5, 4, 16).long()}, "queries and keys must be in"),
        ({"keys": torch.ones(130, 16).double()}, "got queries in torch.float32 and keys in torch.float64"),
        ({"keys": [torch.ones(1, 16), torch.ones(1, 16).half()]}, "the same dtype"),
        ({"keys": []}, "got no tensor"),
        ({"keys": [torch.ones(7, 16), torch.ones(8, 16)], "block": 4}, "got one of 7 keys"),
        ({"weights": torch.ones(4, 5)}, r"weights must be floating-point \[5, 4\], got torch.float32 \[4, 5\]"),
        ({"limit": torch.ones(5).int()}, r"limit must be int64 \[5\], got torch.int32 \[5\]"),
        ({"limit": torch.ones(4).long()}, r"limit must be int64 \[5\], got torch.int64 \[4\]"),
        ({"k": 0}, "k must be an integer of at least 1, got 0"),
        (
            {"codes": lambda: encode(torch.ones(192, 16))},
            r"got codes of keys \[192, 16\], but the first tensor has shape \[130, 16\]",
        ),
        (
            {"codes": lambda: encode(torch.ones(64, 24))},
            r"got codes of keys \[64, 24\], but the first tensor has shape \[130, 16\]",
        ),
        ({"block": 2.5}, "block must be an integer of at least 1, got 2.5"),
        ({"backend": "cuda"}, "backend must be"),
        ({"queries": torch.ones(5, 4, 5000), "keys": torch.ones(1, 5000), "backend": "native"}, "at most 2048 numbers"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    tensors, options = inputs(Case())
    if "codes" in changes:
        in_c(torch.float32)
        changes = {"codes": changes["codes"]()}
    with pytest.raises(InvalidArgument, match=message):
        choose(**{**tensors, **options, **changes})


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_nothing_finds_nothing(queries: int, keys: int) -> None:
    limit = torch.full((queries,), 5)
    ids, scores = choose(torch.ones(queries, 2, 8), None, torch.ones(keys, 8), scale=1.0, limit=limit, k=3)
    assert ids.tolist() == [[-1] * 3] * queries
    assert scores.tolist() == [[-torch.inf] * 3] * queries


@pytest.fixture(scope="module")
def interpreted() -> dict[str, bool]:
    """What the kernel computes in Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    return json.loads(program("tests.kernels.choice", TRITON_INTERPRET="1"))  # type: ignore[no-any-return]


def test_the_kernel_gives_what_the_reference_gives(interpreted: dict[str, bool]) -> None:
    assert [case for case in NAMES if not interpreted[case]] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_kernel_compiles_without_spills(target: str, tmp_path: Path, record_property: Any) -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    rows = json.loads(program("tests.kernels.choice", "--compile", target, TRITON_CACHE_DIR=str(tmp_path)))
    record_property("resources", rows)
    assert len(rows) == 4
    assert all(row["fits"] and not row["spilled"] for row in rows), rows


@pytest.mark.gpu
@each(case=list(CASES.values()) * 3, dtype=list(TYPES.values()))
def test_a_gpu_gives_what_the_reference_gives(case: Case, dtype: torch.dtype) -> None:
    assert agrees(case, dtype, "triton", device="cuda")
