"""Speed of the kernels beside PyTorch's own, and the shares of what the device can do at most."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.on_gpu.child import L2_BYTES, Piece
from memstore.kernels import (
    block_attention,
    grouped_cross_attention,
    knn_attention,
    landmark_attention,
    search_blocks,
)
from memstore.kernels.best_codes import best_codes, hold
from memstore.kernels.index_scores import choose
from memstore.kernels.latent_attention import attend

Sizes = tuple[int, ...]
SHAPES: dict[str, dict[str, Sizes]] = {
    # rows, lists, heads, groups, tokens, head, block, chosen, blocks
    "gca": {
        "train": (4, 64, 16, 16, 64, 64, 64, 8, 64),
        "train, grouped heads": (4, 64, 32, 8, 64, 128, 64, 8, 64),
        "decode, 32 sequences": (32, 1, 32, 8, 1, 128, 64, 64, 256),
        "decode, one sequence": (1, 1, 32, 8, 1, 128, 64, 64, 1024),
    },
    # rows, heads, groups, tokens, head, block
    "landmark 64": {
        "4K": (2, 16, 16, 4096, 128, 64),
        "8K": (2, 16, 16, 8192, 128, 64),
        "8K, grouped heads": (2, 16, 8, 8192, 128, 64),
        "8K, heads of 64": (2, 16, 16, 8192, 64, 64),
    },
    "landmark 50": {"8K": (2, 16, 16, 8192, 128, 50)},
    # rows, heads, tokens, remembered, found, head
    "knn": {"512 queries": (8, 8, 512, 65536, 32, 64)},
}
TINY: dict[str, Sizes] = {
    "gca": (1, 2, 2, 1, 4, 16, 16, 2, 3), "landmark 64": (1, 2, 1, 40, 16, 8), "landmark 50": (1, 2, 1, 40, 16, 7),
    "knn": (1, 2, 4, 20, 4, 16),
}  # fmt: skip
Call = Callable[..., Tensor]


def gradients_of(
    name: str, shape: str, dtype: torch.dtype, *, tiny: bool = False, backend: str = "triton"
) -> tuple[Call, list[Tensor], Tensor]:
    """A call, the tensors that want gradients, and the gradient of what it gives."""
    sizes = TINY[name] if tiny else SHAPES[name][shape]
    given: Any = {"backend": backend}
    if name == "gca":
        b, c, h, g, t, d, s, k, n = sizes
        tensors = [_normal(dtype, b, c, h, t, d), _normal(dtype, b, n, g, s, d), _normal(dtype, b, n, g, s, d)]
        tensors.append(_normal(dtype, b, c, k).softmax(-1))
        blocks = torch.rand(b, c, n, device="cuda").topk(k).indices
        call: Call = lambda q, k, v, weights: grouped_cross_attention(q, k, v, weights, blocks, **given)  # noqa: E731
        out_shape: Sizes = (b, c, h, t, d)
    elif name == "knn":
        b, h, t, n, k, d = sizes
        keys, values = _normal(dtype, b, h, n, d), _normal(dtype, b, h, n, d)
        ids = torch.randint(0, n, (b, h, t, k), device="cuda")
        gate = torch.zeros(h, device="cuda", dtype=dtype)
        tensors = [_normal(dtype, b, h, t, d), _normal(dtype, b, h, t, d)]
        call = lambda q, local: knn_attention(q, keys, values, ids, local=local, gate=gate, **given)  # noqa: E731
        out_shape = (b, h, t, d)
    else:
        b, h, g, t, d, block = sizes
        marks = (torch.arange(1, t + 1, device="cuda") % block == 0).repeat(b, 1)
        tensors = [_normal(dtype, b, h, t, d), _normal(dtype, b, g, t, d), _normal(dtype, b, g, t, d)]
        call = lambda q, k, v: landmark_attention(q, k, v, marks, **given)  # noqa: E731
        out_shape = (b, h, t, d)
    return call, [x.requires_grad_() for x in tensors], _normal(dtype, *out_shape)


def kernels(here: Piece) -> None:
    """Everything in bfloat16, then what there is time for in float32."""
    top = _ceilings(here)
    for name in ("landmark 64", "gca", "knn", "landmark 50"):
        for shape in list(SHAPES[name])[: here.size(9, 1)]:
            with here.attempt(f"{name} {shape}", least=here.size(8, 0)):
                _attention(here, name, shape, torch.bfloat16, top)
    _searches(here, top)
    _codes(here, top)
    _chosen(here, top)
    _with_lse(here, top)
    for name in ("landmark 64", "gca")[: here.size(2, 0)]:
        with here.attempt(f"{name} float32", least=here.size(12, 0)):
            _attention(here, name, next(iter(SHAPES[name])), torch.float32, top)


def _ceilings(here: Piece) -> dict[str, float]:
    """TB/s and TFLOP/s at most, measured in this very process."""
    source = torch.empty(here.size(1 << 29, 1 << 10), dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    x = _normal(torch.bfloat16, here.size(8192, 16), here.size(8192, 16))
    copy, product = here.times([lambda: target.copy_(source), lambda: x @ x], repeats=10)
    return {"TB/s": 2 * source.nbytes / copy / 1e9, "TFLOP/s": 2 * len(x) ** 3 / product / 1e9}


def _attention(here: Piece, name: str, shape: str, dtype: torch.dtype, top: dict[str, float]) -> None:
    if here.tiny:
        dtype = torch.float32  # Triton's interpreter has no bfloat16
    operations, moved = _work(name, TINY[name] if here.tiny else SHAPES[name][shape], dtype.itemsize)
    decoding = "decode" in shape
    torch.cuda.reset_peak_memory_stats()
    call, tensors, dout = gradients_of(name, shape, dtype, tiny=here.tiny)
    calls: dict[str, Callable[[], object]] = {"ours": lambda: call(*tensors)}
    if decoding:
        copies = max(1, min(8, L2_BYTES // moved))
        turns = [[x.detach().clone() for x in tensors] for _ in range(here.size(copies, 1))]
        calls = {"ours": _rotating(call, turns)}
    others = (
        {}
        if name.startswith("landmark") and here.left < 20 and not here.tiny
        else dict(_others(here, name, shape, dtype, tensors))
    )
    calls |= others
    title = f"{name} {shape} {str(dtype).removeprefix('torch.')}"
    with torch.no_grad():
        _rows(here, f"{title}, forward", calls, operations, moved, top)
    if decoding:
        return

    def both(one: Callable[[], Any]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(one(), tensors, dout, allow_unused=True)

    _rows(
        here, f"{title}, forward and backward", {n: both(c) for n, c in calls.items()}, operations * 3.5, moved * 3,
        top, peak_mb=torch.cuda.max_memory_allocated() / 1e6,
    )  # fmt: skip


def _rows(
    here: Piece, title: str, calls: dict[str, Callable[[], object]], operations: float, moved: float,
    top: dict[str, float], **more: Any,
) -> None:  # fmt: skip
    """One row for each baseline; those that cannot do it are told and left out."""
    able = {}
    for name, call in calls.items():
        try:
            call()
            able[name] = call
        except Exception as error:  # noqa: BLE001 - another baseline may
            here.row(f"{title}: {name}", ok=False if name == "ours" else None, note=f"cannot: {error}"[:300])
    if "ours" not in able:
        return
    times = dict(zip(able, here.spread(list(able.values()), warmups=5, repeats=20), strict=True))
    middles = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
    ms, found = middles["ours"], sorted(times["ours"])
    tflops, bandwidth = operations / ms / 1e9, moved / ms / 1e9
    shares = {
        "tflops": tflops, "of_product": tflops / top["TFLOP/s"], "tbs": bandwidth, "of_copy": bandwidth / top["TB/s"],
        "spread": (found[-1] - found[0]) / ms, **more,
    }  # fmt: skip
    here.row(title, ms=ms, value=max(shares["of_product"], shares["of_copy"]), unit="of the ceiling", **shares)
    for name, other in middles.items():
        if name != "ours":
            here.row(f"{title} beside {name}", ms=ms, of=other, baseline=name, ratio=other / ms)


def _work(name: str, sizes: Sizes, width: int) -> tuple[float, int]:
    """Operations of a forward pass as usually counted, and bytes that have to be moved at least."""
    if name == "gca":
        b, c, h, g, t, d, s, k, n = sizes
        return 4.0 * b * c * h * t * k * s * d, width * (2 * b * c * h * t * d + 2 * b * min(n, c * k) * g * s * d)
    if name == "knn":
        b, h, t, n, k, d = sizes
        return 4.0 * b * h * t * k * d, width * (2 * b * h * t * k * d + 3 * b * h * t * d)
    b, h, g, t, d, _ = sizes
    return 2.0 * b * h * t * t * d, width * (2 * b * h * t * d + 2 * b * g * t * d)


def _others(
    here: Piece, name: str, shape: str, dtype: torch.dtype, tensors: list[Tensor]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What to compare with: the form in PyTorch, and attention to all for landmarks."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not name.startswith("landmark"):
        fused, given, _ = gradients_of(name, shape, dtype, tiny=here.tiny, backend="torch")
        yield "PyTorch", lambda: fused(*given)
        return
    q, k, v = tensors
    grouped = q.shape[1] != k.shape[1]
    if here.tiny:
        yield "SDPA", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return

    def limited(backend: SDPBackend) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        return attend

    yield "flash", limited(SDPBackend.FLASH_ATTENTION)
    yield "cuDNN", limited(SDPBackend.CUDNN_ATTENTION)
    if shape == "8K":  # one shape: to compile another takes time that other rows need
        yield "FlexAttention", _flex(q, k, v)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """Causal attention by FlexAttention, compiled at the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    made: list[Callable[[], object]] = []

    def attend() -> object:
        if not made:
            length = q.shape[2]
            mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device=str(q.device))
            compiled = torch.compile(flex_attention)
            made.append(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]))
        return made[0]()

    return attend


