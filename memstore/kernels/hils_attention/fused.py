"""HiLS attention in tiles and lists: the fast path on a CPU, and anywhere without Triton.

The window is computed in tiles of queries, each with the keys that it sees. Attention within chosen blocks goes block
by block: the queries that chose a block are collected, so each block needs two matrix products for any choice.
Softmaxes need no rescaling, because each block has its own. Scores are not kept: the handwritten backward pass computes
them again. With ``g`` the gradient of the output, ``w`` the weights, ``a_c`` attention to block ``c``, ``P`` the
probabilities within it, and ``Delta = g . out``,

    dP = g V^T      dw_c = g . a_c = rowsum(P dP)      dS = w_c P (dP - dw_c)
    de_c = w_c (dw_c - Delta)      dL = w_L (g . o_w - Delta)           in the window: dS = P (w_L (dP - g . o_w) + dL)

and ``de`` flows to ``u``, mean keys and entropies, and through them to landmark queries and keys. In float32 on a CPU
the forward pass uses ``native.c``, which has the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from memstore.errors import InvalidArgument
from memstore.kernels._backends import check_device, check_grouped, shapes
from memstore.kernels.hils_attention.native import PackedBlocks, PackedLandmarks, serves
from memstore.kernels.hils_attention.native import window_attention as native_window
from memstore.kernels.hils_attention.reference import best_blocks as best_of_shares
from memstore.kernels.hils_attention.reference import (
    block_weights,
    check_sizes,
    edges,
    estimates,
    in_blocks,
    pool_landmarks,
)

TILE = 128
"""Least queries of a tile of the window; whole blocks."""
SCORED = 1 << 22
"""Estimates in memory at once while blocks are chosen."""
NATIVE_TILE = 1024
"""Queries that ``native.c`` gets at a time."""
FEW = 4
"""Mean number of queries per chosen block below which each query copies its blocks instead."""


class Sizes(NamedTuple):
    """Settings that are equal for all tensors."""

    size: int
    window: int
    top_k: int
    softmax1: bool
    scale: float


def hils_attention(q: Tensor, k: Tensor, v: Tensor, u: Tensor, sizes: Sizes) -> Tensor:
    """See the public function."""
    out: Tensor = _HilsAttention.apply(q, k, v, u, sizes)  # type: ignore[no-untyped-call]
    return out


class _HilsAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, u: Tensor, sizes: Sizes) -> Tensor:
        size, window, scale = sizes.size, sizes.window, sizes.scale
        near, lse = _window(q, k, v, _Seen(size, window, 0, True, scale))
        kbar, bias = pool_landmarks(u[:, :, size - 1 :: size], in_blocks(k, size), scale=scale)
        far = _far_native if serves(q, k, v, u, size=size) else _far
        out, blocks, weights = far(q, k, v, u, near, lse.to(q.dtype), kbar, bias, sizes)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, u, kbar, blocks, weights, lse, near, out)
            ctx.sizes = sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, u, kbar, blocks, weights, lse, near, out = ctx.saved_tensors
        size, window, _, _, scale = ctx.sizes
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v, wide_u, near, out, g = (x.to(wide) for x in (q, k, v, u, near, out, gradient))
        keys, values = in_blocks(k, size), in_blocks(v, size)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        of_window = (g * near).sum(-1)
        total = (g * out).sum(-1)
        dlse = weights[..., -1] * (of_window - total)
        seen, less = _Seen(size, window, 0, True, scale), of_window * weights[..., -1] - dlse
        _window_backward(q, k, v, lse, g * weights[..., -1:], less, seen, (dq, dk, dv))
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        dweights = _chosen_backward(q, keys, values, blocks, weights[..., :-1], g, scale, (dq, dkeys, dvalues))
        dscores = weights[..., :-1] * (dweights - total.unsqueeze(-1))
        du, dpooled = estimates_backward(wide_u, keys, kbar.to(wide), blocks, dscores, ctx.sizes)
        whole = keys.shape[2] * size
        dk[:, :, :whole].unflatten(2, (-1, size))[:, :, :, :-1] += dkeys + dpooled
        dv[:, :, :whole].unflatten(2, (-1, size))[:, :, :, :-1] += dvalues
        return *(x.to(u.dtype) for x in (dq, dk, dv, du)), None


def _far(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, near: Tensor, lse: Tensor, kbar: Tensor, bias: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, from the window's output; also the lists and their weights."""
    size, window, top_k, softmax1, scale = sizes
    settings: dict[str, Any] = {"block_size": size, "window": window, "top_k": top_k, "scale": scale}
    blocks, scores = choose_blocks(u, kbar, bias, lse, groups=k.shape[1], **settings)
    weights = block_weights(scores, lse, softmax1=softmax1)
    chosen = attend_chosen(q, in_blocks(k, size), in_blocks(v, size), blocks, weights[..., :-1], scale=scale)
    return torch.addcmul(chosen, weights[..., -1:], near).to(q.dtype), blocks, weights


