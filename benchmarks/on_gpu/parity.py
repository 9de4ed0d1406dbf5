"""Whether the kernels compute on this device what they should: the cases of their tests, and shapes of real models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.child import ALLOWED, Piece, relative
from memstore.kernels import (
    block_attention,
    grouped_cross_attention,
    knn_attention,
    landmark_attention,
    search_blocks,
)
from memstore.kernels.best_codes import best_codes, hold
from tests.kernels import choice, codes, gca, knn, landmark, rows, search


def parity(here: Piece) -> None:
    """One operation in one type, ``real`` shapes, or the tests of the index."""
    # Uninitialised memory is NaN; operations that have no deterministic form may run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    own = {"codes": _codes, "attention": _block_attention, "choice": _choice, "rows": _chosen_rows}
    if alone := own.get(here.piece):
        alone(here)
        return
    if here.piece in TESTS:
        _tests(here, TESTS[here.piece])
        return
    operation, what = here.piece.split()
    if what == "real":
        with here.attempt(f"{operation}, real shapes"):
            REAL[operation](here)
        return
    _cases(here, operation, getattr(torch, what))


def _cases(here: Piece, operation: str, dtype: torch.dtype) -> None:
    """All cases of the tests, as these judge them."""
    if here.tiny and dtype == torch.bfloat16:
        here.row(f"{operation} in bfloat16", note="left out: Triton's interpreter has no bfloat16")
        return
    modules: dict[str, Any] = {"gca": gca, "landmark": landmark, "knn": knn, "search": search}
    cases = modules[operation].CASES
    for name in list(cases)[: here.size(len(cases), 1)]:
        title = f"{operation} {here.piece.split()[1]}: {name}"
        with here.attempt(title):
            if operation == "search":
                here.row(title, ok=_search_agrees(cases[name], dtype))
                continue
            found = _errors(operation, cases[name], dtype)
            worst = max(error / (most or 1e-30) if error == error else float("inf") for error, most in found.values())
            here.row(title, ok=worst <= 1, value=worst, unit="of the allowed error")


def _codes(here: Piece) -> None:
    """All cases of the best codes, and whether two runs give the same bits."""
    every = [(name, kind, queries) for name in codes.CASES for kind in codes.KINDS for queries in codes.QUERIES]
    for case in every[:: here.size(1, 12)]:
        title = f"codes: {', '.join(case)}"
        with here.attempt(title):
            here.row(title, ok=codes.agrees(*case, backend="triton", device="cuda"))
    for kind, dtype in codes.KINDS.items():
        keys, asked = codes.inputs("codes of a router", kind, "float32")
        given = hold(keys, dtype).to("cuda"), asked.to("cuda")
        with here.attempt(f"codes: {kind}, twice"):
            here.row(f"codes: {kind}, twice", ok=torch.equal(*(best_codes(*given, backend="triton") for _ in range(2))))


def _choice(here: Piece) -> None:
    """All cases of the choice by index scores: ids and scores are those of the reference to the bit."""
    for name in list(choice.CASES)[:: here.size(1, 4)]:
        for dtype in _types(here):
            title = f"choice {dtype}: {name}"
            with here.attempt(title):
                here.row(title, ok=choice.agrees(choice.CASES[name], dtype, "triton", device="cuda"))


def _chosen_rows(here: Piece) -> None:
    """All cases of attention to chosen rows, as their tests judge them."""
    for name in list(rows.CASES)[:: here.size(1, 4)]:
        for dtype in _types(here):
            title = f"chosen rows {dtype}: {name}"
            with here.attempt(title):
                worst = rows.error(rows.CASES[name], dtype, "triton", device="cuda") / rows.ALLOWED
                here.row(title, ok=worst <= 1, value=worst, unit="of the allowed error")


def _block_attention(here: Piece) -> None:
    """Attention with its log-sum-exp: prompts and single tokens, with masks and without, heads alone and grouped."""
    for batch, heads, groups, tokens, count, dim in (
        (1, 32, 8, 256, 2049, 128),
        (2, 9, 3, 33, 1111, 64),
        (1, 32, 8, 1, 4096, 128),
    ):
        if here.tiny:
            tokens, count, dim = min(tokens, 3), 21, 16
        q, k, v = (
            _normal(batch, heads, tokens, dim),
            _normal(batch, groups, count, dim),
            _normal(batch, groups, count, dim),
        )
        seen = torch.rand(batch, 1, tokens, count, generator=_seeded()).to("cuda") < 0.7
        seen[0, 0, 0] = False  # a query that sees nothing
        sinks = torch.linspace(-1, 1, heads).to("cuda")
        for dtype in _types(here):
            for mask, logits in ((None, None), (seen, None), (seen, sinks)):
                given = [x.to(dtype) for x in (q, k, v)]
                title = f"block attention {tokens} x {count} {dtype}, {'masked' if mask is not None else 'whole'}"
                with here.attempt(title):
                    options: Any = {"mask": mask, "sinks": logits}
                    out, lse = block_attention(*given, **options, backend="torch")
                    exact = block_attention(*(x.double() for x in given), **options, backend="reference")
                    there = exact[1] > -torch.inf
                    error = max(relative(out, exact[0]), relative(lse[there], exact[1][there]))
                    same = torch.equal(lse > -torch.inf, there)
                    here.row(title, ok=same and error <= ALLOWED[dtype], value=error, unit="relative error")


def _errors(operation: str, case: Any, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    match operation:
        case "gca":
            given = gca.inputs(case, dtype)
            return gca.errors(grouped_cross_attention, given, device="cuda", backend="triton")
        case "landmark":
            return landmark.errors(landmark_attention, landmark.inputs(case, dtype), device="cuda", backend="triton")
        case _:
            return knn.errors(_knn_there, knn.inputs(case, dtype), device="cuda")


def _knn_there(*given: Any) -> tuple[Tensor, Tensor]:
    out, lse = knn.public("triton")(*given)
    return out, lse.to(out.device)


def _search_agrees(case: search.Case, dtype: torch.dtype) -> bool:
    queries, landmarks, wanted = search.inputs(case, dtype)
    there = [x if x is None else x.to("cuda") for x in (queries, landmarks, wanted)]
    scores, blocks = search_blocks(there[0], there[1], case.k, wanted=there[2], backend="triton")  # type: ignore[arg-type]
    truth, expected = search_blocks(queries.double(), landmarks, case.k, wanted=wanted, backend="reference")
    close = torch.allclose(scores.cpu().double(), truth, atol=1e-5, rtol=1e-5)
    return close and bool(((blocks.cpu() == expected) | search._tied(truth)).all())


def _judged(here: Piece, name: str, dtype: torch.dtype, call: Callable[..., Tensor], exact: Callable[..., Tensor],
            tensors: list[Tensor]) -> None:  # fmt: skip
    """Forward and all gradients of ``call`` against ``exact`` in float64, and whether two runs give the same bits."""

    def results(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in given]
        out = function(*given)
        gen = torch.Generator().manual_seed(1)
        dout = torch.randn(out.shape, generator=gen).to(dtype).to("cuda").to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, given, dout)]

    first, second = results(call, tensors), results(call, tensors)
    truth = results(exact, [x.double() for x in tensors])
    errors = [relative(x, y) for x, y in zip(first, truth, strict=True)]
    most = ALLOWED[dtype]
    right = errors[0] <= most and all(error <= 2 * most for error in errors[1:])  # NaN is none of these
    equal = all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    title = f"{name} {str(dtype).removeprefix('torch.')}"
    here.row(title, ok=right, value=max(errors), unit="relative error", note=f"out, gradients: {errors}")
    here.row(f"{title}, twice", ok=equal)


def _gca(here: Piece) -> None:
    for name, (b, c, h, g, t, d, s, k, n) in {
        "gca train": (2, 16, 16, 16, 64, 64, 64, 8, 32),
        "gca decode, grouped heads": (8, 1, 32, 8, 1, 128, 64, 64, 128),
    }.items():
        if here.tiny:
            b, c, h, g, t, d, s, k, n = 1, 2, 2, 1, 4, 16, 16, 2, 3
        q, keys, values = _normal(b, c, h, t, d), _normal(b, n, g, s, d), _normal(b, n, g, s, d)
        weights = torch.randn(b, c, k, generator=_seeded()).softmax(-1).to("cuda")
        blocks = torch.rand(b, c, n, generator=_seeded()).topk(k).indices.to("cuda")
        for dtype in _types(here):
            _judged(
                here, name, dtype,
                lambda q, k, v, w: grouped_cross_attention(q, k, v, w, blocks, backend="triton"),  # noqa: B023
                lambda q, k, v, w: grouped_cross_attention(q, k, v, w, blocks, backend="reference"),  # noqa: B023
                [x.to(dtype) for x in (q, keys, values, weights)],
            )  # fmt: skip


def _landmark(here: Piece) -> None:
    for block in (64, 50):
        b, h, t, d = (1, 2, 40, 16) if here.tiny else (2, 8, 2048, 128)
        tensors = [_normal(b, h, t, d), _normal(b, h // 2, t, d), _normal(b, h // 2, t, d)]
        marks = (torch.arange(1, t + 1) % (8 if here.tiny else block) == 0).repeat(b, 1).to("cuda")
        for dtype in _types(here):
            _judged(
                here, f"landmark blocks of {block}", dtype,
                lambda q, k, v: landmark_attention(q, k, v, marks, backend="triton"),  # noqa: B023
                lambda q, k, v: landmark_attention(q, k, v, marks, backend="reference"),  # noqa: B023
                [x.to(dtype) for x in tensors],
            )  # fmt: skip


def _knn(here: Piece) -> None:
    b, h, t, n, k, d = (1, 2, 4, 20, 4, 16) if here.tiny else (4, 8, 512, 8192, 32, 64)
    q, keys, values, local = _normal(b, h, t, d), _normal(b, h, n, d), _normal(b, h, n, d), _normal(b, h, t, d)
    ids = torch.randint(-1, n, (b, h, t, k), generator=_seeded()).to("cuda")
    gate, scale = torch.zeros(h, device="cuda"), torch.full((h,), d**-0.5, device="cuda")
    for dtype in _types(here):
        _judged(
            here, "knn", dtype,
            lambda q, local, gate: knn_attention(
                q, keys.to(q.dtype), values.to(q.dtype), ids, scale=scale.to(q.dtype), local=local, gate=gate,
                backend="reference" if q.dtype == torch.float64 else "triton",
            ),
            lambda q, local, gate: knn_attention(
                q, keys.to(dtype).double(), values.to(dtype).double(), ids, scale=scale.double(), local=local,  # noqa: B023
                gate=gate, backend="reference",
            ),
            [x.to(dtype) for x in (q, local, gate)],
        )  # fmt: skip


def _search(here: Piece) -> None:
    count = here.size(300_000, 300)
    keys, queries = _normal(1, count, 1, 64), _normal(1, 8, 64)
    for dtype in (torch.bfloat16, torch.float32):
        held = keys.to(dtype)
        scores, blocks = search_blocks(queries, held, 16, backend="triton")
        truth = (queries[0].double() @ held[0, :, 0].double().T).topk(16)
        found = (truth.values - scores[0].double()).abs().max()
        same = (blocks[0] == truth.indices).double().mean()
        here.row(f"search of {count} {dtype}", ok=float(found) < 1e-4, value=float(same), unit="of the blocks the same")


def _tests(here: Piece, path: str) -> None:
    """The tests of one file that are marked ``gpu``, on the device."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        path,
    ]
    command += [] if here.tiny else ["-n", "8", "--maxfail=5"]
    title = f"tests of the {here.piece}"
    with here.attempt(title, least=10):
        command += ["--collect-only"] if here.tiny else []
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(5, here.left - 2), check=False, env=dict(os.environ)
        )
        lines = (done.stdout + done.stderr).splitlines()
        right = done.returncode == 0
        here.row(
            title,
            ok=right,
            note=lines[-1] if lines else "",
            error=None if right else "\n".join(lines[-12:]),
        )


TESTS = {"index": "tests/index/test_exact.py", "hils": "tests/kernels/test_hils_attention_triton.py"}
REAL: dict[str, Callable[[Piece], None]] = {"gca": _gca, "landmark": _landmark, "knn": _knn, "search": _search}


def _types(here: Piece) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if here.tiny else (torch.bfloat16, torch.float16, torch.float32)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_seeded()).to("cuda")
