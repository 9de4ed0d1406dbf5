"""Landmark attention is what the paper's equations say, in every form, with the gradients to match."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memstore.errors import InvalidArgument
from memstore.kernels._backends import Backend
from memstore.kernels.landmark_attention import fused, landmark_attention
from tests.kernels.landmark import CASES, EVERYWHERE, Case, Inputs, errors, exact, inputs, results
from tests.pairs import each, pairs

DATA = Path(__file__).parents[1] / "data"
BACKENDS: list[Backend] = ["reference", "torch"]
ALL = CASES | EVERYWHERE
SIZES = [
    Case(t=1, landmarks=50, h=1, g=1),
    Case(t=63, landmarks=8, d=64),
    Case(t=111, landmarks=50, h=4, d=24, ramp=0.5),
    Case(t=130, landmarks=((70,),), window=64),
    Case(t=97, queries=33, b=2, h=6, landmarks=((), (5, 60, 61)), documents=(40,)),
]


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_the_reference_is_the_papers_grouped_softmax(case: Case) -> None:
    given = inputs(case)
    out = exact(given.q, given.k, given.v, given.is_landmark, **given.options)
    torch.testing.assert_close(out, torch.from_numpy(in_loops(given)))


def in_loops(given: Inputs) -> np.ndarray:
    """The output number by number, without PyTorch: as the paper says it for a ramp of 1, else with its bias."""
    q, k, v, lm = (x.numpy() for x in (given.q, given.k, given.v, given.is_landmark))
    options, (queries, tokens) = given.options, (q.shape[2], k.shape[2])
    nobody = np.zeros(lm.shape, dtype=int)
    real = np.asarray(options.get("key_padding", nobody == 0))
    documents = np.asarray(options.get("documents", nobody))
    scale = options.get("scale", 1 / math.sqrt(q.shape[-1]))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, row in np.ndindex(q.shape[:3]):
        i, g = row + tokens - queries, h // (q.shape[1] // k.shape[1])
        blocks, own = blocks_of(lm[b] & real[b], documents[b])
        seen = {j for j in range(tokens) if real[b, j] and real[b, i] and sees(i, j, documents[b], options)}
        score = {j: float(q[b, h, row] @ k[b, g, j]) * scale for j in seen}
        for j, weight in weights(blocks, own[i], seen, score, options["ramp"]).items():
            out[b, h, row] += weight * v[b, g, j]
    return out


def blocks_of(landmark: np.ndarray, documents: np.ndarray) -> tuple[list[tuple[list[int], int | None]], list[int]]:
    """The ordinary tokens and the landmark, if there is one, of each block; and the block of each token."""
    blocks: list[tuple[list[int], int | None]] = [([], None)]
    own = []
    for j in range(len(landmark)):
        if j and (landmark[j - 1] or documents[j - 1] != documents[j]):
            blocks.append(([], None))
        own.append(len(blocks) - 1)
        if landmark[j]:
            blocks[-1] = (blocks[-1][0], j)
        else:
            blocks[-1][0].append(j)
    return blocks, own


def sees(i: int, j: int, documents: np.ndarray, options: dict[str, Any]) -> bool:
    same = all(documents[m] == documents[m + 1] for m in range(min(i, j), max(i, j)))
    return same and (j <= i or not options["causal"]) and (options["window"] is None or i - j < options["window"])


def weights(
    blocks: list[tuple[list[int], int | None]], own: int, seen: set[int], score: dict[int, float], ramp: float
) -> dict[int, float]:
    """The weight of each ordinary token: of its own, or its share of what its block gets."""
    group: dict[tuple[str, int], float] = {}
    shares: dict[int, dict[int, float]] = {}
    for n, (tokens, landmark) in enumerate(blocks):
        there = [j for j in tokens if j in seen]
        if n == own:
            group |= {("token", j): score[j] for j in there}
        elif there and landmark in seen:
            assert landmark is not None
            top = max(score[j] for j in there)
            inside = top + math.log(sum(math.exp(score[j] - top) for j in there))
            group["block", n] = ramp * score[landmark] + (1 - ramp) * inside
            shares[n] = {j: math.exp(score[j] - inside) for j in there}
    top = max(group.values(), default=0.0)
    total = sum(math.exp(s - top) for s in group.values())
    given: dict[int, float] = {}
    for (kind, n), s in group.items():
        weight = math.exp(s - top) / total
        given |= {n: weight} if kind == "token" else {j: weight * share for j, share in shares[n].items()}
    return given


@each(case=list(ALL.values()), dtype=[torch.float64, torch.float32])
def test_the_fast_form_is_as_exact_as_plain_attention(case: Case, dtype: torch.dtype) -> None:
    found = errors(landmark_attention, inputs(case, dtype), backend="torch")
    assert all(error <= allowed for error, allowed in found.values()), found


@each(case=SIZES, dtype=[torch.float16, torch.bfloat16])
def test_the_fast_form_is_as_exact_as_plain_low_precision(case: Case, dtype: torch.dtype) -> None:
    found = errors(landmark_attention, inputs(case, dtype), backend="torch")
    assert all(error <= allowed for error, allowed in found.values()), found


@pairs(name=["b8_T61", "b51_T130", "irreg_off5_b11"], version=["llama", "lmb"], backend=BACKENDS)
def test_it_agrees_with_the_published_implementations(backend: Backend, version: str, name: str) -> None:
    with np.load(DATA / f"landmark_gsm_{name}.npz") as file:
        data = {name: torch.from_numpy(file[name]) for name in file.files}
    tensors = [data[name].requires_grad_() for name in ("q", "k", "v")]
    q, k, v = tensors
    out = landmark_attention(q, k, v, data["is_mem"], backend=backend)
    found = (out, *torch.autograd.grad(out, tensors, data["dout"]))
    for name, got, relative in zip(("out", "dq", "dk", "dv"), found, (2e-5, 5e-5, 5e-5, 5e-5), strict=True):
        want = data[f"{name}_{version}"]
        assert (got - want).abs().max() <= relative * want.abs().max(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ramp", [0.0, 0.4, 1.0])
def test_gradients_are_those_of_differences(backend: Backend, ramp: float) -> None:
    case = Case(t=13, h=2, g=1, d=3, dv=2, landmarks=((2, 3, 7, 11),), padded=((5,),), documents=(6,), ramp=ramp)
    given = inputs(case)
    tensors = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: landmark_attention(q, k, v, given.is_landmark, **given.options, backend=backend), tensors
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_may_be_nan(backend: Backend) -> None:
    given = inputs(CASES["NaN in padding"])
    found = results(landmark_attention, given, backend=backend)
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_changes_nothing(backend: Backend) -> None:
    alone = inputs(Case(t=20, landmarks=8))
    left, right = (torch.nn.functional.pad(alone.is_landmark, pad, value=True) for pad in ((7, 0), (0, 7)))
    want = landmark_attention(alone.q, alone.k, alone.v, alone.is_landmark, backend=backend)
    for is_landmark, pad in ((left, (0, 0, 7, 0)), (right, (0, 0, 0, 7))):
        q, k, v = (torch.nn.functional.pad(x, pad, value=3.0) for x in (alone.q, alone.k, alone.v))
        real = torch.nn.functional.pad(torch.ones(1, 20, dtype=torch.bool), pad[2:])
        out = landmark_attention(q, k, v, is_landmark, key_padding=real, backend=backend)
        torch.testing.assert_close(out[:, :, real[0]], want)
        assert not out[:, :, ~real[0]].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_in_one_row_are_as_if_each_had_its_own(backend: Backend) -> None:
    given = inputs(Case(t=40, landmarks=((4, 11, 18, 30, 35),)))
    q, k, v = given.q, given.k, given.v
    documents = torch.tensor([[9] * 15 + [2] * 8 + [9] * 17])
    packed = landmark_attention(q, k, v, given.is_landmark, documents=documents, backend=backend)
    for part in (slice(0, 15), slice(15, 23), slice(23, 40)):
        one = [x[:, :, part] for x in (q, k, v)]
        alone = landmark_attention(one[0], one[1], one[2], given.is_landmark[:, part], backend=backend)
        torch.testing.assert_close(packed[:, :, part], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_is_as_if_what_lies_before_it_were_not_there(backend: Backend) -> None:
    given = inputs(Case(t=40, landmarks=8))
    windowed = landmark_attention(given.q, given.k, given.v, given.is_landmark, window=13, backend=backend)
    for i in (5, 12, 13, 23, 24, 39):
        seen = slice(max(0, i - 12), i + 1)
        q, k, v = given.q[:, :, i : i + 1], given.k[:, :, seen], given.v[:, :, seen]
        alone = landmark_attention(q, k, v, given.is_landmark[:, seen], backend=backend)
        torch.testing.assert_close(windowed[:, :, i : i + 1], alone)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_memory_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "KEPT", 0)  # as if the input were long
    kept = {}
    for tokens in (1024, 2048):
        given = inputs(Case(t=tokens, d=4, landmarks=64), torch.float32)
        saved: list[int] = []

        def pack(x: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(x.numel())
            return x

        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            results(landmark_attention, given, backend="torch")
        kept[tokens] = sum(saved)
        assert largest.numbers <= 2 * 64 * tokens  # the scores of a block of queries
    assert kept[2048] == 2 * kept[1024]


def test_ten_thousand_blocks_are_seen() -> None:
    given = inputs(Case(t=30_000, queries=5, h=2, d=4, landmarks=3), torch.float32)
    want, got = results(exact, given), results(landmark_attention, given, backend="torch")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)
    late, block = given.v.clone(), 4567
    late[:, :, 3 * block] += 100  # a change of a value in the middle is felt
    outs = [landmark_attention(given.q, given.k, v, given.is_landmark, backend="torch") for v in (given.v, late)]
    assert (outs[0] - outs[1]).abs().amin() > 0


def test_another_layout_is_noticed_also_if_it_was_written_in_place() -> None:
    given = inputs(Case(t=40, landmarks=8))
    for positions in ((7, 15), (3, 15), (3, 20)):
        given.is_landmark.zero_()
        given.is_landmark[:, list(positions)] = True
        want = exact(given.q, given.k, given.v, given.is_landmark, **given.options)
        got = landmark_attention(given.q, given.k, given.v, given.is_landmark, backend="torch")
        torch.testing.assert_close(got, want)


def test_tensors_made_for_inference_are_taken() -> None:
    with torch.inference_mode():
        given = inputs(Case())
        for _ in range(2):
            got = landmark_attention(given.q, given.k, given.v, given.is_landmark, backend="torch")
            torch.testing.assert_close(got, exact(given.q, given.k, given.v, given.is_landmark, **given.options))


@each(empty=["queries", "batch", "keys", "values"], backend=[*BACKENDS, "auto"])
def test_nothing_gives_nothing(backend: Backend, empty: str) -> None:
    rows, queries, tokens = 0 if empty == "batch" else 2, 0 if empty in ("queries", "keys") else 5, 9
    tokens = 0 if empty == "keys" else tokens
    q, k = torch.randn(rows, 4, queries, 8), torch.randn(rows, 2, tokens, 8)
    v = torch.randn(rows, 2, tokens, 0 if empty == "values" else 3)
    tensors = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    out = landmark_attention(q, k, v, torch.zeros(rows, tokens, dtype=torch.bool), backend=backend)
    assert out.shape == (rows, 4, queries, v.shape[-1])
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), tensors))


def test_wrong_inputs_are_named() -> None:
    given = inputs(Case(h=4, g=2))
    q, k, v, lm = given.q, given.k, given.v, given.is_landmark
    with pytest.raises(InvalidArgument, match=r"q \[B, H, Tq, D\].* got q \(4, 23, 16\)"):
        landmark_attention(q[0], k, v, lm)
    with pytest.raises(InvalidArgument, match=r"multiple of .* q \(1, 3, 23, 16\)"):
        landmark_attention(q[:, :3], k, v, lm)
    with pytest.raises(InvalidArgument, match="shapes must agree"):
        landmark_attention(q, k, v[:, :, 1:], lm)
    with pytest.raises(InvalidArgument, match="least as many keys as"):
        landmark_attention(q, k[:, :, 1:], v[:, :, 1:], lm[:, 1:])
    with pytest.raises(InvalidArgument, match=r"is_landmark must be .*\[1, 23\] and boolean, got \[1, 22\]"):
        landmark_attention(q, k, v, lm[:, 1:])
    with pytest.raises(InvalidArgument, match=r"key_padding must be .* boolean, got \[1, 23\] of torch.int64"):
        landmark_attention(q, k, v, lm, key_padding=lm.long())
    with pytest.raises(InvalidArgument, match=r"documents must be .* int32 or int64, got \[1, 23\] of torch.bool"):
        landmark_attention(q, k, v, lm, documents=lm)
    with pytest.raises(InvalidArgument, match="got is_landmark on cpu, k on meta"):
        landmark_attention(q.to("meta"), k.to("meta"), v.to("meta"), lm)
    with pytest.raises(InvalidArgument, match="one device, got q on meta"):
        landmark_attention(q.to("meta"), k, v, lm)
    with pytest.raises(InvalidArgument, match="window must be at least 1"):
        landmark_attention(q, k, v, lm, window=0)
    with pytest.raises(InvalidArgument, match=r"ramp must be from 0 .* got 1.5"):
        landmark_attention(q, k, v, lm, ramp=1.5)
    with pytest.raises(InvalidArgument, match="'auto', 'reference', 'torch' or 'triton', got 'cuda'"):
        landmark_attention(q, k, v, lm, backend="cuda")  # type: ignore[arg-type]


def test_triton_says_why_not_and_what_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = inputs(Case(), torch.float32)
    with pytest.raises(InvalidArgument, match=r"'triton' is not installed: pip install .*, or use 'auto' or 'torch'"):
        results(landmark_attention, given, backend="triton")
