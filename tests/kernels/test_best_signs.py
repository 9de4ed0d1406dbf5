"""Bits that are looked up find the products that multiplying finds, whatever the sizes are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels import best_signs as signs_kernel
from memstore.kernels.best_signs import _pack, allowance, best_signs, pack, problem
from tests.pairs import each

SIZES = [
    (5, 64, 256, 22),
    (300, 5, 24, 9),
    (3, 7, 24, 3),
    (4, 33, 17, 8),
    (2, 1, 8, 1),
    (6, 100, 250, 31),
    (1, 2, 1, 2),
]
"""Blocks, keys of each, numbers of a key, queries."""
in_c = pytest.mark.skipif(problem() is not None, reason=f"backend 'native' {problem()}")


def inputs(blocks: int, keys: int, dim: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(blocks)
    signs = torch.randint(0, 2, (blocks, keys, dim), generator=generator).float() * 2 - 1
    return signs, torch.randn(rows, dim, generator=generator)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_reference_finds_what_a_product_finds_and_packing_loses_nothing(sizes: tuple[int, int, int, int]) -> None:
    signs, queries = inputs(*sizes)
    packed = pack(signs)
    assert torch.equal(packed.unpacked(), signs)
    truth = torch.einsum("npd,rd->nrp", signs.double(), queries.double()).amax(2).float()
    torch.testing.assert_close(best_signs(packed, queries, backend="reference"), truth)


@in_c
@each(sizes=[*SIZES, SIZES[0], SIZES[1]], threads=[1, 3])
def test_c_packs_the_same_bits_and_is_off_by_no_more_than_it_says(
    sizes: tuple[int, int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(signs_kernel, "WORDS_PER_THREAD", 1)
    signs, queries = inputs(*sizes)
    packed = pack(signs)
    words = torch.empty_like(packed.words)
    assert _pack(signs, words)
    assert torch.equal(words, packed.words)
    off = best_signs(packed, queries, backend="native") - best_signs(packed, queries, backend="reference")
    assert (off.abs() <= allowance(queries)).all()


@in_c
@pytest.mark.parametrize("factor", [0.0, 1.0, 127.0])
def test_c_is_exact_for_signs_and_other_whole_numbers(factor: float) -> None:
    signs, queries = inputs(5, 64, 256, 22)
    whole = factor * queries.sign()
    assert torch.equal(best_signs(pack(signs), whole), best_signs(pack(signs), whole, backend="reference"))


def test_numbers_that_are_no_signs_are_refused() -> None:
    for wrong in (0.0, 2.0, float("nan")):
        signs = torch.ones(2, 3, 20)
        signs[1, 2, 19] = wrong
        with pytest.raises(InvalidArgument, match=r"\+1 or -1"):
            pack(signs)
        assert not _pack(signs, torch.empty_like(pack(torch.ones(2, 3, 20)).words))
