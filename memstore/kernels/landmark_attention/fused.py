"""Landmark attention in batched PyTorch operations: the fast path on a CPU, and anywhere without Triton.

Equations 1-4 are one sum over blocks, ``out = sum_b W_b P_b V_b``: ``P_b`` is the softmax within block ``b``, and ``W``
a softmax over blocks of

    g_b = LSE_b                                       for the own block (its tokens are in the softmax themselves)
    g_b = ramp * s_landmark + (1 - ramp) * LSE_b      for an earlier one

with ``LSE_b`` the log-sum-exp of the scores of block ``b``. A block in several pieces (``layout.py``) is a sum over its
pieces, with ``g = LSE_piece + ramp * (s_landmark - LSE_b)``.

The queries are split into chunks of about a block, each with the keys that it sees, so memory holds the weights of one
chunk. Up to ``KEPT`` numbers of weights are kept for the backward pass. Beyond that they are computed again, and memory
is linear in the length. The backward pass is written by hand. With ``G`` the gradient of the output,

    dP = G V^T      delta_b = rowsum(P_b dP_b)      Delta = sum_b W_b delta_b
    dbias_b = W_b (delta_b - Delta)                 in earlier blocks, summed over pieces
    dS = P_b (W_b (dP - Delta) - ramp * dbias_b)    ds_landmark = ramp * dbias_b

With a ramp of 0 blocks do not matter, and a chunk is one softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from memstore.kernels._backends import at_least_float32
from memstore.kernels.landmark_attention import layout

ROWS = 32
"""Least queries of a chunk; whole blocks, if they are short."""
AT_ONCE = 1 << 20
"""Scores computed at once; more would exceed the caches of a CPU."""
KEPT = 1 << 24
"""Weights (numbers) kept for the backward pass."""


def landmark_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: layout.Rows, *, window: int | None, ramp: float, scale: float, causal: bool
) -> Tensor:
    """See the public function; states of padding are 0."""
    plan = _planned(rows, groups=k.shape[1], window=window, ramp=ramp, causal=causal)
    out: Tensor = _LandmarkAttention.apply(q, k, v, plan, scale)  # type: ignore[no-untyped-call]
    return out


class _Plan:
    """The pieces that the queries of a chunk see: the same for all heads, and for all rows if they are alike."""

    def __init__(self, rows: layout.Rows, *, groups: int, window: int | None, ramp: float, causal: bool) -> None:
        self.blocks = layout.find(*rows)
        self.pieces = layout.pieces(self.blocks)
        self.groups, self.window, self.ramp, self.causal = groups, window, ramp, causal
        self.alike = len(self.blocks.number) == 1
        self.tokens = self.blocks.number.shape[1]
        self._views: dict[tuple[int, ...], _View] = {}
        self._room = KEPT
        self._ranges: dict[tuple[int, int], tuple[int, int, int]] = {}

    def chunks(self, queries: int) -> Iterator[tuple[int, int]]:
        """Yield first and last position of each chunk of the last ``queries`` positions; whole blocks if easy."""
        size = self.pieces.size
        rows = size * -(-ROWS // size)
        first = self.tokens - queries
        while first < self.tokens:
            last = min(first // rows * rows + rows, self.tokens)
            yield first, last
            first = last

    def range(self, first: int, last: int) -> tuple[int, int, int]:
        """Return the pieces ``start`` to ``stop`` seen by queries ``first`` to ``last``; from ``edge`` on partly."""
        if (first, last) not in self._ranges:
            self._ranges[first, last] = self._range(first, last)
        return self._ranges[first, last]

    def _range(self, first: int, last: int) -> tuple[int, int, int]:
        if not self.causal:
            return 0, 0, self.pieces.count
        piece = self.pieces.slot // self.pieces.size
        start, edge, stop = 0, int(piece[:, first].min()), int(piece[:, last - 1].max()) + 1
        if self.pieces.packed:
            document = self.blocks.document
            begin = (document == document[:, first, None]).int().argmax(1, keepdim=True)
            start = int(piece.gather(1, begin).min())
        if self.window is not None:
            start = edge = max(start, int(piece[:, max(first - self.window + 1, 0)].min()))
        return start, edge, stop

    def view(self, first: int, last: int, rows: slice) -> _View:
        """Return the view of the queries at positions ``first`` to ``last``, for ``rows`` of the ``B * G``."""
        key = (first, last) if self.alike else (first, last, rows.start, rows.stop)
        if key in self._views:
            return self._views[key]
        view = self._view(first, last, rows)
        self._room -= view.own.numel() + view.hidden.numel()
        if self._room > 0:
            self._views[key] = view
        return view

    def _view(self, first: int, last: int, rows: slice) -> _View:
        p, (start, edge, stop) = self.pieces, self.range(first, last)
        position = torch.arange(first, last, device=p.token.device)[:, None]

        def of(x: Tensor, *places: slice) -> Tensor:
            return (x if self.alike else x.repeat_interleave(self.groups, 0)[rows])[:, *places]

        whole, part = slice(start, stop), slice(edge, stop)
        block, ends = of(p.block, whole)[:, None], of(p.landmark, whole)[:, None]
        own = block == of(self.blocks.number, slice(first, last))[..., None]  # [X, M, N]
        handed = ends < self.tokens if not self.causal else ends <= position
        handed = handed & (of(p.document, whole)[:, None] == of(self.blocks.document, slice(first, last))[..., None])
        visible = own | handed
        ordinary = of(p.ordinary, part)[:, None]  # [X, 1, N, R]
        seen = ordinary < self.tokens if not self.causal else ordinary <= position[..., None]
        if self.window is not None:
            seen = seen & (ordinary > position[..., None] - self.window)
        seen = seen & visible[..., edge - start :, None]
        filled = of(p.ordinary, slice(start, edge))[:, None, :, 0] < self.tokens
        visible = torch.cat([visible[..., : edge - start] & filled, seen.any(-1)], -1)
        holes = of(p.ordinary, slice(start, edge))[:, None, None] == self.tokens if p.ragged else None
        landmark = (of(p.landmark_piece, whole) - start).clamp(0, stop - start - 1) if p.split else None
        return _View(
            slice(start * p.size, stop * p.size),
            edge - start,
            own[:, None],
            ~visible[:, None],
            bool((~visible.any(-1)).any()),
            bool((~visible[..., : edge - start]).any()),
            ~seen[:, None],
            holes,
            block[:, 0].clamp(min=0),
            landmark,
        )


_planned = layout.remembered(_Plan)


class _View(NamedTuple):
    """The view of a chunk of ``M`` queries on ``N`` pieces; ``X`` rows, or 1 if all are alike."""

    slots: slice
    edge: int
    """First pieces, which every query sees whole or not at all."""
    own: Tensor
    """``[X, 1, M, N]``: the piece belongs to the query's block."""
    unseen: Tensor
    """``[X, 1, M, N]``: the query sees no token of the piece."""
    blind: bool
    """Some query sees no piece."""
    barred: bool
    """Some query does not see a piece before the edge."""
    hidden: Tensor
    """``[X, 1, M, N - edge, R]``: tokens that a query does not see."""
    holes: Tensor | None
    """``[X, 1, 1, edge, R]``: slots without an ordinary token, if some pieces are not full."""
    block: Tensor
    """``[X, N]``"""
    landmark: Tensor | None
    """``[X, N]``: the piece with the landmark of the block, if blocks have several pieces."""


