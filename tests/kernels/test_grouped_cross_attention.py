"""Grouped cross attention is what the paper's equations say, in every form, with the gradients to match."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.kernels._backends import Backend
from memstore.kernels.grouped_cross_attention import attend, attend_folded, fold, grouped_cross_attention, prepare
from tests.kernels.gca import CASES, NAMES, Case, Inputs, allowed, errors, exact, inputs, results
from tests.pairs import each

PUBLISHED = Path(__file__).parents[1] / "data" / "gca_kernel_mha_K4.npz"
SIZES = [
    Case(t=t, s=s, d=d, h=h, g=g, off_by_one=(t + s) % 2 == 0, k=k)
    for t, s, d, h, g, k in [
        (1, 1, 16, 1, 1, 1),
        (31, 33, 24, 4, 2, 3),
        (33, 31, 64, 2, 2, 1),
        (63, 64, 16, 3, 1, 2),
        (64, 63, 24, 6, 2, 4),
        (111, 1, 16, 2, 1, 2),
        (1, 111, 64, 8, 2, 7),
    ]
]


@each(case=[*SIZES, *CASES.values()], dtype=[torch.float64, torch.float32])
def test_the_fast_form_is_as_exact_as_plain_attention(case: Case, dtype: torch.dtype) -> None:
    found = errors(grouped_cross_attention, inputs(case, dtype), backend="torch")
    assert all(error <= most for error, most in found.values()), found


@each(case=SIZES, dtype=[torch.float16, torch.bfloat16])
def test_the_fast_form_is_as_exact_as_plain_low_precision(case: Case, dtype: torch.dtype) -> None:
    found = errors(grouped_cross_attention, inputs(case, dtype), backend="torch")
    assert all(error <= most for error, most in found.values()), found


def from_prepared(given: Inputs) -> torch.Tensor:
    """Every list as the one list of a row, handed over and given back in the layout of projections."""
    rows = torch.arange(len(given.k))[:, None, None]
    k, v = (x[rows, given.blocks.clamp(min=0)].flatten(0, 1) for x in (given.k, given.v))
    weights, blocks, q = given.weights.flatten(0, 1), given.blocks.flatten(0, 1), given.q.flatten(0, 1)
    prepared = prepare(k, v, weights, blocks, off_by_one=given.off_by_one)
    out = attend(q.transpose(1, 2).flatten(2), prepared)
    return out.view(*q.transpose(1, 2).shape[:3], v.shape[-1]).transpose(1, 2).view(*given.q.shape[:-1], v.shape[-1])


@each(case=[*SIZES, *CASES.values()], tokens=[None, 0, 1, 3])
def test_a_prepared_list_gives_the_same(case: Case, tokens: int | None) -> None:
    given = inputs(case if tokens is None else replace(case, t=tokens))
    want = exact(given.q, given.k, given.v, given.weights, given.blocks, off_by_one=given.off_by_one)
    torch.testing.assert_close(from_prepared(given), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(from_prepared(given.to(torch.float32)), want.float(), rtol=0, atol=2e-6)


@each(case=[*SIZES, *CASES.values()], tokens=[1, 3, 0])
def test_projections_may_be_in_the_list(case: Case, tokens: int) -> None:
    given = inputs(replace(case, t=tokens))
    batch, lists, heads, _, dim = given.q.shape
    rows = torch.arange(batch)[:, None, None]
    k, v = (x[rows, given.blocks.clamp(min=0)].flatten(0, 1) for x in (given.k, given.v))
    prepared = prepare(k, v, given.weights.flatten(0, 1), given.blocks.flatten(0, 1), off_by_one=given.off_by_one)
    generator = torch.Generator().manual_seed(0)
    x, query, out = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((batch * lists, tokens, 5), (heads * dim, 5), (5, heads * v.shape[-1]))
    )
    folded = fold(prepared, query, out)
    assert folded is not None
    lengths = torch.rand(batch * lists, tokens, 1, generator=generator, dtype=torch.float64) + 0.5
    want = x + attend(x / lengths @ query.T, prepared) @ out.T
    torch.testing.assert_close(attend_folded(x, lengths, folded), want, rtol=1e-12, atol=1e-12)


def test_projections_of_large_models_stay_outside() -> None:
    prepared = prepare(torch.ones(1, 8, 1, 64, 64), torch.ones(1, 8, 1, 64, 64), torch.ones(1, 8), torch.zeros(1, 8))
    assert fold(prepared, torch.ones(768, 768), torch.ones(768, 768)) is None


@each(case=SIZES, dtype=[torch.float16, torch.bfloat16])
def test_a_prepared_list_is_as_exact_as_plain_low_precision(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype)
    high = given.to(torch.float64)
    want = exact(high.q, high.k, high.v, high.weights, given.blocks, off_by_one=given.off_by_one)
    assert (from_prepared(given) - want).abs().max() <= allowed(given)["out"]


@pytest.mark.parametrize("case", [Case(h=4, g=2, k=3), Case(off_by_one=False), CASES["NaN in what was not chosen"]])
def test_the_reference_is_the_papers_sum(case: Case) -> None:
    given = inputs(case)
    out = grouped_cross_attention(
        given.q, given.k, given.v, given.weights, given.blocks, off_by_one=given.off_by_one, backend="reference"
    )
    torch.testing.assert_close(out, torch.from_numpy(summed_in_loops(given)))


def summed_in_loops(given: Inputs) -> np.ndarray:
    """Equations 2-3 number by number, without PyTorch."""
    q, k, v, weights = (x.numpy() for x in (given.q, given.k, given.v, given.weights))
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for b, c, h, t in np.ndindex(q.shape[:-1]):
        g = h // (q.shape[2] // k.shape[2])
        for i, block in enumerate(given.blocks[b, c].tolist()):
            if block < 0:
                continue
            grown = [math.exp(q[b, c, h, t] @ key / math.sqrt(len(key))) for key in k[b, block, g]]
            total = sum(grown) + (1 if given.off_by_one else 0)
            for e, value in zip(grown, v[b, block, g], strict=True):
                out[b, c, h, t] += weights[b, c, i] * e / total * value
    return out


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("off_by_one", [False, True])
def test_it_agrees_with_the_published_implementation(backend: Backend, off_by_one: bool) -> None:
    with np.load(PUBLISHED) as file:
        data = {name: torch.from_numpy(file[name]) for name in file.files}
    tensors = [data[name].requires_grad_() for name in ("q", "k", "v", "weights")]
    q, k, v, weights = tensors
    scale = float(data["sm_scale"])
    out = grouped_cross_attention(q, k, v, weights, scale=scale, off_by_one=off_by_one, backend=backend)
    found = (out, *torch.autograd.grad(out, tensors, data["dout"]))
    for name, got, relative in zip(("out", "dq", "dk", "dv"), found[:4], (2e-5, 5e-5, 5e-5, 5e-5), strict=True):
        want = data[f"ref_{name}_sm{int(off_by_one)}"]
        assert (got - want).abs().max() <= relative * want.abs().max(), name
    torch.testing.assert_close(found[4], data[f"ref_dw_sm{int(off_by_one)}"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("off_by_one", [False, True])
def test_gradients_are_those_of_differences(backend: Backend, off_by_one: bool) -> None:
    given = inputs(Case(b=2, h=2, g=1, t=3, d=4, dv=3, s=3, k=3, n=3))
    tensors = [x.requires_grad_() for x in (given.q, given.k, given.v, given.weights)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, w: grouped_cross_attention(q, k, v, w, given.blocks, off_by_one=off_by_one, backend=backend),
        tensors,
    )


@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_alone_is_the_same(wanted: int) -> None:
    given = inputs(Case())
    tensors = [given.q, given.k, given.v, given.weights]
    q, k, v, weights = one = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
    out = grouped_cross_attention(q, k, v, weights, given.blocks, backend="torch")
    (gradient,) = torch.autograd.grad(out, one[wanted], given.dout)
    assert gradient.equal(results(grouped_cross_attention, given, backend="torch")[NAMES[wanted + 1]])


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_what_was_not_chosen_may_be_nan(backend: Backend) -> None:
    given = inputs(CASES["NaN in what was not chosen"])
    clean = replace(given, k=given.k.nan_to_num(), v=given.v.nan_to_num(), weights=given.weights.nan_to_num())
    got, want = (results(grouped_cross_attention, x, backend=backend) for x in (given, clean))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@each(empty=[Case(k=0), Case(n=0), Case(s=0), Case(c=0), Case(t=0)], backend=["auto", "reference", "torch"])
def test_nothing_to_attend_to_gives_zero(backend: Backend, empty: Case) -> None:
    given = inputs(empty if empty.n else Case(n=0, blocks=((-1, -1), (-1, -1))))
    got = results(grouped_cross_attention, given, backend=backend)
    assert got["out"].shape == given.dout.shape
    assert not any(x.any() for x in got.values())


def test_the_gathered_form_is_the_indexed_form_of_one_list() -> None:
    given = inputs(Case(b=2, c=1, h=4, g=2, k=3, blocks=((2, 0, 3),)))
    chosen = [x[:, given.blocks[0, 0]].transpose(1, 2) for x in (given.k, given.v)]  # [B, G, K, S, D]
    gathered = grouped_cross_attention(given.q[:, 0], chosen[0], chosen[1], given.weights[:, 0])
    indexed = grouped_cross_attention(given.q, given.k, given.v, given.weights, given.blocks)
    torch.testing.assert_close(gathered, indexed[:, 0])


def test_off_by_one_lets_a_query_find_nothing() -> None:
    given = inputs(Case(blocks=((0, 1), (2, 3))))
    out = exact(
        given.q, given.k - 1e3 * given.q.sign()[:, :1, :1, :1], given.v, given.weights, given.blocks, off_by_one=True
    )
    assert out[0, 0, 0, 0].abs().max() < 1e-9


def test_auto_is_the_torch_form_on_a_cpu() -> None:
    given = inputs(Case(), torch.float32)
    got, want = (results(grouped_cross_attention, given, backend=name) for name in ("auto", "torch"))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_wrong_inputs_are_named() -> None:
    given = inputs(Case(h=4, g=2))
    q, k, v, weights, blocks = given.q, given.k, given.v, given.weights, given.blocks
    with pytest.raises(InvalidArgument, match=r"q \[B, C, H, T, D\].* got q \(2, 4, 5, 16\)"):
        grouped_cross_attention(q[0], k, v, weights, blocks)
    with pytest.raises(InvalidArgument, match=r"multiple of G, .* q \(1, 2, 3, 5, 16\)"):
        grouped_cross_attention(q[:, :, :3], k, v, weights, blocks)
    with pytest.raises(InvalidArgument, match="shapes must agree"):
        grouped_cross_attention(q, k, v[:, 1:], weights, blocks)
    with pytest.raises(InvalidArgument, match=r"int32 or int64, got torch.float64"):
        grouped_cross_attention(q, k, v, weights, blocks.double())
    with pytest.raises(InvalidArgument, match=r"got \(1, 2, 2\) and \(1, 2, 1\)"):
        grouped_cross_attention(q, k, v, weights[..., :1], blocks)
    with pytest.raises(InvalidArgument, match="block 4 does not exist; there are 4"):
        grouped_cross_attention(q, k, v, weights, blocks.clamp(min=4))
    with pytest.raises(InvalidArgument, match=r"on one device.* k on meta"):
        grouped_cross_attention(q, k.to("meta"), v, weights, blocks)
    with pytest.raises(InvalidArgument, match=r"weights \[B, K\] \(with blocks"):
        grouped_cross_attention(q, k, v, weights)
    with pytest.raises(InvalidArgument, match="'auto', 'reference', 'torch' or 'triton', got 'cuda'"):
        grouped_cross_attention(q, k, v, weights, blocks, backend="cuda")  # type: ignore[arg-type]


def test_triton_says_why_not_and_what_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = inputs(Case(), torch.float32)
    with pytest.raises(InvalidArgument, match=r"'triton' is not installed: pip install .*, or use 'auto' or 'torch'"):
        results(grouped_cross_attention, given, backend="triton")
