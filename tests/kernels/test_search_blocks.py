"""The search for blocks finds what a sort of all scores finds, in the reference and in the kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.kernels import search_blocks
from tests.kernels.child import program
from tests.kernels.search import CASES, Case, agrees, inputs

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.ones(4, 16)}, "expected queries"),
        ({"queries": torch.ones(3, 5, 16)}, "H must be a multiple of G"),
        ({"queries": torch.ones(2, 5, 17)}, "shapes do not fit"),
        ({"landmarks": torch.ones(2, 130, 0, 16)}, "at least one key"),
        ({"landmarks": torch.ones(2, 130, 1, 16).long()}, "numbers with a point"),
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


@pytest.mark.parametrize("case", NAMES)
def test_kernels_find_what_the_reference_finds(interpreted: dict[str, bool], case: str) -> None:
    assert interpreted[case]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_without_spills(target: str, tmp_path: Path, record_property: Any) -> None:
    pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
    rows = json.loads(program("tests.kernels.search", "--compile", target, TRITON_CACHE_DIR=str(tmp_path)))
    record_property("resources", rows)
    assert len(rows) == 4
    assert all(row["fits"] and not row["spilled"] for row in rows), rows


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gpu_finds_what_the_reference_finds(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.kernels.search.inputs", lambda *given: tuple(None if x is None else x.cuda() for x in inputs(*given))
    )
    assert agrees(case, dtype)