class _Weights(NamedTuple):
    """Weights of a chunk: a token has the weight ``inside * piece``."""

    inside: Tensor
    """``P [X, heads, M, N, R]``; one piece of all slots if the ramp is 0."""
    piece: Tensor
    """``W [X, heads, M, N]``"""
    share: Tensor | None
    """Share of a piece in its block, ``[X, heads, M, N]``, if blocks have several pieces."""


def weights(q: Tensor, k: Tensor, view: _View, ramp: float, size: int) -> _Weights:
    """Take ``q [X, heads, M, D]``, scaled, and the keys of the view ``[X, N * R, D]``; return the weights."""
    rows, heads, many, _ = q.shape
    scores = at_least_float32(torch.bmm(q.flatten(1, 2), k.mT)).view(rows, heads, many, -1, size)
    landmark = scores[..., -1].clone()
    _hide_(scores, view, ramp)
    if ramp == 0:
        p = scores.flatten(-2).softmax(-1)
        return _Weights(
            p.unsqueeze(-2), (~view.unseen.all(-1, keepdim=True)).to(p.dtype).expand(*p.shape[:-1], 1), None
        )
    share = None
    first = 0 if ramp < 1 or view.landmark is not None else view.edge  # the first piece whose sum is needed
    p = scores.softmax(-1)
    # The log-sum-exp, from the largest of P, which is exp(highest - LSE): many exponentials of hidden scores would be
    # slow.
    inside = scores[..., first:, :].amax(-1) - p[..., first:, :].amax(-1).log_()
    if view.landmark is None:
        group = landmark
        other = ramp * landmark[..., first:] + (1 - ramp) * inside
    else:
        whole = _logsumexp_of_blocks(inside, view.block)
        share = (inside - whole).exp_()
        group = landmark.gather(-1, _expanded(view.landmark, landmark))
        other = ramp * (group - whole) + inside
    group[..., first:] = torch.where(view.own[..., first:], inside, other)
    group.masked_fill_(view.unseen, float("-inf"))
    piece = group.softmax(-1)
    if view.blind:
        piece.masked_fill_(view.unseen.all(-1, keepdim=True), 0)
    return _Weights(p, piece, share)


