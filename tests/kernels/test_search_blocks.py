"""The search for blocks finds what a sort of all scores finds, in the reference and in the kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels import search_blocks
from memstore.kernels.native import Library, processor
from memstore.kernels.search_blocks import native
from tests.kernels.child import program
from tests.kernels.search import CASES, Case, agrees, inputs
from tests.pairs import each, pairs

in_c = pytest.mark.skipif(native.problem() is not None, reason=f"backend 'native' {native.problem()}")
NAMES = [f"{name} ({dtype})" for name in CASES for dtype in ("float32", "float16")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_finds_what_a_loop_finds(case: Case) -> None:
    queries, landmarks, wanted = inputs(case)
    scores, blocks = search_blocks(queries, landmarks, case.k, wanted=wanted, backend="reference")
    for head in range(case.h):
        for token in range(case.t):
            query, keys = queries[head, token], landmarks[head // (case.h // case.g)]
            every = [
                (-float((key @ query).max()), number)
                for number, key in enumerate(keys)
                if wanted is None or bool(wanted[number])
            ]
            best = sorted(every)[: case.k]
            found = blocks[head, token].tolist()
            assert found[len(best) :] == [-1] * (case.k - len(best))
            assert scores[head, token, : len(best)].tolist() == pytest.approx([-score for score, _ in best], abs=1e-5)
            if case.special == "equal":
                assert found[: len(best)] == [number for _, number in best]


@in_c
@each(case=list(CASES.values()), dtype=[torch.float32, torch.bfloat16])
def test_c_finds_what_the_reference_finds(case: Case, dtype: torch.dtype) -> None:
    assert agrees(case, dtype, "native")


def search(
    chunks: list[native.KeyChunk], queries: Tensor, k: int, settle: native.Settle = "vectors"
) -> tuple[Tensor, Tensor, Tensor]:
    found = native.KeyChunks([chunks]).search(queries[None], k, settle=settle)
    assert found is not None
    return found[0][0], found[1][0], found[2][0]


@in_c
def test_c_searches_keys_in_several_parts_and_says_which_key_matched() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((90, 3, 8), (4, 8)))
    ids, wanted = torch.randperm(1000, generator=generator)[:90], torch.rand(90, generator=generator) < 0.7
    pieces = [slice(0, 50), slice(50, 51), slice(51, 51), slice(51, 90)]
    parts = [native.KeyChunk(keys[piece], ids[piece], wanted[piece]) for piece in pieces]
    scores, found, offsets = search(parts, queries, 70)
    products = torch.einsum("npd,rd->rnp", keys, queries)
    for row, best in enumerate(products.amax(2)):
        every = sorted((-float(best[n]), int(ids[n]), n) for n in range(90) if wanted[n])[:70]
        assert found[row, : len(every)].tolist() == [number for _, number, _ in every]
        assert scores[row, : len(every)].tolist() == [-score for score, _, _ in every]
        assert offsets[row, : len(every)].tolist() == [int(products[row, n].argmax()) for _, _, n in every]
        assert found[row, len(every) :].tolist() == offsets[row, len(every) :].tolist() == [-1] * (70 - len(every))


@in_c
@pairs(
    features=[frozenset(), frozenset({"avx2", "fma"}), processor()],
    rows=[1, 2, 4, 5, 9, 16, 17, 33, 70],
    size=[1, 2, 48, 49, 100],
    dim=[1, 7, 32, 100],
    dtype=[torch.float32, torch.bfloat16],
    wanted=[1.0, 0.9, 0.1],
    threads=[1, 3],
)
def test_vectors_of_any_length_find_the_same(
    features: frozenset[str],
    rows: int,
    size: int,
    dim: int,
    dtype: torch.dtype,
    wanted: float,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not features <= processor():
        pytest.skip("this processor has no such vectors")
    monkeypatch.setattr("memstore.kernels.native.processor", lambda: features)
    monkeypatch.setattr(native, "_library", Library(native.__file__, native._library.load))
    monkeypatch.setattr(native, "PRODUCTS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(rows + size + dim)
    count = 1 + 400 // size
    keys, queries = (torch.randint(-3, 4, shape, generator=generator) for shape in ((count, size, dim), (rows, dim)))
    ids, there = torch.randperm(count, generator=generator), torch.rand(count, generator=generator) < wanted
    chunks = [
        native.KeyChunk(keys[piece].to(dtype), ids[piece], None if wanted == 1 else there[piece], piece.start + 7)
        for piece in (slice(0, count // 3), slice(count // 3, count))
    ]
    products = torch.einsum("npd,rd->rnp", keys, queries)
    best = products.amax(2).masked_fill(~there, -(1 << 40)) * count - ids  # the smaller id of equal ones
    k = min(9, int(there.sum()))
    truth = best.topk(k, 1).indices
    chosen = products.gather(1, truth.unsqueeze(2).expand(-1, -1, size))
    for settle in native.SETTLE[1:]:
        scores, found, offsets = search(chunks, queries.float(), 9, settle=settle)
        assert torch.equal(found[:, :k], ids[truth])
        assert bool((found[:, k:] == -1).all())
        assert torch.equal(scores[:, :k], products.amax(2).gather(1, truth).float())
        assert torch.equal(offsets[:, :k], chosen.argmax(2))
    _, found, places = search(chunks, queries.float(), 9, settle="no")
    assert torch.equal(found[:, :k], ids[truth])
    assert torch.equal(places[:, :k] - 7, truth)


@in_c
def test_blocks_with_the_score_of_none_are_not_found() -> None:
    landmarks = torch.ones(1, 3, 1, 2)
    landmarks[0, 1] = torch.inf
    queries = torch.tensor([[[-1.0, -1.0]]])
    found = [search_blocks(queries, landmarks, 3, backend=way) for way in ("native", "reference")]
    assert found[0][0].tolist() == found[1][0].tolist() == [[[-2, -2, -torch.inf]]]
    assert found[0][1].tolist() == found[1][1].tolist() == [[[0, 2, -1]]]


DEFAULTS = """
import torch
from memstore.kernels import search_blocks
inputs = torch.randn(2, 5, 16), torch.randn(2, 130, 1, 16)
truth = search_blocks(*inputs, 30, backend="reference")
for default in ("float64", "bfloat16", "meta"):
    if default == "meta":
        torch.set_default_device(default)
    else:
        torch.set_default_dtype(getattr(torch, default))
    found = search_blocks(*inputs, 30, backend="native")
    print(default, torch.allclose(found[0], truth[0], atol=1e-5), torch.equal(found[1], truth[1]))
    torch.set_default_dtype(torch.float32)