def _rotating(call: Call, turns: list[list[Tensor]]) -> Callable[[], Tensor]:
    """Other inputs each time, so that no cache has them."""
    count = [0]

    def once() -> Tensor:
        count[0] += 1
        return call(*turns[count[0] % len(turns)])

    return once


def _searches(here: Piece, top: dict[str, float]) -> None:
    for count, dim, heads, dtype in (
        (1 << 20, 64, 1, torch.bfloat16), (1 << 22, 64, 1, torch.bfloat16), (1 << 20, 64, 1, torch.float32),
        (1 << 18, 256, 1, torch.bfloat16),
    )[: here.size(4, 1)]:  # fmt: skip
        count = here.size(count, 200)
        for queries in (1, 8, 64)[: here.size(3, 1)]:
            title = f"search of {count} x {dim} {str(dtype).removeprefix('torch.')}, {queries} queries"
            with here.attempt(title, least=here.size(4, 0)):
                if here.tiny:
                    dtype = torch.float32
                keys, asked = _normal(dtype, heads, count, 1, dim), _normal(torch.float32, heads, queries, dim)
                flat = keys[0, :, 0]
                calls: dict[str, Callable[[], object]] = {
                    "ours": lambda k=keys, q=asked: search_blocks(q, k, 16, backend="triton"),  # type: ignore[misc]
                    "topk": lambda k=flat, q=asked: (q[0].to(k.dtype) @ k.T).topk(16),  # type: ignore[misc]
                }
                _rows(here, title, calls, 2.0 * queries * count * dim, keys.nbytes, top)