def _far_native(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, near: Tensor, lse: Tensor, kbar: Tensor, bias: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Do ``_far`` for some tokens at a time: queries, lists and outputs stay in the processor's caches."""
    size, window, top_k, softmax1, scale = sizes
    edge = edges(0, q.shape[2], size, window, q.device).clamp(0, kbar.shape[2])
    landmarks = PackedLandmarks(kbar, bias, scale=scale)
    packed = PackedBlocks(in_blocks(k, size), in_blocks(v, size), scale=scale)
    out, lists = torch.empty_like(q, memory_format=torch.contiguous_format), list[tuple[Tensor, Tensor]]()
    for at in range(0, q.shape[2], NATIVE_TILE):
        part = slice(at, at + NATIVE_TILE)
        blocks, scores = landmarks.choose(u[:, :, part], lse[:, :, part], edge[part], groups=k.shape[1], top_k=top_k)
        weights = block_weights(scores, lse[:, :, part], softmax1=softmax1)
        some = near[:, :, part] * weights[..., -1:]
        packed.attend(q[:, :, part], blocks, weights[..., :-1], out=some)
        out[:, :, part] = some
        lists.append((blocks, weights))
    blocks, weights = (torch.cat(each, 2) for each in zip(*lists, strict=True))
    return out, blocks, weights


# The window


class _Seen(NamedTuple):
    """The part of a window that queries see."""

    size: int
    window: int
    first: int
    widened: bool
    scale: float


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    window: int,
    first: int = 0,
    widened: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the last ``window`` positions without landmarks; also return the log-sum-exp.

    Args:
        q: queries ``[B, H, M, D]`` of the last ``M`` positions of the keys.
        k: keys ``[B, G, T, D]``.
        v: values ``[B, G, T, D]``.
        block_size: tokens of a block, landmark included.
        window: positions that a query sees, its own included.
        first: the position of the first key; earlier positions are ignored.
        widened: extend the window to the beginning of the first position's block, as HiLS layers do; else keep it
            exact.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        ``[B, H, M, D]`` in the dtype of ``q`` and ``[B, H, M]`` in float32 or better; 0 and -inf for queries that see
        nothing. Only the output is differentiable, once. Raises ``InvalidArgument`` for arguments that do not fit.
    """
    check_grouped(q, k, v, "q [B, H, M, D] and k, v [B, G, T, D]")
    check_sizes(block_size, window)
    if q.shape[2] > k.shape[2] or first < 0:
        raise InvalidArgument(
            f"the queries must belong to the last keys, and first must be at least 0; got {shapes(q=q, k=k)}, "
            f"first={first!r}"
        )
    seen = _Seen(block_size, window, first, widened, q.shape[-1] ** -0.5 if scale is None else scale)
    with torch.autocast(q.device.type, enabled=False):  # as in hils_attention
        out, lse = _WindowAttention.apply(q, k, v, seen)  # type: ignore[no-untyped-call]
    return out, lse


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: _Seen) -> tuple[Tensor, Tensor]:
        out, lse = _window(q, k, v, seen)
        ctx.mark_non_differentiable(lse)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, lse, out)
            ctx.seen = seen
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lse, out = ctx.saved_tensors
        q, k, v, g = (x.to(lse.dtype) for x in (q, k, v, gradient))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        _window_backward(q, k, v, lse, g, (g * out).sum(-1), ctx.seen, (dq, dk, dv))
        return *(x.to(out.dtype) for x in (dq, dk, dv)), None


def _window(q: Tensor, k: Tensor, v: Tensor, seen: _Seen) -> tuple[Tensor, Tensor]:
    size, window, first, widened, scale = seen
    if widened and first % size == 0 and q.numel() and serves(q, k, v, size=size):
        return native_window(q, k, v, size=size, window=window, first=first, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    groups, many = k.shape[1], q.shape[2]
    queries = (q.to(wide) * seen.scale).unflatten(1, (groups, -1))  # [B, G, R, M, D]
    keys, values = k.to(wide), v.to(wide)
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:-1])
    for rows, part, bias in _tiles(many, k.shape[2], seen, q.device):
        scores = _scores(queries[..., rows, :], keys[:, :, part], bias)
        p = scores.softmax(-1)
        # The log-sum-exp from the largest of P, because many exponentials of hidden scores would be slow.
        highest = scores.amax(-1)
        blind = highest == torch.finfo(wide).min
        lse[..., rows] = (highest - p.amax(-1).log()).masked_fill_(blind, -math.inf)
        product = _flat(p) @ values[:, :, part]
        out[..., rows, :] = product.view(*p.shape[:-1], -1).masked_fill_(blind.unsqueeze(-1), 0)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _flat(x: Tensor) -> Tensor:
    """Return ``[B, G, R, m, n]`` as ``[B, G, R * m, n]``."""
    return x.flatten(2, 3)


def _scores(queries: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """Multiply ``queries [B, G, R, m, D]``, ``keys [B, G, n, D]``, add ``bias [m, n]`` -> ``[B, G, R, m, n]``."""
    scores: Tensor = (_flat(queries) @ keys.mT).view(*queries.shape[:-1], -1)
    # The lowest number, not -inf: a query may see nothing.
    return scores.add_(bias).clamp_(min=torch.finfo(scores.dtype).min)


def _tiles(many: int, held: int, seen: _Seen, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries of a tile, the keys that they see, and the bias of their scores ``[m, n]``."""
    size, window, first, widened, _ = seen
    start, before = first + held - many, first
    step = size * -(-TILE // size)
    known: dict[tuple[int, ...], Tensor] = {}
    at = start
    while at < start + many:
        stop = min(at // step * step + step, start + many)
        low = at - window + 1
        low = max(low // size * size if widened else low, before)
        kind = (stop - at, stop - low, low % size, (at - window + 1 - low) if low == before else 0)
        if kind not in known:
            rows, columns = torch.arange(at, stop, device=device)[:, None], torch.arange(low, stop, device=device)
            edge = rows - window + 1
            edge = edge.div(size, rounding_mode="floor") * size if widened else edge
            visible = (columns >= edge) & (columns <= rows) & (columns % size != size - 1)
            known[kind] = torch.zeros((), device=device).masked_fill(~visible, -math.inf)
        yield slice(at - start, stop - start), slice(low - before, stop - before), known[kind]
        at = stop


def _window_backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, g: Tensor, less: Tensor, seen: _Seen, into: tuple[Tensor, ...]
) -> None:
    """Add the gradients ``dS = P (g V^T - less)`` ``into`` dq, dk and dv; ``g`` is the output's gradient."""
    groups = k.shape[1]
    queries, g, dq = ((x.unflatten(1, (groups, -1))) for x in (q * seen.scale, g, into[0]))
    lse, less = (x.unflatten(1, (groups, -1)) for x in (lse, less))
    _, dk, dv = into
    for rows, part, bias in _tiles(q.shape[2], k.shape[2], seen, q.device):
        x, gradient = queries[..., rows, :], g[..., rows, :]
        some = lse[..., rows].unsqueeze(-1)
        p = _scores(x, k[:, :, part], bias).sub_(some.masked_fill(some.isneginf(), 0)).exp_()
        dp = (_flat(gradient) @ v[:, :, part].mT).view(p.shape)
        ds = _flat(dp.sub_(less[..., rows].unsqueeze(-1)).mul_(p))
        dq[..., rows, :] += (ds @ k[:, :, part]).view(x.shape).mul_(seen.scale)
        dk[:, :, part] += ds.mT @ _flat(x)
        dv[:, :, part] += _flat(p).mT @ _flat(gradient)


# The choice


def choose_blocks(
    u: Tensor,
    kbar: Tensor,
    bias: Tensor,
    lse: Tensor,
    *,
    groups: int,
    block_size: int,
    window: int,
    top_k: int,
    first: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the ``top_k`` blocks with the largest estimated share of attention before each token's window.

    A block's estimate is ``scale * u . kbar + bias``. For each head, its share is relative to all candidates and the
    window. If heads share a list, the largest share counts.

    Args:
        u: landmark queries ``[B, H, M, D]`` at positions from ``first`` on.
        kbar: mean keys ``[B, H, N, D]`` of the blocks from 0 on.
        bias: entropies ``[B, H, N]``.
        lse: log-sum-exp of the window ``[B, H, M]``.
        groups: key-value heads, with a list each.
        block_size: tokens of a block, landmark included.
        window: as in ``hils_attention``.
        top_k: blocks of a list.
        first: the position of the first query.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        Blocks ``[B, G, M, K]``, ascending, then -1; and estimates ``[B, H, M, K]``, -inf there. Raises
        ``InvalidArgument`` for arguments that do not fit.
    """
    fit = u.dim() == 4 and kbar.shape[:2] == u.shape[:2] and kbar.shape[-1] == u.shape[-1]
    if not fit or bias.shape != kbar.shape[:-1] or lse.shape != u.shape[:-1] or groups < 1 or u.shape[1] % groups:
        raise InvalidArgument(f"the shapes do not fit {groups} groups: {shapes(u=u, kbar=kbar, bias=bias, lse=lse)}")
    check_sizes(block_size, window, top_k)
    scale = u.shape[-1] ** -0.5 if scale is None else float(scale)
    parts = []
    batch, heads, many, _ = u.shape
    edge = edges(first, many, block_size, window, u.device).clamp(0, kbar.shape[2])
    if serves(u, kbar, bias, lse, size=block_size):
        return PackedLandmarks(kbar, bias, scale=scale).choose(u, lse, edge, groups=groups, top_k=top_k)
    at = 0
    while at < many:
        rows = max(1, SCORED // max(1, batch * heads * min(kbar.shape[2], int(edge[-1]))))
        part = slice(at, min(at + rows, many))
        count = int(edge[part][-1])
        scores = estimates(u[:, :, part], kbar[:, :, :count], bias[:, :, :count], scale=scale)
        scores.masked_fill_(torch.arange(count, device=u.device) >= edge[part, None], -math.inf)
        parts.append(best_blocks(scores, lse[:, :, part], groups=groups, top_k=top_k))
        at = part.stop
    if not parts:
        return best_of_shares(u.new_empty(batch, heads, 0, 0), lse, groups=groups, top_k=top_k)
    blocks, chosen = zip(*parts, strict=True)
    return torch.cat(blocks, 2), torch.cat(chosen, 2)


def best_blocks(scores: Tensor, lse: Tensor, *, groups: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose blocks as in ``choose_blocks`` by known estimates ``scores [B, H, M, N]``; return their scores too."""
    if scores.shape[1] != groups or not scores.shape[-1]:  # else the reference of the scores does not matter
        return best_of_shares(scores, lse, groups=groups, top_k=top_k)
    kept = min(top_k, scores.shape[-1])
    best, blocks = scores.topk(kept, -1, sorted=False)
    blocks, order = torch.where(best.isneginf(), scores.shape[-1], blocks).sort(-1)
    blocks = blocks.masked_fill_(blocks == scores.shape[-1], -1)
    missing = top_k - kept
    return F.pad(blocks, (0, missing), value=-1), F.pad(best.gather(-1, order), (0, missing), value=-math.inf)


def estimates_backward(
    u: Tensor, keys: Tensor, kbar: Tensor, blocks: Tensor, dscores: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Return gradients of ``u [B, H, T, D]`` and of keys ``[B, G, N, S - 1, D]`` from those of the estimates.

    ``dscores`` is ``[B, H, T, K]``. They flow through mean keys and entropies, which are pooled from keys by ``u``.
    """
    size, scale = sizes.size, sizes.scale
    batch, heads, many, _ = u.shape
    groups, count = keys.shape[1:3]
    du, dkbar = torch.zeros_like(u), torch.zeros_like(kbar)
    dbias = kbar.new_zeros(kbar.shape[:-1])
    at = blocks.where(blocks >= 0, count)
    rows = max(1, SCORED // max(1, batch * heads * count))
    for start in range(0, many if count else 0, rows):
        part = slice(start, start + rows)
        places = at[:, :, part].repeat_interleave(heads // groups, 1)
        dense = u.new_zeros(*places.shape[:-1], count + 1).scatter_(-1, places, dscores[:, :, part])[..., :-1]
        du[:, :, part] = dense @ kbar * scale
        dkbar += dense.mT @ u[:, :, part] * scale
        dbias += dense.sum(2)
    m = u[:, :, size - 1 :: size]
    m, dkbar, dbias = (x.unflatten(1, (groups, -1)).transpose(2, 3) for x in (m, dkbar, dbias))  # [B, G, N, R, D]
    logs = (m @ keys.mT * scale).log_softmax(-1)
    p = logs.exp()
    dp = dkbar @ keys.mT - dbias.unsqueeze(-1) * (logs + 1)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    du[:, :, size - 1 :: size] += (ds @ keys).transpose(2, 3).flatten(1, 2)
    return du, p.mT @ dkbar + ds.mT @ m


# Chosen blocks


def _lists(blocks: Tensor, count: int) -> Iterator[tuple[tuple[int, int], int, Tensor, Tensor]]:
    """Yield each of ``count`` blocks that is in ``blocks [B, G, M, K]``, row by row and head by head.

    With the row and the head come the block, the queries that chose it, and its places ``query * K + place``.
    """
    for row, of_row in enumerate(blocks):
        for group, of_group in enumerate(of_row):
            flat = of_group.flatten().to(torch.int32) + 1
            counts = flat.bincount(minlength=count + 1).tolist()
            for block, places in enumerate(flat.argsort(stable=True).split(counts)):
                if block and len(places):
                    yield (row, group), block - 1, places.div(blocks.shape[3], rounding_mode="floor"), places


def attend_chosen(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, weights: Tensor, *, scale: float | None = None
) -> Tensor:
    """Attend to each chosen block by itself, and sum with the weights of the blocks.

    Args:
        q: queries ``[B, H, M, D]``.
        keys: ``[B, G, N, S - 1, D]``, of the blocks' tokens.
        values: shaped like ``keys``.
        blocks: chosen blocks ``[B, G, M, K]``, int64 below ``N``; -1 for none.
        weights: ``[B, H, M, K]``, 0 for none.
        scale: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        ``[B, H, M, D]`` in float32 or better. Not differentiable. Raises ``InvalidArgument`` for arguments that do not
        fit.
    """
    fit = q.dim() == 4 and keys.dim() == 5 and keys.shape == values.shape and keys.shape[-1] == q.shape[-1]
    fit = fit and blocks.shape[:3] == (len(q), keys.shape[1], q.shape[2]) and blocks.dtype == torch.int64
    if not fit or weights.shape != (*q.shape[:-1], blocks.shape[-1]):
        given = shapes(q=q, keys=keys, values=values, blocks=blocks, weights=weights)
        raise InvalidArgument(f"the shapes do not fit, or blocks are not int64: {given}")
    check_device(q=q, keys=keys, values=values, blocks=blocks, weights=weights)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    groups, count, held, dim = keys.shape[1:]
    many, top_k = blocks.shape[2:]
    if not (count and q.numel()):
        return q.new_zeros(q.shape, dtype=wide)
    if many * top_k < FEW * count or many == 1:
        return _attend_copies(q, keys, values, blocks, weights, scale)
    if serves(q, keys, values, weights, size=held + 1):
        found = torch.zeros_like(q, memory_format=torch.contiguous_format)
        PackedBlocks(keys, values, scale=scale).attend(q, blocks, weights, out=found)
        return found
    # The heads of a group become rows of one product.
    queries = (q.to(wide) * scale).unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)  # [B, G, M, R * D]
    given = weights.unflatten(1, (groups, -1)).permute(0, 1, 3, 4, 2).flatten(2, 3)  # [B, G, M * K, R]
    out = torch.zeros_like(queries)
    for at, block, which, places in _lists(blocks, count):
        k, v = keys[at][block].to(wide), values[at][block].to(wide)
        p = (queries[at].index_select(0, which).view(-1, dim) @ k.mT).softmax(-1)
        p.mul_(given[at].index_select(0, places).view(-1, 1))
        out[at].index_add_(0, which, (p @ v).view(len(which), -1))
    joined: Tensor = out.unflatten(3, (-1, dim)).transpose(2, 3).flatten(1, 2)
    return joined


def _attend_copies(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Attend with few queries: copy the states of their lists, unless one chose most blocks."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, groups, count, held, dim = keys.shape
    if q.shape[2] == 1 and count < 2 * blocks.shape[-1]:
        x = (q.to(wide) * scale).unflatten(1, (groups, -1))[:, :, None, :, 0]  # [B, G, 1, R, D]
        p = (x @ keys.to(wide).mT).softmax(-1)  # [B, G, n, R, S - 1]
        at = blocks.where(blocks >= 0, count).unsqueeze(3).expand(-1, -1, -1, x.shape[3], -1)[:, :, 0]  # [B, G, R, K]
        share = p.new_zeros(*at.shape[:-1], count + 1)
        share.scatter_(-1, at, weights.unflatten(1, (groups, -1))[:, :, :, 0].to(wide))
        p = p * share[..., :-1].mT.unsqueeze(-1)
        single: Tensor = p.transpose(2, 3).flatten(3) @ values.to(wide).flatten(2, 3)
        return single.flatten(1, 2).unsqueeze(2)
    first = torch.arange(batch * groups, device=q.device).view(batch, groups, 1, 1) * count
    at = (blocks.clamp(min=0) + first).flatten()
    k, v = (x.flatten(0, 2).index_select(0, at).view(*blocks.shape, held, dim).to(wide) for x in (keys, values))
    x = (q.to(wide) * scale).unflatten(1, (groups, -1)).permute(0, 1, 3, 2, 4)[:, :, :, None]  # [B, G, M, 1, R, D]
    p = (x @ k.mT).softmax(-1)  # [B, G, M, K, R, S - 1]
    p = p * weights.unflatten(1, (groups, -1)).permute(0, 1, 3, 4, 2).unsqueeze(-1)
    out = p.permute(0, 1, 2, 4, 3, 5).flatten(4) @ v.flatten(3, 4)  # [B, G, M, R, D]
    joined: Tensor = out.transpose(2, 3).flatten(1, 2)
    return joined


def _chosen_backward(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    weights: Tensor,
    g: Tensor,
    scale: float,
    into: tuple[Tensor, ...],
) -> Tensor:
    """Return the gradient of the weights; add those of queries, keys and values ``into`` three tensors."""
    groups, count, _, dim = keys.shape[1:]
    dq, dkeys, dvalues = into
    queries, gradients = (x.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3) for x in (q * scale, g))
    given = weights.unflatten(1, (groups, -1)).permute(0, 1, 3, 4, 2).flatten(2, 3)  # [B, G, M * K, R]
    dqueries, dgiven = torch.zeros_like(queries), torch.zeros_like(given)  # queries: [B, G, M, R * D]
    for at, block, which, places in _lists(blocks, count):
        k, v = keys[at][block], values[at][block]
        asked, gradient = (each[at].index_select(0, which).view(-1, dim) for each in (queries, gradients))
        p = (asked @ k.mT).softmax(-1)
        dp = gradient @ v.mT
        delta = torch.linalg.vecdot(p, dp).unsqueeze(-1)
        dgiven[at][places] = delta.view(len(places), -1)
        p.mul_(given[at].index_select(0, places).view(-1, 1))
        ds = dp.sub_(delta).mul_(p)
        dqueries[at].index_add_(0, which, (ds @ k).view(len(which), -1))
        dkeys[at][block] = ds.mT @ asked
        dvalues[at][block] = p.mT @ gradient
    dq += dqueries.unflatten(3, (-1, dim)).transpose(2, 3).flatten(1, 2) * scale
    dweights: Tensor = dgiven.unflatten(2, blocks.shape[2:]).permute(0, 1, 4, 2, 3).flatten(1, 2)
    return dweights