"""


@in_c
def test_what_pytorch_makes_by_default_does_not_matter() -> None:
    """In a process of its own: C would write behind tensors that are too small."""
    result = subprocess.run([sys.executable, "-c", DEFAULTS], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == [f"{name} True True" for name in ("float64", "bfloat16", "meta")], (
        result.stderr
    )


@in_c
def test_c_takes_what_it_says() -> None:
    queries, landmarks, _ = inputs(Case())
    with pytest.raises(InvalidArgument, match=r"'native' takes queries in float32 .* got torch.float64"):
        search_blocks(queries.double(), landmarks, 3, backend="native")
    with pytest.raises(InvalidArgument, match=r"'native' takes .* got torch.float32 and torch.float16"):
        search_blocks(queries, landmarks.half(), 3, backend="native")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.ones(4, 16)}, "expected queries"),
        ({"queries": torch.ones(3, 5, 16)}, "H must be a multiple of G"),
        ({"queries": torch.ones(2, 5, 17)}, "shapes must agree"),
        ({"landmarks": torch.ones(2, 130, 0, 16)}, "at least one key"),
        ({"landmarks": torch.ones(2, 130, 1, 16).long()}, "must be floating-point"),
        ({"k": 0}, "k must be"),
        ({"wanted": torch.ones(129, dtype=torch.bool)}, r"wanted must be boolean \[130\]"),
        ({"wanted": torch.ones(130)}, "wanted must be boolean"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    queries, landmarks, _ = inputs(Case())
    given: dict[str, Any] = {"queries": queries, "landmarks": landmarks, "k": 3, **changes}
    with pytest.raises(InvalidArgument, match=message):
        search_blocks(**given)


def test_triton_says_why_it_cannot() -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    queries, landmarks, _ = inputs(Case())
    with pytest.raises(InvalidArgument, match="TRITON_INTERPRET"):
        search_blocks(queries, landmarks, 3, backend="triton")
    with pytest.raises(InvalidArgument, match="float64"):
        search_blocks(queries.double(), landmarks, 3, backend="triton")


@pytest.mark.parametrize(("queries", "blocks"), [(0, 5), (5, 0)])
def test_nothing_finds_nothing(queries: int, blocks: int) -> None:
    scores, found = search_blocks(torch.ones(2, queries, 8), torch.ones(1, blocks, 1, 8), 3)
    assert scores.shape == found.shape == (2, queries, 3)
    assert bool((found == -1).all())


@pytest.fixture(scope="module")
def interpreted() -> dict[str, bool]:
    """What the kernels compute in Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    return json.loads(program("tests.kernels.search", TRITON_INTERPRET="1"))  # type: ignore[no-any-return]


def test_kernels_find_what_the_reference_finds(interpreted: dict[str, bool]) -> None:
    assert [case for case in NAMES if not interpreted[case]] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_without_spills(target: str, tmp_path: Path, record_property: Any) -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    rows = json.loads(program("tests.kernels.search", "--compile", target, TRITON_CACHE_DIR=str(tmp_path)))
    record_property("resources", rows)
    assert len(rows) == 4
    assert all(row["fits"] and not row["spilled"] for row in rows), rows


@pytest.mark.gpu
@each(case=list(CASES.values()), dtype=[torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_finds_what_the_reference_finds(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.kernels.search.inputs", lambda *given: tuple(None if x is None else x.cuda() for x in inputs(*given))
    )
    assert agrees(case, dtype)