def _codes(here: Piece, top: dict[str, float]) -> None:
    """The score of every block for 32 tokens of a question: 8M codes of a router, as they are held and in bfloat16."""
    blocks, keys, dim, queries = (here.size(*sizes) for sizes in ((1 << 17, 70), (64, 3), (256, 24), (32, 5)))
    for kind, dtype in (("bits", torch.bool), ("int8", torch.int8)):
        title = f"late interaction with {blocks * keys} codes of {dim}, {kind}, {queries} queries"
        with here.attempt(title, least=here.size(4, 0)):
            signs = torch.where(torch.rand(blocks, keys, dim, device="cuda") < 0.5, -1.0, 1.0).bfloat16()
            asked, held = _normal(torch.float32, queries, dim), hold(signs, dtype)
            calls: dict[str, Callable[[], object]] = {
                "ours": lambda k=held, q=asked: best_codes(k, q, backend="triton"),  # type: ignore[misc]
                "bfloat16": lambda k=signs, q=asked: (k.flatten(0, 1) @ q.bfloat16().T).view(*k.shape[:2], -1).amax(1),  # type: ignore[misc]
            }
            truth = (signs[:100].double() @ asked.double().T).amax(1).T
            worst = (best_codes(held[:100], asked, backend="triton").double() - truth).abs().max()
            here.row(f"{title}: parity", ok=float(worst) < 1e-3, value=float(worst), unit="largest error")
            _rows(here, title, calls, 2.0 * queries * blocks * keys * dim, held.nbytes, top)


def _chosen(here: Piece, top: dict[str, float]) -> None:
    """The index of DeepSeek-V3.2 and attention to what it chooses: a token, and a segment."""
    heads, dim, count, k = (here.size(*sizes) for sizes in ((64, 2), (128, 16), (1 << 18, 200), (2048, 20)))
    own, latent, rope = (here.size(*sizes) for sizes in ((128, 2), (512, 16), (64, 8)))
    dtype = torch.float32 if here.tiny else torch.bfloat16
    for tokens in (1, here.size(64, 2)):
        title = f"choice of {k} of {count} keys, {tokens} queries"
        with here.attempt(title, least=here.size(4, 0)):
            q, weights, keys = (
                _normal(dtype, tokens, heads, dim),
                _normal(dtype, tokens, heads),
                _normal(dtype, count, dim),
            )
            limit = torch.full((tokens,), count, device="cuda")
            calls: dict[str, Callable[[], object]] = {
                "ours": lambda q=q, w=weights, x=keys, n=limit: choose(  # type: ignore[misc]
                    q, w, x, scale=0.1, limit=n, k=k, backend="triton"
                ),
                "PyTorch": lambda q=q, w=weights, x=keys: (  # type: ignore[misc]
                    torch.einsum("sht,sh->st", (q @ x.T).relu(), w).topk(k)
                ),
            }
            _rows(here, title, calls, 2.0 * tokens * heads * dim * count, keys.nbytes, top)
        title = f"attention to {k} latents, {tokens} queries"
        with here.attempt(title, least=here.size(4, 0)):
            q, rotated = _normal(dtype, tokens, own, latent), _normal(dtype, tokens, own, rope)
            table = _normal(dtype, count, latent + rope)
            ids = torch.rand(tokens, count, device="cuda").topk(k).indices
            calls = {
                name: lambda q=q, r=rotated, t=table, i=ids, b=backend: attend(q, r, t, i, scale=0.1, backend=b)  # type: ignore[misc]
                for name, backend in (("ours", "triton"), ("PyTorch", "torch"))
            }
            operations = 2.0 * tokens * own * k * (2 * latent + rope)
            _rows(here, title, calls, operations, dtype.itemsize * tokens * k * (latent + rope), top)


