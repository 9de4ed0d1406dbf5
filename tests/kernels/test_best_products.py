"""Every back end finds the same best products, exactly, whatever the sizes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels import best_codes, best_products
from memstore.kernels.best_products import backend_problem, native, torch_int
from memstore.kernels.native import Library, Unavailable, processor
from tests.pairs import each

SIZES = [
    (7, 32, 64, 64),
    (3, 30, 64, 5),
    (5, 1, 32, 17),
    (4, 3, 80, 33),
    (2, 100, 36, 1),
    (9, 17, 128, 48),
    (3, 64, 256, 32),
    (3, 16, 68, 70),
    (2, 5, 4, 3),
    (1, 50, 1024, 130),
]
"""Groups, keys of each, numbers of a key, queries."""
in_c = pytest.mark.skipif(native.problem() is not None, reason=f"backend 'native' {native.problem()}")
by_torch = pytest.mark.skipif(torch_int.problem() is not None, reason=f"backend 'torch' {torch_int.problem()}")
WAYS = [pytest.param("torch", marks=by_torch), pytest.param("native", marks=in_c)]


def inputs(groups: int, keys: int, dim: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(groups)
    codes = torch.randint(-127, 128, (groups, keys, dim), generator=generator).to(torch.int8)
    return codes, torch.randint(-127, 128, (rows, dim), generator=generator).to(torch.int8)


def test_the_reference_finds_what_a_loop_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_codes, "STEP_NUMBERS", 40)
    codes, queries = inputs(4, 3, 5, 2)
    found = best_products(codes, queries, backend="reference")
    for group in range(4):
        for row in range(2):
            products = [int((key.long() * queries[row].long()).sum()) for key in codes[group]]
            assert found[group, row] == max(products)
    chosen = torch.tensor([3, 0, 3, 1])
    assert torch.equal(best_products(codes, queries, chosen=chosen, backend="reference"), found[chosen])


@pytest.mark.parametrize("backend", WAYS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_back_ends_agree_with_the_reference(sizes: tuple[int, int, int, int], backend: Any) -> None:
    codes, queries = inputs(*sizes)
    truth = best_products(codes, queries, backend="reference")
    assert torch.equal(best_products(codes, queries, backend=backend), truth)
    chosen = torch.tensor([len(codes) - 1, 0, 0])
    out = torch.full((3, len(queries)), torch.nan)
    assert best_products(codes, queries, chosen=chosen, out=out, backend=backend) is out
    assert torch.equal(out, truth[chosen])


@in_c
@each(sizes=SIZES, matrices=[False, True, True, False], threads=[1, 3])
def test_vectors_and_matrices_agree_on_any_number_of_threads(
    sizes: tuple[int, int, int, int], matrices: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(native, "NUMBERS_PER_THREAD", 1)
    if not matrices:
        monkeypatch.setattr(native, "MATRICES", {"no processor's": ""})
        monkeypatch.setattr(native, "_library", Library(native.__file__, native._library.load))
    codes, queries = inputs(*sizes)
    out = torch.full((len(codes), len(queries)), torch.nan)
    native.best_products(codes, queries, None, out)
    assert torch.equal(out, best_products(codes, queries, backend="reference"))


@pytest.mark.parametrize("backend", ["reference", *WAYS])
def test_largest_and_smallest_numbers_do_not_run_over(backend: Any) -> None:
    codes = torch.tensor([-127, 127]).to(torch.int8)[:, None, None].expand(2, 20, 1024)
    queries = torch.full((1, 1024), 127, dtype=torch.int8)
    most = 127.0 * 127 * 1024
    assert best_products(codes, queries, backend=backend).flatten().tolist() == [-most, most]


@pytest.fixture
def avx2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2" not in processor():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr("memstore.kernels.native.processor", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(native, "_library", Library(native.__file__, native._library.load))
    monkeypatch.setattr(native, "NUMBERS_PER_THREAD", 1)


@in_c
@pytest.mark.usefixtures("avx2_alone")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_avx2_alone_finds_the_same(sizes: tuple[int, int, int, int]) -> None:
    test_back_ends_agree_with_the_reference(sizes, "native")


@in_c
@pytest.mark.usefixtures("avx2_alone")
def test_avx2_alone_holds_the_largest_sums() -> None:
    test_largest_and_smallest_numbers_do_not_run_over("native")
    test_sums_beyond_24_bits_are_rounded("native")


@pytest.mark.parametrize("backend", ["reference", *WAYS])
def test_nothing_is_multiplied_by_nothing(backend: Any) -> None:
    codes, queries = inputs(3, 4, 8, 2)
    assert best_products(codes, queries[:0], backend=backend).shape == (3, 0)
    assert best_products(codes[:0], queries, backend=backend).shape == (0, 2)
    none = torch.empty(0, dtype=torch.int64)
    assert best_products(codes, queries, chosen=none, backend=backend).shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": torch.ones(2, 8, dtype=torch.int8)}, "expected codes"),
        ({"queries": torch.ones(3, 9, dtype=torch.int8)}, "expected codes"),
        ({"codes": torch.ones(2, 0, 8, dtype=torch.int8)}, "at least one key"),
        ({"codes": torch.ones(2, 4, 8)}, "must be int8"),
        ({"queries": torch.ones(3, 8)}, "must be int8"),
        ({"chosen": torch.tensor([0, 2])}, "group numbers from 0 to 1, got 0 to 2"),
        ({"chosen": torch.tensor([-1])}, "group numbers from 0 to 1"),
        ({"chosen": torch.tensor([0], dtype=torch.int32)}, "int64"),
        ({"chosen": torch.tensor([0, 1, 0, 1])[::2]}, "contiguous"),
        ({"out": torch.ones(2, 4)}, "out must be"),
        ({"out": torch.ones(2, 3, dtype=torch.float64)}, "out must be"),
        ({"out": torch.ones(3, 2).T}, "out must be contiguous"),
        ({"out": torch.ones(2, 3, device="meta")}, "on the CPU, got .*, meta"),
        ({"backend": "cuda"}, "'cuda' must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    codes, queries = torch.ones(2, 4, 8, dtype=torch.int8), torch.ones(3, 8, dtype=torch.int8)
    with pytest.raises(InvalidArgument, match=message):
        best_products(**{"codes": codes, "queries": queries, **changes})


@pytest.mark.parametrize("backend", ["reference", *WAYS])
def test_what_pytorch_makes_by_default_does_not_matter(backend: Any) -> None:
    codes, queries = inputs(3, 20, 32, 2)
    truth = best_products(codes, queries, backend="reference")
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(best_products(codes, queries, backend=backend), truth)
    finally:
        torch.set_default_dtype(torch.float32)


@in_c
def test_a_compiler_that_knows_no_matrices_makes_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []

    def library(_: Any, flags: list[str]) -> Any:
        tried.append(flags)
        if "-mamx-int8" in flags:
            raise Unavailable("no such flag")
        return flags

    monkeypatch.setattr("memstore.kernels.native.library", library)
    monkeypatch.setattr("memstore.kernels.native.processor", lambda: frozenset(native.VECTORS | native.MATRICES))
    made: Any = native._library.load(Path(native.__file__))
    assert made == [*native.VECTORS.values(), "-fopenmp"]
    assert "-mamx-int8" in tried[0]


def test_vectors_that_c_does_not_take_are_left_to_pytorch() -> None:
    codes, queries = inputs(3, 20, 30, 2)
    with pytest.raises(InvalidArgument, match="multiple of 4 numbers, got 30; use 'auto'"):
        best_products(codes, queries, backend="native")
    assert torch.equal(best_products(codes, queries), best_products(codes, queries, backend="reference"))
    assert backend_problem("reference", 30) is None


@pytest.mark.parametrize("backend", ["reference", *WAYS])
def test_sums_beyond_24_bits_are_rounded(backend: Any) -> None:
    codes, queries = inputs(3, 17, 3000, 5)
    codes[0, 3], queries[2] = 127, 127
    codes[1], queries[3] = -128, -128
    exact = torch.einsum("npd,rd->nrp", codes.long(), queries.long()).amax(2)
    assert int(exact.max()) == 128 * 128 * 3000
    assert torch.equal(best_products(codes, queries, backend=backend), exact.float())
    long = torch.full((1, 1, 1 << 16), 127, dtype=torch.int8)
    for sign in (1, -1):
        found = best_products(long, long[0] * sign, backend=backend)
        assert found.item() == sign * 127 * 127 * (1 << 16)
    with pytest.raises(InvalidArgument, match="1 to 65536 numbers per key"):
        best_products(torch.cat([long, long], 2), torch.cat([long, long], 2)[0], backend=backend)


def test_vectors_of_one_number_are_multiplied_rightly() -> None:
    codes, queries = inputs(5, 22, 1, 57)
    assert torch.equal(best_products(codes, queries), best_products(codes, queries, backend="reference"))
    with pytest.raises(InvalidArgument, match="at least 2 numbers, got 1; use 'auto'"):
        best_products(codes, queries, backend="torch")
