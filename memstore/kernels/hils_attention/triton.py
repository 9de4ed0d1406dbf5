"""HiLS attention in Triton: the window, and attention within chosen blocks, forward and backward.

*HiLS-Attention*, arXiv 2607.02980. A tile of keys is one block. The weights of blocks are a matrix with a row for each
block, and 0 for tokens that did not choose it. A tile of queries walks over the blocks and skips blocks that none of
its tokens chose. So nothing is sorted, no sum is shared by several programs, and every run gives the same bits. The
estimates, the choice and the pooling are products and sums of PyTorch.

With ``P`` the softmax within a block, or in the window ``exp(s - L)``, ``w`` the weight of the block or of the window,
``G`` the gradient of the output and ``Delta = G . out``,

    dP = G V^T      dw_c = rowsum(P dP)       dS = w P (dP - dw_c)       in a chosen block
    dS = w P (dP - Delta)                             in the window, whose log-sum-exp has a gradient too

``dw`` is stored, and PyTorch continues with it to estimates and landmarks. Two kernels, as usual: a tile of queries
walks over blocks for ``dQ`` and ``dw``, a block walks over tiles of queries for ``dK`` and ``dV``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from memstore.kernels._tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    Machine,
    config,
    grid,
    load_rows,
    machine,
    padded,
    precision,
    store_rows,
    tiled,
)
from memstore.kernels.hils_attention.fused import Sizes, choose_blocks, estimates_backward
from memstore.kernels.hils_attention.reference import block_weights, in_blocks, pool_landmarks

LONGEST, LARGEST_HEAD = 64, 128
"""Most tokens of a block, landmark included, and numbers of a head: more would not stay in registers."""


def tiles(device: Machine, dim: int) -> triton.Config:
    """Choose tiles of queries that leave registers for scores and sums, for heads of a padded size in a half type."""
    if device == "gfx942":
        return config(8, 1, BM=16)
    return config(4 if dim <= 64 else 8, 2, BM=32)


_tiled = tiled(lambda arguments: tiles(machine(), arguments["BD"]), interpreted_config=config(1, 1, BM=32))


@triton.jit
def _edge(row: tl.tensor, window: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Return the first block of the window of each row."""
    return tl.maximum(row - window + 1, 0) // S