def _with_lse(here: Piece, top: dict[str, float]) -> None:
    """Attention of a segment to lists and window, with its log-sum-exp, beside that without it."""
    heads, groups, tokens, count, dim = (4, 2, 3, 21, 16) if here.tiny else (32, 8, 1024, 4096, 128)
    dtype = torch.float32 if here.tiny else torch.bfloat16
    q, k, v = (
        _normal(dtype, 1, heads, tokens, dim),
        _normal(dtype, 1, groups, count, dim),
        _normal(dtype, 1, groups, count, dim),
    )
    mask = torch.zeros(1, 1, tokens, count, dtype=dtype, device="cuda")
    moved = dtype.itemsize * dim * (2 * heads * tokens + 2 * groups * count)
    for title, seen in (("whole", None), ("masked", mask)):
        with here.attempt(f"block attention with its log-sum-exp, {title}", least=here.size(4, 0)), torch.no_grad():
            calls: dict[str, Callable[[], object]] = {
                "ours": lambda m=seen: block_attention(q, k, v, mask=m, backend="torch"),  # type: ignore[misc]
                "reference": lambda m=seen: block_attention(q, k, v, mask=m, backend="reference"),  # type: ignore[misc]
                "SDPA": lambda m=seen: F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True),  # type: ignore[misc]
            }
            name = f"block attention with its log-sum-exp, {title}"
            _rows(here, name, calls, 4.0 * heads * tokens * count * dim, moved, top)


def tune(here: Piece) -> None:
    """What measuring would choose, for the shapes that matter most: each configuration's milliseconds."""
    from memstore.kernels._tiles import TiledKernel, config
    from memstore.kernels.grouped_cross_attention import triton as gca
    from memstore.kernels.landmark_attention import triton as landmark

    blocks = [
        config(4, 2, BM=16),
        config(4, 2, BM=32),
        config(8, 3, BM=32),
        config(4, 2, BM=64),
        config(4, 3, BM=64),
        config(8, 2, BM=64),
        config(8, 3, BM=64),
        config(8, 2, BM=128),
        config(8, 3, BM=128),
    ]
    chosen = [
        config(4, 1, BM=16, BS=16),
        config(4, 2, BM=16, BS=32),
        config(4, 3, BM=16, BS=64),
        config(4, 2, BM=32, BS=32),
        config(4, 2, BM=32, BS=64),
        config(4, 3, BM=64, BS=32),
        config(4, 3, BM=64, BS=64),
        config(8, 3, BM=64, BS=64),
        config(8, 2, BM=128, BS=32),
        config(8, 3, BM=128, BS=64),
    ]
    shapes = (("landmark 64", "8K", landmark, ("_keys_kernel", "_forward_kernel", "_queries_kernel"), blocks),
              ("gca", "train, grouped heads", gca, ("_forward_kernel", "_blocks_kernel"), chosen))  # fmt: skip
    for name, shape, module, names, configs in shapes:
        dtype = torch.float32 if here.tiny else torch.bfloat16
        call, tensors, dout = gradients_of(name, shape, dtype, tiny=here.tiny)
        both = functools.partial(_both, call, tensors, dout)
        for kernel in names:
            tiled: Any = getattr(module, kernel)
            assert isinstance(tiled, TiledKernel)
            table = tiled.choose
            for each in configs[: here.size(99, 1)]:
                title = f"{name} {kernel} {each}"
                with here.attempt(title, least=here.size(15, 0)):
                    tiled.choose = lambda _, each=each: each  # type: ignore[misc]
                    try:
                        (ms,) = here.times([both], warmups=2, repeats=7)
                    finally:
                        tiled.choose = table
                    here.row(title, ms=ms, note="forward and backward with these tiles in one kernel")


def _both(call: Call, tensors: list[Tensor], dout: Tensor) -> object:
    return torch.autograd.grad(call(*tensors), tensors, dout)


def _normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)
