"""HiLS attention is what the paper and its published implementation say, in every form, with the gradients to match."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import Backend
from memstore.kernels.hils_attention import (
    attend_chosen,
    block_weights,
    choose_blocks,
    hils_attention,
    native,
    pool_landmarks,
    reference,
    window_attention,
)
from tests.kernels.hils import CASES, NAMES, Case, exact, inputs, largest, results
from tests.oracles import oracle, tensors
from tests.pairs import each, pairs

BACKENDS: list[Backend] = ["reference", "torch"]
LAYERS = ["mha", "gqa4", "S64_T400"]


@pytest.mark.parametrize("name", ["blocks of 8", "four heads share", "softmax1", "a window shorter than a block"])
def test_the_reference_is_what_the_paper_says(name: str) -> None:
    case = CASES[name]
    q, k, v, u = inputs(case).tensors
    torch.testing.assert_close(exact(q, k, v, u, **inputs(case).options), torch.from_numpy(in_loops(case)))


def in_loops(case: Case) -> np.ndarray:
    """The output number by number, without PyTorch."""
    q, k, v, u = (x.numpy() for x in inputs(case).tensors)
    scale, size, shared = case.d**-0.5, case.size, case.h // case.g
    out = np.zeros_like(q)
    for b, t in np.ndindex(case.b, case.t):
        edge = (t - case.window + 1) // size
        near = [j for j in range(max(0, edge * size), t + 1) if j % size != size - 1]
        candidates = range(max(0, edge))
        estimate: dict[tuple[int, int], float] = {}
        share: dict[tuple[int, int], float] = {}
        lse: dict[int, float] = {}
        for h in range(case.h):
            lse[h] = log_sum([scale * float(q[b, h, t] @ k[b, h // shared, j]) for j in near])
            for c in candidates:
                keys = k[b, h // shared, c * size : c * size + size - 1]
                p = softmax(scale * keys @ u[b, h, c * size + size - 1])
                estimate[h, c] = scale * float(u[b, h, t] @ (p @ keys)) - float(p @ np.log(p))
            total = log_sum([lse[h], *(estimate[h, c] for c in candidates)])
            share |= {(h, c): estimate[h, c] - total for c in candidates}
        for h in range(case.h):
            group = range(h // shared * shared, (h // shared + 1) * shared)
            best = sorted(candidates, key=lambda c: -max(share[each, c] for each in group))[: case.top_k]
            weights = softmax(np.array([*(estimate[h, c] for c in best), lse[h], *([0.0] if case.softmax1 else [])]))
            parts = [list(range(c * size, c * size + size - 1)) for c in best] + [near]
            for weight, part in zip(weights, parts, strict=False):
                if part:
                    inside = softmax(scale * k[b, h // shared, part] @ q[b, h, t])
                    out[b, h, t] += weight * inside @ v[b, h // shared, part]
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    grown: np.ndarray = np.exp(x - x.max())
    return np.asarray(grown / grown.sum())


def log_sum(x: list[float]) -> float:
    return max(x) + math.log(sum(math.exp(each - max(x)) for each in x)) if x else -math.inf


@each(case=list(CASES.values()), dtype=[torch.float64, torch.float32])
def test_the_fast_form_is_the_reference(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype)
    truth, found = results(exact, given), results(hils_attention, given, backend="torch")
    roundings = 3000 if case.large else 300
    for name in NAMES:
        allowed = roundings * torch.finfo(dtype).eps * (largest(truth[name]) or largest(given.dout))
        assert largest(found[name] - truth[name]) <= allowed, name


@pytest.mark.parametrize("name", CASES)
def test_c_and_pytorch_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(CASES[name], torch.float32)
    with_c = results(hils_attention, given, backend="torch")
    monkeypatch.setattr(native, "problem", lambda: "is switched off")
    without = results(hils_attention, given, backend="torch")
    for each_name in NAMES:
        size = largest(without[each_name]) or largest(given.dout)
        roundings = 3000 if CASES[name].large else 300
        assert largest(with_c[each_name] - without[each_name]) <= roundings * 1.2e-7 * size, each_name


def test_numbers_that_are_none_end_nowhere() -> None:
    """A choice among NaNs is any, and comes to an end."""
    x = torch.full((1, 1, 300, 16), math.nan)
    assert hils_attention(x, x, x, x, block_size=8, window=16, top_k=3, backend="torch").shape == x.shape


@pytest.mark.parametrize("seed", range(8))
def test_the_fast_form_is_the_reference_at_odd_sizes(seed: int) -> None:
    gen = np.random.default_rng(seed)
    g, size = int(gen.integers(1, 4)), int(gen.integers(2, 40))
    case = Case(
        t=int(gen.integers(1, 400)), b=int(gen.integers(1, 3)), h=g * int(gen.integers(1, 4)), g=g,
        d=int(gen.integers(1, 12)), size=size, window=int(gen.integers(1, 4 * size)), top_k=int(gen.integers(1, 9)),
        softmax1=bool(gen.integers(2)),
    )  # fmt: skip
    given = inputs(case)
    truth, found = results(exact, given), results(hils_attention, given, backend="torch")
    for name in NAMES:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-9, atol=1e-9, msg=f"{name} of {case}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_give_nearly_what_float32_gives(dtype: torch.dtype) -> None:
    given = inputs(Case(top_k=40), dtype)  # everything is chosen: roundings change no choice
    truth, found = results(exact, given.to(torch.float32)), results(hils_attention, given)
    for name in NAMES:
        assert found[name].dtype == dtype
        assert largest(found[name].float() - truth[name]) <= 16 * torch.finfo(dtype).eps * largest(truth[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softmax1", [False, True])
def test_gradients_are_those_of_differences(backend: Backend, softmax1: bool) -> None:
    case = Case(t=27, h=4, g=2, d=3, size=4, window=6, top_k=2, softmax1=softmax1)
    given = inputs(case)
    leaves = [x.requires_grad_() for x in given.tensors]
    assert torch.autograd.gradcheck(lambda *x: hils_attention(*x, **given.options, backend=backend), leaves)


def test_shapes_without_numbers() -> None:
    q = torch.zeros(1, 2, 0, 8, requires_grad=True)
    out = hils_attention(q, q, q, q, block_size=4, window=4, top_k=2)
    assert out.shape == q.shape
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 3, 9, 4), "v": torch.zeros(1, 3, 9, 4)}, "multiple of G"),
        ({"u": torch.zeros(1, 2, 8, 4)}, "expected q, u"),
        ({"block_size": 1}, "at least 2"),
        ({"window": 0}, "at least 1"),
        ({"top_k": 0}, "at least 1"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 2, 9, 4)
    given = {"q": x, "k": x, "v": x, "u": x, "block_size": 4, "window": 4, "top_k": 2}
    with pytest.raises(InvalidArgument, match=message):
        hils_attention(**{**given, **change})


def test_a_window_over_the_last_keys_is_that_over_all() -> None:
    q, k, v, _ = inputs(Case(t=70, h=4, g=2)).tensors
    for widened in (True, False):
        options: dict[str, Any] = {"block_size": 8, "window": 13, "widened": widened}
        whole = window_attention(q, k, v, **options)
        last = window_attention(q[:, :, 61:], k[:, :, 48:], v[:, :, 48:], first=48, **options)
        for part, each_whole in zip(last, whole, strict=True):
            torch.testing.assert_close(part, each_whole[:, :, 61:])


@pytest.mark.parametrize("widened", [False, True])
def test_gradients_of_a_window_are_those_of_differences(widened: bool) -> None:
    leaves = [x.requires_grad_() for x in inputs(Case(t=22, h=4, g=2, d=3)).tensors[:3]]
    options: dict[str, Any] = {"block_size": 5, "window": 7, "widened": widened}
    assert torch.autograd.gradcheck(lambda *x: window_attention(*x, **options)[0], leaves)


@pytest.mark.parametrize("many", [1, 3, 64])
def test_few_queries_and_many_attend_to_chosen_blocks_alike(many: int) -> None:
    gen = torch.Generator().manual_seed(many)
    q = torch.randn(2, 4, many, 8, generator=gen)
    keys, values = torch.randn(2, 2, 2, 9, 7, 8, generator=gen).unbind()
    blocks = torch.stack([torch.randperm(9, generator=gen)[:3] for _ in range(4 * many)]).view(2, 2, many, 3)
    blocks[:, 0, :, 2] = -1
    weights = torch.rand(2, 4, many, 3, generator=gen).where(blocks.repeat_interleave(2, 1) >= 0, 0)
    truth = reference.attend_chosen(q, keys, values, blocks, weights, scale=0.4)
    torch.testing.assert_close(attend_chosen(q, keys, values, blocks, weights, scale=0.4), truth)


# The published implementation


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def close(found: Tensor, truth: np.ndarray, tolerance: float = 1e-5) -> None:
    there = np.isfinite(truth)
    assert (np.isfinite(found.detach().numpy()) == there).all()
    assert np.abs(found.detach().numpy()[there] - truth[there]).max(initial=0) <= tolerance


@pairs(name=LAYERS, backend=BACKENDS)
def test_a_layer_is_the_published_one(name: str, backend: Backend) -> None:
    given = oracle(f"hils_attn_{name}.npz")
    leaves = [heads_first(x).requires_grad_() for x in tensors(given, "q", "k", "v", "u")]
    sizes: dict[str, Any] = {"block_size": int(given["S"]), "window": int(given["W"]), "top_k": int(given["K"])}
    out = hils_attention(*leaves, **sizes, softmax1=bool(given["softmax1"]), backend=backend)
    close(heads_first(out), given["out"])
    gradients = torch.autograd.grad(out, leaves, heads_first(torch.from_numpy(given["dout"])))
    for letter, found in zip("qkvu", gradients, strict=True):
        truth = given[f"d{letter}"]
        close(heads_first(found), truth, 1e-5 * float(np.abs(truth).max()))


@pytest.mark.parametrize("name", LAYERS)
def test_steps_are_the_published_ones(name: str) -> None:
    given = oracle(f"hils_attn_{name}.npz")
    size, window, top_k = (int(given[letter]) for letter in "SWK")
    q, k, v, u = map(heads_first, tensors(given, "q", "k", "v", "u"))
    near, lse = window_attention(q, k, v, block_size=size, window=window)
    close(heads_first(near), given["o_window"])
    close(lse.transpose(1, 2), given["lse_window"])
    keys, values = reference.in_blocks(k, size), reference.in_blocks(v, size)
    kbar, bias = pool_landmarks(u[:, :, size - 1 :: size], keys)
    close(heads_first(kbar), given["kbar"])
    close(bias.transpose(1, 2), given["b"])
    blocks, scores = choose_blocks(u, kbar, bias, lse, groups=k.shape[1], block_size=size, window=window, top_k=top_k)
    assert (heads_first(blocks).numpy() == given["indices"]).all()
    weights = block_weights(scores, lse, softmax1=bool(given["softmax1"]))
    close(heads_first(weights), given["weights"])
    close(heads_first(attend_chosen(q, keys, values, blocks, weights[..., :-1])), given["o_chunks"])


def test_pooling_is_the_published_one() -> None:
    given = oracle("hils_pool_mha_S64.npz")
    m, keys = (x.requires_grad_() for x in tensors(given, "mu", "k_chunked"))
    kbar, bias = pool_landmarks(heads_first(m), keys.permute(0, 3, 1, 2, 4)[:, :, :, :-1])
    close(heads_first(kbar), given["kbar"])
    close(bias.transpose(1, 2), given["b"])
    wanted = tensors(given, "dkbar", "db")
    dm, dkeys = torch.autograd.grad([heads_first(kbar), bias.transpose(1, 2)], [m, keys], wanted)
    close(dm, given["dmu"])
    close(dkeys, given["dk_chunked"])


@pytest.mark.parametrize("name", ["mha", "gqa4"])
def test_the_choice_is_the_published_one(name: str) -> None:
    given = oracle(f"hils_topk_{name}.npz")
    u, kbar = map(heads_first, tensors(given, "u", "kbar"))
    bias, lse = (x.transpose(1, 2) for x in tensors(given, "b", "lse_window"))
    options = {"block_size": int(given["S"]), "window": int(given["W"]), "top_k": int(given["K"])}
    groups = given["indices"].shape[2]
    blocks, scores = choose_blocks(u, kbar, bias, lse, groups=groups, first=int(given["q_offset"]), **options)
    assert (heads_first(blocks).numpy() == given["indices"]).all()
    close(heads_first(scores), given["e"])
    for softmax1, key in ((False, "weights"), (True, "weights_softmax1")):
        found = heads_first(block_weights(scores, lse, softmax1=softmax1)).numpy()
        assert np.abs(found - given[key][..., : found.shape[-1]]).max() <= 1e-5
    parts = [
        choose_blocks(u[:, :, at : at + 37], kbar, bias, lse[:, :, at : at + 37], groups=groups, first=at, **options)[0]
        for at in range(0, u.shape[2], 37)
    ]
    assert torch.equal(torch.cat(parts, 2), blocks)


def test_windows_are_the_published_ones() -> None:
    given = oracle("hils_window_T192.npz")
    q, k, v = map(heads_first, tensors(given, "q", "k", "v"))
    for widened, which in ((True, "expand"), (False, "exact")):
        out, lse = window_attention(q, k, v, block_size=int(given["S"]), window=int(given["W"]), widened=widened)
        close(heads_first(out), given[f"o_{which}"])
        close(lse.transpose(1, 2), given[f"lse_{which}"])


def test_steps_refuse_what_does_not_fit() -> None:
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 1, 8, 16)
    for size, window in ((4, 0), (1, 3), (0, 3)):
        with pytest.raises(InvalidArgument, match="must be at least"):
            window_attention(q, k, k, block_size=size, window=window)
    for m, keys in (
        ((1, 2, 4, 16), (1, 1, 1, 3, 16)),
        ((1, 1, 4, 16), (1, 2, 4, 3, 16)),
        ((1, 2, 4, 16), (1, 1, 4, 0, 16)),
    ):
        with pytest.raises(InvalidArgument, match=r"got m \("):
            pool_landmarks(torch.randn(m), torch.randn(keys))
    with pytest.raises(InvalidArgument, match="expected scores"):
        block_weights(torch.randn(1, 2, 4, 3), torch.randn(1, 2, 5))