def _hide_(scores: Tensor, view: _View, ramp: float) -> None:
    """Set hidden scores to the lowest number, in place."""
    lowest = torch.finfo(scores.dtype).min
    scores[..., view.edge :, :].masked_fill_(view.hidden, lowest)
    if view.holes is None:
        scores[..., : view.edge, -1] = lowest
    else:
        scores[..., : view.edge, :].masked_fill_(view.holes, lowest)
    if ramp == 0 and view.barred:
        scores[..., : view.edge, :].masked_fill_(view.unseen[..., : view.edge, None], lowest)


def score_gradients(found: _Weights, dp: Tensor, view: _View, ramp: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of the scores, and the weights, ``[X, heads * M, N * R]`` each; ``dp`` is overwritten."""
    p, piece, share = found
    dp = dp.view(p.shape)
    ds = p * dp
    delta = ds.sum(-1)
    total = (piece * delta).sum(-1, keepdim=True)
    minus = piece * total
    if ramp > 0:
        dbias = (delta.sub_(total).mul_(piece)).masked_fill_(view.own, 0).mul_(ramp)
        if view.landmark is not None and share is not None:
            dbias = _sum_of_blocks(dbias, view.block)
            minus += dbias * share
            pieces = torch.arange(dbias.shape[-1], device=dbias.device)
            dbias = torch.where((view.landmark == pieces)[:, None, None], dbias, 0)  # the last pieces of blocks
        else:
            minus += dbias
    ds.mul_(piece.unsqueeze(-1)).addcmul_(p, minus.unsqueeze(-1), value=-1)
    if ramp > 0:
        ds[..., -1] = dbias
    w = torch.mul(p, piece.unsqueeze(-1), out=dp)
    return ds.flatten(-2).flatten(1, 2), w.flatten(-2).flatten(1, 2)


class _LandmarkAttention(torch.autograd.Function):
    """``X = B * G`` rows; the heads of a group count as more queries."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan, scale: float) -> Tensor:
        many = q.shape[2]
        queries = (q * scale).reshape(len(k) * k.shape[1], -1, many, q.shape[-1])
        keys, values = _in_slots(k, plan), _in_slots(v, plan)
        out = queries.new_empty(*queries.shape[:3], v.shape[-1])
        kept = any(ctx.needs_input_grad) and _scores(queries, plan) <= KEPT
        found: list[Tensor | None] = []
        for rows, chunk, view in _steps(queries, plan):
            w = weights(queries[rows, :, chunk], keys[rows, view.slots], view, plan.ramp, plan.pieces.size)
            weighted = (w.inside * w.piece.unsqueeze(-1)).flatten(-2).flatten(1, 2).to(values.dtype)
            product = torch.bmm(weighted, values[rows, view.slots])
            out[rows, :, chunk] = product.view(len(product), queries.shape[1], -1, v.shape[-1])
            if kept:
                found += w
        ctx.save_for_backward(queries, keys, values, *found)
        ctx.plan, ctx.scale, ctx.kept, ctx.shapes = plan, scale, kept, (q.shape, k.shape, v.shape)
        return out.view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *found = ctx.saved_tensors
        plan, shapes, size = ctx.plan, ctx.shapes, ctx.plan.pieces.size
        dout = dout.reshape(*queries.shape[:3], values.shape[-1])
        dq, dk, dv = torch.empty_like(queries), _zeros(keys), _zeros(values)
        kept = iter(found)
        for rows, chunk, view in _steps(queries, plan):
            q, k, v = queries[rows, :, chunk], keys[rows, view.slots], values[rows, view.slots]
            gradient = dout[rows, :, chunk].flatten(1, 2)
            w = _Weights(next(kept), next(kept), next(kept)) if ctx.kept else weights(q, k, view, plan.ramp, size)
            dp = at_least_float32(torch.bmm(gradient, v.mT))
            ds, weighted = (x.to(q.dtype) for x in score_gradients(w, dp, view, plan.ramp))
            dq[rows, :, chunk] = torch.bmm(ds, k).view(q.shape)
            dk[rows, view.slots] += torch.bmm(ds.mT, q.flatten(1, 2))
            dv[rows, view.slots] += torch.bmm(weighted.mT, gradient)
        return (
            (dq * ctx.scale).view(shapes[0]),
            _of_tokens(dk, plan, shapes[1]),
            _of_tokens(dv, plan, shapes[2]),
            None,
            None,
        )


def _steps(queries: Tensor, plan: _Plan) -> Iterator[tuple[slice, slice, _View]]:
    """Yield rows and queries that are computed at once, with their view."""
    rows, heads, many, _ = queries.shape
    for first, last in plan.chunks(many):
        start, _, stop = plan.range(first, last)
        step = max(1, AT_ONCE // (heads * (last - first) * (stop - start) * plan.pieces.size))
        for row in range(0, rows, step):
            part = slice(row, row + step)
            yield part, slice(first - plan.tokens + many, last - plan.tokens + many), plan.view(first, last, part)


def _scores(queries: Tensor, plan: _Plan) -> int:
    """Return the number of scores."""
    rows, heads, many, _ = queries.shape
    ranges = ((last - first, plan.range(first, last)) for first, last in plan.chunks(many))
    return rows * heads * plan.pieces.size * sum(count * (stop - start) for count, (start, _, stop) in ranges)


def _in_slots(x: Tensor, plan: _Plan) -> Tensor:
    """Put keys or values ``[B, G, T, D]`` into slots, ``[B * G, N * R, D]``; 0 in slots without a token."""
    pieces, slots = plan.pieces, plan.pieces.count * plan.pieces.size
    x = x.flatten(0, 1)
    if pieces.regular:
        return F.pad(x, (0, 0, 0, slots - plan.tokens)).contiguous()
    x = F.pad(x, (0, 0, 0, 1))
    return x.gather(1, _of_rows(pieces.token, plan, x))


def _of_tokens(x: Tensor, plan: _Plan, shape: torch.Size) -> Tensor:
    """Reverse ``_in_slots``, for gradients; gradients of padding are not used."""
    if plan.pieces.regular:
        return x[:, : plan.tokens].reshape(shape)
    return x.gather(1, _of_rows(plan.pieces.slot, plan, x)).view(shape)


def _of_rows(index: Tensor, plan: _Plan, x: Tensor) -> Tensor:
    """Expand an index ``[X, n]`` to all ``B * G`` rows of ``x``, and its whole last dimension."""
    index = index.expand(len(x), -1) if plan.alike else index.repeat_interleave(plan.groups, 0)
    return index.unsqueeze(-1).expand(-1, -1, x.shape[-1])


def _logsumexp_of_blocks(x: Tensor, block: Tensor) -> Tensor:
    """Compute the log-sum-exp over each block's pieces, at each of them: ``[X, heads, M, N]`` to the same shape."""
    index = _expanded(block, x)
    highest = torch.full_like(x, torch.finfo(x.dtype).min).scatter_reduce_(-1, index, x, "amax").gather(-1, index)
    return highest + _sum_of_blocks((x - highest).exp_(), block).log_()


def _sum_of_blocks(x: Tensor, block: Tensor) -> Tensor:
    index = _expanded(block, x)
    return torch.zeros_like(x).scatter_add_(-1, index, x).gather(-1, index)


def _expanded(index: Tensor, x: Tensor) -> Tensor:
    """Expand an index ``[X, N]`` to all queries of ``x [X, heads, M, N]``."""
    return index[:, None, None].expand_as(x)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