@triton.jit
def _inside(scores: tl.tensor, S: tl.constexpr, BS: tl.constexpr) -> tl.tensor:
    """Compute softmax over the tokens of a block, of ``scores [BM, BS]`` to the base 2."""
    scores = tl.where((tl.arange(0, BS) < S - 1)[None, :], scores, float("-inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _near(
    scores: tl.tensor, n: tl.tensor, row: tl.tensor, window: tl.tensor, tokens: tl.tensor,
    S: tl.constexpr, BS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return ``scores [BM, BS]`` of block ``n``, -inf for keys outside the window of a row."""
    index = tl.arange(0, BS)
    key = n * S + index
    seen = ((index < S - 1) & (key < tokens))[None, :] & (key[None, :] <= row[:, None])
    return tl.where(seen & (n >= _edge(row, window, S))[:, None], scores, float("-inf"))


@_tiled
@triton.jit
def _window_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor,  # [B * H, T, D], [B * G, T, D], contiguous
    out: tl.tensor,  # [B * H, T, D]
    lse: tl.tensor,  # [B * H, T]
    tokens: tl.tensor, shared: tl.tensor, window: tl.tensor, scale: tl.tensor,
    S: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a tile of queries over the blocks of its window."""
    many = tl.cdiv(tokens, BM)
    at = tl.program_id(0) % many * BM
    head = (tl.program_id(0) // many).to(tl.int64)
    row = at + tl.arange(0, BM)
    q += head * tokens * D
    k += head // shared * tokens * D
    v += head // shared * tokens * D
    queries = load_rows(q, at, tokens, D, BM, D, BD)
    attended = tl.zeros([BM, BD], tl.float32)
    highest = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    for n in range(_edge(at, window, S), (tl.minimum(at + BM, tokens) - 1) // S + 1):
        keys = load_rows(k, n * S, tokens, D, BS, D, BD)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
        scores = _near(scores, n, row, window, tokens, S, BS)
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        values = load_rows(v, n * S, tokens, D, BS, D, BD)
        attended = attended * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        highest = higher
    found = total > 0
    total = tl.where(found, total, 1.0)
    store_rows(out + head * tokens * D, attended / total[:, None], at, tokens, BM, D, BD)
    found_lse = tl.where(found, (highest + tl.log2(total)) * LN_2, float("-inf"))
    tl.store(lse + head * tokens + row, found_lse, mask=row < tokens)


@_tiled
@triton.jit
def _chosen_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor,
    weights: tl.tensor,  # [B * H, N + 1, T]: of blocks and window
    near: tl.tensor,  # [B * H, T, D]: the output of the window
    out: tl.tensor,
    tokens: tl.tensor, shared: tl.tensor, window: tl.tensor, scale: tl.tensor, blocks: tl.tensor,
    S: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a tile of queries over the blocks before its window, and attend to the chosen ones."""
    many = tl.cdiv(tokens, BM)
    at = (many - 1 - tl.program_id(0) % many) * BM  # tiles with the most work begin
    head = (tl.program_id(0) // many).to(tl.int64)
    row = at + tl.arange(0, BM)
    k += head // shared * tokens * D
    v += head // shared * tokens * D
    weights += head * (blocks + 1) * tokens
    queries = load_rows(q + head * tokens * D, at, tokens, D, BM, D, BD)
    local = load_rows(near + head * tokens * D, at, tokens, D, BM, D, BD).to(tl.float32)
    own = tl.load(weights + tl.cast(blocks, tl.int64) * tokens + row, mask=row < tokens, other=0.0)
    attended = local * own[:, None]
    for n in range(tl.minimum(_edge(tl.minimum(at + BM, tokens) - 1, window, S), blocks)):
        w = tl.load(weights + tl.cast(n, tl.int64) * tokens + row, mask=row < tokens, other=0.0)
        if tl.max(w, 0) > 0:
            block = tl.cast(n, tl.int64) * S * D  # whole, so its rows need no mask
            keys = load_rows(k + block, 0, S, D, BS, D, BD)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            p = _inside(scores, S, BS) * w[:, None]
            values = load_rows(v + block, 0, S, D, BS, D, BD)
            attended += tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
    store_rows(out + head * tokens * D, attended, at, tokens, BM, D, BD)


@_tiled
@triton.jit
def _queries_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, weights: tl.tensor,
    dout: tl.tensor,  # [B * H, T, D]
    lse: tl.tensor, delta: tl.tensor,  # [B * H, T]: of the window; the gradient times the output
    dq: tl.tensor,  # [B * H, T, D]
    dweights: tl.tensor,  # [B * H, N, T], zeros
    tokens: tl.tensor, shared: tl.tensor, window: tl.tensor, scale: tl.tensor, blocks: tl.tensor,
    S: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a tile of queries over all blocks that it sees, for its own gradient and the gradients of the weights."""
    many = tl.cdiv(tokens, BM)
    at = (many - 1 - tl.program_id(0) % many) * BM
    head = (tl.program_id(0) // many).to(tl.int64)
    row = at + tl.arange(0, BM)
    there = row < tokens
    q += head * tokens * D
    k += head // shared * tokens * D
    v += head // shared * tokens * D
    weights += head * (blocks + 1) * tokens
    dweights += head * blocks * tokens
    queries = load_rows(q, at, tokens, D, BM, D, BD)
    gradient = load_rows(dout + head * tokens * D, at, tokens, D, BM, D, BD)
    less = tl.load(delta + head * tokens + row, mask=there, other=0.0)
    local = tl.load(weights + tl.cast(blocks, tl.int64) * tokens + row, mask=there, other=0.0)
    whole = tl.load(lse + head * tokens + row, mask=there, other=0.0) * LOG2_E
    whole = tl.where(whole > LOWEST, whole, 0.0)
    dqueries = tl.zeros([BM, BD], tl.float32)
    last = tl.minimum(at + BM, tokens) - 1
    for n in range(tl.minimum(_edge(last, window, S), blocks)):
        w = tl.load(weights + tl.cast(n, tl.int64) * tokens + row, mask=there, other=0.0)
        if tl.max(w, 0) > 0:
            keys = load_rows(k, n * S, tokens, D, BS, D, BD)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
            p = _inside(scores, S, BS)
            values = load_rows(v, n * S, tokens, D, BS, D, BD)
            dp = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
            dw = tl.sum(p * dp, 1)
            tl.store(dweights + tl.cast(n, tl.int64) * tokens + row, dw, mask=there & (w > 0))
            ds = p * w[:, None] * (dp - dw[:, None])
            dqueries += tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
    for n in range(_edge(at, window, S), last // S + 1):
        keys = load_rows(k, n * S, tokens, D, BS, D, BD)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
        p = tl.exp2(_near(scores, n, row, window, tokens, S, BS) - whole[:, None]) * local[:, None]
        values = load_rows(v, n * S, tokens, D, BS, D, BD)
        dp = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
        ds = p * (dp - less[:, None])
        dqueries += tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
    store_rows(dq + head * tokens * D, dqueries * scale, at, tokens, BM, D, BD)


@_tiled
@triton.jit
def _keys_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, weights: tl.tensor, dout: tl.tensor, lse: tl.tensor, delta: tl.tensor,
    dweights: tl.tensor,
    dk: tl.tensor, dv: tl.tensor,  # [B * G, T, D]
    tokens: tl.tensor, shared: tl.tensor, window: tl.tensor, scale: tl.tensor, blocks: tl.tensor,
    S: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
) -> None:  # fmt: skip
    """Walk a block over the tiles of queries that see it, or have chosen it."""
    all_blocks = tl.cdiv(tokens, S)
    n = tl.program_id(0) % all_blocks
    group = (tl.program_id(0) // all_blocks).to(tl.int64)
    k += group * tokens * D
    v += group * tokens * D
    keys = load_rows(k, n * S, tokens, D, BS, D, BD)
    values = load_rows(v, n * S, tokens, D, BS, D, BD)
    dkeys = tl.zeros([BS, BD], tl.float32)
    dvalues = tl.zeros([BS, BD], tl.float32)
    index = tl.arange(0, BS)
    key = n * S + index
    ordinary = (index < S - 1) & (key < tokens)
    first, many = n * S // BM, tl.cdiv(tokens, BM)
    for step in range(shared * (many - first)):
        head = group * shared + step // (many - first)
        at = (first + step % (many - first)) * BM
        row = at + tl.arange(0, BM)
        there = row < tokens
        close = n >= _edge(row, window, S)
        far = there & (n < _edge(row, window, S))  # then the block is complete
        mine = weights + head * (blocks + 1) * tokens + row
        w = tl.load(mine + tl.where(close, blocks, n).to(tl.int64) * tokens, mask=there, other=0.0)
        if tl.max(w, 0) > 0:
            queries = load_rows(q + head * tokens * D, at, tokens, D, BM, D, BD)
            gradient = load_rows(dout + head * tokens * D, at, tokens, D, BM, D, BD)
            whole = tl.load(lse + head * tokens + row, mask=there, other=0.0) * LOG2_E
            # For a query that sees no window, any value; for one with the block before its window, exp must be 0.
            whole = tl.where(close, tl.where(whole > LOWEST, whole, 0.0), -LOWEST)
            total = tl.load(delta + head * tokens + row, mask=there, other=0.0)
            own = tl.load(dweights + (head * blocks + n) * tokens + row, mask=far, other=0.0)
            # Transposed, [BS, BM]: values summed over queries are then the left side of a product without another
            # transpose.
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (scale * LOG2_E)
            scores = tl.where(ordinary[:, None], scores, float("-inf"))
            visible = tl.where(key[:, None] <= row[None, :], scores, float("-inf"))
            inside = tl.exp2(scores - tl.max(scores, 0)[None, :])
            share = tl.where(close, 0.0, w / tl.sum(inside, 0))
            p = tl.exp2(visible - whole[None, :]) * tl.where(close, w, 0.0)[None, :] + inside * share[None, :]
            dvalues += tl.dot(p.to(gradient.dtype), gradient, input_precision=PRECISION)
            dp = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
            ds = p * (dp - tl.where(close, total, own)[None, :])
            dkeys += tl.dot(ds.to(queries.dtype), queries, input_precision=PRECISION)
    until = tl.minimum(n * S + S, tokens)
    store_rows(dk + group * tokens * D, dkeys * scale, n * S, until, BS, D, BD)
    store_rows(dv + group * tokens * D, dvalues, n * S, until, BS, D, BD)


def hils_attention(q: Tensor, k: Tensor, v: Tensor, u: Tensor, sizes: Sizes) -> Tensor:
    """See the public function."""
    out: Tensor = _HilsAttention.apply(q, k, v, u, sizes)  # type: ignore[no-untyped-call]
    return out


class _HilsAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor, sizes: Sizes) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        size, window, top_k, softmax1, scale = sizes
        told = _told(q, k, sizes)
        near, out = torch.empty_like(q), torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        kbar, bias = pool_landmarks(u[:, :, size - 1 :: size], in_blocks(k, size), scale=scale)
        programs = grid(q.shape[0] * q.shape[1], q.shape[2], "BM")
        _window_kernel[programs](q=q, k=k, v=v, out=near, lse=lse, **told)
        settings: dict[str, Any] = {"block_size": size, "window": window, "top_k": top_k, "scale": scale}
        rounded = lse.to(q.dtype)
        blocks, scores = choose_blocks(u, kbar, bias, rounded, groups=k.shape[1], **settings)
        weights = block_weights(scores, rounded, softmax1=softmax1)
        matrix = _matrix(weights, blocks, kbar.shape[2])
        _chosen_kernel[programs](q=q, k=k, v=v, weights=matrix, near=near, out=out, blocks=kbar.shape[2], **told)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, u, kbar, blocks, weights, lse, out)
            ctx.sizes = sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, u, kbar, blocks, weights, lse, out = ctx.saved_tensors
        size, count = ctx.sizes.size, kbar.shape[2]
        dout = gradient.contiguous()
        delta = (dout.float() * out.float()).sum(-1)
        matrix = _matrix(weights, blocks, count)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dmatrix = torch.zeros_like(matrix[:, :, :count]).contiguous()
        told = {
            **_told(q, k, ctx.sizes), "weights": matrix, "dout": dout, "lse": lse, "delta": delta,
            "dweights": dmatrix, "blocks": count,
        }  # fmt: skip
        _queries_kernel[grid(q.shape[0] * q.shape[1], q.shape[2], "BM")](q=q, k=k, v=v, dq=dq, **told)
        _keys_kernel[(k.shape[0] * k.shape[1] * -(-q.shape[2] // size),)](q=q, k=k, v=v, dk=dk, dv=dv, **told)
        at = blocks.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
        dweights = dmatrix.gather(2, at.clamp(min=0)).transpose(2, 3) if count else torch.zeros_like(weights[..., :-1])
        dscores = (weights[..., :-1] * (dweights - delta.unsqueeze(-1))).masked_fill_(at.transpose(2, 3) < 0, 0)
        keys = in_blocks(k, size).float()
        du, dpooled = estimates_backward(u.float(), keys, kbar.float(), blocks, dscores, ctx.sizes)
        dk[:, :, : count * size].unflatten(2, (count, size))[:, :, :, :-1] += dpooled.to(dk.dtype)
        return dq, dk, dv, du.to(u.dtype), None


def _told(q: Tensor, k: Tensor, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments common to all kernels."""
    return {
        "tokens": q.shape[2],
        "shared": q.shape[1] // k.shape[1],
        "window": sizes.window,
        "scale": sizes.scale,
        "S": sizes.size,
        "BS": padded(sizes.size),
        "D": q.shape[-1],
        "BD": padded(q.shape[-1]),
        "PRECISION": precision(q.dtype),
    }


def _matrix(weights: Tensor, blocks: Tensor, count: int) -> Tensor:
    """Sort weights ``[B, H, T, K + 1]`` by block, the window last: ``[B, H, count + 1, T]``, 0 if not chosen."""
    batch, heads, tokens, _ = weights.shape
    at = blocks.repeat_interleave(heads // blocks.shape[1], 1).transpose(2, 3)
    weights = weights.float().transpose(2, 3)
    matrix = weights.new_zeros(batch, heads, count + 1, tokens)
    # Places without a block have weight 0 and go to the last row, which the window overwrites.
    matrix.scatter_(2, at.where(at >= 0, count), weights[:, :, :-1])
    matrix[:, :, count] = weights[:, :, -1]
    return matrix
